"""The depth-mixing matrix of a connection.

``M[l, j]`` says how much of v_j is in what unit l reads: ``read_l = sum_{j <= l} M[l, j] v_j`` with v_0 the embedding
and v_j the output of unit j - 1; the last row is the readout. It may differ from token to token, and from channel to
channel for a few connections.

It is found without a formula per connection: the contexts of a real run hold the weights that were used, and given
those a connection is linear, so replaying them on one-hot states gives the matrix.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmres.residual.interface import Connection, read_unit, split_skip, ways_of


def depth_mixing(
    connection: Connection, contexts: Sequence[Any], like: Array, inner: int = 1, way: int = 0
) -> Array:
    """The matrix from the contexts of one run.

    Args:
      connection: the spec.
      contexts: of the units in order and of the readout, from ``run_layers`` or ``Stack.record``.
      like: an array [B, S, D] of the run (the embedding), for shapes and dtype.
      inner: sub-layers inside a unit that is a block with plain additive skips (2 in a transformer); then rows and
        columns are sub-layers. 1 leaves the units as they are.
      way: which input of the sub-layers that take several (0 query, 1 key, 2 value).

    Returns: [L + 1, L + 1, B, S] (reader, source), with a trailing D axis if the connection is channelwise. L is the
    number of sub-layers.

    Raises ValueError for a connection that mixes channels: no such matrix exists then.
    """
    if not connection.has_matrix:
        raise ValueError(
            f"{connection.name} mixes channels on the way up, so it has no depth-mixing matrix (has_matrix is False)"
        )
    sources = (len(contexts) - 1) * inner + 1
    dtype = jnp.promote_types(like.dtype, jnp.float32)
    one_hot = jnp.eye(sources, dtype=dtype)
    blocks = connection.unit == "block" and inner > 1
    if connection.channelwise:
        # Source j is all ones where it stands and nothing elsewhere; one replay per source.
        ones = jnp.ones(like.shape, dtype)
        one = lambda row: replay(connection, contexts, [w * ones for w in row], blocks, way)  # noqa: E731
        return jax.vmap(one, out_axes=1)(one_hot)
    # Channels are never mixed, so the channel axis can hold the sources: one replay for all.
    values = [jnp.broadcast_to(row, (*like.shape[:-1], sources)) for row in one_hot]
    return jnp.moveaxis(replay(connection, contexts, values, blocks, way), -1, 1)


def replay(
    connection: Connection, contexts: Sequence[Any], values: Sequence[Array], blocks: bool = False, way: int = 0
) -> Array:
    """Reads [L + 1, B, S, W] of a run with fixed weights, whose embedding and outputs are ``values`` ([B, S, W] each).

    With ``blocks`` the outputs are those of the sub-layers inside each unit, and the unit's output is its input plus
    theirs.
    """
    units = len(contexts) - 1
    inner = (len(values) - 1) // units
    state = connection.open(None, values[0], units)
    reads = []
    for l in range(units):
        x, _ = read_unit(connection, None, state, l, l, contexts[l])
        y = None
        for value in values[1 + l * inner : 1 + (l + 1) * inner]:
            x, skip = split_skip(x) if blocks else (x, 0.0)
            reads.append(pick_way(x, way))
            x = y = skip + value
        state = connection.write(None, state, contexts[l], y, l)
    return jnp.stack([*reads, connection.close(None, state, contexts[-1])[0]])


def pick_way(x: Any, way: int) -> Array:
    """One of a unit's inputs; units with fewer give their first."""
    return x if ways_of(x) == 1 else x[way if way < len(x) else 0]


def recompose(matrix: Array, e: Array, outputs: Sequence[Array]) -> Array:
    """``sum_j M[l, j] v_j`` for every reader: [L + 1, B, S, D], from the embedding and the units' outputs [B, S, D]."""
    values = jnp.stack([e, *outputs])
    if matrix.ndim == values.ndim:
        return jnp.einsum("ljbs,jbsd->lbsd", matrix, values)
    return jnp.einsum("ljbsd,jbsd->lbsd", matrix, values)
