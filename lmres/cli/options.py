"""Options that several commands have."""

import argparse
from collections.abc import Sequence


def is_override(word: str) -> bool:
    """Whether a word has the form key=value."""
    return "=" in word and not word.startswith("-")


def add_overrides(
    command: argparse.ArgumentParser, help_text: str = "settings that replace those of the file"
) -> None:
    """``key=value ...``."""
    command.add_argument("overrides", nargs="*", metavar="key=value", help=help_text)


def add_device(command: argparse.ArgumentParser, distributed: bool = False) -> None:
    """``--device``, and ``--distributed`` for what runs on several hosts."""
    command.add_argument(
        "--device", choices=("cpu", "gpu", "tpu"), help="run on this or fail; default: what there is"
    )
    if distributed:
        command.add_argument(
            "--distributed",
            action="store_true",
            help="this is one of several processes: find the others through the cluster (TPU pod, Slurm, "
            "MPI, Kubernetes), or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID",
        )


def add_folder(command: argparse.ArgumentParser) -> None:
    """``--folder`` and what to do with what is in it."""
    command.add_argument("--folder", metavar="DIR", help="where the results go; default: runs/NAME")
    what = command.add_mutually_exclusive_group()
    what.add_argument(
        "--resume",
        action="store_true",
        help="go on where the folder's run stopped; start if there is nothing yet",
    )
    what.add_argument(
        "--overwrite", action="store_true", help="delete what an earlier run left in the folder"
    )


def config_of(path: str | None, overrides: Sequence[str], defaults: Sequence[str] = ()):
    """The run config of a file, or of overrides alone. defaults: overrides that come first.

    Raises ConfigError.
    """
    from lmres.config import ConfigError, RunConfig, load_config
    from lmres.config.reading import read_overrides
    from lmres.config.validation import validate

    words = [*defaults, *overrides]
    if path is not None:
        return load_config(path, words)
    tree = read_overrides(words)
    if tree.problems:
        raise ConfigError(tree.problems)
    return validate(tree.values, RunConfig, tree.where)
