"""Reading a history over depth: the softmax that gives the weights, weighted sums of slots, and their backward.

A history holds M slots, of which a reader uses some: ``Span`` says which, and may be traced. Two ways to walk
over them:

- on CPUs a loop over exactly these slots, one [B, S, D] tensor at a time, which stays in cache;
- elsewhere one fused pass over all slots, the others at weight zero: a loop whose length is only known at run time
  would make the host wait on a GPU.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
    """``sum_m weights[m] * slots[m]``: one reader of ``weighted_sums``. weights: [M, ...]. Returns [B, S, D]."""
    return weighted_sums(weights[None], slots, span)[0]


def weighted_sums(weights: Array | Sequence[Array], slots: Array, span: Span | None = None) -> Array:
    """``sum_m weights[r, m] * slots[m]`` for R readers of the same slots, accumulated in the statistics dtype.

    weights, zero outside ``span``: [R, M] (the same for every token and channel), [R, M, D] (per channel),
    [R, M, B, S] (per token) or [R, M, B, S, H] (per token and head, a head being D / H consecutive channels).
    Several of these forms in a list are added up. slots: [M, B, S, D]. span: None for all.
    Returns [R, B, S, D] in the dtype of ``slots``.
    """
    several = [weights] if isinstance(weights, Array | np.ndarray) else weights
    wide = [jnp.asarray(w, stat_dtype(slots)) for w in several]
    return _weighted_sums(wide, slots, span or Span(0, 1, slots.shape[0]))


@jax.custom_vjp
def _weighted_sums(several: list[Array], slots: Array, span: Span) -> Array:
    totals = [_one_form(weights, slots, span) for weights in several]
    return functools.reduce(jnp.add, totals).astype(slots.dtype)


def _one_form(weights: Array, slots: Array, span: Span) -> Array:
    shape = (weights.shape[0], *slots.shape[1:])

    def walk(weights, slots, span):
        def body(t, totals):
            m = span.first + span.stride * t
            return totals + _spread(_at(weights, m, 1), shape) * _at(slots, m).astype(totals.dtype)

        return jax.lax.fori_loop(0, span.count, body, jnp.zeros(shape, weights.dtype))

    def fused(weights, slots, span):
        each = _spread(weights, (shape[0], *slots.shape)) * slots.astype(weights.dtype)
        return jnp.sum(each, axis=1)

    return jax.lax.platform_dependent(weights, slots, span, cpu=walk, default=fused)


def _forward(several, slots, span):
    return _weighted_sums(several, slots, span), (several, slots, span)


def _backward(residuals, g):
    several, slots, span = residuals
    g_slots = jnp.zeros_like(slots)
    for weights in several:
        g_slots = add_outer(g_slots, weights, g, span)
    return [slot_dots(g, slots, span, weights.shape) for weights in several], g_slots, None


_weighted_sums.defvjp(_forward, _backward)


def slot_dots(g: Array, slots: Array, span: Span, shape: tuple[int, ...]) -> Array:
    """Sums of ``g[r] * slots[m]`` for the slots of ``span``, 0 for the others: the cotangent of the weights.

    g: [R, B, S, D]; slots: [M, B, S, D]; shape: of the weights, any that ``weighted_sums`` takes.
    Returns that shape.
    """
    dtype = stat_dtype(slots)
    kind = len(shape) - 1  # of weights without the reader axis

    def dot(g, slot):
        """One slot's sums, of shape ``(R, *shape[2:])``."""
        slot = slot.astype(dtype)
        if kind == 4:
            g, slot = (x.reshape(*x.shape[:-1], shape[4], -1) for x in (g, slot))
        equation = {1: "rbsd,bsd->r", 2: "rbsd,bsd->rd", 3: "rbsd,bsd->rbs", 4: "rbshd,bshd->rbsh"}[kind]
        return jnp.einsum(equation, g, slot, precision=jax.lax.Precision.HIGHEST)

    def walk(g, slots, span):
        def body(t, dots):
            m = span.first + span.stride * t
            return jax.lax.dynamic_update_index_in_dim(dots, dot(g, _at(slots, m)), m, 1)

        return jax.lax.fori_loop(0, span.count, body, jnp.zeros(shape, dtype))

    def fused(g, slots, span):
        product = g[:, None] * slots.astype(dtype)
        if kind == 4:
            product = product.reshape(*product.shape[:4], shape[4], -1)
        dots = jnp.sum(product, axis={1: (2, 3, 4), 2: (2, 3), 3: 4, 4: 5}[kind])
        inside = _inside(span, shape[1]).reshape(-1, *[1] * (kind - 1))
        return jnp.where(inside, dots, 0)

    return jax.lax.platform_dependent(g.astype(dtype), slots, span, cpu=walk, default=fused)


def add_outer(g_slots: Array, weights: Array, g: Array, span: Span) -> Array:
    """``g_slots[m] + sum_r weights[r, m] * g[r]`` for the slots of ``span``: the cotangent of the slots, added where
    it belongs.

    g_slots: [M, B, S, D]; weights: as in ``weighted_sums``, zero outside ``span``; g: [R, B, S, D].
    """

    def walk(g_slots, weights, g, span):
        def body(t, g_slots):
            m = span.first + span.stride * t
            more = jnp.sum(_spread(_at(weights, m, 1), g.shape) * g, axis=0)
            return jax.lax.dynamic_update_index_in_dim(g_slots, _at(g_slots, m) + more.astype(g_slots.dtype), m, 0)

        return jax.lax.fori_loop(0, span.count, body, g_slots)

    def fused(g_slots, weights, g, span):
        more = jnp.sum(_spread(weights, (len(g), *g_slots.shape)) * g[:, None], axis=0)
        return g_slots + more.astype(g_slots.dtype)

    return jax.lax.platform_dependent(g_slots, weights, g.astype(weights.dtype), span, cpu=walk, default=fused)


def _at(x: Array, m: Array, axis: int = 0) -> Array:
    return jax.lax.dynamic_index_in_dim(x, m, axis, keepdims=False)


def _spread(weights: Array, shape: tuple[int, ...]) -> Array:
    """``weights``, in any of their forms, with axes that broadcast to ``shape``, [R, B, S, D] or [R, M, B, S, D]."""
    lead = len(shape) - 3
    kind = weights.ndim - lead
    if kind == 0:
        return weights.reshape(*weights.shape, 1, 1, 1)
    if kind == 1:
        return weights.reshape(*weights.shape[:lead], 1, 1, shape[-1])
    if kind == 2:
        return weights[..., None]
    return jnp.repeat(weights, shape[-1] // weights.shape[-1], axis=-1)


def _inside(span: Span, count: int) -> Array:
    steps, rest = jnp.divmod(jnp.arange(count) - span.first, span.stride)
    return (rest == 0) & (steps >= 0) & (steps < span.count)
