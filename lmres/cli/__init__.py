"""cli: the ``lmres`` command.

One small file per command: ``add`` declares it, ``run`` does it and returns the exit code. ``parsing``
joins them, ``options`` has what several of them take, ``runtime`` sets jax up, ``trained`` opens a run's
folder, ``output`` prints, ``errors`` turns what went wrong into a line and an exit code. Commands import
the other rooms inside ``run``, so that ``lmres --help`` answers at once.

Results go to stdout (with ``--json`` one JSON document and nothing else), progress and errors to stderr.

Exit codes::

    0    done
    1    an error; one readable line on stderr
    2    the command line was not understood
    3    training diverged: a loss or gradient was not finite (in a comparison: of at least one run)
    4    planned, and it does not fit the machine's memory
    130  stopped by Ctrl-C before the planned end, after saving
    143  stopped by SIGTERM before the planned end, after saving

A run that was told to stop is not finished, so its code is not 0: a scheduler that starts failed jobs again
then goes on with it, given ``--resume``, and does not take it for done.
"""

from collections.abc import Sequence

OK, FAILED, USAGE, DIVERGED = 0, 1, 2, 3
STOPPED = {"Ctrl-C": 130, "SIGTERM": 143}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. argv: without the program's name; None: the process's."""
    from lmres.cli.errors import guarded
    from lmres.cli.parsing import parse

    try:
        args = parse(argv)
    except SystemExit as end:  # argparse has printed the help, or what it did not understand
        return end.code if isinstance(end.code, int) else USAGE
    return guarded(args)
