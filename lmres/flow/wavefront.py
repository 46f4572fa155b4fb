"""Running the grid along its anti-diagonals: cell (t, l) in step l + lambda t, for an integer slope lambda >= 1.

A step holds one token per running layer, J = ceil(L / lambda) of them, computed together by one compiled body. With
lambda = ceil(slope) of the read set no read is of a later step, so T tokens take L + lambda (T - 1) steps instead of
the T L of going cell by cell.

Backward as in ``lmres.flow.tiles``: the final grid and the state before each cell are kept, and nothing else.

Legend: B batch, T tokens, L layers, P slots, R slots that a cell writes, J
running layers, U steps. Layers, tokens and steps count from 0.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmres.flow.reader import Reader, Tokens
from lmres.flow.tiles import CellProgram


@dataclasses.dataclass(frozen=True)
class Wavefront:
    """The schedule. slope: lambda, an integer of at least the read set's; the reader's ``one_tile`` is False."""

    program: CellProgram
    reader: Reader
    layers: int
    tokens: int
    slope: int

    def __post_init__(self):
        if not self.reader.store.has_own:
            raise ValueError(f"{self.reader.reads.name}: its channels are ready one step too late for a wavefront")
        needed = max(1, math.ceil(self.reader.reads.slope(self.tokens)))
        if self.slope < needed:
            raise ValueError(f"{self.reader.reads.name} needs a wavefront of slope {needed} or more, not {self.slope}")

    @property
    def steps(self) -> int:
        """U = L + lambda (T - 1)."""
        return self.layers + self.slope * (self.tokens - 1)

    @property
    def running(self) -> int:
        """J, cells of a step."""
        return math.ceil(self.layers / self.slope)

    def cells(self, u: Any) -> tuple[Array, Array, Array]:
        """(token, layer, whether it exists) of the cells of step ``u``, [J] each; limited to the grid where not."""
        layer = u % self.slope + self.slope * jnp.arange(self.running)
        token = (u - layer) // self.slope
        exists = (layer < self.layers) & (token >= 0) & (token < self.tokens)
        return jnp.clip(token, 0, self.tokens - 1), jnp.minimum(layer, self.layers - 1), exists

    def enter(self, states: Any, opened: Any, u: Any) -> Any:
        """The states before the cells of step ``u``, from those after the step before: every token is one layer up, and
        where layer 0 runs, a new token enters."""

        def one(state, new):
            moved = jnp.concatenate([new[None], state[:-1]])
            return jnp.where(u % self.slope == 0, moved, state)

        return jax.tree.map(one, states, opened)

    def put(self, grid: Any, entries: Any, u: Any) -> Any:
        """``grid`` with ``entries`` [J, R, B, 1, ...] of the cells of step ``u``; those of no cell are dropped."""
        token, slots = self._where(u)

        def one(leaf, x):
            where = jnp.where(slots < 0, leaf.shape[0], slots)
            return leaf.at[where, :, token[:, None]].set(x[:, :, :, 0].astype(leaf.dtype), mode="drop")

        return jax.tree.map(one, grid, entries) if slots.shape[1] else grid

    def take(self, grid: Any, u: Any) -> Any:
        """What ``put`` wrote; zeros for no cell."""
        token, slots = self._where(u)

        def one(leaf):
            x = leaf[jnp.maximum(slots, 0), :, token[:, None]][:, :, :, None]
            return jnp.where(slots.reshape(*slots.shape, *[1] * (x.ndim - 2)) < 0, 0, x)

        return jax.tree.map(one, grid) if slots.shape[1] else ()

    def _where(self, u: Any) -> tuple[Array, Array]:
        """The tokens [J] and slots [J, R] that step ``u`` writes, -1 for none."""
        token, layer, exists = self.cells(u)
        return token, jnp.where(exists[:, None], jnp.asarray(self.reader.store.written())[layer], -1)

    @property
    def top(self) -> int:
        """The place among the running layers of the last one."""
        return (self.layers - 1) // self.slope

    def done(self, u: Any) -> tuple[Array, Array]:
        """The token whose column step ``u`` ends, [1], and the slots then written, [R], -1 for none."""
        token, layer, exists = self.cells(u)
        slots = jnp.array([slot for slot, _ in self.reader.store.last()], jnp.int32)
        ends = exists[self.top] & (layer[self.top] == self.layers - 1)
        return token[self.top : self.top + 1], jnp.where(ends, slots, -1)

    def put_last(self, grid: Any, entries: Any, u: Any) -> Any:
        """``grid`` with ``entries`` [R, B, 1, ...] of the column that step ``u`` ends, if any."""
        token, slots = self.done(u)

        def one(leaf, x):
            where = jnp.where(slots < 0, leaf.shape[0], slots)
            return leaf.at[where, :, token].set(x[:, :, 0].astype(leaf.dtype), mode="drop")

        return jax.tree.map(one, grid, entries)

    def take_last(self, grid: Any, u: Any) -> Any:
        """What ``put_last`` wrote; zeros for no column."""
        token, slots = self.done(u)

        def one(leaf):
            x = leaf[jnp.maximum(slots, 0), :, token][:, :, None]
            return jnp.where(slots.reshape(-1, *[1] * (x.ndim - 1)) < 0, 0, x)

        return jax.tree.map(one, grid)

    def read(self, grid: Any, u: Any) -> Any:
        """What each cell of step ``u`` gathers, with a leading axis J."""
        token, layer, _ = self.cells(u)
        return jax.vmap(lambda t, l: self.reader.gather(grid, t[None], l))(token, layer)

    def read_transposed(self, g_grid: Any, g_gathered: Any, u: Any) -> Any:
        """``g_grid`` with the cotangent of what was read added."""
        token, layer, _ = self.cells(u)
        return jax.lax.fori_loop(
            0,
            self.running,
            lambda j, g: self.reader.add(g, jax.tree.map(lambda x: x[j], g_gathered), token[j][None], layer[j]),
            g_grid,
        )


def _keys(plan, tokens, u, shared, layers, states):
    """What the cells of step ``u`` put into the grid, with a leading axis J: before any of them reads, since a read of
    the largest slope is of a cell of the same step."""
    token, layer, _ = plan.cells(u)
    params = jax.tree.map(lambda p: p[layer], layers)
    one = lambda params_l, state, t, l: plan.program.keys(shared, params_l, state, tokens, t[None], l)  # noqa: E731
    return jax.vmap(one)(params, states, token, layer)


def _step(plan, tokens, u, shared, layers, states, own, gathered):
    """The states after the cells of step ``u``, with a leading axis J."""
    token, layer, _ = plan.cells(u)
    params = jax.tree.map(lambda p: p[layer], layers)

    def one(params_l, state, own, gathered, t, l):
        return plan.program.step(shared, params_l, state, own, gathered, tokens, t[None], l)

    return jax.vmap(one)(params, states, own, gathered, token, layer)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_wavefront(plan: Wavefront, shared: Any, layers: Any, e: Array, grid: Any, tokens: Tokens) -> tuple[Array, Any]:
    """Runs all cells; arguments and results as in ``run_tiles``."""
    return _forward(plan, shared, layers, e, grid, tokens)[0]


def _opened(plan, shared, e):
    """The state each token starts from, [T, B, 1, ...]."""
    return jax.vmap(lambda e_t: plan.program.open(shared, e_t))(jnp.moveaxis(e, 1, 0)[:, :, None])


def _entering(plan, opened, u):
    return jax.tree.map(lambda x: x[jnp.minimum(u // plan.slope, plan.tokens - 1)], opened)


def _ends(plan):
    """The step of each token's top cell, [T]."""
    return plan.layers - 1 + plan.slope * jnp.arange(plan.tokens)


