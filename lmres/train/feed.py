"""From batches on the host to arrays on the mesh; each process makes its own rows only."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lmres.data import IndexedBatches
from lmres.sharding import batch_sharding


class Feed:
    """Global arrays [B, ...] for batches of ``batch_size`` rows on a mesh."""

    def __init__(self, batches: IndexedBatches, mesh: Mesh, batch_size: int):
        self._batches, self._sharding, self._size = batches, batch_sharding(mesh), batch_size
        slices = self._sharding.addressable_devices_indices_map((batch_size,)).values()
        rows = np.unique(np.concatenate([np.arange(batch_size)[index] for index in slices]))
        self._rows = None if len(rows) == batch_size else rows
        self._place = {int(row): i for i, row in enumerate(rows)}

    def _put(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        if self._rows is None:
            return jax.device_put(batch, self._sharding)
        return {name: self._from_rows(local) for name, local in batch.items()}

    def _from_rows(self, local: np.ndarray) -> jax.Array:
        def rows_of(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(self._size)
            return local[self._place[start] : self._place[stop - 1] + 1]

        return jax.make_array_from_callback((self._size, *local.shape[1:]), self._sharding, rows_of)

    def train(self, start_step: int) -> Iterator[dict[str, jax.Array]]:
        """Batches of steps start_step, start_step + 1, ...; close it to stop the threads behind it."""
        iterator = self._batches.iterate(start_step, self._rows)
        try:
            for batch in iterator:
                yield self._put(batch)
        finally:
            iterator.close()

    def evaluation(self, max_batches: int | None) -> Iterator[dict[str, jax.Array]]:
        """Every window once, in order."""
        for batch in self._batches.eval_batches(self._size, max_batches, self._rows):
            yield self._put(batch)

    def num_eval_batches(self, max_batches: int | None) -> int:
        """How many batches ``evaluation`` yields."""
        return self._batches.num_eval_batches(self._size, max_batches)


def eval_batch_size(asked: int | None, micro_batch: int, mesh: Mesh) -> int:
    """Rows per evaluation batch: as asked, else as in training; rounded up to what the mesh can split."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-(asked or micro_batch) // parts) * parts


def to_host(tree: Any) -> Any:
    """Numpy copies of replicated arrays."""
    return jax.tree.map(np.asarray, tree)
