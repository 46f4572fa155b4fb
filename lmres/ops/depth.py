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

from lmres.ops.indexing import put, take
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
    shape = (several[0].shape[0], *slots.shape[1:])

    def walk(several, slots, span):
        def body(t, totals):
            m = span.first + span.stride * t
            return totals + _at_slot(several, m, shape) * take(slots, m).astype(totals.dtype)

        return jax.lax.fori_loop(0, span.count, body, jnp.zeros(shape, several[0].dtype))

    def fused(several, slots, span):
        each = _total(several, (shape[0], *slots.shape)) * slots.astype(several[0].dtype)
        return jnp.sum(each, axis=1)

    return jax.lax.platform_dependent(several, slots, span, cpu=walk, default=fused).astype(slots.dtype)


def _forward(several, slots, span):
    return _weighted_sums(several, slots, span), (several, slots, span)


def _backward(residuals, g):
    several, slots, span = residuals
    return *weighted_sums_back(g, several, slots, jnp.zeros_like(slots), span), None


_weighted_sums.defvjp(_forward, _backward)


def weighted_sums_back(
    g: Array, several: Sequence[Array], slots: Array, g_slots: Array, span: Span
) -> tuple[list[Array], Array]:
    """Backward of ``weighted_sums``, the slots' part added where it belongs.

    g: [R, B, S, D]; several: the weights, a list; slots, g_slots: [M, B, S, D].
    Returns (cotangents of the weights, zero outside ``span``; g_slots[m] + sum_r weights[r, m] * g[r] for the slots of
    ``span``).
    """
    several = [jnp.asarray(w, stat_dtype(slots)) for w in several]

    def walk(g, several, slots, g_slots, span):
        def body(t, found):
            dots, g_slots = found
            m = span.first + span.stride * t
            new = [_dot(g, take(slots, m), w) for w in several]
            dots = [put(d, x, m, 1) for d, x in zip(dots, new)]
            more = jnp.sum(_at_slot(several, m, g.shape) * g, axis=0)
            slot = take(g_slots, m) + more.astype(g_slots.dtype)
            return dots, put(g_slots, slot, m, 0)

        return jax.lax.fori_loop(0, span.count, body, ([jnp.zeros_like(w) for w in several], g_slots))

    def fused(g, several, slots, g_slots, span):
        inside = _inside(span, len(slots))
        dots = [jax.vmap(functools.partial(_dot, g, weights=w), out_axes=1)(slots) for w in several]
        dots = [jnp.where(inside.reshape(-1, *[1] * (d.ndim - 2)), d, 0) for d in dots]
        more = jnp.sum(_total(several, (len(g), *slots.shape)) * g[:, None], axis=0)
        return dots, g_slots + more.astype(g_slots.dtype)

    return jax.lax.platform_dependent(
        g.astype(stat_dtype(slots)), several, slots, g_slots, span, cpu=walk, default=fused
    )


def _dot(g: Array, slot: Array, weights: Array) -> Array:
    """Sums of ``g[r] * slot`` over what the form of ``weights`` shares: [R, ...] without the slot axis."""
    slot = slot.astype(g.dtype)
    kind = weights.ndim - 1
    if kind == 4:
        g, slot = (x.reshape(*x.shape[:-1], weights.shape[4], -1) for x in (g, slot))
    equation = {1: "rbsd,bsd->r", 2: "rbsd,bsd->rd", 3: "rbsd,bsd->rbs", 4: "rbshd,bshd->rbsh"}[kind]
    return jnp.einsum(equation, g, slot, precision=jax.lax.Precision.HIGHEST)


def _total(several: Sequence[Array], shape: tuple[int, ...]) -> Array:
    return functools.reduce(jnp.add, [_spread(w, shape) for w in several])


def _at_slot(several: Sequence[Array], m: Array, shape: tuple[int, ...]) -> Array:
    """The sum of the weights of slot ``m``, with axes that broadcast to ``shape`` [R, B, S, D]."""
    return _total([take(w, m, 1) for w in several], shape)


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
