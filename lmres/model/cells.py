"""The transformer's block as the program of a cell of the token x layer grid (``lmres.flow``).

A copy of the stack is a layer of the grid: the connection's state of a token is its column, attention's keys and values
are the cells, and attention reads what the flow allows.

Legend: B batch, S tokens of a tile, T tokens, L blocks, M source layers, R slots, H query heads, G key/value heads, K
head size.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmres.flow import FlowConfig, Reader
from lmres.flow.attention import Cells, attend_cells, own_cells
from lmres.flow.geometry import Feedback, Pool, Standard
from lmres.flow.reader import Gathered, Masks
from lmres.flow.store import Store
from lmres.model.config import ModelConfig
from lmres.model.layers import Args, Attention, attend
from lmres.model.sources import Channels, Mixture, Output
from lmres.residual.interface import Exchange
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


class Column(NamedTuple):
    """A tile's columns: the connection's state, and what is carried for sources that no layer makes."""

    state: Any
    carry: Any


def column_source(flow: FlowConfig, config: ModelConfig) -> Output:
    """What is put into the grid when a column is done."""
    if isinstance(flow.geometry, Feedback):
        return Mixture(config)
    return Channels(config, flow.geometry.channels) if isinstance(flow.geometry, Pool) else Output(config)


class Flow(nn.Module):
    """The flow's own parameters: the logit bias [L, M], the gates [L, H], and those of sources that no layer makes.

    projections: the attention whose keys and values serve the output cell.
    """

    flow: FlowConfig
    config: ModelConfig
    projections: Attention

    @nn.compact
    def __call__(self, e: Array) -> dict[str, Any]:
        flow, layers = self.flow, self.config.blocks
        found: dict[str, Any] = {}
        if flow.has_bias:
            found["bias"] = self.param("bias", lambda _: bias_at_start(flow, layers))
        if flow.combine == "gated":
            found["gate"] = self.param("gate", lambda _: jnp.zeros((layers, self.config.heads), jnp.float32))
        source = column_source(flow, self.config)
        if type(source) is not Output:
            found["source"] = self.param("source", source.init)
        if any(projector == layers for _, projector in flow.store(layers).last()):
            x = e[:1, :1] if self.projections.ways == 1 else (e[:1, :1],) * self.projections.ways
            args = Args(jnp.zeros((1, 1), jnp.int32))
            init = lambda key: self.projections.init(key, x, args, method="keys")["params"]  # noqa: E731
            found["output"] = self.param("output", init)
        return found


def bias_at_start(flow: FlowConfig, layers: int) -> Array:
    """[L, M]: 0 for the own layer, the start for foreign ones, that for upward reads where it differs."""
    foreign = 0.0 if flow.bias is None else flow.bias
    upward = foreign if flow.bias_upward is None else flow.bias_upward
    reader, source = jnp.ogrid[:layers, : flow.reads(layers).sources]
    return jnp.where(source > reader, upward, jnp.where(source < reader, foreign, 0.0)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class BlockProgram:
    """A ``CellProgram``. shared: {"connection", "flow", "writers"}; layers: (the connection's parameters, the units',
    writers).

    writers: attention parameters of the layers that project a source beside its own, [R, ...] per layer and, in
    ``shared``, for what is written when the column is done. row_only: read the own row alone, whatever the flow.
    """

    stack: Stack
    reader: Reader
    flow: FlowConfig
    config: ModelConfig
    row_only: bool = False

    @property
    def source(self) -> Output:
        return column_source(self.flow, self.config)

    def open(self, shared, e):
        connection = {"layers": {}, "shared": shared["connection"]}
        state = self.stack.pin(self.stack.connection.open(connection, e, self.stack.depth))
        return Column(state, self.source.open(e))

    def keys(self, shared, layer, column, tokens, tile, l):
        if not self.reader.store.has_own:
            return ()
        connection, units, writers = layer
        x = self.stack.first_input(shared["connection"], column.state, connection, l)
        args = tokens.args(tile, _plain(x).shape[0])
        own = self._project(units[0] if self.stack.connection.unit == "sublayer" else units[0][0], x, args)
        if not jax.tree.leaves(writers):
            return jax.tree.map(lambda k: k[None], own)
        x = x.x if isinstance(x, Exchange) else x
        others = jax.vmap(lambda writer: self._project(writer, x, args))(writers)
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), own, others)

    def _project(self, attention, x, args):
        return self.stack.branches[0].keys(attention, x, args)

    def step(self, shared, layer, column, own, gathered, tokens, tile, l):
        def attention(query, _):
            return self._attend(shared["flow"], query, own, gathered, tokens, tile, l)

        connection, units, _ = layer
        state, carry = column
        if not isinstance(carry, tuple):
            x = _plain(self.stack.first_input(shared["connection"], state, connection, l))
            carry = self.source.add(shared["flow"]["source"], carry, x, l)
        batch = jax.tree.leaves(gathered.rows)[0].shape[1]
        inputs = self.stack.by_unit((attention, ()))
        args = tokens.args(tile, batch)
        state, _ = self.stack.copy(shared["connection"], state, connection, units, l, args, inputs)
        return Column(state, carry)

    def close(self, shared, column):
        h, _ = self.stack.connection.close({"layers": {}, "shared": shared["connection"]}, column.state)
        return h

    def last(self, shared, column, tokens, tile):
        h = self.close(shared, column)
        args = tokens.args(tile, h.shape[0])
        ways = self.stack.branches[0].module.ways
        project = lambda writer, x: self._project(writer, x if ways == 1 else (x,) * ways, args)  # noqa: E731
        params = shared["flow"].get("source")
        return self.source.keys(params, column.carry, h, args.position, shared["writers"], project)

    def _attend(self, params, query, own, gathered, tokens, tile, l):
        """Attention of ``query`` [B, S, H, K] over what the flow allows."""
        if self.row_only:
            return self._along_the_row(query, own, gathered, tokens, tile, l)
        parts = self.flow.parts(self.config.blocks)
        masks = [self.reader.masks(tokens, tile, l, part) for part in parts]
        bias = params["bias"][l] if "bias" in params else None
        if self.flow.combine == "gated":
            rows = slice(0 if self.reader.one_tile else 1, None)  # without the own row
            extra = attend_cells(query, _cells((), *_picked(gathered, masks[0], rows), bias, l))
            return self._along_the_row(query, own, gathered, tokens, tile, l) + (
                jnp.tanh(params["gate"][l])[:, None] * extra
            ).astype(query.dtype)
        shares = []
        for i, mask in enumerate(masks):
            of = lambda x, axis, i=i: jnp.split(x, len(parts), axis)[i]  # noqa: E731
            cells = _cells(own, *self._of_part(gathered, mask, parts[i]), bias, l)
            cells = tuple(c._replace(key=of(c.key, -2), value=of(c.value, -2)) for c in cells)
            shares.append(attend_cells(of(query, 2), cells))
        return jnp.concatenate(shares, axis=2)

    def _of_part(self, gathered, masks: Masks, part):
        """What a share of the heads needs of what all of them gathered, so that it is not compared with the rest."""
        rows, near = self.reader.needed(part)
        if len(rows) < self.reader.lowering.rows:
            gathered, masks = _picked(gathered, masks, np.array(rows, int))
        if not near:
            gathered = gathered._replace(near=jax.tree.map(lambda x: x[:0], gathered.near))
            masks = masks._replace(near=masks.near[:, :, :0], near_layers=masks.near_layers[:0])
        return gathered, masks

    def _along_the_row(self, query, own, gathered, tokens, tile, l):
        """Ordinary attention, by the operations of the ordinary transformer and of ``standard`` on the grid: equal to
        theirs bit for bit."""
        reads = dataclasses.replace(self.reader.reads, terms=Standard().terms(self.config.blocks))
        masks = Reader(reads, self.reader.tokens, self.reader.one_tile).masks(tokens, tile, l)
        if self.reader.one_tile:
            return attend(query, (own,), (masks.own[:, None],), self.config.attention)
        row = Cells(*jax.tree.map(lambda x: x[:1], gathered.rows), masks.rows)
        return attend_cells(query, (own_cells(*own, masks.own), row))


def _plain(x):
    """A branch's input as one array [B, S, D]: the first where it takes several, without what other layers lend."""
    x = x.x if isinstance(x, Exchange) else x
    return x[0] if isinstance(x, tuple) else x


