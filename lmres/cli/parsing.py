"""The arguments of all commands. Nothing here imports jax."""

import argparse
from collections.abc import Sequence

from lmres import __version__
from lmres.cli import bench, compare, config, convert, data, evaluate, generate, growth, inspect, plan, train, variants
from lmres.cli.options import is_override

COMMANDS = (train, evaluate, generate, compare, convert, variants, bench, plan, growth, data, inspect, config)

_EPILOG = """exit codes: 0 done; 1 error; 2 usage; 3 training diverged; 4 a plan does not fit; 130 (Ctrl-C) and 143
(SIGTERM) stopped and saved, to be resumed. `lmres COMMAND --help` has an example; `lmres config` lists all settings."""


class Commands:
    """Adds commands to a parser, each with the options that all have."""

    def __init__(self, parser: argparse.ArgumentParser):
        self._commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(self, name: str, run, summary: str, example: str, *, json: bool = True) -> argparse.ArgumentParser:
        """A command ``name`` that ``run(args) -> exit code`` does."""
        lines = "\n  ".join(example.split("\n"))
        command = self._commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n  {lines}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(run=run, parser=command)
        if json:
            command.add_argument("--json", action="store_true", help="print one JSON document on stdout")
        command.add_argument("--traceback", action="store_true", help="show where an error came from")
        return command

    def group(self, name: str, summary: str) -> "Commands":
        """A command that has commands of its own."""
        group = self._commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        return Commands(group)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="lmres",
        description="Language models in JAX/Flax whose residual connection is a choice.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lmres {__version__}")
    commands = Commands(parser)
    for module in COMMANDS:
        module.add(commands)
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of one command; ``key=value`` may stand before, between and after options.

    Raises SystemExit, as argparse does.
    """
    args, rest = make_parser().parse_known_args(argv)
    if hasattr(args, "overrides"):
        # argparse gives all positional arguments to the first group of them that it meets.
        args.overrides = [*args.overrides, *(word for word in rest if is_override(word))]
        rest = [word for word in rest if not is_override(word)]
        wrong = [word for word in args.overrides if not is_override(word)]
        if wrong:
            args.parser.error(f"expected key=value, found {' '.join(wrong)}")
    if rest:
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args
