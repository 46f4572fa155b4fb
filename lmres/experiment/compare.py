"""Trains the variants of a comparison, one after the other, and puts what they did into one result.

Each run has a folder of its own, ``<folder>/<variant>-seed<k>``, like any other run's, and in it
``run.json`` once it is over: what the report needs of it. A comparison that was interrupted goes on from
these: runs that are over are read, the one under way is resumed, the others are started.

A run whose loss stops being finite is over too: it is reported with what it measured until then, and the
others go on.
"""

import dataclasses
import datetime
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from lmres.analysis import MixingResult, model_mixing
from lmres.config import CompareConfig, ConfigError, RunConfig, describe_structure, resumable_changes, to_dict
from lmres.config import from_dict as config_from_dict
from lmres.experiment.bench import Timed, label, peak_bytes, random_batch, time_in_turns
from lmres.experiment.machine import machine, versions
from lmres.experiment.report import write_report
from lmres.experiment.result import ComparisonResult, RunResult
from lmres.train.checkpoint import Checkpoints, FolderInUse
from lmres.train.feed import Feed, eval_batch_size
from lmres.train.loop import TrainingDiverged, TrainResult
from lmres.train.metrics import read_metrics
from lmres.train.progress import Reporter
from lmres.train.run import CHECKPOINTS, train_run
from lmres.train.session import Session, build_session
from lmres.train.state import count, init_state

Mode = Literal["new", "resume", "overwrite"]
REPORT, RESULTS, RUN = "report.html", "comparison.json", "run.json"
_ROWS, _TOKENS = 4, 256  # of the batch whose depth mixing is pictured
_ROUNDS = 7  # steps of each variant when they are timed in turns
_UNIGRAM = "unigram entropy of the validation text"
_SAMPLE = 1 << 26  # bytes of the validation text that the unigram entropy is taken from, at most


class Stopped(Exception):
    """A signal ended a run before its planned end; its name is the message."""


def compare(
    title: str,
    settings: CompareConfig,
    runs: dict[str, RunConfig],
    folder: Path,
    *,
    mode: Mode = "new",
    tell: Callable[[str], None] = print,
) -> tuple[ComparisonResult, Path]:
    """Trains every variant with every seed and writes the report.

    Args:
      settings: seeds and baseline (None: the first variant). runs: the variants' configs by name, in order.
      folder: gets a folder per run, ``comparison.json`` and ``report.html``.
      mode: "new" refuses a folder that holds runs of a comparison; "resume" goes on with them; "overwrite"
        replaces them.
      tell: gets lines on the progress.

    Returns: the result and the path of the report. A run that diverged says so in its ``notes``.

    Raises: Stopped on a signal; ConfigError, before anything is trained, for changes that a resumed run
      cannot take; FolderInUse; and what ``train_run`` raises.
    """
    plan = {
        folder / f"{name}-seed{seed}": (name, _with_seed(run, name, seed))
        for name, run in runs.items()
        for seed in settings.seeds
    }
    done = _prepare(folder, plan, mode, tell)
    results, last = [], None
    for number, (where, (name, config)) in enumerate(plan.items(), start=1):
        place = f"run {number} of {len(plan)}, {where.name}"
        if where in done:
            tell(f"{place}: is finished")
            results.append(done[where])
            continue
        tell(f"{place}: {describe_structure(config)[1]}")
        one, last = _run(name, config, where, mode)
        results.append(one)
        _write(where / RUN, one)
    session = last or _session(next(iter(plan.values()))[1])
    if jax.default_backend() == "cpu" and jax.process_count() == 1:
        results = _timed_in_turns(results, runs, tell)
    result = ComparisonResult(
        title=title,
        runs=results,
        baseline=settings.baseline or next(iter(runs)),
        data=_data(session),
        machine=machine(list(session.mesh.devices.flat)),
        versions=versions(),
        date=datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
    )
    result = dataclasses.replace(result, notes=reference(result))
    new = folder / f".{RESULTS}.new"
    new.write_text(result.to_json(), encoding="utf-8")
    new.replace(folder / RESULTS)
    return result, write_report(result, folder / REPORT)


def _with_seed(run: RunConfig, name: str, seed: int) -> RunConfig:
    if name != Path(name).name or name.startswith("."):
        raise ConfigError([f"compare.variants: {name!r} cannot be the name of a folder; choose another name"])
    return dataclasses.replace(
        run, name=f"{name}-seed{seed}", train=dataclasses.replace(run.train, seed=seed)
    )


# What is there already


