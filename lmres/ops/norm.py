"""Normalisation over the last axis, and projections of what is normalised; statistics in float32 or wider."""

from functools import partial

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


def normed_projection(x: Array, w: Array, *, centre: bool = False, eps: float = 0.0, floor: float = 0.0) -> Array:
    """``N(x) @ w.T`` without ever holding N(x), where ``N(x) = (x - mean) / sqrt(max(mean((x - mean)^2), floor) +
    eps)``.

    The norm is linear but for one scale (and one mean) per row, so the product is taken first and scaled after; the
    backward pass needs two products and no reduction over D. The product runs in float32 or wider: its results are
    logits of mixing weights.

    x: [..., D]; w: [C, D], the layout in which its gradient is one fast product; centre: subtract the mean (LayerNorm)
    or not (RMSNorm). Returns [..., C] in the statistics dtype.
    """
    return _normed_projection(x, w.astype(stat_dtype(x)), centre, eps, floor)


def _statistics(x, centre, eps, floor):
    wide = x.astype(stat_dtype(x))
    mean = jnp.mean(wide, axis=-1, keepdims=True) if centre else jnp.zeros((), wide.dtype)
    centred = wide - mean if centre else wide
    square = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return wide, mean, square, jax.lax.rsqrt(jnp.maximum(square, floor) + eps)


_product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _normed_projection(x, w, centre, eps, floor):
    return _project(x, w, centre, eps, floor)[0]


def _project(x, w, centre, eps, floor):
    wide, mean, _, scale = _statistics(x, centre, eps, floor)
    product = _product("...d,cd->...c", wide, w)
    if centre:
        product = product - mean * jnp.sum(w, axis=-1)
    out = product * scale
    return out, (x, w, out)


def _project_backward(centre, eps, floor, residuals, g):
    x, w, out = residuals
    wide, mean, square, scale = _statistics(x, centre, eps, floor)
    scaled = g * scale
    g_w = _product("...c,...d->cd", scaled, wide)
    through = jnp.sum(out * g, axis=-1, keepdims=True) * scale**2 / x.shape[-1]
    through = jnp.where(square > floor, through, 0.0)  # at the floor the scale is a constant
    g_x = _product("...c,cd->...d", scaled, w) - through * (wide - mean)
    if centre:
        g_w = g_w - jnp.sum(scaled * mean, axis=tuple(range(g.ndim - 1)))[:, None]
        g_x = g_x - _product("...c,c->...", scaled, jnp.mean(w, axis=-1))[..., None]
    return g_x.astype(x.dtype), g_w


_normed_projection.defvjp(_project, _project_backward)
