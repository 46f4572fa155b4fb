"""Running the transformer's blocks over the token x layer grid: the schedules, and going on from a cache.

Legend: B batch, T tokens, S new tokens, D width, P slots of the grid, G key/value heads, K head size.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lmres.flow import FlowConfig, Reader, Tiles, Wavefront, extend_tiles, run_tiles, run_wavefront
from lmres.flow.geometry import Standard
from lmres.model.cells import BlockProgram, GridTokens, writers_of
from lmres.model.config import ModelConfig
from lmres.model.layers import KeyValues
from lmres.residual.stack import Stack


class Grid(NamedTuple):
    """A model on the grid: the stack with the connection's and the branches' parameters, the flow with its own."""

    stack: Stack
    connection: Any
    branches: Any
    flow: FlowConfig
    config: ModelConfig
    own: Any

    def parameters(self) -> tuple[Any, Any]:
        """(shared, layers) for ``BlockProgram``."""
        writers, last = writers_of(self.flow.store(self.config.blocks), self.branches[0], self.own.get("output"))
        shared = {"connection": self.connection["shared"], "flow": self.own, "writers": last}
        return shared, (self.stack.grouped(self.connection), self.stack.by_unit(self.branches), writers)

    def reader(self, tokens: int, one_tile: bool) -> Reader:
        """The flow's reader over a grid of ``tokens`` tokens."""
        return self.flow.reader(self.config.blocks, tokens, one_tile)

    def program(self, reader: Reader) -> BlockProgram:
        return BlockProgram(self.stack, reader, self.flow, self.config)

    def tiles(self, reader: Reader, tokens: int, count: int, strided: bool = False) -> Tiles:
        return Tiles(self.program(reader), reader, self.config.blocks, tokens, count, strided)

    def empty(self, batch: int, tokens: int, dtype: Any) -> KeyValues:
        """Keys and values of nothing, [P, B, T, G, K]."""
        shape = (len(self.flow.store(self.config.blocks).slots), batch, tokens, self.config.kv, self.config.head_size)
        return KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def run_on_grid(model: Grid, e: Array, tokens: GridTokens) -> tuple[Array, KeyValues]:
    """Embeddings [B, T, D] to the columns' outputs [B, T, D], and the grid [P, B, T, G, K]."""
    flow, count, blocks = model.flow, e.shape[1], model.config.blocks
    reads = flow.reads(blocks)
    schedule, tiles, each = flow.tiling(blocks, count)
    # Tokens that fill the last tile come after all others, so nobody reads them.
    size = tiles * each
    e, tokens = _filled(e, tokens, size - count)
    shared, layers = model.parameters()
    grid = model.empty(e.shape[0], size, e.dtype)
    reader = model.reader(size, one_tile=tiles == 1)
    if schedule == "wavefront":
        slope = max(1, math.ceil(reads.slope(size)))
        plan = Wavefront(model.program(reader), reader, blocks, size, slope)
        h, grid = run_wavefront(plan, shared, layers, e, grid, tokens)
    elif schedule == "swept":
        plan = model.tiles(reader, size, tiles, strided=True)
        h, grid = _swept(plan, flow, _first_grid(model, shared, layers, e, grid, tokens), shared, layers, e, tokens)
    elif schedule == "parallel" and model.config.remat == "none":
        h, grid = extend_tiles(model.tiles(reader, size, tiles), shared, layers, e, grid, tokens)
    else:
        h, grid = run_tiles(model.tiles(reader, size, tiles), shared, layers, e, grid, None, tokens)
    return h[:, :count], jax.tree.map(lambda x: x[:, :, :count], grid)


def extend_on_grid(model: Grid, e: Array, grid: KeyValues, tokens: GridTokens, start: Array) -> tuple[Array, KeyValues]:
    """Outputs [B, S, D] of S more tokens from place ``start`` of the grid on, and the grid with them in it.

    tokens: of all places of the grid, [B, T] each.
    """
    count, size = e.shape[1], grid.key.shape[2]
    parallel = model.flow.reads(model.config.blocks).slope(size) == 0 and model.flow.store(model.config.blocks).has_own
    plan = model.tiles(model.reader(size, one_tile=False), count, 1 if parallel else count)
    return extend_tiles(plan, *model.parameters(), e, grid, tokens, start)


def _first_grid(model: Grid, shared, layers, e, grid, tokens):
    """What the first sweep reads where nothing is computed yet."""
    if model.flow.start == "zeros":
        return grid
    blocks = model.config.blocks
    row = dataclasses.replace(model.flow.reads(blocks), terms=Standard().terms(blocks))
    reader = Reader(row, e.shape[1], one_tile=True, store=model.flow.store(blocks))
    program = dataclasses.replace(model.program(reader), row_only=True)
    plan = Tiles(program, reader, blocks, e.shape[1], 1)
    if model.flow.start == "plain":
        return run_tiles(plan, shared, layers, e, grid, None, tokens)[1]
    column, tile = program.open(shared, e), plan.tile(0)

    def write(grid, xs):
        layer, l = xs
        return plan.put(grid, program.keys(shared, layer, column, tokens, tile, l), tile, plan.written(l)), None

    grid, _ = jax.lax.scan(write, grid, (layers, jnp.arange(plan.layers)))
    return plan.put(grid, program.last(shared, column, tokens, tile), tile, plan.last) if len(plan.last) else grid


def _swept(plan, flow, grid, shared, layers, e, tokens):
    """Outputs and grid of the last sweep; only the last ``gradient_sweeps`` are differentiated."""

    def sweep(shared, layers, e):
        def one(previous, _):
            h, after = run_tiles(plan, shared, layers, e, jax.tree.map(jnp.zeros_like, grid), previous, tokens)
            return after, h

        return one

    fixed = jax.lax.stop_gradient((shared, layers, e))
    previous, _ = jax.lax.scan(lambda p, _: (sweep(*fixed)(p, None)[0], None), grid, None, length=flow.sweeps)
    previous = jax.lax.stop_gradient(previous)
    previous, h = jax.lax.scan(sweep(shared, layers, e), previous, None, length=flow.gradient_sweeps)
    return h[-1], previous


def _filled(e, tokens: GridTokens, more: int):
    if not more:
        return e, tokens
    e = jnp.pad(e, ((0, 0), (0, more), (0, 0)))

    def going_on(x):
        return jnp.concatenate([x, x[:, -1:] + 1 + jnp.arange(more)], axis=1)

    segment = None if tokens.segment is None else jnp.pad(tokens.segment, ((0, 0), (0, more)))
    return e, tokens._replace(position=going_on(tokens.position), place=going_on(tokens.place), segment=segment)
