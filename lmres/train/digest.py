"""Digests of arrays: a few bytes that change when any byte of an array does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
CHUNK = 1 << 22  # entries hashed at a time on the host, to bound its memory


def named(tree: Any) -> list[tuple[str, Any]]:
    """(path with slashes, leaf) of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def _mix(x: Any) -> Any:
    """A bijection of uint32 in which every input bit moves every output bit (MurmurHash3's finaliser)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


# One small program per shape, which moments share with their parameters; one for all takes longer to compile.
@jax.jit
def _on_device(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint32)
    elif x.dtype.itemsize >= 4:
        x = jax.lax.bitcast_convert_type(x, jnp.uint32)  # 8-byte types get a trailing axis of 2
    else:
        x = jax.lax.bitcast_convert_type(x, UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)
    where = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        where = where * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(_mix(x ^ _mix(where + jnp.uint32(1))), dtype=jnp.uint32)


def _on_host(x: np.ndarray) -> int:
    bits = np.ascontiguousarray(x).reshape(-1).view(UNSIGNED[min(x.dtype.itemsize, 4)])
    total = 0
    for start in range(0, bits.size, CHUNK):
        part = bits[start : start + CHUNK].astype(np.uint32)
        where = (np.arange(start, start + part.size) + 1).astype(np.uint32)
        total += int(_mix(part ^ _mix(where)).sum(dtype=np.uint64))
    return total % 2**32


def digests(tree: Any) -> dict[str, str]:
    """{path: 8 hex digits} for the arrays of ``tree``.

    The sum of a hash of each entry's bits and place, in 32-bit integers: exact in any order, so the same for
    every sharding, mesh, kind of device and number of processes. Accelerators compute it where the arrays
    are, without a copy to the host; on CPUs it is numpy, which needs no compiling. A change of one entry is
    always found, and of several but for a chance of 2^-32.
    """
    found: dict[str, Any] = {}
    for name, leaf in named(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        far = isinstance(leaf, jax.Array) and not (
            leaf.is_fully_addressable and all(device.platform == "cpu" for device in leaf.devices())
        )
        found[name] = _on_device(leaf) if far else _on_host(np.asarray(leaf))
    return {name: f"{int(value):08x}" for name, value in jax.device_get(found).items()}
