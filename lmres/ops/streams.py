"""Mixes of n residual streams: sums over streams that compile to one fused pass, with hand-chosen backward passes.

n is 2 to 8, so a batched matrix product of [n, n] by [n, D] per token would be all overhead. The cotangents of the
weights are contractions over D; written as products they are several times faster than the reductions that automatic
differentiation of the sums would give.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from lmres.ops.norm import stat_dtype


def combine_streams(weights: Array, streams: Array) -> Array:
    """``sum_s weights[s] * streams[s]``: what a branch reads.

    weights: [..., n], with the leading axes of ``streams`` or none; streams: [..., n, D].
    Returns [..., D] in the dtype of ``streams``.
    """
    return _combine(weights.astype(stat_dtype(streams)), streams)


def mix_streams(mixing: Array, streams: Array, weights: Array, y: Array) -> Array:
    """``out[t] = sum_s mixing[s, t] * streams[s] + weights[t] * y``: streams after a branch returned ``y``.

    mixing: [..., n, n], source first; streams: [..., n, D]; weights: [..., n]; y: [..., D]. ``mixing`` and
    ``weights`` have the leading axes of ``streams`` or none. There may be more sources than targets: mixing
    [..., k, n] and streams [..., k, D]. Returns [..., n, D] in the dtype of ``streams``.
    """
    wide = stat_dtype(streams)
    return _mix(mixing.astype(wide), streams, weights.astype(wide), y)


def add_to_streams(streams: Array, weights: Array, y: Array) -> Array:
    """``out[t] = streams[t] + weights[t] * y``: ``mix_streams`` with the identity.

    streams: [..., n, D]; weights: [..., n], or [n]; y: [..., D]. Returns [..., n, D] in the dtype of ``streams``.
    """
    return _add(streams, weights.astype(stat_dtype(streams)), y)


def _scaled_sum(weights: Array, streams: Array, axis: int) -> Array:
    """``sum_s weights[s] * streams[s]`` over axis -2 of ``streams``; s is axis ``axis`` of ``weights``, whose other
    trailing axis, if it has one, becomes axis -2 of the result."""
    wide = weights.dtype
    total = None
    for s in range(streams.shape[-2]):
        w = jnp.take(weights, s, axis=axis)[..., None]
        x = streams[..., s, :].astype(wide)
        term = w * (x if axis == -1 else x[..., None, :])
        total = term if total is None else total + term
    return total


def _fit(g: Array, like: Array) -> Array:
    """Sums a per-token cotangent down to weights that are shared by all tokens."""
    extra = g.ndim - like.ndim
    return jnp.sum(g, axis=tuple(range(extra))) if extra else g


_dot = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@jax.custom_vjp
def _combine(weights, streams):
    return _scaled_sum(weights, streams, -1).astype(streams.dtype)


def _combine_backward(residuals, g):
    weights, streams = residuals
    g = g.astype(weights.dtype)
    g_weights = _dot("...nd,...d->...n", streams.astype(g.dtype), g)
    g_streams = weights[..., None] * g[..., None, :]
    return _fit(g_weights, weights), g_streams.astype(streams.dtype)


_combine.defvjp(lambda w, x: (_combine(w, x), (w, x)), _combine_backward)


@jax.custom_vjp
def _mix(mixing, streams, weights, y):
    out = _scaled_sum(mixing, streams, -2) + weights[..., None] * y[..., None, :].astype(weights.dtype)
    return out.astype(streams.dtype)


def _mix_backward(residuals, g):
    mixing, streams, weights, y = residuals
    g = g.astype(mixing.dtype)
    wide = streams.astype(g.dtype)
    targets = range(g.shape[-2])  # one product per target: the compiler has no fast form for all at once
    g_mixing = jnp.stack([_dot("...nd,...d->...n", wide, g[..., t, :]) for t in targets], axis=-1)
    g_weights = _dot("...md,...d->...m", g, y.astype(g.dtype))
    g_streams = _scaled_sum(jnp.swapaxes(mixing, -1, -2), g, -2).astype(streams.dtype)
    g_y = _scaled_sum(weights, g, -1).astype(y.dtype)
    return _fit(g_mixing, mixing), g_streams, _fit(g_weights, weights), g_y


_mix.defvjp(lambda m, x, w, y: (_mix(m, x, w, y), (m, x, w, y)), _mix_backward)


@jax.custom_vjp
def _add(streams, weights, y):
    wide = weights.dtype
    return (streams.astype(wide) + weights[..., None] * y[..., None, :].astype(wide)).astype(streams.dtype)


def _add_backward(residuals, g):
    weights, y = residuals
    wide = g.astype(weights.dtype)
    g_weights = _dot("...md,...d->...m", wide, y.astype(wide.dtype))
    return g, _fit(g_weights, weights), _scaled_sum(weights, wide, -1).astype(y.dtype)


_add.defvjp(lambda x, w, y: (_add(x, w, y), (w, y)), _add_backward)
