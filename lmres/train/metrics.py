"""Metrics: one JSON line per step in the run's folder, and the same to TensorBoard and Weights & Biases.

``metrics.jsonl`` is one clean sequence whatever happened to the run: a run resumed from step N drops the
lines after N that its predecessor wrote, and a half-written last line. On an object store, where a file can only be
written whole, that is done once a minute, before every checkpoint and at the end.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from lmres.data.files import as_path, is_remote
from lmres.train.config import LogConfig

FILE = "metrics.jsonl"


class Deferred:
    """Hands out the metrics of a step when the next one has been dispatched, so that the host never waits.

    While the device works on step t + 1, reading the results of step t costs nothing: they are there.
    """

    def __init__(self):
        self._held: tuple[int, dict[str, Any]] | None = None

    def push(self, step: int, arrays: Mapping[str, Any]) -> tuple[int, dict[str, float]] | None:
        """Takes step ``step``'s scalars (device arrays or numbers), gives the floats of the one before."""
        for value in arrays.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        ready, self._held = self._held, (step, dict(arrays))
        return _floats(ready)

    def flush(self) -> tuple[int, dict[str, float]] | None:
        """The floats of the last step pushed, waiting for them; None when there is none."""
        ready, self._held = self._held, None
        return _floats(ready)


def _floats(held: tuple[int, dict[str, Any]] | None) -> tuple[int, dict[str, float]] | None:
    if held is None:
        return None
    return held[0], {name: float(np.asarray(value)) for name, value in held[1].items()}


def _json_value(value: Any) -> Any:
    """JSON has no NaN and no infinities: they become "nan", "inf" and "-inf", which ``float`` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def read_metrics(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """The complete lines of ``metrics.jsonl`` in ``folder``, oldest first; none when there is no such file.

    Raises ValueError naming file and line for a complete line that is not what ``MetricWriter`` writes.
    """
    return _read(as_path(folder, "metrics") / FILE)


def _read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    found = []
    for number, line in enumerate(lines, start=1):  # what follows the last newline was cut off in writing
        try:
            found.append(json.loads(line))
            found[-1]["step"] + 0
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a line of metrics: {line[:80]!r}") from error
    return found


class MetricWriter:
    """Writes metrics; only process 0 does, the others' calls do nothing.

    folder: the run's; made when missing. Holds ``metrics.jsonl``, and ``tensorboard/``.
    resume: number of updates done before this start: 0 for a new run, which begins an empty file. Lines of
      later steps are dropped from all places that allow it.
    config: plain dict shown beside the run in Weights & Biases.
    name: of the run there; None for the folder's name.

    Raises ImportError naming the extra to install when Weights & Biases is asked for and not there.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        log: LogConfig,
        *,
        resume: int = 0,
        config: Mapping[str, Any] | None = None,
        name: str | None = None,
    ):
        self._file = self._board = self._wandb = None
        if jax.process_index() != 0:
            return
        folder = as_path(folder, "metrics")
        folder.mkdir(parents=True, exist_ok=True)
        if is_remote(folder):
            self._file = _Whole(folder / FILE, _lines_until(folder / FILE, resume))
        else:
            _drop_after(folder / FILE, resume)
            self._file = (folder / FILE).open("a", encoding="utf-8")
        if log.tensorboard:
            from tensorboardX import SummaryWriter  # not at the top: takes most of a second

            # TensorBoard hides what earlier files in the folder say from purge_step on.
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resume + 1)
        if log.wandb is not None:
            self._wandb = _start_wandb(folder, log.wandb, resume, dict(config or {}), name or folder.name)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line: ``{"step": step, **values}``. step: number of updates done. Names may have slashes."""
        if self._file is None:
            return
        line = {"step": step, **{k: _json_value(v) for k, v in values.items()}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()  # a killed run keeps what it wrote
        if self._board is not None:
            for key, value in values.items():
                self._board.add_scalar(key, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)

    def sync(self) -> None:
        """Returns when the lines written so far would survive the end of this machine, as far as its files do."""
        if isinstance(self._file, _Whole):
            self._file.sync()

    def close(self, ok: bool = True) -> None:
        """Ends all outputs. ok: whether the run ended well, for Weights & Biases."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if ok else 1)
        self._file = self._board = self._wandb = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        self.close(ok=kind is None)


def _drop_after(path: Path, step: int) -> None:
    """Leaves the complete lines of steps up to ``step``; the file is replaced in one move."""
    if not path.exists():
        return
    new = path.with_suffix(".new")
    new.write_text("".join(_lines_until(path, step)), encoding="utf-8")
    new.replace(path)


def _lines_until(path: Path, step: int) -> list[str]:
    """The complete lines of steps up to ``step``."""
    return [json.dumps(line) + "\n" for line in _read(path) if line["step"] <= step] if step else []


class _Whole:
    """A text file that can only be written whole. Its lines are kept here; ``flush`` writes them once a minute."""

    _SECONDS = 60.0

    def __init__(self, path: Path, lines: list[str]):
        self._path, self._lines, self._changed = path, lines, True
        self.sync()

    def write(self, text: str) -> None:
        self._lines.append(text)
        self._changed = True

    def flush(self) -> None:
        if time.monotonic() - self._written > self._SECONDS:
            self.sync()

    def sync(self) -> None:
        if self._changed:
            self._path.write_text("".join(self._lines))
        self._changed, self._written = False, time.monotonic()

    def close(self) -> None:
        self.sync()


def _start_wandb(folder: Path, project: str, resume: int, config: dict[str, Any], name: str) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ImportError(
            f'log.wandb={project!r} needs Weights & Biases: pip install "lmres[wandb]", or set log.wandb=null'
        ) from error
    known = folder / "wandb_id"
    place = None if is_remote(folder) else str(folder)  # what it keeps on this machine
    if resume and known.exists():
        return wandb.init(
            project=project,
            dir=place,
            name=name,
            config=config,
            id=known.read_text().strip(),
            resume="must",
        )
    run = wandb.init(project=project, dir=place, name=name, config=config)
    known.write_text(run.id)
    return run