def _prepare(
    folder: Path, plan: dict[Path, tuple[str, RunConfig]], mode: Mode, tell: Callable[[str], None]
) -> dict[Path, RunResult]:
    """The runs that are over, by folder; makes the folder fit for ``mode``."""
    if mode == "new":
        used = next((where for where in plan if (where / RUN).exists() or _steps(where)), None)
        if used is not None or (folder / RESULTS).exists():
            raise FolderInUse(
                f"{folder} holds a comparison ({(used or folder / RESULTS).name}); "
                "go on with it (--resume), replace it (--overwrite), or choose another folder (--folder)"
            )
    done, problems = {}, []
    if mode == "resume":
        for where, (_, config) in plan.items():
            stored = _read(where / RUN)
            old = stored.config if stored else _config_of_checkpoint(where)
            if old is None:
                continue
            changes = resumable_changes(config_from_dict(old), config)
            problems += [f"cannot resume {where} with {change}: {why}" for change, why in changes.refused]
            for change in changes.applied:
                tell(f"{where.name}: changed {change}")
            if stored and not changes.applied:
                done[where] = stored
    if problems:
        raise ConfigError(problems)
    for stale in [folder / REPORT, folder / RESULTS, *(where / RUN for where in plan if where not in done)]:
        stale.unlink(missing_ok=True)
    return done


def _steps(where: Path) -> list[int]:
    with Checkpoints(where / CHECKPOINTS, mode="read") as checkpoints:
        return checkpoints.steps()


def _config_of_checkpoint(where: Path) -> dict[str, Any] | None:
    with Checkpoints(where / CHECKPOINTS, mode="read") as checkpoints:
        return checkpoints.meta()["config"] if checkpoints.steps() else None


