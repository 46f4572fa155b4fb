"""What went wrong, as a readable line and an exit code."""

import argparse
import os
import sys
import traceback

from lmres.cli import DIVERGED, FAILED, OK, STOPPED


class CommandError(ValueError):
    """Something about a command's arguments, said in one readable line."""


def guarded(args: argparse.Namespace) -> int:
    """``args.run(args)`` and its exit code; what goes wrong becomes ``error: ...`` on stderr.

    Errors that no one foresaw are raised: their traceback is what a bug report needs. ``--traceback`` or
    LMRES_TRACEBACK=1 shows it for the others too.
    """
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return OK
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return STOPPED["Ctrl-C"]
    except Exception as error:
        code, text = explained(error)
        if args.traceback or os.environ.get("LMRES_TRACEBACK", "0") not in ("", "0"):
            traceback.print_exc()
        elif text is None:
            raise
        for line in (text or str(error)).split("\n"):
            print(line if line.startswith(" ") else f"error: {line}", file=sys.stderr)
        return code


def explained(error: Exception) -> tuple[int, str | None]:
    """(exit code, message); the message is None for an error that is none of the user's."""
    from lmres.config import ConfigError
    from lmres.data import DataError

    text = str(error)
    if isinstance(error, (ConfigError, DataError, CommandError)):
        return FAILED, text
    if isinstance(error, OSError):
        parts = [str(error.filename)] if error.filename else []
        return FAILED, ": ".join([*parts, error.strerror or text])
    if isinstance(error, (ValueError, FloatingPointError)):
        return FAILED, f"{text} (--traceback shows where)"
    if isinstance(error, ImportError) and "pip install" in text:
        return FAILED, text
    from jax.errors import JaxRuntimeError

    from lmres.train.fingerprint import CheckpointError
    from lmres.train.loop import TrainingDiverged

    if isinstance(error, TrainingDiverged):
        return DIVERGED, text
    if isinstance(error, CheckpointError):
        return FAILED, text
    if isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" in text:
        told = text.split("\n")[0]
        return (
            FAILED,
            f"out of memory ({told}); lower train.batch_size, or raise train.accumulate, or set model.remat",
        )
    return FAILED, None
