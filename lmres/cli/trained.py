"""What a run left in its folder, opened to evaluate, generate or inspect."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmres.cli.errors import CommandError
from lmres.config import RunConfig, from_dict, load_config
from lmres.data.files import as_path
from lmres.train.checkpoint import Checkpoints
from lmres.train.run import CHECKPOINTS

# Object stores that a run may be on: those that orbax writes checkpoints to.
RUN_STORES = ("gs",)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A checkpoint of a run, nothing of it read but ``meta``.

    config: with the vocabulary of the checkpoint, and the overrides asked for.
    """

    folder: Path
    config: RunConfig
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        """Updates made."""
        return self.meta["step"]


def run_folder(name: str) -> Path:
    """The folder of a run. Raises CommandError if it is none, DataError if it can be none."""
    folder = as_path(name, "runs", RUN_STORES)
    if not (folder / CHECKPOINTS).is_dir():
        found = "no such folder" if not folder.is_dir() else f"no {CHECKPOINTS}/ in it"
        raise CommandError(f"{folder} is not the folder of a run ({found})")
    return folder


def open_run(name: str, step: int | None = None, overrides: Sequence[str] = ()) -> Trained:
    """The run in the folder ``name`` at ``step``, or at its newest complete checkpoint.

    Raises CommandError, ConfigError or CheckpointError.
    """
    folder = run_folder(name)
    with Checkpoints(folder / CHECKPOINTS, mode="read") as checkpoints:
        steps = checkpoints.steps()
        if step is not None and step not in steps:
            raise CommandError(f"--step {step}: {folder} has no such checkpoint (steps there: {steps})")
        meta = checkpoints.meta(step)
    config = load_config(folder / "config.yaml", overrides) if overrides else from_dict(meta["config"])
    model = config.model
    if model.vocab_size is None:
        model = dataclasses.replace(model, vocab_size=meta["architecture"]["model"]["vocab_size"])
    return Trained(folder, dataclasses.replace(config, model=model), meta)


def restore(trained: Trained, model: Any, target: Any, step: int | None, tell) -> tuple[Any, int]:
    """(parameters, their step), read as ``target`` says: ShapeDtypeStructs, sharded or not.

    A damaged checkpoint is told of, and the one before is read, unless ``step`` names it.

    Raises CheckpointMismatch when ``model`` is not the function that was trained; CheckpointError.
    """
    from lmres.train.fingerprint import architecture

    config, connection = dataclasses.asdict(model.config), dataclasses.asdict(model.connection)
    shape = architecture(config, connection, target, model.flow)
    with Checkpoints(trained.folder / CHECKPOINTS, mode="read", report=tell) as checkpoints:
        restored = checkpoints.restore_params(target, architecture=shape, step=step)
    return restored.state, restored.step
