"""What must hold between the keys of a config, checked before anything is compiled."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from lmres.config.errors import ConfigError
from lmres.config.schema import RunConfig
from lmres.data.config import DataConfig
from lmres.model.config import ModelConfig, check_ways
from lmres.residual import Residual
from lmres.sharding import AXES, MESH, MeshConfig, mesh_sizes
from lmres.tasks import Task, Text
from lmres.train.config import ScheduleConfig, TrainConfig

BYTES_VOCABULARY = 257  # of data.tokenizer="bytes": 256 bytes and a separator

Range = tuple[Callable[[Any], bool], str]
_POSITIVE: Range = (lambda v: v > 0, "above 0")
_NOT_NEGATIVE: Range = (lambda v: v >= 0, "0 or more")
_AT_LEAST_1: Range = (lambda v: v >= 1, "at least 1")
_BELOW_1: Range = (lambda v: 0 <= v < 1, "in [0, 1)")
_FRACTION: Range = (lambda v: 0 <= v <= 1, "in [0, 1]")
_SEED: Range = (lambda v: 0 <= v < 2**32, "in 0 .. 2**32 - 1")

RANGES: dict[str, Range] = {
    "model.vocab_size": _AT_LEAST_1,
    "model.head_dim": _AT_LEAST_1,
    "model.mlp_hidden": _AT_LEAST_1,
    "model.logit_softcap": _POSITIVE,
    "model.rope_base": _POSITIVE,
    "model.norm_eps": _NOT_NEGATIVE,
    "model.embedding_std": _NOT_NEGATIVE,
    "model.weight_std": _NOT_NEGATIVE,
    "optimizer.learning_rate": _POSITIVE,
    "optimizer.muon_learning_rate": _POSITIVE,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "optimizer.beta1": _BELOW_1,
    "optimizer.beta2": _BELOW_1,
    "optimizer.eps": _NOT_NEGATIVE,
    "optimizer.muon_momentum": _BELOW_1,
    "optimizer.clip": _POSITIVE,
    "schedule.warmup": _NOT_NEGATIVE,
    "schedule.final": _FRACTION,
    "schedule.decay_fraction": _FRACTION,
    "train.steps": _AT_LEAST_1,
    "train.batch_size": _AT_LEAST_1,
    "train.accumulate": _AT_LEAST_1,
    "train.z_loss": _NOT_NEGATIVE,
    "train.seed": _SEED,
    "train.eval_every": _NOT_NEGATIVE,
    "train.eval_batches": _AT_LEAST_1,
    "train.eval_batch_size": _AT_LEAST_1,
    "train.save_every": _NOT_NEGATIVE,
    "train.keep": _AT_LEAST_1,
    "train.log_every": _AT_LEAST_1,
}


def check_config(config: RunConfig, device_count: int | None = None) -> None:
    """Checks values and what must hold between them.

    device_count: number of devices of the run; None checks only what holds on any number.
    Raises ConfigError with a line for every problem, in terms of config keys and numbers.
    """
    problems = _ranges(config)
    model, residual = config.model, config.residual
    for check in (
        model.check,
        lambda: residual.check(residual_depth(model, residual), model.width),
        lambda: check_ways(residual.unit, residual.ways, model.heads_from),
        lambda: residual.fit(model.kv, model.head_size) if model.heads >= 1 else None,
        lambda: check_flow(config),
    ):
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    if not any(problem.startswith(("schedule.", "train.")) for problem in problems):
        problems += _schedule(config.schedule, config.train)
    problems += _vocabulary(model, config.data) if isinstance(config.task, Text) else _task(config)
    if not problems:  # sizes below are only meaningful when those above are
        problems = _batch_and_mesh(model, config.task, config.data, config.train, config.mesh, device_count)
    if problems:
        raise ConfigError(problems)


def check_task(config: RunConfig) -> None:
    """The part of ``check_config`` that is about the task; for what evaluates a run under other settings.

    Raises ConfigError as it does.
    """
    problems = [] if isinstance(config.task, Text) else _task(config)
    if problems:
        raise ConfigError(problems)


def check_flow(config: RunConfig) -> None:
    """The part of ``check_config`` that is about the flow, so that a file's line can be named as it is read.

    Raises ValueError naming the key.
    """
    model = config.model
    if min(model.blocks, model.context, model.heads, model.kv) >= 1:  # otherwise the model's own check says so
        config.flow.check(model.blocks, model.context, model.kv, model.heads_from)
        if config.mesh.sequence != 1 and not config.flow.is_standard:
            schedule = config.flow.resolve(config.flow.reads(model.blocks), model.context)
            if schedule != "parallel":
                raise ValueError(
                    f"flow.kind={config.flow.kind} runs its tokens in turn (flow.schedule={schedule}), so they cannot "
                    f"be split over mesh.sequence={config.mesh.sequence}; set it to 1"
                )


def residual_depth(model: ModelConfig, residual: Residual) -> int:
    """Number of units the connection acts on: two sub-layers per block, or the blocks themselves."""
    return model.blocks * (2 if residual.unit == "sublayer" else 1)


def _ranges(config: RunConfig) -> list[str]:
    problems = []
    for key, (holds, words) in RANGES.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value is not None and not holds(value):
            problems.append(f"{key}={value} must be {words}")
    return problems


def _schedule(schedule: ScheduleConfig, train: TrainConfig) -> list[str]:
    problems = []
    if schedule.warmup >= 1 and schedule.warmup != int(schedule.warmup):
        problems.append(
            f"schedule.warmup={schedule.warmup} must be a whole number of updates, or below 1 for a fraction of the run"
        )
    warmup = schedule.warmup_updates(train.steps)
    decay = schedule.decay_updates(train.steps) if schedule.kind == "wsd" else 0
    if warmup + decay > train.steps:
        parts = f"schedule.warmup={schedule.warmup:g}"
        parts += f" and schedule.decay_fraction={schedule.decay_fraction}" if decay else ""
        problems.append(
            f"{parts} take {warmup + decay} updates, more than train.steps={train.steps}; "
            "a warm-up below 1 is a fraction of the run"
        )
    if train.profile_steps is not None:
        first, last = train.profile_steps
        if not 0 <= first <= last <= train.steps:
            problems.append(
                f"train.profile_steps=[{first}, {last}] must be two updates in order, within train.steps={train.steps}"
            )
    return problems


def _vocabulary(model: ModelConfig, data: DataConfig) -> list[str]:
    problems = []
    if model.vocab_size is None:
        return problems
    if data.vocab_size is not None and data.vocab_size > model.vocab_size:
        problems.append(f"data.vocab_size={data.vocab_size} is more than model.vocab_size={model.vocab_size}")
    text = data.format in ("text", "stdlib") or data.train in (None, "stdlib")
    if text and data.tokenizer == "bytes" and model.vocab_size < BYTES_VOCABULARY:
        problems.append(
            f"model.vocab_size={model.vocab_size} is less than the {BYTES_VOCABULARY} ids of "
            "data.tokenizer=bytes; leave it out or raise it"
        )
    return problems


def _task(config: RunConfig) -> list[str]:
    task, model, data, problems = config.task, config.model, config.data, []
    try:
        task.check()
    except ValueError as error:
        return [str(error)]
    if model.context < task.length:
        problems.append(
            f"model.context={model.context} is less than task.length={task.length}; raise the one or lower the other"
        )
    if model.vocab_size is not None and model.vocab_size < task.vocab_size:
        problems.append(
            f"model.vocab_size={model.vocab_size} is less than the {task.vocab_size} ids of task.group={task.group}; "
            "leave it out or raise it"
        )
    unused = DataConfig()
    return problems + [
        f"data.{field.name} has no effect with task.kind={task.kind}, whose sequences are made, not read; leave it out"
        for field in dataclasses.fields(data)
        if getattr(data, field.name) != getattr(unused, field.name)
    ]


def _batch_and_mesh(
    model: ModelConfig,
    task: Task,
    data: DataConfig,
    train: TrainConfig,
    mesh: MeshConfig,
    device_count: int | None,
) -> list[str]:
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    asked = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    if any(size < 1 and size != -1 for size in sizes.values()) or len(free) > 1:
        return [f"{asked}: sizes must be positive, and at most one may be -1 (all remaining devices)"]
    problems = []
    if device_count is not None:
        try:
            sizes = mesh_sizes(mesh, device_count)
        except ValueError as error:
            return [str(error)]
    # An axis whose size is not known yet asks for nothing.
    sizes |= {axis: 1 for axis, size in sizes.items() if size == -1}

    def split(what: str, size: int, axes: tuple[str, ...]) -> None:
        parts = math.prod(sizes[axis] for axis in axes)
        if size % parts:
            over = " x ".join(f"mesh.{axis}={sizes[axis]}" for axis in axes if sizes[axis] > 1)
            problems.append(f"{what} is not a multiple of {over}; change one of them")

    micro, rest = divmod(train.batch_size, train.accumulate)
    if rest:
        problems.append(f"train.batch_size={train.batch_size} is not a multiple of train.accumulate={train.accumulate}")
    else:
        what = f"train.batch_size={train.batch_size} / train.accumulate={train.accumulate} = {micro}"
        split(what, micro, ("data", "fsdp"))
    if train.eval_batch_size is not None:
        split(f"train.eval_batch_size={train.eval_batch_size}", train.eval_batch_size, ("data", "fsdp"))
    split(f"model.width={model.width}", model.width, MESH["embed"])
    split(f"model.context={model.context}", model.context, ("sequence",))
    split(f"model.heads={model.heads}", model.heads, ("tensor",))
    split(f"model.kv_heads={model.kv}", model.kv, ("tensor",))
    split(f"model.mlp_hidden={model.hidden}", model.hidden, ("tensor",))
    if model.vocab_size is not None:
        split(f"model.vocab_size={model.vocab_size}", model.vocab_size, ("tensor",))
    elif not isinstance(task, Text):
        of = f"model.vocab_size={task.vocab_size} (of task.group={task.group})"
        split(of, task.vocab_size, ("tensor",))
    elif data.tokenizer == "bytes" and data.train in (None, "stdlib"):
        split(f"model.vocab_size={BYTES_VOCABULARY} (of data.tokenizer=bytes)", BYTES_VOCABULARY, ("tensor",))
    return problems
