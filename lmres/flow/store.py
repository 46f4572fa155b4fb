"""Where keys and values lie in the grid: which slots there are, what is written into each, and when.

A slot holds, for every token, what one projector makes of one source. A source m is the state h[s, m-1]: what layer m
is about to process, known when layer m runs; source L + 1 is known when the column is done. Three ways to project:

    producer    layer m projects source m for all its readers                        one slot per source
    consumer    every reader l projects source m for itself (Recurrent Transformer)  one slot per (l, m) that is read
    channels    k mixtures with projections of their own (WhiteMatter)               k slots, written with the column

Layers, sources, projectors and slots are counted from 0 here; the output cell's projector is L.
"""

import dataclasses
import functools
from typing import Literal

import numpy as np

from lmres.flow.readset import ReadSet

Projection = Literal["producer", "consumer", "channels"]


@dataclasses.dataclass(frozen=True)
class Store:
    """The slots of the grid for a read set.

    channels: k, for projection "channels".
    """

    reads: ReadSet
    projection: Projection = "producer"
    channels: int = 0

    def _projector(self, l: int, m: int) -> int:
        return {"producer": m, "consumer": l, "channels": l % max(self.channels, 1)}[self.projection]

    @property
    def has_own(self) -> bool:
        """Whether a cell makes keys and values of its own, to be read in its own tile."""
        return self.projection != "channels"

    @property
    def slots(self) -> tuple[tuple[int, int], ...]:
        """(projector, source) of every slot, in order."""
        return _slots(self)

    def slot_of(self) -> np.ndarray:
        """[L, M] int32: where a reader finds a source; -1 where there is no such slot."""
        reads = self.reads
        table = np.full((reads.layers, reads.sources), -1, np.int32)
        where = {slot: i for i, slot in enumerate(self.slots)}
        for l, m in np.ndindex(table.shape):
            table[l, m] = where.get((self._projector(l, m), m), -1)
        return table

    def foreign(self) -> tuple[tuple[int, ...], ...]:
        """Per source 0 .. L - 1, the layers other than its own that project it; padded with -1 to one width."""
        layers = self.reads.layers
        found = [[p for p, m in self.slots if m == source and p != source] for source in range(layers)]
        width = max(map(len, found)) if self.projection == "consumer" else 0
        return tuple((*each, *[-1] * (width - len(each))) if width else () for each in found)

    def written(self) -> np.ndarray:
        """[L, R] int32: the slots that layer m writes, first that of its own projection; -1 for none."""
        if not self.has_own:
            return np.zeros((self.reads.layers, 0), np.int32)
        where = {slot: i for i, slot in enumerate(self.slots)}
        return np.array([[where.get((p, m), -1) for p in (m, *f)] for m, f in enumerate(self.foreign())], np.int32)

    def last(self) -> tuple[tuple[int, int], ...]:
        """(slot, projector) of what is written when the column is done."""
        late = self.reads.layers if self.projection != "channels" else self.reads.sources - 1
        return tuple((i, p) for i, (p, m) in enumerate(self.slots) if m == late)


@functools.lru_cache(maxsize=256)
def _slots(store: Store) -> tuple[tuple[int, int], ...]:
    found = {(store._projector(l - 1, m - 1), m - 1) for l, m in store.reads.pairs()}
    return tuple(sorted(found, key=lambda slot: (slot[1], slot[0])))
