"""Digests of arrays: a few bytes that change when any byte of an array does."""

from typing import Any

import jax
import jax.numpy as jnp


def named(tree: Any) -> list[tuple[str, Any]]:
    """(path with slashes, leaf) of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every input bit moves every output bit (MurmurHash3's finaliser)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


# One small program per shape, which moments share with their parameters; one for all takes longer to compile.
@jax.jit
def _digest(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint32)
    elif jnp.dtype(x.dtype).itemsize >= 4:
        x = jax.lax.bitcast_convert_type(x, jnp.uint32)  # 8-byte types get a trailing axis of 2
    else:
        unsigned = {1: jnp.uint8, 2: jnp.uint16}[jnp.dtype(x.dtype).itemsize]
        x = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    where = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        where = where * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(_mix(x ^ _mix(where + jnp.uint32(1))), dtype=jnp.uint32)


def digests(tree: Any) -> dict[str, str]:
    """{path: 8 hex digits} for the arrays of ``tree``.

    The sum of a hash of each entry's bits and place, in 32-bit integers: exact in any order, so the same for
    every sharding, mesh and number of processes, and computed where the arrays are, without a copy to the host.
    A change of one entry is always found, and of several but for a chance of 2^-32.
    """
    leaves = named(tree)
    sums = jax.device_get([_digest(leaf) for _, leaf in leaves])
    return {name: f"{int(value):08x}" for (name, _), value in zip(leaves, sums)}
