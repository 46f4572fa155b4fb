"""Batches of sequences that are made as they are asked for: no store, no text, nothing on disk."""

from __future__ import annotations

import dataclasses
import sys
from typing import Literal, Protocol

import numpy as np

from .errors import DataError
from .indexed import Batch, IndexedBatches, Rows, picked


class Sequences(Protocol):
    """What makes the sequences.

    length: inputs per sequence. valid_sequences: of the validation split; the training split never ends.
    vocab_size: every id is below it. vocabulary: what the ids mean, in words; equal only if they mean the same.
    """

    length: int
    valid_sequences: int

    @property
    def vocab_size(self) -> int: ...

    @property
    def vocabulary(self) -> str: ...

    def describe(self) -> str: ...

    def rows(self, split: Literal["train", "valid"], index: np.ndarray) -> Batch:
        """inputs, targets int32, weights float32, [B, length], of the sequences numbered `index` int [B]: a pure
        function of both arguments."""
        ...


@dataclasses.dataclass(frozen=True)
class GeneratedInfo:
    """What `StoreInfo` says of a store. tokenizer: what the ids mean, in words."""

    tokenizer: str
    vocab_size: int
    description: str

    def facts(self) -> dict[str, str]:
        """What there is, by name, for a report."""
        return {"task": self.description, "vocabulary": f"{self.vocab_size}"}

    def lines(self) -> list[str]:
        """A summary for people."""
        return [f"{self.description}; vocabulary {self.vocab_size}"]


class GeneratedBatches(IndexedBatches):
    """The batches of one split: row r of step s is the sequence numbered s * batch_size + r, padded to `context`.

    Args:
      sequences: what makes them.
      split: "train", which never ends, or "valid", of `sequences.valid_sequences` rows.
      context: inputs per row, S.
      batch_size: rows of the global batch, B, all hosts together.

    Raises:
      DataError: a context shorter than the sequences, or a size below 1.
    """

    def __init__(self, sequences: Sequences, split: Literal["train", "valid"], context: int, batch_size: int):
        if batch_size < 1:
            raise DataError(f"the batch size is {batch_size}; it must be at least 1")
        if context < sequences.length:
            raise DataError(
                f"model.context={context} is less than task.length={sequences.length}; raise the one or lower the other"
            )
        self.sequences, self.name, self.context, self.batch_size = sequences, split, context, batch_size

    @property
    def num_windows(self) -> int:
        return sys.maxsize if self.name == "train" else self.sequences.valid_sequences

    @property
    def bytes_per_target(self) -> None:
        return None

    def describe(self) -> str:
        count = "without end" if self.name == "train" else f"{self.num_windows} in all"
        unused = self.context - self.sequences.length
        padding = f" ({unused} of {self.context} places of a row are padding)" if unused else ""
        return f"{self.name}: sequences of {self.sequences.length}{padding}, {count}; {self.batch_size} rows per step"

    def batch(self, step: int, rows: Rows = None) -> Batch:
        """The batch of a step, or some rows of it; arrays as in `Batches.batch`.

        Raises:
          DataError: a negative step.
          IndexError: rows outside the batch.
        """
        if step < 0:
            raise DataError(f"step {step} asked of the {self.name} split; steps begin at 0")
        return self.assemble(step * self.batch_size + picked(self.batch_size, rows))

    def assemble(self, index: np.ndarray) -> Batch:
        """The sequences numbered `index`, int [B] (-1: all padding); arrays as in `Batches.batch`."""
        shape, length = (len(index), self.context), self.sequences.length
        batch = {name: np.zeros(shape, np.int32) for name in ("inputs", "targets", "segment_ids", "positions")}
        batch["weights"] = np.zeros(shape, np.float32)
        real = np.flatnonzero(index >= 0)
        made = self.sequences.rows(self.name, index[real])
        made["segment_ids"] = np.ones((len(real), length), np.int32)
        made["positions"] = np.broadcast_to(np.arange(length, dtype=np.int32), (len(real), length))
        for name, values in made.items():
            batch[name][real, :length] = values
        return batch