def _close(plan, shared, states):
    """Outputs [B, T, D] from each token's last state [T, B, 1, ...]."""
    h = jax.vmap(lambda state: plan.program.close(shared, state))(states)
    return jnp.moveaxis(h[:, :, 0], 0, 1)


def _last(plan, tokens, u, shared, after):
    """What the column that step ``u`` ends puts into the grid."""
    return plan.program.last(shared, jax.tree.map(lambda x: x[plan.top], after), tokens, plan.done(u)[0])


def _forward(plan, shared, layers, e, grid, tokens):
    opened = _opened(plan, shared, e)

    def step(carry, u):
        states, grid = carry
        before = plan.enter(states, _entering(plan, opened, u), u)
        made = _keys(plan, tokens, u, shared, layers, before)
        grid = plan.put(grid, made, u)
        after = _step(plan, tokens, u, shared, layers, before, _own(made), plan.read(grid, u))
        if plan.reader.store.last():
            grid = plan.put_last(grid, _last(plan, tokens, u, shared, after), u)
        return (after, grid), (before, after)

    nothing = jax.tree.map(lambda x: jnp.zeros((plan.running, *x.shape[1:]), x.dtype), opened)
    (_, grid), (before, after) = jax.lax.scan(step, (nothing, grid), jnp.arange(plan.steps))
    last = jax.tree.map(lambda x: x[_ends(plan), plan.top], after)
    return (_close(plan, shared, last), grid), (shared, layers, e, grid, tokens, before, last)


