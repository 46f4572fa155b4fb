"""Loss of a model on a split, in nats per token and in bits per byte; accuracy where targets are answers."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lmres.data import IndexedBatches, Splits
from lmres.train.feed import Feed
from lmres.train.loss import LossSums, ScoredSums, loss_sums, scored_sums
from lmres.train.step import Measure


def measure_of(splits: Splits) -> Measure:
    """What is summed up over the validation split: the loss, and for a task what is right too."""
    return scored_sums if splits.scored else loss_sums


class Evaluator:
    """Evaluates parameters on a split; compiled once.

    The host makes a batch while the device works on the one before, and no more than that: batches queued without
    limit fill the device's memory, and collectives of simulated devices were seen to hang behind them. The sums are
    over real tokens, so the result does not depend on the evaluation's batch size.
    """

    def __init__(
        self,
        eval_step: Callable[[Any, dict[str, jax.Array]], LossSums | ScoredSums],
        feed: Feed,
        batches: IndexedBatches,
        max_batches: int | None,
    ):
        self._step, self._feed, self._batches, self._max = eval_step, feed, batches, max_batches

    def is_finite(self, params: Any) -> bool:
        """Whether the loss on the first batch is a number."""
        return bool(np.isfinite(np.asarray(self._step(params, next(self._feed.evaluation(1))).nats)))

    def __call__(self, params: Any) -> dict[str, float]:
        """``summary`` of ``totals``."""
        return self.summary(self.totals(params))

    def totals(self, params: Any) -> LossSums | ScoredSums:
        """The sums over the split, on the host."""
        total = None
        for batch in self._feed.evaluation(self._max):
            jax.block_until_ready(total)
            sums = self._step(params, batch)
            total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        return jax.tree.map(np.asarray, total)

    def summary(self, totals: LossSums | ScoredSums) -> dict[str, float]:
        """{"valid_loss" (nats per token), "valid_bpb" (bits per UTF-8 byte, if bytes are known), "valid_tokens"}.

        Of ``ScoredSums`` also "valid_accuracy", over all labels, and "valid_accuracy_last", over those at the last
        position that has any; both in 0 .. 1.
        """
        tokens = float(totals.tokens)
        result = {"valid_loss": float(totals.nats) / max(tokens, 1.0), "valid_tokens": tokens}
        per_target = self._batches.bytes_per_target
        if per_target:
            result["valid_bpb"] = result["valid_loss"] / math.log(2) / per_target
        if isinstance(totals, ScoredSums):
            result["valid_accuracy"] = float(totals.right.sum()) / max(tokens, 1.0)
            result["valid_accuracy_last"] = accuracy_by_position(totals)[-1]
        return result


def accuracy_by_position(totals: ScoredSums) -> list[float]:
    """Share of the labels that are right, 0 .. 1, at each position up to the last that has labels.

    NaN at positions before it that have none, and at the one position of a split without any label.
    """
    labelled = np.flatnonzero(totals.labels)
    end = labelled[-1] + 1 if len(labelled) else 1
    labels, right = totals.labels[:end], totals.right[:end]
    return np.where(labels > 0, right / np.maximum(labels, 1), np.nan).tolist()


def in_words(evaluation: dict[str, float]) -> str:
    """A ``summary`` for people."""
    text = f"{evaluation['valid_loss']:.4f} nats per token"
    if "valid_bpb" in evaluation:
        text += f", {evaluation['valid_bpb']:.4f} bits per byte"
    if "valid_accuracy" in evaluation:
        text += f", accuracy {evaluation['valid_accuracy']:.4f}, at the last position "
        text += f"{evaluation['valid_accuracy_last']:.4f}"
    return text
