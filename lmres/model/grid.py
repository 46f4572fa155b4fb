"""The transformer's blocks as a program for the token x layer grid (``lmres.flow``).

A copy of the stack is a layer of the grid: the connection's state of a token is its column, attention's keys and values
are the cells, and attention reads what the flow allows.

Legend: B batch, S tokens of a tile, T tokens, L blocks, M source layers, G key/value heads, K head size.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from lmres.flow import Reader, Tiles, Wavefront, run_tiles, run_wavefront
from lmres.flow.attention import Cells, attend_cells
from lmres.flow.config import FlowConfig
from lmres.model.config import ModelConfig
from lmres.model.layers import Args, KeyValues
from lmres.residual.stack import Stack


class GridTokens(NamedTuple):
    """As ``lmres.flow.Tokens``, with the key of dropout (raw key data, or None)."""

    position: Array
    place: Array
    segment: Array | None = None
    dropout_key: Array | None = None

    def args(self, tile: Array, batch: int) -> Args:
        """The branches' arguments for the tokens of ``tile`` [S]."""
        position = self.position[:, tile]
        position = jnp.broadcast_to(position, (batch, position.shape[1]))
        return Args(position, dropout_key=self.dropout_key, tokens=tile)


@dataclasses.dataclass(frozen=True)
class StackProgram:
    """A ``CellProgram``: shared is {"connection": ..., "flow": ...}, layers (the connection's, the units')."""

    stack: Stack
    reader: Reader

    def open(self, shared, e):
        connection = {"layers": {}, "shared": shared["connection"]}
        return self.stack.pin(self.stack.connection.open(connection, e, self.stack.depth))

    def keys(self, shared, layer, state, tokens, tile, l):
        connection, branches = layer
        x = self.stack.first_input(shared["connection"], state, connection, l)
        args = tokens.args(tile, jax.tree.leaves(x)[0].shape[0])
        attention = branches[0] if self.stack.connection.unit == "sublayer" else branches[0][0]
        return jax.tree.map(lambda k: k[None], self.stack.branches[0].keys(attention, x, l, args))

    def step(self, shared, layer, state, own, gathered, tokens, tile, l):
        masks = self.reader.masks(tokens, tile, l)
        bias = shared["flow"].get("bias")

        def attend(query, _):
            own_bias, row_bias, near_bias = (None, None, None) if bias is None else (
                bias[l][l], bias[l][masks.row_layers][:, None], bias[l][masks.near_layers]
            )  # fmt: skip
            cells = (
                Cells(*own, masks.own, own_bias),
                Cells(*gathered.rows, masks.rows, row_bias),
                Cells(*gathered.near, masks.near, near_bias),
            )
            return attend_cells(query, cells)

        connection, branches = layer
        args = tokens.args(tile, own.key.shape[0])
        inputs = self.stack.by_unit((attend, ()))
        return self.stack.copy(shared["connection"], state, connection, branches, l, args, inputs)[0]

    def close(self, shared, state):
        h, _ = self.stack.connection.close({"layers": {}, "shared": shared["connection"]}, state)
        return h


class Flow(nn.Module):
    """The flow's own parameters: the logit bias [L, M]."""

    flow: FlowConfig
    layers: int

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        if self.flow.bias is None:
            return {}
        sources = self.flow.reads(self.layers).sources

        def start(_):
            return jnp.full((self.layers, sources), self.flow.bias, jnp.float32).at[
                jnp.arange(self.layers), jnp.arange(self.layers)
            ].set(0.0)  # fmt: skip

        return {"bias": self.param("bias", start)}


def run_on_grid(
    stack: Stack,
    connection: Any,
    branches: Any,
    flow: FlowConfig,
    config: ModelConfig,
    own: Any,
    e: Array,
    tokens: GridTokens,
) -> Array:
    """The stack over the grid: embeddings [B, T, D] to outputs [B, T, D].

    connection, branches: the stack's parameters; own: the flow's.
    """
    count = e.shape[1]
    reads = flow.reads(stack.repeats)
    schedule = flow.resolve(reads, count)
    tiles = {"parallel": 1, "swept": flow.groups, "sequential": count, "wavefront": count}.get(schedule)
    if tiles is None:
        tiles = math.ceil(count / reads.tile(count))
    # Tokens that fill the last tile come after all others, so nobody reads them.
    size = tiles * math.ceil(count / tiles)
    e, tokens = _filled(e, tokens, size - count)
    reader = Reader(reads, size, one_tile=tiles == 1)
    program = StackProgram(stack, reader)
    shared = {"connection": connection["shared"], "flow": own}
    layers = (stack.grouped(connection), stack.by_unit(branches))
    shape = (len(reader.store.slots), e.shape[0], size, config.kv, config.head_size)
    grid = KeyValues(jnp.zeros(shape, e.dtype), jnp.zeros(shape, e.dtype))
    if schedule == "wavefront":
        slope = max(1, math.ceil(reads.slope(size)))
        h, _ = run_wavefront(Wavefront(program, reader, stack.repeats, size, slope), shared, layers, e, grid, tokens)
    else:
        plan = Tiles(program, reader, stack.repeats, size, tiles, strided=schedule == "swept")
        if schedule == "swept":
            h = _swept(plan, flow, shared, layers, e, grid, tokens)
        else:
            h, _ = run_tiles(plan, shared, layers, e, grid, None, tokens)
    return h[:, :count]


def _swept(plan, flow, shared, layers, e, grid, tokens):
    """Outputs of the last sweep; only the last ``gradient_sweeps`` are differentiated."""

    def sweep(shared, layers, e):
        def one(previous, _):
            h, after = run_tiles(plan, shared, layers, e, grid, previous, tokens)
            return after, h

        return one

    fixed = jax.lax.stop_gradient((shared, layers, e))
    previous, _ = jax.lax.scan(lambda p, _: (sweep(*fixed)(p, None)[0], None), grid, None, length=flow.sweeps)
    previous = jax.lax.stop_gradient(previous)
    _, h = jax.lax.scan(sweep(shared, layers, e), previous, None, length=flow.gradient_sweeps)
    return h[-1]


def _filled(e, tokens: GridTokens, more: int):
    if not more:
        return e, tokens
    e = jnp.pad(e, ((0, 0), (0, more), (0, 0)))

    def going_on(x):
        return jnp.concatenate([x, x[:, -1:] + 1 + jnp.arange(more)], axis=1)

    segment = None if tokens.segment is None else jnp.pad(tokens.segment, ((0, 0), (0, more)))
    return e, tokens._replace(position=going_on(tokens.position), place=going_on(tokens.place), segment=segment)
