"""Reading a history over depth: the softmax that gives the weights, weighted sums of slots, and their backward.

A history holds M slots, of which a reader uses some: ``Span`` says which, and may be traced. Two ways to walk
over them:

- on CPUs a loop over exactly these slots, one [B, S, D] tensor at a time, which stays in cache;
- elsewhere one fused pass over all slots, the others at weight zero: a loop whose length is only known at run time
  would make the host wait on a GPU.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lmres.ops.norm import stat_dtype


class Span(NamedTuple):
    """The slots first, first + stride, ..., ``count`` of them. Ints or traced int scalars."""

    first: int | Array
    stride: int | Array
    count: int | Array


def depth_softmax(logits: Array, valid: Array) -> Array:
    """Softmax over the leading axis among the entries where ``valid``; the others get exactly 0.

    logits: [M, ...]; valid: broadcastable to it, with at least one True per column. Float32 or wider.
    """
    logits = jnp.where(valid, logits.astype(stat_dtype(logits)), -jnp.inf)
    return jax.nn.softmax(logits, axis=0)


def weighted_sum(weights: Array, slots: Array, span: Span | None = None) -> Array:
    """``sum_m weights[m] * slots[m]``, accumulated in the statistics dtype.

    weights: [M] (the same for every token) or [M, B, S], zero outside ``span``; slots: [M, B, S, D]; span: None for
    all.
    Returns [B, S, D] in the dtype of ``slots``.
    """
    return _weighted_sum(weights.astype(stat_dtype(slots)), slots, span or Span(0, 1, slots.shape[0]))


@jax.custom_vjp
def _weighted_sum(weights: Array, slots: Array, span: Span) -> Array:
    def walk(weights, slots, span):
        def body(t, total):
            m = span.first + span.stride * t
            return total + _spread(_at(weights, m), total) * _at(slots, m).astype(total.dtype)

        return jax.lax.fori_loop(0, span.count, body, jnp.zeros(slots.shape[1:], weights.dtype))

    def fused(weights, slots, span):
        return jnp.sum(_spread(weights, slots) * slots.astype(weights.dtype), axis=0)

    total = jax.lax.platform_dependent(weights, slots, span, cpu=walk, default=fused)
    return total.astype(slots.dtype)


def _forward(weights, slots, span):
    return _weighted_sum(weights, slots, span), (weights, slots, span)


def _backward(residuals, g):
    weights, slots, span = residuals
    g_slots = add_outer(jnp.zeros_like(slots), weights, g, span)
    return slot_dots(g, slots, span, weights.ndim), g_slots, None


_weighted_sum.defvjp(_forward, _backward)


def slot_dots(g: Array, slots: Array, span: Span, ndim: int = 3) -> Array:
    """``sum_d g * slots[m]`` for the slots of ``span``, 0 for the others: the cotangent of the weights.

    g: [B, S, D]; slots: [M, B, S, D]. Returns [M, B, S], or [M] (summed over tokens too) for ``ndim`` 1.
    """
    dtype = stat_dtype(slots)
    equation = "bsd,bsd->bs" if ndim == 3 else "bsd,bsd->"

    def dot(g, slot):
        return jnp.einsum(equation, g, slot.astype(dtype), precision=jax.lax.Precision.HIGHEST)

    def walk(g, slots, span):
        def body(t, dots):
            m = span.first + span.stride * t
            return jax.lax.dynamic_update_index_in_dim(dots, dot(g, _at(slots, m)), m, 0)

        start = jnp.zeros((slots.shape[0], *g.shape[: ndim - 1]), dtype)
        return jax.lax.fori_loop(0, span.count, body, start)

    def fused(g, slots, span):
        dots = jnp.sum(g * slots.astype(dtype), axis=tuple(range(ndim, slots.ndim)))
        return jnp.where(_spread(_inside(span, slots.shape[0]), dots), dots, 0)

    return jax.lax.platform_dependent(g.astype(dtype), slots, span, cpu=walk, default=fused)


def add_outer(g_slots: Array, weights: Array, g: Array, span: Span) -> Array:
    """``g_slots[m] + weights[m] * g`` for the slots of ``span``: the cotangent of the slots, added where it belongs.

    g_slots: [M, B, S, D]; weights: [M] or [M, B, S], zero outside ``span``; g: [B, S, D].
    """

    def walk(g_slots, weights, g, span):
        def body(t, g_slots):
            m = span.first + span.stride * t
            new = _at(g_slots, m) + (_spread(_at(weights, m), g) * g).astype(g_slots.dtype)
            return jax.lax.dynamic_update_index_in_dim(g_slots, new, m, 0)

        return jax.lax.fori_loop(0, span.count, body, g_slots)

    def fused(g_slots, weights, g, span):
        return g_slots + (_spread(weights, g_slots) * g).astype(g_slots.dtype)

    return jax.lax.platform_dependent(g_slots, weights, g.astype(weights.dtype), span, cpu=walk, default=fused)


def _at(x: Array, m: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, m, 0, keepdims=False)


def _spread(weights: Array, like: Array) -> Array:
    """``weights`` with trailing axes of size one, to the rank of ``like``."""
    return jnp.expand_dims(weights, tuple(range(weights.ndim, like.ndim)))


def _inside(span: Span, count: int) -> Array:
    steps, rest = jnp.divmod(jnp.arange(count) - span.first, span.stride)
    return (rest == 0) & (steps >= 0) & (steps < span.count)
