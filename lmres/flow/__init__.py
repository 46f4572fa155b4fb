"""flow: the token x layer grid. Which cells a cell may read, and what follows from it.

``readset`` is the algebra: one hashable description, and legality, slope, tile, class and cache from it alone.
``geometry`` names the known read sets. ``counting`` counts cells one by one: critical path, sweeps, keys per query.
``lowering`` turns a read set into index tables, ``reader`` gathers by them and masks, ``attention`` is the softmax over
cells. ``tiles`` and ``wavefront`` are the schedules, each with one compiled body and its own backward pass.
``store`` says where keys and values lie. ``config`` is a model's flow as a setting.

May import: ops, numpy, jax. Knows nothing of residual connections, of the model, or of meshes.
"""

from lmres.flow.config import FlowConfig
from lmres.flow.counting import critical_path, exact_prefix, keys_per_query, reads_of, sweeps_needed
from lmres.flow.geometry import GEOMETRIES, Geometry, parse
from lmres.flow.reader import Reader, Tokens
from lmres.flow.readset import Chunks, IllegalReadSet, Layer, ReadSet, Term
from lmres.flow.store import Store
from lmres.flow.tiles import CellProgram, Tiles, extend_tiles, run_tiles
from lmres.flow.wavefront import Wavefront, run_wavefront

__all__ = [
    "GEOMETRIES",
    "CellProgram",
    "Chunks",
    "FlowConfig",
    "Geometry",
    "IllegalReadSet",
    "Layer",
    "ReadSet",
    "Reader",
    "Store",
    "Term",
    "Tiles",
    "Tokens",
    "Wavefront",
    "critical_path",
    "exact_prefix",
    "extend_tiles",
    "keys_per_query",
    "parse",
    "reads_of",
    "run_tiles",
    "run_wavefront",
    "sweeps_needed",
]
