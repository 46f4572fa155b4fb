"""The third door: an NNX module that wraps your branch modules. Run it with ``python example_nnx.py``.

A small column of MLPs learns a function of four numbers. ``ResidualStack`` makes the copies from ``MLP``, stacks their
parameters and scans over depth; to NNX all of them are ordinary ``nnx.Param``.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lmres.residual import MHC
from lmres.residual.nnx import ResidualStack

DEPTH, WIDTH, HIDDEN, STEPS = 6, 32, 64, 200


def data(key):
    """Inputs [64, 8, 4] and targets [64, 8]."""
    x = jax.random.uniform(key, (64, 8, 4), minval=-1.0)
    return x, jnp.sin(4.0 * x[..., 0] * x[..., 1]) + x[..., 2] * x[..., 3]


class MLP(nnx.Module):
    """A branch: it normalises its input, since the connection is pre-norm."""

    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(4, WIDTH, rngs=rngs)
        self.stack = ResidualStack(MHC(streams=2), (MLP,), repeats=DEPTH, width=WIDTH, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(self.stack(self.embed(x))))[..., 0]


def loss_of(model, key):
    x, target = data(key)
    return jnp.mean((model(x) - target) ** 2)


@nnx.jit
def step(model, optimizer, key):
    optimizer.update(model, nnx.grad(loss_of)(model, key))


def main():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    test = nnx.jit(lambda model: loss_of(model, jax.random.key(1)))
    before = float(test(model))
    for key in jax.random.split(jax.random.key(2), STEPS):
        step(model, optimizer, key)
    after = float(test(model))
    print(f"loss {before:.4f} before, {after:.4f} after {STEPS} steps")
    return before, after


if __name__ == "__main__":
    main()
