"""The training state: a plain dict of arrays, made straight into its shards."""

import dataclasses
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lmres.model import Transformer
from lmres.sharding import param_shardings


class TrainState(TypedDict):
    """params, the optimiser's state, and the number of updates made so far (int32 scalar)."""

    params: Any
    opt_state: Any
    step: jax.Array


def init_params(model: Transformer, key: jax.Array) -> Any:
    """Fresh parameters, float32. One token is enough to make them, or two where tokens read only those before; that is
    too little to be split over a mesh, or to be run in chunks."""
    flow = dataclasses.replace(model.flow, schedule="auto")
    bare = Transformer(model.config, model.connection, flow=flow)
    tokens = 1 if flow.is_standard else min(2, model.config.context)
    return bare.init(key, jnp.zeros((1, tokens), jnp.int32))["params"]


def abstract_params(model: Transformer) -> Any:
    """Shapes and dtypes of the parameters; nothing is computed."""
    return jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))


def abstract_state(model: Transformer, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """ShapeDtypeStructs of the whole state with their shardings on ``mesh``: the target of a restore.

    Raises ValueError, naming the config key, when a size cannot be split as the mesh asks.
    """
    params = abstract_params(model)
    state = TrainState(
        params=params,
        opt_state=jax.eval_shape(optimizer.init, params),
        step=jax.ShapeDtypeStruct((), jnp.int32),
    )
    shardings = param_shardings(state, mesh)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state, shardings
    )


def init_state(model: Transformer, optimizer: optax.GradientTransformation, mesh: Mesh, seed: int) -> TrainState:
    """A fresh state. The initialisation is jitted with the final shardings, so no device ever holds all of it."""
    target = abstract_state(model, optimizer, mesh)

    def make(key):
        params = init_params(model, key)
        return TrainState(params=params, opt_state=optimizer.init(params), step=jnp.zeros((), jnp.int32))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    return jax.jit(make, out_shardings=shardings)(jax.random.key(seed))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds all of it."""
    return NamedSharding(mesh, P())


def count(tree: Any) -> int:
    """Number of scalars in a tree of arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
