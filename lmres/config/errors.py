"""The one error of this room, and how its lines show values and name what was probably meant."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class ConfigError(ValueError):
    """Everything that is wrong with a config, one readable line per problem.

    problems: the lines. A command line may print the message without a traceback.
    """

    def __init__(self, problems: Iterable[str]):
        # Without repetition: every variant of a comparison has its base's problems.
        self.problems: tuple[str, ...] = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


def nearest(name: Any, names: Sequence[str]) -> str:
    """``"; did you mean 'width'?"`` when one of ``names`` is close, else ``""``."""
    found = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


def shown(value: Any) -> str:
    """A value and its type, for "expected ..., found ..."."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    kinds = {str: "text", int: "integer", float: "number", list: "list", tuple: "list", dict: "mapping"}
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({kinds.get(type(value), type(value).__name__)})"
