"""Sinkhorn normalisation towards doubly stochastic matrices, with a hand-written backward pass.

One iteration divides by the sums over axis ``first``, then by the sums over the other axis. After finitely
many iterations only the axis normalised last sums to one exactly; the other is off by an amount that depends
on the logits (arXiv:2512.24880, Eq. 9, uses t = 20).

Layout: the small matrix comes first, ``[n, n, ...]``, so that every step is a plain elementwise operation
over the trailing (token) axes; with the matrix last, each reduction would run over n = 4 numbers.

Three ways to write it, which public code does not keep apart:

- ``eps = 0``: the paper. Evaluated on logarithms, because in the linear domain a row of ``exp(logits)`` can
  underflow to zeros for logits of +-100, and the iteration then divides zero by zero.
- ``eps > 0``: DeepSeek's reference code: ``softmax + eps`` first, and ``+ eps`` in each later denominator.
- ``floor > 0``: the lucidrains package: linear domain, each denominator at least ``floor``.

Cost per matrix: ``4 n^2 t`` FLOPs (and ``n^2 t`` exponentials on the log path). The backward pass keeps only
the logits and recomputes the iterates, so what is stored between the passes does not grow with ``iters``.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lmres.ops.norm import stat_dtype


class _Rule(NamedTuple):
    iters: int
    first: int
    eps: float
    floor: float

    @property
    def log_domain(self) -> bool:
        return self.eps == 0.0 and self.floor == 0.0


def _normalise(m: Array, axis: int, rule: _Rule) -> Array:
    """One half-iteration; ``m`` holds logarithms on the log path."""
    if rule.log_domain:
        return m - jax.nn.logsumexp(m, axis=axis, keepdims=True)
    total = jnp.sum(m, axis=axis, keepdims=True) + rule.eps
    return m / (jnp.maximum(total, rule.floor) if rule.floor else total)


def _normalise_vjp(m: Array, axis: int, rule: _Rule, g: Array) -> Array:
    """Cotangent of the input ``m`` of ``_normalise``."""
    if rule.log_domain:
        return g - jax.nn.softmax(m, axis=axis) * jnp.sum(g, axis=axis, keepdims=True)
    total = jnp.sum(m, axis=axis, keepdims=True) + rule.eps
    through = jnp.sum(g * m, axis=axis, keepdims=True)
    if rule.floor:
        through = jnp.where(total > rule.floor, through, 0.0)
        total = jnp.maximum(total, rule.floor)
    return g / total - through / (total * total)


def _start(z: Array, rule: _Rule) -> Array:
    """The first division. The maximum is taken out along ``first``, where it cancels; a maximum along the other
    axis would be a rescaling that changes every later iterate."""
    if rule.log_domain:
        return jax.nn.log_softmax(z, axis=rule.first)
    if rule.floor:
        top = jax.lax.stop_gradient(jnp.max(z, axis=rule.first, keepdims=True))
        return _normalise(jnp.exp(z - top), rule.first, rule)
    return jax.nn.softmax(z, axis=rule.first) + rule.eps


def _round(m: Array, rule: _Rule) -> Array:
    return _normalise(_normalise(m, 1 - rule.first, rule), rule.first, rule)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sinkhorn(z: Array, rule: _Rule) -> Array:
    m = jax.lax.fori_loop(0, rule.iters - 1, lambda _, m: _round(m, rule), _start(z, rule))
    m = _normalise(m, 1 - rule.first, rule)
    return jnp.exp(m) if rule.log_domain else m


def _forward(z, rule):
    return _sinkhorn(z, rule), z


def _backward(rule, z, g):
    other = 1 - rule.first
    start, start_vjp = jax.vjp(lambda z: _start(z, rule), z)
    last, before = jax.lax.scan(lambda m, _: (_round(m, rule), m), start, length=rule.iters - 1)
    if rule.log_domain:
        g = g * jnp.exp(_normalise(last, other, rule))
    g = _normalise_vjp(last, other, rule, g)

    def back(g, m):
        half = _normalise(m, other, rule)
        return _normalise_vjp(m, other, rule, _normalise_vjp(half, rule.first, rule, g)), None

    g, _ = jax.lax.scan(back, g, before, reverse=True)
    return start_vjp(g)


_sinkhorn.defvjp(_forward, _backward)


def sinkhorn(logits: Array, iters: int = 20, *, first: int = 0, eps: float = 0.0, floor: float = 0.0) -> Array:
    """``iters`` Sinkhorn iterations of ``exp(logits)``, in float32 (float64 for float64 logits).

    Args:
      logits: [n, n, ...], the matrix on the two leading axes.
      iters: number of iterations, at least 1.
      first: 0 or 1, the axis whose sums are divided out first in each iteration. The other axis is normalised
        last and is the one that sums to one (exactly for ``eps = 0``).
      eps: 0 for arXiv:2512.24880 Eq. 9, positive for DeepSeek's reference code (see the head of this file).
      floor: smallest denominator, for the convention of the lucidrains package.

    Returns: [n, n, ...] in the statistics dtype.

    Raises: ValueError for ``iters < 1``, a ``first`` other than 0 or 1, or a matrix that is not square.
    """
    if iters < 1:
        raise ValueError(f"sinkhorn needs at least one iteration, got iters={iters}")
    if first not in (0, 1):
        raise ValueError(f"sinkhorn: first must be 0 or 1, got {first}")
    if logits.ndim < 2 or logits.shape[0] != logits.shape[1]:
        raise ValueError(f"sinkhorn needs a square matrix on the two leading axes, got shape {logits.shape}")
    return _sinkhorn(logits.astype(stat_dtype(logits)), _Rule(iters, first, eps, floor))