def _cells(own, gathered, masks: Masks, bias, l) -> tuple[Cells, ...]:
    """All that a reader has at hand; bias [M] or None."""
    at = (lambda layers: None) if bias is None else (lambda layers: bias[layers])
    rows = at(masks.row_layers)
    found = (
        Cells(*gathered.rows, masks.rows, None if rows is None else rows[:, None]),
        Cells(*gathered.near, masks.near, at(masks.near_layers)),
    )
    return found if own == () else (own_cells(*own, masks.own, at(l)), *found)


def _picked(gathered: Gathered, masks: Masks, rows) -> tuple[Gathered, Masks]:
    """Both with some of the rows only."""
    gathered = gathered._replace(rows=jax.tree.map(lambda x: x[rows], gathered.rows))
    return gathered, masks._replace(rows=masks.rows[:, :, rows], row_layers=masks.row_layers[rows])


def writers_of(store: Store, attention: Any, output: Any) -> tuple[Any, Any]:
    """(per layer [L, R, ...], for the end of the column [R, ...]): the attention parameters that project sources beside
    their own layers'. attention: [L, ...]; output: the output cell's, or None."""
    foreign = jnp.maximum(jnp.array(store.foreign(), jnp.int32), 0)
    per_layer = jax.tree.map(lambda p: p[foreign], attention) if foreign.shape[1] else ()
    last = [projector for _, projector in store.last()] if store.has_own else []
    if not last:
        return per_layer, ()
    if output is not None and last == [store.reads.layers]:
        return per_layer, jax.tree.map(lambda p: p[None], output)
    return per_layer, jax.tree.map(lambda p: p[jnp.array(last)], attention)