def _own(made):
    return jax.tree.map(lambda x: x[:, 0], made)


def _backward(plan, saved, cotangents):
    shared, layers, e, grid, tokens, before, last = saved
    g_h, g_grid = cotangents
    add, zeros = partial(jax.tree.map, jnp.add), partial(jax.tree.map, jnp.zeros_like)
    _, close_vjp = jax.vjp(partial(_close, plan), shared, last)
    g_shared, g_last = close_vjp(g_h)
    opened, open_vjp = jax.vjp(partial(_opened, plan), shared, e)

    def step(carry, xs):
        g_states, g_shared, g_layers, g_grid, g_opened = carry
        before_u, u = xs
        token, layer, exists = plan.cells(u)
        ends = exists[plan.top] & (layer[plan.top] == plan.layers - 1)  # a token's top cell: on to ``close``
        ended = token[plan.top]
        g_states = jax.tree.map(lambda g, top: g.at[plan.top].add(jnp.where(ends, top[ended], 0)), g_states, g_last)
        # Cells that do not exist compute something, but nobody reads it.
        g_states = jax.tree.map(lambda g: jnp.where(exists.reshape(-1, *[1] * (g.ndim - 1)), g, 0), g_states)
        made, keys_vjp = jax.vjp(partial(_keys, plan, tokens, u), shared, layers, before_u)
        inputs = (shared, layers, before_u, _own(made), plan.read(grid, u))
        after, step_vjp = jax.vjp(partial(_step, plan, tokens, u), *inputs)
        if plan.reader.store.last():
            g_more, g_after = jax.vjp(partial(_last, plan, tokens, u), shared, after)[1](plan.take_last(g_grid, u))
            g_shared, g_states = add(g_shared, g_more), add(g_states, g_after)
        *g_step, g_own, g_gathered = step_vjp(g_states)
        g_grid = plan.read_transposed(g_grid, g_gathered, u)
        # The cells of this step are among the readers of what it made.
        g_made = jax.tree.map(lambda g, own: g.at[:, 0].add(own), plan.take(g_grid, u), g_own)
        g_more, g_layers_u, g_before = add(tuple(g_step), keys_vjp(g_made))
        enter = lambda states, opened: plan.enter(states, _entering(plan, opened, u), u)  # noqa: E731
        g_states, g_entering = jax.vjp(enter, before_u, opened)[1](g_before)
        carry = (g_states, add(g_shared, g_more), add(g_layers, g_layers_u), g_grid, add(g_opened, g_entering))
        return carry, None

    start = (zeros(jax.tree.map(lambda x: x[0], before)), g_shared, zeros(layers), g_grid, zeros(opened))
    xs = (before, jnp.arange(plan.steps))
    (_, g_shared, g_layers, _, g_opened), _ = jax.lax.scan(step, start, xs, reverse=True)
    g_more, g_e = open_vjp(g_opened)
    return add(g_shared, g_more), g_layers, g_e, zeros(grid), None


run_wavefront.defvjp(_forward, _backward)
