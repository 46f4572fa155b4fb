"""What batches have in common wherever their rows come from: rows are addressed by number, batches by step."""

from __future__ import annotations

import abc
import contextlib
import sys
from collections.abc import Iterator

import grain
import numpy as np

from .errors import DataError

Rows = slice | np.ndarray | None
Batch = dict[str, np.ndarray]

# Two threads keep ahead of any training step; more would only fight over the interpreter's lock.
_READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)


def picked(batch_size: int, rows: Rows) -> np.ndarray:
    """Numbers of the rows asked for, int64 [B]."""
    every = np.arange(batch_size)
    return every if rows is None else every[rows]


class IndexedBatches(abc.ABC):
    """Batches as a trainer takes them."""

    batch_size: int

    @property
    @abc.abstractmethod
    def num_windows(self) -> int:
        """Rows of one epoch; `sys.maxsize` stands for no end."""

    @property
    def num_steps(self) -> int | None:
        """Steps that can be asked for; None: no end."""
        return None

    @property
    @abc.abstractmethod
    def bytes_per_target(self) -> float | None:
        """UTF-8 bytes that a target stands for, in the mean; None where they are not known."""

    @abc.abstractmethod
    def describe(self) -> str:
        """One line about the rows and steps."""

    @abc.abstractmethod
    def batch(self, step: int, rows: Rows = None) -> Batch:
        """The batch of a step, or some rows of it: a pure function of both."""

    @abc.abstractmethod
    def assemble(self, index: np.ndarray) -> Batch:
        """The rows numbered `index`, int [B], in the fixed order of evaluation; -1 stands for an empty row."""

    def iterate(self, start_step: int = 0, rows: Rows = None) -> Iterator[Batch]:
        """The batches `batch(step, rows)` for step = start_step, start_step + 1, ..., made ahead by threads.

        Endless if `num_steps` is None. Close the iterator (or let it be collected) to stop the threads.
        """
        if start_step < 0:
            raise DataError(f"start_step is {start_step}; steps begin at 0")
        end = sys.maxsize if self.num_steps is None else self.num_steps
        steps = grain.MapDataset.range(min(start_step, end), end).map(lambda step: self.batch(step, rows))
        iterator = iter(steps.to_iter_dataset(_READ))
        with contextlib.closing(iterator):
            yield from iterator

    def eval_batches(
        self, batch_size: int, max_batches: int | None = None, rows: Rows = None
    ) -> Iterator[Batch]:
        """Every row once, in order, whatever the order of training. All batches have the same shape: the
        last is filled up with rows of weight 0. Sums over the weights therefore do not depend on `batch_size`
        (with `max_batches`, the part of the set that is seen does)."""
        if batch_size < 1:
            raise DataError(f"the batch size of the evaluation is {batch_size}; it must be at least 1")
        count = self.num_eval_batches(batch_size, max_batches)
        for first in range(0, count * batch_size, batch_size):
            index = first + picked(batch_size, rows)
            index[index >= self.num_windows] = -1
            yield self.assemble(index)

    def num_eval_batches(self, batch_size: int, max_batches: int | None = None) -> int:
        """How many batches `eval_batches` yields."""
        count = -(-self.num_windows // batch_size)
        return count if max_batches is None else min(count, max_batches)
