"""What happens to the streams between the sub-layers: the maps that mix them, and their values.

Given the weights that were used (the contexts of a run), ``write`` is linear in the state, and channels keep their
place. With the output left out, a unit is then a small matrix per token, found by writing nothing to one-hot streams:
no formula per connection, and the paper's H_res or A_r' where a connection has one.

Legend: U units of the connection, B batch, S sequence, n streams, C channels of a stream (D, or a part of it).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from lmres.residual.interface import AppendOnly, Connection, read_unit, split_skip


def stream_maps(connection: Connection, contexts: Sequence[Any], state: Array, e: Array) -> Array:
    """How every unit maps the streams: ``state' = map state + (what it writes)``.

    Args:
      connection: the spec, with a state of constant size: [B, S, n, C], or [B, S, D], which is one stream.
      contexts: of the units in order and of the readout, from ``run_layers`` or ``Stack.record``.
      state: one of the run's states (``record.state``), for its shape.
      e: the embedding [B, S, D] of the run.

    Returns: [U, B, S, n, n] (target, source), float32 or wider, with a trailing C axis if the connection is
    channelwise. The composite of units i .. j is the matrix product map_j ... map_i.

    Raises ValueError for a growing state, which has no maps (nothing in it is mixed), and where ``write`` mixes
    channels.
    """
    _check_streams(connection, state)
    single = state.ndim == e.ndim
    n, channels = 1 if single else state.shape[-2], state.shape[-1]
    dtype = jnp.promote_types(e.dtype, jnp.float32)

    def write(l, streams):
        """[B, S, n, size] after unit l wrote nothing."""
        nothing = jnp.zeros((*e.shape[:-1], e.shape[-1] // channels * streams.shape[-1]), dtype)
        streams = streams[..., 0, :] if single else streams
        written = connection.write(None, streams, contexts[l], nothing, l)
        return written[..., None, :] if single else written

    def unit(l):
        if connection.channelwise:  # source s is all ones in stream s
            one = lambda row: write(l, jnp.broadcast_to(row[:, None], (*e.shape[:-1], n, channels)))  # noqa: E731
            return jax.vmap(one, out_axes=-2)(jnp.eye(n, dtype=dtype))
        # The channel axis can hold the sources. A size that is not the real one gives away what mixes channels.
        size = n + (n == channels)
        return write(l, jnp.broadcast_to(jnp.eye(n, size, dtype=dtype), (*e.shape[:-1], n, size)))[..., :n]

    try:
        return jnp.stack([unit(l) for l in range(len(contexts) - 1)])
    except (TypeError, ValueError) as error:
        if connection.has_matrix:
            raise
        raise ValueError(f"{connection.name} mixes channels in its state, so it has no maps between streams") from error


def stream_states(connection: Connection, contexts: Sequence[Any], e: Array, outputs: Sequence[Array]) -> Array:
    """The states before every unit and after the last, from the record of a run: [U + 1, B, S, n, C].

    e: the embedding. outputs: of the sub-layers. Other arguments, and what is raised, as in ``stream_maps``.
    """
    units = len(contexts) - 1
    inner = len(outputs) // units
    state = connection.open(None, e, units)
    _check_streams(connection, state)
    states = [state]
    for l in range(units):
        y = outputs[l * inner]
        if connection.unit == "block" and inner > 1:
            x, _ = read_unit(connection, None, state, l, l, contexts[l])
            y = sum(outputs[l * inner : (l + 1) * inner], start=split_skip(x)[1])
        state = connection.write(None, state, contexts[l], y, l)
        states.append(state)
    stacked = jnp.stack(states)
    return stacked[..., None, :] if state.ndim == e.ndim else stacked


def has_streams(connection: Connection, state: Any) -> bool:
    """Whether the state is streams, [B, S, n, C], or one stream, [B, S, D]."""
    axes = connection.state_axes()
    ranked = isinstance(axes, PartitionSpec) and len(axes) in (3, 4)
    return isinstance(state, jax.Array) and ranked and tuple(axes)[:2] == ("batch", "sequence")


def _check_streams(connection: Connection, state: Any) -> None:
    if isinstance(connection, AppendOnly):
        raise ValueError(f"{connection.name} appends to its state and mixes nothing in it: there are no streams")
    if not has_streams(connection, state):
        shapes = jax.tree.map(jnp.shape, state)
        raise ValueError(f"{connection.name}: the state must be [B, S, n, C] or [B, S, D], found {shapes}")
