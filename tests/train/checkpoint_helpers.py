"""A small training state and folders of checkpoints of it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from lmres.train.checkpoint import Checkpoints

META = {"architecture": {"model": {"width": 8}}, "data": {"next": 7}}


def make_state(value=0.0, width=8):
    params = {
        "embed": {"table": jnp.arange(16.0 * width).reshape(16, width) + value},
        "gain": jnp.ones(width),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {
        "params": params,
        "opt_state": optimizer.init(params),
        "step": jnp.asarray(int(value), jnp.int32),
        "key": jax.random.key(3),
    }


def shapes_of(state, sharding=None):
    where = sharding or SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), state)


def raw(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(raw(x), raw(y)), a, b)


def filled(folder, steps=(1, 2, 3), **options):
    with Checkpoints(folder, keep=len(steps), **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), META)
    return Path(folder)
