"""The depth-mixing matrix of a connection.

``M[l, j]`` says how much of v_j is in what unit l reads: ``read_l = sum_{j <= l} M[l, j] v_j`` with v_0 the embedding and v_j the
output of unit j - 1; the last row is the readout. It may differ from token to token, and from channel to channel for
a few connections.

It is found without a formula per connection: the contexts of a real run hold the weights that were used, and given
those a connection is linear, so replaying them on one-hot states gives the matrix.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmres.residual.interface import Connection


def depth_mixing(connection: Connection, contexts: Sequence[Any], like: Array) -> Array:
    """The matrix from the contexts of one run.

    Args:
      connection: the spec.
      contexts: of units 0 .. L - 1 and of the readout, from ``run_layers``.
      like: an array [B, S, D] of the run (the embedding), for shapes and dtype.

    Returns: [L + 1, L + 1, B, S] (reader, source), with a trailing D axis if the connection is channelwise.
    """
    sources = len(contexts)
    dtype = jnp.promote_types(like.dtype, jnp.float32)
    one_hot = jnp.eye(sources, dtype=dtype)
    if connection.channelwise:
        # Source j is all ones where it stands and nothing elsewhere; one replay per source.
        ones = jnp.ones(like.shape, dtype)
        return jax.vmap(lambda row: replay(connection, contexts, [w * ones for w in row]), out_axes=1)(one_hot)
    # Channels are never mixed, so the channel axis can hold the sources: one replay for all.
    values = [jnp.broadcast_to(row, (*like.shape[:-1], sources)) for row in one_hot]
    return jnp.moveaxis(replay(connection, contexts, values), -1, 1)


def replay(connection: Connection, contexts: Sequence[Any], values: Sequence[Array]) -> Array:
    """Reads [L + 1, B, S, W] of a run whose embedding and outputs are ``values`` ([B, S, W] each), weights fixed."""
    state = connection.open(None, values[0], len(contexts) - 1)
    reads = []
    for l, value in enumerate(values[1:]):
        reads.append(connection.read(None, state, l, contexts[l])[0])
        state = connection.write(None, state, contexts[l], value, l)
    return jnp.stack([*reads, connection.close(None, state, contexts[-1])[0]])


def recompose(matrix: Array, e: Array, outputs: Sequence[Array]) -> Array:
    """``sum_j M[l, j] v_j`` for every reader: [L + 1, B, S, D], from the embedding and the units' outputs [B, S, D]."""
    values = jnp.stack([e, *outputs])
    if matrix.ndim == values.ndim:
        return jnp.einsum("ljbs,jbsd->lbsd", matrix, values)
    return jnp.einsum("ljbsd,jbsd->lbsd", matrix, values)
