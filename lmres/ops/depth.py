"""Reading a history over depth: weighted sums of its slots and the softmax that gives the weights."""

import jax
import jax.numpy as jnp
from jax import Array

from lmres.ops.norm import stat_dtype


def weighted_sum(weights: Array, slots: Array) -> Array:
    """``sum_m weights[m] * slots[m]``, accumulated in the statistics dtype.

    weights: [M] (the same for every token) or [M, B, S]; slots: [M, B, S, D]. Returns [B, S, D] in the dtype of
    ``slots``.
    """
    wide = stat_dtype(slots)
    weights = jnp.expand_dims(weights, tuple(range(weights.ndim, slots.ndim))).astype(wide)
    return jnp.sum(weights * slots.astype(wide), axis=0).astype(slots.dtype)


def depth_softmax(logits: Array, valid: Array) -> Array:
    """Softmax over the leading axis among the entries where ``valid``; the others get exactly 0.

    logits: [M, ...]; valid: broadcastable to it, with at least one True per column. Float32 or wider.
    """
    logits = jnp.where(valid, logits.astype(stat_dtype(logits)), -jnp.inf)
    return jax.nn.softmax(logits, axis=0)
