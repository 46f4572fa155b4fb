"""One training run from start to end: new, resumed, or from another run's weights."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import yaml

from lmres.data import DataConfig
from lmres.data.files import is_remote
from lmres.flow.config import FlowConfig
from lmres.model import ModelConfig
from lmres.residual import Connection
from lmres.sharding import MeshConfig
from lmres.tasks import TEXT, Task
from lmres.train.checkpoint import Checkpoints, refuse_used
from lmres.train.config import LogConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from lmres.train.fingerprint import CheckpointMismatch, architecture, differences, stored_architecture
from lmres.train.loop import Loop, TrainResult
from lmres.train.metrics import MetricWriter
from lmres.train.optimizer import describe_roles
from lmres.train.preempt import StopSignals
from lmres.train.progress import Reporter
from lmres.train.session import Session, build_session, describe_devices
from lmres.train.state import count, init_state

CHECKPOINTS = "checkpoints"

# What may differ between a run and the one its weights come from: no parameter depends on them.
WITHOUT_PARAMETERS = tuple(f"model.{key}:" for key in ("context", "rope_base", "norm_eps", "logit_softcap"))


def train_run(
    *,
    name: str | None,
    model: ModelConfig,
    residual: Connection,
    flow: FlowConfig = FlowConfig(),  # noqa: B008 - frozen
    data: DataConfig,
    task: Task = TEXT,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    train: TrainConfig,
    mesh: MeshConfig,
    log: LogConfig,
    folder: Path,
    stored_config: dict[str, Any],
    mode: Literal["new", "resume", "overwrite"] = "new",
    weights_from: Path | None = None,
    reporter: Reporter | None = None,
    devices: list[Any] | None = None,
) -> tuple[Session, TrainResult]:
    """Trains as the sections of a config say.

    Args:
      name .. log: the sections; see each one's class.
      folder: of the run: checkpoints, ``metrics.jsonl``, ``config.yaml``, TensorBoard files.
      stored_config: the whole config as JSON, kept with every checkpoint.
      mode: "new" refuses a folder that holds checkpoints, "resume" goes on from its newest readable one, "overwrite"
        deletes them.
      weights_from: folder of another run: start at step 0 with its parameters.
      reporter: where lines and the progress bar go.
      devices: None for all.

    Raises: ValueError for settings that do not fit, CheckpointError and its kinds, TrainingDiverged.
    """
    if train.profile_steps is not None and is_remote(folder):
        raise ValueError(f"train.profile_steps: the profiler cannot write to {folder}; set it to null")
    if mode == "new":
        refuse_used(folder / CHECKPOINTS)  # before data are prepared, which may take long
    reporter = reporter or Reporter(quiet=jax.process_index() != 0, log_every=train.log_every)
    session = build_session(
        model=model, residual=residual, flow=flow, task=task, data=data, optimizer=optimizer, schedule=schedule,
        train=train, mesh=mesh, devices=devices, progress=data_progress(reporter),
    )  # fmt: skip
    shape = architecture(
        dataclasses.asdict(session.model.config), dataclasses.asdict(residual), session.state_like["params"], flow
    )
    _describe(session, optimizer.kind, reporter)
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(
            Checkpoints(folder / CHECKPOINTS, keep=train.keep, mode=mode, report=reporter.line)
        )
        # From here on a stop is remembered until a step is done: interrupting jax while it compiles may crash it.
        signals = stack.enter_context(StopSignals())
        state, start = _start(session, checkpoints, shape, mode, weights_from, reporter)
        if start > train.steps:
            raise ValueError(f"train.steps={train.steps} is less than the {start} updates that {folder} has made")
        if jax.process_index() == 0 and start < train.steps:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(yaml.safe_dump(stored_config, sort_keys=False), encoding="utf-8")
        writer = stack.enter_context(MetricWriter(folder, log, resume=start, config=stored_config, name=name))
        meta = {
            "config": stored_config,
            "architecture": shape,
            "tokenizer": session.splits.info.tokenizer,
            "device": describe_devices(session.mesh),
        }
        loop = Loop(session, writer, checkpoints, meta, reporter, folder, optimizer.learning_rate)
        if start >= train.steps:
            reporter.line(f"{folder} is finished at step {start}; raise train.steps={train.steps} to train on")
            return session, TrainResult(state, start, None, loop.evaluate(state["params"]), None, 0.0, 0, [])
        result = loop.run(state, start, signals)
        reporter.line(f"saved step {result.step} in {folder / CHECKPOINTS}")
    return session, result


def _start(session, checkpoints, shape, mode, weights_from, reporter):
    """(state, updates already made)."""
    if mode == "resume":
        restored = checkpoints.restore(session.state_like, architecture=shape)
        reporter.line(f"resumed from step {restored.step}")
        return restored.state, restored.step
    state = init_state(session.model, session.optimizer, session.mesh, session.train.seed)
    if weights_from is not None:
        with Checkpoints(weights_from / CHECKPOINTS, mode="read", report=reporter.line) as source:
            found = differences(stored_architecture(source.meta()), shape)
            refused = [line for line in found if not line.startswith(WITHOUT_PARAMETERS)]
            if refused:
                raise CheckpointMismatch(f"{weights_from} has another architecture", refused)
            for line in found:
                reporter.line(f"other than in {weights_from}: {line}")
            restored = source.restore_params(session.state_like["params"])
        reporter.line(
            f"started at step 0 with the parameters of {weights_from}, step {restored.step}; a fresh optimiser"
        )
        state = {**state, "params": restored.state}
    return state, 0


def _describe(session: Session, optimizer_kind: str, reporter: Reporter) -> None:
    """What is about to run, in a few lines."""
    params = session.state_like["params"]
    for line in session.splits.info.lines():
        reporter.line(line)
    reporter.line(session.splits.train.describe())
    reporter.line(session.splits.valid.describe())
    reporter.line(
        f"{session.connection.name}: {count(params):,} parameters, "
        f"{count(params['stack']['connection']):,} of them the connection's, on {describe_devices(session.mesh)}"
    )
    for row in describe_roles(params, session.connection, optimizer_kind):
        decay = "decayed" if row["decayed"] else "not decayed"
        reporter.line(
            f"  {row['role']}: {row['parameters']:,} parameters in {row['arrays']} arrays, {row['rule']}, {decay}"
        )


def data_progress(reporter: Reporter):
    """Prints how far the preparation of the data is, at every tenth."""
    told = {}

    def tell(progress):
        tenth = 10 * progress.source_bytes // max(progress.source_total, 1)
        if told.get(progress.split) != tenth:
            told[progress.split] = tenth
            reporter.line(f"preparing {progress.split}: {10 * tenth}%, {progress.tokens:,} tokens")

    return tell
