"""From a read set to index tables: which keys each reader gathers, so that masked work stays small.

A reader's sources are split by distance. Near tokens, d < N, are gathered one by one, each at the few layers that are
read at that distance; farther ones as whole rows, one per source layer. What a cell has just made is at hand and is in
neither table: its own key, or those of its layer for its whole tile. Where the own row is read apart, in a softmax of
its own, it is the first row, whole, and nothing else in the tables is of it. N is what makes the keys fewest:

    standard, block(w)   N = 0: w - 1 rows below the own one      moda           N = 1: own column; no rows
    rectangle(C)         N = C: a patch of C x L                  diagonal(-1)   N = L - 1: one key each; one row

Layers are counted from 0 here.
"""

import dataclasses
import functools
import itertools
from typing import Literal

import numpy as np

from lmres.flow.readset import ReadSet

LONGEST_NEAR = 512  # tokens gathered one by one, at most
AtHand = Literal["tile", "cell", "nothing"]  # of the own layer: all of the tile, the own cell alone, or nothing


@dataclasses.dataclass(frozen=True)
class Lowering:
    """near: [L][N][Wn], far: [L][W] source layers from 0, -1 where a place is not needed (nested tuples). at_hand: what
    is in neither."""

    at_hand: AtHand
    near: tuple[tuple[tuple[int, ...], ...], ...]
    far: tuple[tuple[int, ...], ...]

    @property
    def near_tokens(self) -> int:
        """N: how many nearest tokens are gathered one by one."""
        return len(self.near[0])

    @property
    def rows(self) -> int:
        """W: whole rows that are gathered per reader."""
        return len(self.far[0])

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """(near [L, N, Wn], far [L, W]) int32."""
        layers, near = len(self.far), self.near_tokens
        width = len(self.near[0][0]) if near else 0
        return (
            np.array(self.near, np.int32).reshape(layers, near, width),
            np.array(self.far, np.int32).reshape(layers, self.rows),
        )

    def keys(self, tokens: int, tile: int) -> int:
        """Keys that a query is compared with among ``tokens`` tokens, ``tile`` of them at a time, masked ones
        included."""
        own = {"tile": tile, "cell": 1, "nothing": 0}[self.at_hand]
        return own + sum(len(at) for at in self.near[0]) + self.rows * tokens


@functools.lru_cache(maxsize=256)
def lower(reads: ReadSet, tokens: int, one_tile: bool, own: bool = True, row: bool = False) -> Lowering:
    """The tables for sequences of ``tokens`` tokens. one_tile: all tokens are one tile. own: whether a cell makes keys
    of its own layer. row: whether the own row is read apart."""
    if not own:
        return _lower(reads, tokens, "nothing", one_tile)
    if row or not one_tile:
        return _lower(reads, tokens, "tile", one_tile, row)
    forms = [_lower(reads, tokens, at_hand, one_tile) for at_hand in ("tile", "cell")]
    return min(forms, key=lambda form: form.keys(tokens, tokens))


def _lower(reads: ReadSet, tokens: int, at_hand: AtHand, one_tile: bool, row: bool = False) -> Lowering:
    found = [_by_distance(reads, l, tokens, at_hand, one_tile, row) for l in range(1, reads.layers + 1)]
    last = len(found[0])  # from here on all distances are as the last one
    beyond = [_from_each_on(at) for at in found]
    widest = [max(len(at[d]) for at in found) for d in range(last)]
    patch = [0, *itertools.accumulate(widest[min(d, last - 1)] for d in range(min(tokens, last, LONGEST_NEAR) + 1))]

    def rows_from(near):
        return [sorted(at[min(near, last - 1)]) if near < tokens else [] for at in beyond]

    def cost(near):
        return patch[near] + tokens * max(map(len, rows_from(near)))

    near = min(range(min(tokens, last, LONGEST_NEAR) + 1), key=cost)
    width = max((len(at[d]) for at in found for d in range(min(near, last))), default=0)
    rows = rows_from(near)
    if row and not one_tile:
        rows = [[l, *each] for l, each in enumerate(rows)]
    many = max(map(len, rows))
    return Lowering(
        at_hand,
        tuple(tuple(_padded(sorted(at[min(d, last - 1)]), width) for d in range(near)) for at in found),
        tuple(_padded(each, many) for each in rows),
    )


def _from_each_on(found: list[set[int]]) -> list[frozenset[int]]:
    """The union of each entry with all that follow."""
    unions = [frozenset(found[-1])]
    for at in reversed(found[:-1]):
        unions.append(unions[-1] if at <= unions[-1] else unions[-1] | at)
    return unions[::-1]


def _by_distance(reads: ReadSet, l: int, tokens: int, at_hand: AtHand, one_tile: bool, row: bool) -> list[set[int]]:
    """Source layers from 0 that reader l reads at each distance, up to one from which on they stay the same."""
    ends = [reads.settled_distance(term, tokens) for term in reads.terms]
    found: list[set[int]] = [set() for _ in range(min(tokens, max(ends) + 1))]
    for term in reads.terms:
        near, far = term.distances(tokens)
        for d in range(near, min(len(found), tokens if far is None else far + 1)):
            low, high = term.layers_at(l, d, reads.sources)
            found[d].update(range(low - 1, high))
    for d, at in enumerate(found):
        if row or (at_hand != "nothing" and (d == 0 or (at_hand == "tile" and one_tile))):
            at.discard(l - 1)
    return found


def _padded(layers: list[int], size: int) -> tuple[int, ...]:
    return (*layers, *[-1] * (size - len(layers)))
