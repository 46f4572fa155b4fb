"""``lmres config``: all settings with their types and defaults."""

_EXAMPLE = """lmres config
lmres config residual"""


def add(commands) -> None:
    command = commands.add("config", run, "list all settings", _EXAMPLE)
    command.add_argument(
        "prefix", nargs="?", default="", metavar="KEY", help="only keys that begin so, such as train"
    )


def run(args) -> int:
    from lmres.cli import OK
    from lmres.cli.errors import CommandError
    from lmres.cli.output import print_json
    from lmres.config import field_table

    table = field_table()
    rows = [row for row in table if row.key.startswith(args.prefix)]
    if not rows:
        sections = dict.fromkeys(row.key.partition(".")[0] for row in table)
        raise CommandError(f"no setting begins with {args.prefix!r} (sections: {', '.join(sections)})")
    if args.json:
        print_json([row._asdict() for row in rows])
        return OK
    for row in rows:
        when = f"  [{row.when}]" if row.when else ""
        print(f"{row.key} = {row.default}  ({row.type}){when}\n    {row.doc}")
    return OK
