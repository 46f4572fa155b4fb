"""What a person sees while a run goes on: a progress bar on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lmres.train.flops import show


class Reporter:
    """Lines, and a bar of steps; a context manager around the bar.

    quiet: print nothing (all processes but the first). label: stands before the bar. log_every: steps between plain
    lines where there is no terminal.
    """

    def __init__(self, quiet: bool = False, label: str = "", log_every: int = 10):
        # Progress goes to stderr: stdout is for results.
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._label, self._log_every = label, log_every
        self._bar: Progress | None = None
        self._task: Any = None
        self._total = 0

    def line(self, text: str) -> None:
        """One line, above the bar."""
        (self._bar.console if self._bar else self._console).print(text, markup=False, soft_wrap=True)

    def start(self, done: int, total: int) -> Self:
        """Shows ``done`` of ``total`` steps."""
        self._total = total
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[info]}"),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(self._label or "train", total=total, completed=done, info="compiling")
            self._bar.start()
        return self

    def step(
        self,
        step: int,
        values: Mapping[str, float],
        rate: float | None,
        remaining: float | None,
        used: float | None = None,
    ) -> None:
        """Step ``step`` is done. values: its metrics. rate: tokens per second. remaining: seconds. used: model FLOPs
        utilisation, None (shown as n/a) on unknown hardware."""
        info = " ".join(
            [
                *(f"{name} {value:.4g}" for name, value in values.items()),
                f"{show(rate, ',.0f')} tok/s",
                f"MFU {show(used)}",
                f"ETA {clock(remaining)}",
            ]
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, info=info)
        elif step % self._log_every == 0 or step == self._total:
            label = f"{self._label}: " if self._label else ""
            self.line(f"{label}step {step}/{self._total} {info}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        sys.stderr.flush()


def clock(seconds: float | None) -> str:
    """m:ss or h:mm:ss; n/a for None."""
    if seconds is None:
        return "n/a"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
