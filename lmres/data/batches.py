"""Batches of token windows, addressed by step.

A window is a run of `context` inputs; its targets are the same run moved by one token, so a full window
touches context + 1 tokens and shares one with the next. Every token but the first of each document is the
target of exactly one window; the last window of the set (packing="concat") or of a document (packing="none")
is padded if it is short. Nothing is dropped.

The global batch of a step is a pure function of (store, settings, step). Hosts ask for their own rows of it,
so the position in the data is one number and does not depend on how many hosts there are.
"""

from __future__ import annotations

import sys
from typing import Literal

import grain
import numpy as np

from .errors import DataError
from .indexed import Batch, IndexedBatches, Rows, picked
from .store import TokenSplit


class Windows:
    """The windows of a split, each (start, length): inputs are tokens [start, start + length), length <=
    context."""

    def __init__(self, split: TokenSplit, context: int, packing: Literal["concat", "none"]):
        self.split, self.context, self.packing = split, context, packing
        if packing == "concat":
            # The last token of all is no input: nothing follows it.
            self._count = -(-(len(split.tokens) - 1) // context)
        else:
            per_document = -(-(np.diff(split.offsets) - 1) // context)
            self._first = np.concatenate([[0], np.cumsum(per_document)])
            self._count = int(self._first[-1])

    def __len__(self) -> int:
        return self._count

    def spans(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """start and length, int64 [B] each, of windows `index` int [B]; -1 stands for an empty window (length
        0)."""
        empty, index = index < 0, np.maximum(index, 0)
        if self.packing == "concat":
            start, end = index * self.context, len(self.split.tokens)
        else:
            document = np.searchsorted(self._first, index, side="right") - 1
            start = self.split.offsets[document] + (index - self._first[document]) * self.context
            end = self.split.offsets[document + 1]
        length = np.minimum(self.context, end - 1 - start)
        return np.where(empty, 0, start), np.where(empty, 0, length)

    def assemble(self, index: np.ndarray) -> Batch:
        """Rows for windows `index` int [B] (-1: all padding); see `Batches.batch` for the arrays."""
        start, length = self.spans(index)
        tokens, offsets, S = self.split.tokens, self.split.offsets, self.context
        run = np.zeros((len(index), S + 1), np.int32)
        for row, a, n in zip(run, start.tolist(), length.tolist()):
            if n:
                row[: n + 1] = tokens[a : a + n + 1]
        real = np.arange(S) < length[:, None]
        place = start[:, None] + np.arange(S)
        document = np.searchsorted(offsets, np.where(real, place, 0).ravel(), side="right").reshape(
            place.shape
        )
        begin = np.maximum(offsets[document - 1], start[:, None])
        return {
            "inputs": np.where(real, run[:, :-1], 0),
            "targets": np.where(real, run[:, 1:], 0),
            "segment_ids": np.where(real, document - document[:, :1] + 1, 0).astype(np.int32),
            "positions": np.where(real, place - begin, 0).astype(np.int32),
            "weights": (real & (place + 1 < offsets[document])).astype(np.float32),
        }


class Batches(IndexedBatches):
    """The batches of one split.

    Args:
      store: a split of an open store (`open_store(path).splits["train"]`).
      context: inputs per row, S.
      batch_size: rows of the global batch, B, all hosts together.
      seed: order of the windows; each epoch has another one.
      shuffle: False keeps the windows in order.
      packing: "concat": rows run on from document to document. "none": a row holds one document, or one
        stretch of a long one.
      repeat: "epochs", "small" or "never", see `DataConfig.repeat`.

    A batch may hold the end of one epoch and the beginning of the next: epochs follow each other without a
    gap, and an epoch is `num_windows` consecutive rows.

    Raises:
      DataError: no window at all; or, unless repeat="small", fewer windows than `batch_size`, or
        (packing="concat") fewer than context + 1 tokens. With repeat="never" fewer windows than `batch_size`
        are padded.
    """

    def __init__(
        self,
        store: TokenSplit,
        context: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        packing: Literal["concat", "none"] = "concat",
        repeat: Literal["epochs", "small", "never"] = "epochs",
    ):
        if context < 1 or batch_size < 1:
            raise DataError(f"context is {context} and batch size {batch_size}; both must be at least 1")
        self.store, self.context, self.batch_size, self.seed = store, context, batch_size, seed
        self.packing, self.repeat = packing, repeat
        self._windows = Windows(store, context, packing)
        self._check()
        order = grain.MapDataset.range(self.num_windows)
        if shuffle:
            order = order.seed(seed).shuffle()
        # Of window numbers, not of windows: these are put together at once for all rows a host wants.
        self._order = order.repeat(1 if repeat == "never" else None)

    def _check(self) -> None:
        found, where = len(self._windows), f"{self.store.path}: the {self.store.name} split"
        tokens = len(self.store.tokens)
        if not found:
            raise DataError(
                f"{where} has {tokens} tokens in {self.store.info.documents} documents and none to predict"
            )
        if self.repeat == "small":
            return
        if self.packing == "concat" and tokens <= self.context:
            raise DataError(
                f"{where} has {tokens} tokens, one window of context {self.context} needs "
                f"{self.context + 1}; give more text, a shorter context, or set data.repeat to 'small' to "
                "pad it"
            )
        if self.repeat == "epochs" and found < self.batch_size:
            raise DataError(
                f"{where} has {found} windows of context {self.context}, one batch needs {self.batch_size}; "
                "give more text, a smaller batch, or set data.repeat to 'small' to let windows recur within "
                "a batch"
            )

    @property
    def num_windows(self) -> int:
        """Rows of one epoch."""
        return len(self._windows)

    @property
    def steps_per_epoch(self) -> float:
        """Steps of one epoch; not whole when an epoch ends inside a batch."""
        return self.num_windows / self.batch_size

    @property
    def num_steps(self) -> int | None:
        """Steps that can be asked for: None (no end), or with repeat="never" those of one epoch."""
        return -(-self.num_windows // self.batch_size) if self.repeat == "never" else None

    @property
    def target_tokens(self) -> int:
        """Tokens predicted in one epoch: the sum of `weights` over all windows."""
        return self.store.info.targets

    @property
    def target_bytes(self) -> int | None:
        """UTF-8 bytes that the targets of one epoch stand for: bits per byte of a full evaluation is
        total_nats / ln 2 / target_bytes. None for ready-made ids. Exact for tokenizers that keep all of the
        text."""
        return self.store.info.target_bytes

    @property
    def bytes_per_target(self) -> float | None:
        """target_bytes / target_tokens, to turn the mean nats per token of a partial evaluation into bits per
        byte: nats / ln 2 / bytes_per_target. Exact for a full one."""
        return None if self.target_bytes is None else self.target_bytes / self.target_tokens

    def describe(self) -> str:
        """One line: windows, steps per epoch, and what happens to the remainder."""
        places = self.num_windows * self.context
        used = len(self.store.tokens) - 1 if self.packing == "concat" else self.target_tokens
        end = {
            "epochs": "epochs follow without a gap",
            "small": "epochs follow without a gap, windows may recur within a batch",
            "never": "one epoch, the last batch is padded with empty rows",
        }[self.repeat]
        return (
            f"{self.store.name}: {self.num_windows} windows of {self.context} ({places - used} of {places} "
            f"places are padding), {self.steps_per_epoch:.4g} steps of {self.batch_size} rows per epoch; "
            f"{end}"
        )

    def batch(self, step: int, rows: Rows = None) -> Batch:
        """The batch of a step, or some rows of it.

        Args:
          step: from 0, any order, any number of times.
          rows: slice or int array of rows of the global batch; None: all.
        Returns:
          inputs, targets: int32 [B, S].
          segment_ids: int32 [B, S], 1, 2, ... for the documents of the row, 0 for padding. A document cut by
            the edge of a row goes on as a segment of its own in another row.
          positions: int32 [B, S], from 0 in each segment.
          weights: float32 [B, S], 1 where the target belongs to the same document as the input, else 0. The
            separator that ends a document is a target; the first token of the next one is not.
        Raises:
          DataError: a negative step, or one past the end with repeat="never".
          IndexError: rows outside the batch.
        """
        if step < 0 or (self.num_steps is not None and step >= self.num_steps):
            raise DataError(
                f"step {step} asked of the {self.store.name} split, which has {self.num_steps or 'endless'} "
                f"steps of {self.batch_size} rows from 0; set data.repeat to 'epochs' to start over, or "
                "train for fewer steps"
            )
        place = step * self.batch_size + picked(self.batch_size, rows)
        # Only the last batch with repeat="never" reaches past the end; its rows there stay empty.
        end = self.num_windows if self.repeat == "never" else sys.maxsize
        return self.assemble(
            np.array([self._order[i] if i < end else -1 for i in place.tolist()], int)
        )

    def assemble(self, index: np.ndarray) -> Batch:
        """The windows numbered `index`, int [B], in the order of the text (-1: all padding); arrays as in `batch`."""
        return self._windows.assemble(index)
