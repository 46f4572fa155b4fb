"""Normalisation over the last axis, statistics in float32 or wider."""

import jax
import jax.numpy as jnp
from jax import Array


def stat_dtype(x: Array) -> jnp.dtype:
    """The dtype in which statistics of ``x`` are computed: float32, or float64 for float64 data."""
    return jnp.promote_types(x.dtype, jnp.float32)


def rms_scale(x: Array, eps: float, axis: int | tuple[int, ...] = -1) -> Array:
    """``1 / sqrt(mean(x^2) + eps)`` over ``axis`` (kept with size one), in the statistics dtype."""
    wide = x.astype(stat_dtype(x))
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=axis, keepdims=True) + eps)


def rms_norm(x: Array, gain: Array | None = None, eps: float = 1e-6) -> Array:
    """RMSNorm (arXiv:1910.07467): ``x / sqrt(mean(x^2) + eps) * gain`` over the last axis.

    x: [..., D]; gain: [D] or None. Returns the dtype of ``x``.
    """
    y = x.astype(stat_dtype(x)) * rms_scale(x, eps)
    if gain is not None:
        y = y * gain.astype(y.dtype)
    return y.astype(x.dtype)


def layer_norm(x: Array, eps: float = 1e-5) -> Array:
    """LayerNorm without affine part: zero mean, unit (biased) variance over the last axis.

    x: [..., D]. Returns the dtype of ``x``.
    """
    wide = x.astype(stat_dtype(x))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return (centred * rms_scale(centred, eps)).astype(x.dtype)
