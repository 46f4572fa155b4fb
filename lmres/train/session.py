"""Everything one run needs, built from the sections of a config and checked before anything is compiled."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from lmres.data import DataConfig, DataError, Splits, generated_splits, load_splits
from lmres.flow.config import FlowConfig
from lmres.model import ModelConfig, Transformer
from lmres.residual import Connection
from lmres.residual.stack import no_constraint
from lmres.sharding import MeshConfig, constrainer, make_mesh
from lmres.tasks import TEXT, Task, Text
from lmres.train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from lmres.train.update import Update, build_update


@dataclasses.dataclass(frozen=True)
class Session(Update):
    """An update, the connection as it was asked for, and the data."""

    connection: Connection
    splits: Splits


def open_splits(
    task: Task, data: DataConfig, model: ModelConfig, batch_size: int, progress: Any = None
) -> Splits:
    """Batches of a task, or of the text of the data section if that is the task.

    batch_size: rows of the global training batch. progress: as in ``lmres.data.prepare``, for text.

    Raises DataError.
    """
    if isinstance(task, Text):
        return load_splits(data, model.context, batch_size, vocab_size=model.vocab_size, progress=progress)
    return generated_splits(task, model.context, batch_size, vocab_size=model.vocab_size)


def build_model(
    model: ModelConfig, residual: Connection, flow: FlowConfig, splits: Splits | None, mesh: Mesh | None
) -> Transformer:
    """The model, its vocabulary taken from the data where the config leaves it open, shardings pinned on ``mesh``.

    Raises DataError if neither says how large the vocabulary is.
    """
    if model.vocab_size is None:
        found = splits.info.vocab_size if splits is not None else None
        if found is None:
            raise DataError("model.vocab_size is not set, and the data do not say how large the vocabulary is")
        model = dataclasses.replace(model, vocab_size=found)
    return Transformer(model, residual, no_constraint if mesh is None else constrainer(mesh), flow)


def build_session(
    *,
    model: ModelConfig,
    residual: Connection,
    flow: FlowConfig = FlowConfig(),  # noqa: B008 - frozen
    data: DataConfig,
    task: Task = TEXT,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    train: TrainConfig,
    mesh: MeshConfig,
    devices: list[Any] | None = None,
    progress: Any = None,
) -> Session:
    """Prepares the data if need be and builds all parts; nothing is allocated on the devices.

    flow: by default ordinary attention. task: what is trained on; by default the text of ``data``. devices: None for
      all. progress: as in ``lmres.data.prepare``.

    Raises ValueError (DataError among them) naming the config key and the numbers.
    """
    the_mesh = make_mesh(mesh, devices)
    splits = open_splits(task, data, model, train.batch_size, progress)
    there = splits.train.num_steps
    if there is not None and there < train.steps:
        raise ValueError(
            f"data.repeat=never: the training text is {there} steps of {train.batch_size} rows, and "
            f"train.steps={train.steps} asks for more; lower train.steps, or set data.repeat=epochs"
        )
    the_model = build_model(model, residual, flow, splits, the_mesh)
    update = build_update(the_model, optimizer, schedule, train, the_mesh)
    return Session(**vars(update), connection=residual, splits=splits)


def describe_devices(mesh: Mesh) -> str:
    """One line: which devices a run uses, and how."""
    first = mesh.devices.flat[0]
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{mesh.size} {first.device_kind} ({first.platform}){processes}: {shape}"
