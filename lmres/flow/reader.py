"""Reading from the grid of keys and values: gathering what a tile's readers need, its transpose, and the masks.

The grid is any pytree of arrays [P, B, T, ...]: P slots (``lmres.flow.store``) of T tokens (keys and values, with
[G, K] at the end). A tile is a group of tokens that goes through the layers together. Layers, slots, tokens and tiles
are counted from 0 here.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmres.flow.lowering import Lowering, lower
from lmres.flow.readset import ReadSet
from lmres.flow.store import Store


class Tokens(NamedTuple):
    """The tokens of the grid, [B or 1, T] each.

    position: within the document; distances are counted in it. place: what chunks are counted in. segment: document,
    0 for padding; None where each row is one document.
    """

    position: Array
    place: Array
    segment: Array | None = None


class Gathered(NamedTuple):
    """What a reader gathers from a grid: rows [W, B, T, ...] and near cells [N, V, S, B, ...], per leaf of the grid."""

    rows: Any
    near: Any


class Masks(NamedTuple):
    """What may be read: own [., S, S], or [., S, 1, 1] where the own cell alone is at hand; rows [., S, W, T], near
    [., S, N, V]; and which source layers [W], [N, V]."""

    own: Array
    rows: Array
    near: Array
    row_layers: Array
    near_layers: Array


@dataclasses.dataclass(frozen=True)
class Reader:
    """Gathers and masks for one read set.

    tokens: T, of the grid. one_tile: all of them are one tile, so that its own layer is never gathered. store: where
    what is read lies; None for one slot per source. row: whether the own row is read apart (``lmres.flow.lowering``).
    """

    reads: ReadSet
    tokens: int
    one_tile: bool
    store: Store = None  # type: ignore[assignment]
    row: bool = False

    def __post_init__(self):
        if self.store is None:
            object.__setattr__(self, "store", Store(self.reads))

    @property
    def lowering(self) -> Lowering:
        return lower(self.reads, self.tokens, self.one_tile, self.store.has_own, self.row)

    def needed(self, part: ReadSet) -> tuple[tuple[int, ...], bool]:
        """What a part of the read set needs of what is gathered: which of the rows, and whether the near cells."""
        form = self.lowering
        far, near = part.pairs(self.tokens, form.near_tokens), part.pairs(self.tokens)
        rows = [w for w in range(form.rows) if any((l, m[w] + 1) in far for l, m in enumerate(form.far, 1))]
        return tuple(rows), any((l, m + 1) in near for l, at in enumerate(form.near, 1) for ms in at for m in ms)

    def keys(self, tile: int, part: ReadSet | None = None) -> int:
        """Keys that a query is compared with, ``tile`` tokens at a time, masked ones included. part: of the read set,
        where a head reads no more."""
        form = self.lowering
        if part is None:
            return form.keys(self.tokens, tile)
        rows, near = self.needed(part)
        less = dataclasses.replace(
            form,
            near=form.near if near else ((),) * len(form.near),
            far=tuple(tuple(m[w] for w in rows) for m in form.far),
        )
        return less.keys(self.tokens, tile)

    def _layers(self, l: Any) -> tuple[Array, Array]:
        """Source layers of what reader ``l`` gathers, [N, V] and [W]; -1 where a place is not needed."""
        near, far = self.lowering.tables()
        return jnp.asarray(near)[l], jnp.asarray(far)[l]

    def _slots(self, l: Any) -> tuple[Array, Array]:
        """Where these lie; 0 where a place is not needed."""
        slot_of = np.maximum(self.store.slot_of(), 0)
        readers = np.arange(self.reads.layers)
        near, far = self.lowering.tables()
        near, far = slot_of[readers[:, None, None], near], slot_of[readers[:, None], far]
        return jnp.asarray(near)[l], jnp.asarray(far)[l]

    def _near_tokens(self, tile: Array) -> Array:
        """[N, S]: the tokens that are 0 .. N - 1 before those of ``tile`` [S]; below 0 where there are none."""
        return tile - np.arange(self.lowering.near_tokens)[:, None]

    def gather(self, grid: Any, tile: Array, l: Any) -> Gathered:
        """What readers of layer ``l`` in ``tile`` gather."""
        near, far = self._slots(l)
        before = jnp.maximum(self._near_tokens(tile), 0)

        def rows(leaf):
            return leaf[far]

        def cells(leaf):
            return leaf[near[:, :, None], :, before[:, None, :]]

        return Gathered(jax.tree.map(rows, grid), jax.tree.map(cells, grid))

    def add(self, grid: Any, gathered: Gathered, tile: Array, l: Any) -> Any:
        """The transpose of ``gather``, added to ``grid``."""
        near, far = self._slots(l)
        before = jnp.maximum(self._near_tokens(tile), 0)

        def one(leaf, rows, cells):
            if self.lowering.rows:
                leaf = leaf.at[far].add(rows)
            if self.lowering.near_tokens:
                leaf = leaf.at[near[:, :, None], :, before[:, None, :]].add(cells)
            return leaf

        return jax.tree.map(one, grid, gathered.rows, gathered.near)

    def written(self, tile_of: Array, tile: Array, u: Any, l: Any) -> tuple[Array, Array]:
        """Whether gathered cells were computed before cell (tile ``u``, layer ``l``): ([W, T], [N, V, S]).

        tile_of: [T], the number of each token's tile; tiles run in order, layers from the bottom within each, and a
        cell's own keys are written before it reads.
        """
        near, far = self._layers(l)
        before = self._near_tokens(tile)

        def done(layer, token):
            written = (layer <= l) & self.store.has_own
            return (tile_of[token] < u) | ((tile_of[token] == u) & written)

        rows = done(far[:, None], jnp.arange(self.tokens))
        return rows, done(near[:, :, None], jnp.maximum(before, 0)[:, None, :])

    def masks(self, tokens: Tokens, tile: Array, l: Any, reads: ReadSet | None = None) -> Masks:
        """What readers of layer ``l`` at the tokens of ``tile`` [S] may read of what they have made and gathered.

        reads: a part of the reader's read set; None for all of it.
        """
        reads = self.reads if reads is None else reads
        near, far = self._layers(l)
        before = self._near_tokens(tile)
        position, place, segment = tokens.position, tokens.place, tokens.segment
        t, here = position[:, tile], place[:, tile]
        reader = l + 1

        def allowed(s, there, other, m, axes):
            up = lambda a: a.reshape(*a.shape, *(1,) * axes)  # noqa: E731
            ok = reads.allows(up(t) + 1, reader, s + 1, m + 1, up(here), there)
            if segment is not None:
                ok = ok & (up(segment[:, tile]) == other) & (other != 0)
            return ok

        def of(index, axes):
            """position, place and segment of tokens ``index``, with ``axes`` spread by the caller."""
            pick = lambda a: None if a is None else axes(a[:, index])  # noqa: E731
            return pick(position), pick(place), pick(segment)

        own = allowed(*of(tile, lambda a: a[:, None, :]), l, 1)
        everything = jnp.arange(self.tokens)
        rows = allowed(*of(everything, lambda a: a[:, None, None, :]), far[:, None], 2)
        if self.lowering.near_tokens:
            distance = t[:, :, None, None] - position[:, None, None, :]
            rows = rows & (distance >= self.lowering.near_tokens)  # near cells are not gathered twice
        cells = allowed(*of(jnp.maximum(before, 0).T, lambda a: a[..., None]), near, 2)
        cells = cells & (before >= 0).T[:, :, None]
        # Nor is what is at hand.
        if self.lowering.at_hand == "tile":
            in_tile = jnp.zeros(self.tokens, bool).at[tile].set(True)
            made_rows, made_cells = in_tile, in_tile[jnp.maximum(before, 0)]
        elif self.lowering.at_hand == "cell":
            place = np.arange(tile.shape[0])
            own = own[:, place, place][:, :, None, None]
            made_rows, made_cells = everything == tile[:, None, None], before == tile
        else:
            own, made_rows, made_cells = jnp.zeros_like(own), jnp.zeros((), bool), jnp.zeros((1, 1), bool)
        rows = rows & ~(made_rows & (far[:, None] == l)) & (far[:, None] >= 0)
        cells = cells & ~(made_cells.T[:, :, None] & (near == l)) & (near >= 0)
        return Masks(own, rows, cells, far, near)
