"""Running the grid tile by tile: one compiled body for every (tile, layer), and memory linear in the cells.

A tile is a group of tokens that goes through the layers together. The schedules are choices of tiles:

    one token per tile              exact for every legal read set
    C tokens in a row               exact if no upward read leads from one of them to another (``ReadSet.tile``)
    all tokens                      layer by layer; exact if no read goes up, else one Jacobi sweep
    every g-th token, in g tiles    a cyclic Gauss-Seidel sweep

In a sweep, what is not yet written is read from the previous sweep's grid.

The grid is only ever appended to, so its final value holds every earlier one: the backward pass keeps it and the state
before each cell, walks the cells in reverse, gathers again what each one read (masks hide what came later) and adds
the cotangents into one cotangent of the grid. Differentiating the scan would keep the grid once per cell.

Legend: B batch, T tokens, U tiles, S = T / U tokens of a tile, L layers, P slots, R slots that a cell writes.
"""

import dataclasses
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmres.flow.reader import Gathered, Reader, Tokens


class CellProgram(Protocol):
    """What is computed in a cell; hashable. ``shared`` and ``layer`` are parameters: for all layers, and layer l's."""

    def open(self, shared: Any, e: Array) -> Any:
        """The state of a tile's columns from their embeddings [B, S, D]."""

    def keys(self, shared: Any, layer: Any, state: Any, tokens: Tokens, tile: Array, l: Any) -> Any:
        """What the cells of layer ``l`` put into the grid (``Store.written``), a pytree of [R, B, S, ...], made from
        the state before them; first what they read themselves. Empty where the store has no such keys."""

    def step(
        self, shared: Any, layer: Any, state: Any, own: Any, gathered: Gathered, tokens: Tokens, tile: Array, l: Any
    ) -> Any:
        """The state after the cells of layer ``l``, from what they gathered and from ``own``, the first of their
        ``keys``."""

    def close(self, shared: Any, state: Any) -> Array:
        """The columns' outputs [B, S, D]."""

    def last(self, shared: Any, state: Any, tokens: Tokens, tile: Array) -> Any:
        """What is put into the grid when the columns are done (``Store.last``), a pytree of [R, B, S, ...]; not asked
        for where there is nothing."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A schedule: ``count`` tiles over ``tokens`` tokens; strided: tile u holds the tokens t with t mod count = u."""

    program: CellProgram
    reader: Reader
    layers: int
    tokens: int
    count: int
    strided: bool = False

    def __post_init__(self):
        if self.tokens % self.count:
            raise ValueError(f"{self.tokens} tokens cannot be cut into {self.count} tiles of equal size")

    @property
    def size(self) -> int:
        """S, tokens of a tile."""
        return self.tokens // self.count

    def tile(self, u: Any) -> Array:
        """The tokens of tile ``u``, [S]."""
        places = jnp.arange(self.size)
        return u + self.count * places if self.strided else u * self.size + places

    def tile_of(self) -> Array:
        """The tile of each token, [T]."""
        places = jnp.arange(self.tokens)
        return places % self.count if self.strided else places // self.size

    def cut(self, x: Array) -> Array:
        """[B, T, ...] to [U, B, S, ...]."""
        if self.strided:
            return jnp.moveaxis(x.reshape(x.shape[0], self.size, self.count, *x.shape[2:]), 2, 0)
        return jnp.moveaxis(x.reshape(x.shape[0], self.count, self.size, *x.shape[2:]), 1, 0)

    def join(self, x: Array) -> Array:
        """The inverse of ``cut``."""
        x = jnp.moveaxis(x, 0, 2 if self.strided else 1)
        return x.reshape(x.shape[0], self.tokens, *x.shape[3:])

    def put(self, grid: Any, entries: Any, tile: Array, slots: Array) -> Any:
        """``grid`` with ``entries`` [R, B, S, ...] at ``slots`` [R] of ``tile``; those below 0 are dropped."""

        def one(leaf, x):
            x = x.astype(leaf.dtype)
            if self.strided:
                where = jnp.where(slots < 0, leaf.shape[0], slots)
                return leaf.at[where[:, None], :, tile].set(jnp.moveaxis(x, 2, 1), mode="drop")
            for r in range(len(slots)):
                slot = jnp.maximum(slots[r], 0).astype(tile.dtype)
                start = (slot, 0, tile[0], *[0] * (leaf.ndim - 3))
                new = jnp.where(slots[r] < 0, jax.lax.dynamic_slice(leaf, start, (1, *x.shape[1:])), x[r][None])
                leaf = jax.lax.dynamic_update_slice(leaf, new, start)
            return leaf

        return jax.tree.map(one, grid, entries) if len(slots) else grid

    def take(self, grid: Any, tile: Array, slots: Array) -> Any:
        """What ``put`` wrote; zeros where it dropped."""

        def one(leaf):
            found = leaf[jnp.maximum(slots, 0)][:, :, tile]
            return jnp.where(slots.reshape(-1, *[1] * (found.ndim - 1)) < 0, 0, found)

        return jax.tree.map(one, grid) if len(slots) else ()

    def written(self, l: Any) -> Array:
        """The slots that layer ``l`` writes, [R]."""
        return jnp.asarray(self.reader.store.written())[l]

    @property
    def last(self) -> np.ndarray:
        """The slots that are written when a column is done, [R]."""
        return np.array([slot for slot, _ in self.reader.store.last()], np.int32)

    def read(self, grid: Any, previous: Any, u: Any, tile: Array, l: Any) -> Gathered:
        """What cells (tile u, layer l) gather: from this sweep's grid where written, else from the previous one's."""
        now = self.reader.gather(grid, tile, l)
        if previous is None:
            return now
        return self._choose(now, self.reader.gather(previous, tile, l), u, tile, l)

    def read_transposed(
        self, g_grid: Any, g_previous: Any, g_gathered: Gathered, u: Any, tile: Array, l: Any
    ) -> tuple[Any, Any]:
        """Cotangents of both grids with that of what was read added."""
        if g_previous is None:
            return self.reader.add(g_grid, g_gathered, tile, l), None
        none = jax.tree.map(jnp.zeros_like, g_gathered)
        new, old = self._choose(g_gathered, none, u, tile, l), self._choose(none, g_gathered, u, tile, l)
        return self.reader.add(g_grid, new, tile, l), self.reader.add(g_previous, old, tile, l)

    def _choose(self, now: Gathered, before: Gathered, u: Any, tile: Array, l: Any) -> Gathered:
        rows, near = self.reader.written(self.tile_of(), tile, u, l)

        def pick(mask):
            return lambda a, b: jnp.where(mask.reshape(*mask.shape, *[1] * (a.ndim - mask.ndim)), a, b)

        return Gathered(
            jax.tree.map(pick(rows[:, None]), now.rows, before.rows), jax.tree.map(pick(near), now.near, before.near)
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_tiles(
    plan: Tiles, shared: Any, layers: Any, e: Array, grid: Any, previous: Any, tokens: Tokens
) -> tuple[Array, Any]:
    """Runs all cells.

    Args:
      plan: the schedule. shared, layers: parameters; leaves of ``layers`` are [L, ...].
      e: embeddings [B, T, D].
      grid: zeros of the grid's shape; nothing of it is read before it is written, and it gets no gradient.
      previous: the grid of the sweep before, or None if nothing unwritten is ever read.
      tokens: see ``Tokens``.

    Returns: outputs [B, T, D], and the grid.
    """
    return _forward(plan, shared, layers, e, grid, previous, tokens)[0]


def extend_tiles(
    plan: Tiles, shared: Any, layers: Any, e: Array, grid: Any, tokens: Tokens, start: int | Array = 0
) -> tuple[Array, Any]:
    """As ``run_tiles`` for ``plan.tokens`` tokens from place ``start`` of a larger grid on, which holds what was
    computed before; ``tokens`` tells of all places of the grid.

    Differentiated as it stands, so the backward pass keeps what each cell gathered and computed instead of computing it
    again: what one wants of one tile with memory to spare, and never of many.
    """
    return _forward(plan, shared, layers, e, grid, None, tokens, start)[0]


def _forward(plan, shared, layers, e, grid, previous, tokens, start=0):
    program = plan.program

    def column(grid, xs):
        e_u, u = xs
        tile = plan.tile(u) + start

        def cell(carry, xs):
            state, grid = carry
            layer, l = xs
            made = program.keys(shared, layer, state, tokens, tile, l)
            grid = plan.put(grid, made, tile, plan.written(l))
            gathered = plan.read(grid, previous, u, tile, l)
            return (program.step(shared, layer, state, _own(made), gathered, tokens, tile, l), grid), state

        (state, grid), before = jax.lax.scan(cell, (program.open(shared, e_u), grid), (layers, jnp.arange(plan.layers)))
        if len(plan.last):
            grid = plan.put(grid, program.last(shared, state, tokens, tile), tile, plan.last)
        return grid, (program.close(shared, state), before, state)

    grid, (h, before, last) = jax.lax.scan(column, grid, (plan.cut(e), jnp.arange(plan.count)))
    return (plan.join(h), grid), (shared, layers, e, grid, previous, tokens, before, last)


def _own(made):
    return jax.tree.map(lambda x: x[0], made)


def _backward(plan, saved, cotangents):
    shared, layers, e, grid, previous, tokens, before, last = saved
    program, (g_h, g_grid) = plan.program, cotangents
    add = partial(jax.tree.map, jnp.add)

    def column(carry, xs):
        g_shared, g_layers, g_grid, g_previous = carry
        e_u, g_h_u, before_u, last_u, u = xs
        tile = plan.tile(u)

        def end(shared, state):
            return program.close(shared, state), program.last(shared, state, tokens, tile) if len(plan.last) else ()

        _, end_vjp = jax.vjp(end, shared, last_u)
        g_more, g_state = end_vjp((g_h_u, plan.take(g_grid, tile, plan.last)))
        g_shared = add(g_shared, g_more)

        def cell(carry, xs):
            g_state, g_shared, g_grid, g_previous = carry
            layer, state, l = xs
            keys = partial(program.keys, tokens=tokens, tile=tile, l=l)
            step = partial(program.step, tokens=tokens, tile=tile, l=l)
            made, keys_vjp = jax.vjp(keys, shared, layer, state)
            gathered = plan.read(grid, previous, u, tile, l)
            _, step_vjp = jax.vjp(step, shared, layer, state, _own(made), gathered)
            *g_step, g_own, g_gathered = step_vjp(g_state)
            g_grid, g_previous = plan.read_transposed(g_grid, g_previous, g_gathered, u, tile, l)
            # The cell itself is among the readers of what it made.
            g_made = jax.tree.map(lambda g, own: g.at[0].add(own), plan.take(g_grid, tile, plan.written(l)), g_own)
            g_more, g_layer, g_state = add(tuple(g_step), keys_vjp(g_made))
            return (g_state, add(g_shared, g_more), g_grid, g_previous), g_layer

        carry = (g_state, g_shared, g_grid, g_previous)
        xs = (layers, before_u, jnp.arange(plan.layers))
        (g_state, g_shared, g_grid, g_previous), g_more = jax.lax.scan(cell, carry, xs, reverse=True)
        g_layers = add(g_layers, g_more)
        g_more, g_e = jax.vjp(program.open, shared, e_u)[1](g_state)
        return (add(g_shared, g_more), g_layers, g_grid, g_previous), g_e

    zeros = partial(jax.tree.map, jnp.zeros_like)
    start = (zeros(shared), zeros(layers), g_grid, None if previous is None else zeros(previous))
    xs = (plan.cut(e), plan.cut(g_h), before, last, jnp.arange(plan.count))
    (g_shared, g_layers, _, g_previous), g_e = jax.lax.scan(column, start, xs, reverse=True)
    return g_shared, g_layers, plan.join(g_e), zeros(grid), g_previous, None


run_tiles.defvjp(_forward, _backward)
