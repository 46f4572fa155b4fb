"""Loss of a model on a split, in nats per token and in bits per byte."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lmres.data import Batches
from lmres.train.feed import Feed
from lmres.train.loss import LossSums


class Evaluator:
    """Evaluates parameters on a split; compiled once.

    The host makes a batch while the device works on the one before, and no more than that: batches queued without
    limit fill the device's memory, and collectives of simulated devices were seen to hang behind them. The sums are
    over real tokens, so the result does not depend on the evaluation's batch size.
    """

    def __init__(
        self,
        eval_step: Callable[[Any, dict[str, jax.Array]], LossSums],
        feed: Feed,
        batches: Batches,
        max_batches: int | None,
    ):
        self._step, self._feed, self._batches, self._max = eval_step, feed, batches, max_batches

    def is_finite(self, params: Any) -> bool:
        """Whether the loss on the first batch is a number."""
        return bool(np.isfinite(np.asarray(self._step(params, next(self._feed.evaluation(1))).nats)))

    def __call__(self, params: Any) -> dict[str, float]:
        """{"valid_loss" (nats per token), "valid_bpb" (bits per UTF-8 byte, if bytes are known), "valid_tokens"}."""
        total = None
        for batch in self._feed.evaluation(self._max):
            jax.block_until_ready(total)
            sums = self._step(params, batch)
            total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        nats, _, tokens = (float(np.asarray(x)) for x in total)
        result = {"valid_loss": nats / max(tokens, 1.0), "valid_tokens": tokens}
        per_target = self._batches.bytes_per_target
        if per_target:
            result["valid_bpb"] = result["valid_loss"] / math.log(2) / per_target
        return result
