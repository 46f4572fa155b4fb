"""The first door: pure functions in a hand-written JAX loop. Run it with ``python example_functions.py``.

A small column of MLPs learns a function of four numbers. Parameters are plain nested dicts, the loop over depth is
``run_layers``, everything else is your own.
"""

import jax
import jax.numpy as jnp
import optax

from lmres.residual import HyperConnections, run_layers

DEPTH, WIDTH, HIDDEN, STEPS = 6, 32, 64, 200
connection = HyperConnections(streams=2)


def data(key):
    """Inputs [64, 8, 4] and targets [64, 8]."""
    x = jax.random.uniform(key, (64, 8, 4), minval=-1.0)
    return x, jnp.sin(4.0 * x[..., 0] * x[..., 1]) + x[..., 2] * x[..., 3]


def init(key):
    draw = lambda key, *shape: jax.random.normal(key, shape) * shape[-2] ** -0.5  # noqa: E731
    keys = jax.random.split(key, 5)
    return {
        "embed": draw(keys[0], 4, WIDTH),
        "up": draw(keys[1], DEPTH, WIDTH, HIDDEN),
        "down": draw(keys[2], DEPTH, HIDDEN, WIDTH) * DEPTH**-0.5,
        "out": draw(keys[3], WIDTH, 1),
        "connection": connection.init(keys[4], DEPTH, WIDTH),
    }


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def predict(params, x):
    branches = [
        lambda x, up=params["up"][l], down=params["down"][l]: jax.nn.gelu(norm(x) @ up) @ down for l in range(DEPTH)
    ]
    h, _ = run_layers(connection, params["connection"], branches, x @ params["embed"])
    return (norm(h) @ params["out"])[..., 0]


def loss_of(params, key):
    x, target = data(key)
    return jnp.mean((predict(params, x) - target) ** 2)


def main():
    params = init(jax.random.key(0))
    optimizer = optax.adam(3e-3)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, key):
        updates, state = optimizer.update(jax.grad(loss_of)(params, key), state)
        return optax.apply_updates(params, updates), state

    test = jax.jit(lambda params: loss_of(params, jax.random.key(1)))
    before = float(test(params))
    for key in jax.random.split(jax.random.key(2), STEPS):
        params, state = step(params, state, key)
    after = float(test(params))
    print(f"loss {before:.4f} before, {after:.4f} after {STEPS} steps")
    return before, after


if __name__ == "__main__":
    main()
