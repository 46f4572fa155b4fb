"""What the tests of growing connections run: stacks of the references' branches, in float64."""

from functools import partial

import growing_references as reference
import jax
import jax.numpy as jnp
import numpy as np
from growing_references import GAINS, WEIGHTS, D, E, L, N
from stream_references import rms

from lmres.residual import Stack
from lmres.residual.interface import Exchange, Lent
from lmres.residual.key_values import KeyValueHeads

EPS = 1e-30  # of the norms inside connections: nothing beside the numbers here, but 0 / 0 is 0


def branch(s):
    return lambda p, x, i, args, inputs: (reference.layer(s, p, x, jnp), ())


def attention_branch(p, x, i, args, inputs):
    """Real attention, with the keys and values of other layers if there are any."""
    if not isinstance(x, Exchange):
        return reference.attention(p, x, lambda *pair: pair, jnp)[0], ()

    def mix(key, value):
        used = []
        for own, m in ((key, x.key), (value, x.value)):
            if m is not None:
                own = m.gathered + (m.own * own if m.own.ndim == 0 else jnp.einsum("gh,bshk->bsgk", m.own, own))
            used.append(own)
        return used

    return Lent(*reference.attention(p, x.x, mix, jnp)), ()


def run(connection, params):
    """The column's output."""
    first = attention_branch if isinstance(connection, KeyValueHeads) else branch(0)
    weights = tuple({"weight": jnp.asarray(WEIGHTS[s::2]), "gain": jnp.asarray(GAINS[s::2])} for s in range(2))
    return Stack(connection, (first, branch(1)), N)(params, weights, jnp.asarray(E))[0]


run_jitted = jax.jit(run, static_argnums=0)


def output(connection, params):
    return np.asarray(run_jitted(connection, params))


@partial(jax.jit, static_argnums=0)
def gradient_jitted(connection, params):
    def loss(p):
        h = run(connection, p)
        return jnp.sum(jnp.sin(h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True))))

    return jax.grad(loss)(params)


def gradient(connection, params):
    """Of something that sees the final norm."""
    return jax.tree.map(np.asarray, gradient_jitted(connection, params))


def depth_of(connection):
    return N if connection.unit == "block" else L


def start(connection, **shared):
    """Parameters at their start in float64, entries of ``shared`` replaced."""
    params = connection.init(jax.random.key(0), depth_of(connection), D)
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    assert set(shared) <= set(params["shared"])
    return {**params, "shared": {**params["shared"], **shared}}


def moved(connection, size=0.5, seed=1):
    """Parameters far from their start, as numpy arrays."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda p: p + size * draw.normal(size=p.shape), start(connection))


def noise(*shape):
    return np.random.default_rng(7).normal(size=shape)


def same(actual, expected, tolerance=1e-12):
    """Within ``tolerance`` of the largest expected entry."""
    np.testing.assert_allclose(actual, expected, atol=tolerance * np.max(np.abs(expected)), rtol=0)


def same_function(actual, expected, tolerance=1e-12):
    """The same after the final norm."""
    same(rms(actual), rms(expected), tolerance)
