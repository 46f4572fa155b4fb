"""Mixes over the heads of a history of keys or values, and their backward: as ``depth``, with weights between heads.

Two ways to walk over the slots, for the reasons given in ``depth``: a loop over those that are used on CPUs, one
product elsewhere.

Legend: M slots, G heads (h of the reader, g of the slot), K head size, B batch, S sequence.
"""

import jax
import jax.numpy as jnp
from jax import Array

from lmres.ops.indexing import put, take
from lmres.ops.norm import stat_dtype


@jax.custom_vjp
def mix_heads(weights: Array, slots: Array, count: int | Array) -> Array:
    """``sum_mg weights[h, m, g] slots[m, ..., g, :]`` over the first ``count`` slots; weights beyond them are zero.

    weights: [G, M, G]; slots: [M, B, S, G, K]. Returns [B, S, G, K] in the statistics dtype.
    """
    dtype = stat_dtype(slots)

    def walk(weights, slots, count):
        def body(m, total):
            return total + jnp.einsum("hg,bsgk->bshk", take(weights, m, 1), take(slots, m).astype(dtype))

        return jax.lax.fori_loop(0, count, body, jnp.zeros(slots.shape[1:], dtype))

    def fused(weights, slots, count):
        return jnp.einsum("hmg,mbsgk->bshk", weights, slots.astype(dtype))

    return jax.lax.platform_dependent(weights.astype(dtype), slots, count, cpu=walk, default=fused)


def mix_heads_back(g: Array, weights: Array, slots: Array, g_slots: Array, count: int | Array) -> tuple[Array, Array]:
    """Backward of ``mix_heads`` for the cotangent ``g`` [B, S, G, K]: (of the weights, ``g_slots`` + of the slots)."""
    dtype = stat_dtype(slots)

    def walk(g, weights, slots, g_slots, count):
        def body(m, found):
            g_weights, g_slots = found
            dots = jnp.einsum("bshk,bsgk->hg", g, take(slots, m).astype(dtype))
            more = jnp.einsum("hg,bshk->bsgk", take(weights, m, 1), g)
            g_weights = put(g_weights, dots, m, 1)
            new = take(g_slots, m) + more.astype(g_slots.dtype)
            return g_weights, put(g_slots, new, m, 0)

        return jax.lax.fori_loop(0, count, body, (jnp.zeros_like(weights), g_slots))

    def fused(g, weights, slots, g_slots, count):
        dots = jnp.einsum("bshk,mbsgk->hmg", g, slots.astype(dtype))
        more = jnp.einsum("hmg,bshk->mbsgk", weights, g)
        used = (jnp.arange(len(slots)) < count)[:, None]
        return jnp.where(used, dots, 0), g_slots + more.astype(g_slots.dtype)

    arguments = (g.astype(dtype), weights.astype(dtype), slots, g_slots, count)
    return jax.lax.platform_dependent(*arguments, cpu=walk, default=fused)


def _backward(residuals, g):
    weights, slots, count = residuals
    return *mix_heads_back(g, weights, slots, jnp.zeros_like(slots), count), None


mix_heads.defvjp(lambda w, x, n: (mix_heads(w, x, n), (w, x, n)), _backward)
