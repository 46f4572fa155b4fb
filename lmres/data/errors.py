"""The one error of this room."""


class DataError(ValueError):
    """Something about the data, its settings or a prepared store that the user has to change.

    The message is one readable line: the file (and line or record), what was found, what was wanted, the
    numbers involved, and what to do about it. A command line may print it without a traceback.
    """


def shown(values, limit: int = 8) -> str:
    """Short list of names for a message: the first `limit` of them, and how many more there are."""
    values = [str(v) for v in values]
    text = ", ".join(values[:limit]) or "none"
    return text if len(values) <= limit else f"{text} and {len(values) - limit} more"
