"""Cross-entropy per real token, what is added to it, and how many tokens are right.

Legend: B batch, S sequence, V vocabulary. ``weights`` [B, S] is 1 for a target that counts and 0 for padding and
document borders.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class LossSums(NamedTuple):
    """Sums over the real tokens of a batch, float32 scalars: nats, squared log-partition, number of tokens."""

    nats: Array
    z: Array
    tokens: Array


def loss_sums(logits: Array, targets: Array, weights: Array) -> LossSums:
    """logits: [B, S, V] float32; targets: [B, S] int; weights: [B, S]."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    weights = weights.astype(logits.dtype)
    return LossSums(
        nats=jnp.sum((log_z - picked) * weights),
        z=jnp.sum(log_z * log_z * weights),
        tokens=jnp.sum(weights),
    )


class ScoredSums(NamedTuple):
    """``LossSums``, and by position: labels there, and those of them that are the most probable id; float32 [S]."""

    nats: Array
    z: Array
    tokens: Array
    labels: Array
    right: Array


def scored_sums(logits: Array, targets: Array, weights: Array) -> ScoredSums:
    """``loss_sums`` and the counts; arguments as there."""
    right = jnp.argmax(logits, axis=-1) == targets
    weights = weights.astype(logits.dtype)
    return ScoredSums(
        *loss_sums(logits, targets, weights), labels=jnp.sum(weights, axis=0), right=jnp.sum(right * weights, axis=0)
    )
