"""The second door: a Linen module that wraps your branch modules. Run it with ``python example_linen.py``.

A small column of MLPs learns a function of four numbers. ``ResidualStack`` makes the copies, stacks their parameters
and scans over depth.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from lmres.residual import AttentionResiduals
from lmres.residual.linen import ModuleBranch, ResidualStack

DEPTH, WIDTH, HIDDEN, STEPS = 6, 32, 64, 200


def data(key):
    """Inputs [64, 8, 4] and targets [64, 8]."""
    x = jax.random.uniform(key, (64, 8, 4), minval=-1.0)
    return x, jnp.sin(4.0 * x[..., 0] * x[..., 1]) + x[..., 2] * x[..., 3]


class MLP(nn.Module):
    """A branch: it normalises its input, since the connection is pre-norm."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(HIDDEN)(nn.RMSNorm()(x))))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        stack = ResidualStack(AttentionResiduals(), (ModuleBranch("mlp", MLP(parent=None)),), repeats=DEPTH)
        h, _ = stack(nn.Dense(WIDTH)(x))
        return nn.Dense(1)(nn.RMSNorm()(h))[..., 0]


def main():
    model = Model()
    optimizer = optax.adam(3e-3)

    def loss_of(params, key):
        x, target = data(key)
        return jnp.mean((model.apply({"params": params}, x) - target) ** 2)

    @jax.jit
    def step(params, state, key):
        updates, state = optimizer.update(jax.grad(loss_of)(params, key), state)
        return optax.apply_updates(params, updates), state

    params = model.init(jax.random.key(0), data(jax.random.key(1))[0])["params"]
    state = optimizer.init(params)
    test = jax.jit(lambda params: loss_of(params, jax.random.key(1)))
    before = float(test(params))
    for key in jax.random.split(jax.random.key(2), STEPS):
        params, state = step(params, state, key)
    after = float(test(params))
    print(f"loss {before:.4f} before, {after:.4f} after {STEPS} steps")
    return before, after


if __name__ == "__main__":
    main()