def _write(path: Path, run: RunResult) -> None:
    """A comparison of one run, so that there is one file format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(ComparisonResult(title=run.name, runs=[run]).to_json(), encoding="utf-8")
    new.replace(path)


def _read(path: Path) -> RunResult | None:
    return ComparisonResult.from_json(path.read_text(encoding="utf-8")).runs[0] if path.exists() else None


# One run


def _run(name: str, config: RunConfig, where: Path, mode: Mode) -> tuple[RunResult, Session]:
    if mode == "resume" and not _steps(where):
        mode = "new"
    reporter = Reporter(quiet=jax.process_index() != 0, label=where.name, log_every=config.train.log_every)
    result: TrainResult | None = None
    notes = ""
    try:
        session, result = train_run(
            **vars(config), folder=where, stored_config=to_dict(config), mode=mode, reporter=reporter
        )
    except TrainingDiverged as error:
        notes = f"diverged: {error}"
        reporter.line(f"{where.name}: {notes}")
        session = _session(config)
    if result is not None and result.stopped is not None and result.step < config.train.steps:
        raise Stopped(result.stopped)
    curves = _curves(read_metrics(where), result)
    params = session.state_like["params"]
    has_mixing = config.residual.has_matrix and config.flow.is_standard  # what is recorded is ordinary attention's
    return RunResult(
        name=name,
        connection=label(config.residual, config.flow),
        seed=config.train.seed,
        **curves,
        params=count(params),
        connection_params=count(params["stack"]["connection"]),
        peak_memory_bytes=_step_memory(session),
        mixing=_mixing(session, result.state["params"]) if result is not None and has_mixing else None,
        config=to_dict(config),
        notes=notes,
    ), session


def _session(config: RunConfig) -> Session:
    parts = ("model", "residual", "flow", "task", "data", "optimizer", "schedule", "train", "mesh")
    return build_session(**{part: getattr(config, part) for part in parts})


def _curves(lines: list[dict[str, Any]], result: TrainResult | None) -> dict[str, Any]:
    """Losses, times and speed from the lines of ``metrics.jsonl``, those before a resume included.

    A step takes its tokens over the speed of its interval; intervals leave out compiling and pauses.
    """
    steps = [line for line in lines if "loss" in line]
    rates = [line["tokens_per_second"] for line in steps if "tokens_per_second" in line]
    seconds, total, rate = [], 0.0, rates[-1] if rates else math.inf
    backwards = []
    for line in reversed(steps):  # a line tells the speed of the steps up to it
        rate = line.get("tokens_per_second", rate)
        backwards.append(line["tokens"] / rate)
    for own in reversed(backwards):
        seconds.append(total)
        total += own
    valid = [line for line in lines if "valid_loss" in line]
    if result is not None and result.evaluation and (not valid or valid[-1]["step"] < result.step):
        valid.append({"step": result.step, **result.evaluation})
    bits = [float(line.get("valid_bpb", float(line["valid_loss"]) / math.log(2))) for line in valid]
    at = [line["step"] for line in valid]
    if result is None:  # diverged: an earlier validation is not the run's result
        at.append(steps[-1]["step"] + 1 if steps else 1)
        bits.append(math.nan)
    return {
        "steps": [line["step"] for line in steps],
        "seconds": seconds,
        "train_loss": [float(line["loss"]) for line in steps],
        "valid_steps": at,
        "valid_bpb": bits,
        "tokens_per_second": sorted(rates)[len(rates) // 2] if rates else math.nan,
    }


def _compiled_step(session: Session) -> Any:
    """The train step, compiled ahead; found in the compilation cache when the session was trained."""
    step = session.function()

    # The loop's name for it: what the run has compiled is then found in the compilation cache.
    def counted(state, batch):
        return step(state, batch)

    return session.jitted(counted).lower(session.state_like, session.batch_like).compile()


def _step_memory(session: Session) -> int | None:
    """Bytes of one device in a train step, by the compiler; None where it does not say."""
    memory = _compiled_step(session).memory_analysis()
    return None if memory is None else peak_bytes(memory)


def _timed_in_turns(
    results: list[RunResult], runs: dict[str, RunConfig], tell: Callable[[str], None]
) -> list[RunResult]:
    """The results with speeds taken step by step in turns, as medians, instead of each run's own.

    For CPUs only. The speed of a shared machine drifts by a factor of two within minutes, so that runs trained one
    after the other cannot be compared; accelerators keep theirs, and may not hold all states at once.
    """
    timed = []
    for name, config in runs.items():
        session = _session(config)
        model, rows = session.model.config, config.train.batch_size
        state = init_state(session.model, session.optimizer, session.mesh, 0)
        draw = partial(random_batch, rows, model.context, model.vocab_size)
        timed.append((Timed(name, _compiled_step(session), state, draw), rows * model.context))
    tell(f"timing the steps of {len(timed)} variants in turns, {_ROUNDS} each")
    time_in_turns([one for one, _ in timed], _ROUNDS, lambda what, done: None)
    step = {one.name: statistics.median(one.seconds) for one, _ in timed}
    tokens = {one.name: count for one, count in timed}
    return [
        dataclasses.replace(
            run,
            tokens_per_second=tokens[run.name] / step[run.name],
            seconds=[(number - 1) * step[run.name] for number in run.steps],
        )
        for run in results
    ]


def _mixing(session: Session, params: Any) -> MixingResult:
    """The depth mixing of the trained model on the first rows of its validation split."""
    rows = eval_batch_size(_ROWS, _ROWS, session.mesh)
    batch = next(Feed(session.splits.valid, session.mesh, rows).evaluation(1))
    tokens, segments, positions = (batch[k][:, :_TOKENS] for k in ("inputs", "segment_ids", "positions"))
    return model_mixing(session.model, params, tokens, segments, positions)


# What the report tells beside the runs


def reference(result: ComparisonResult) -> str:
    """What stands beside the results for orientation, in a sentence."""
    entropy = result.data.get(_UNIGRAM)
    if "task" in result.data:
        return "Validation is in bits per label."
    if entropy is None:
        return "Validation is in bits per token: ready-made ids do not say how many bytes they stand for."
    return f"For orientation: a model that knows only how often each byte occurs scores {entropy}."


def unigram_entropy(session: Session) -> float | None:
    """Entropy of the bytes of the validation text, in bits per byte; None where ids stand for no text.

    It is taken from the first 64 MiB if there are more.
    """
    if session.splits.tokenizer is None:
        return None
    counts = np.zeros(256, np.int64)
    for chunk in _validation_bytes(session):
        counts += np.bincount(chunk, minlength=256)
        if counts.sum() >= _SAMPLE:
            break
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def _validation_bytes(session: Session) -> Iterator[np.ndarray]:
    split, tokenizer = session.splits.valid.store, session.splits.tokenizer
    if tokenizer.fingerprint.startswith("bytes"):
        for start in range(0, len(split.tokens), 1 << 20):
            chunk = split.tokens[start : start + (1 << 20)]
            yield chunk[chunk < 256]
        return
    for index in range(split.info.documents):
        yield np.frombuffer(tokenizer.decode(split.document(index)).encode("utf-8"), np.uint8)


def _data(session: Session) -> dict[str, str]:
    told, entropy = session.splits.info.facts(), unigram_entropy(session)
    return told if entropy is None else told | {_UNIGRAM: f"{entropy:.4f} bits per byte"}
