"""flow: the token x layer grid. Which cells a cell may read, and what follows from it.

``readset`` is the algebra: one hashable description, and legality, slope, tile, class and cache from it alone.
``geometry`` names the known read sets. ``counting`` counts cells one by one: critical path, sweeps, keys per query.
The model does not read by it yet: schedules and attention over cells come next.

May import: ops, numpy, jax. Knows nothing of residual connections, of the model, or of meshes.
"""

from lmres.flow.counting import critical_path, exact_prefix, keys_per_query, reads_of, sweeps_needed
from lmres.flow.geometry import GEOMETRIES, Geometry, parse
from lmres.flow.readset import Chunks, IllegalReadSet, Layer, ReadSet, Term

__all__ = [
    "GEOMETRIES",
    "Chunks",
    "Geometry",
    "IllegalReadSet",
    "Layer",
    "ReadSet",
    "Term",
    "critical_path",
    "exact_prefix",
    "keys_per_query",
    "parse",
    "reads_of",
    "sweeps_needed",
]
