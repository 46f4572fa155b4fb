"""generate: tokens from a trained model.

``cache`` keeps what earlier tokens left behind (keys and values, never a connection's state: that belongs to
one token's column and is dropped with it); ``sampling`` turns logits into tokens; ``decode`` is the loop.

May import: model, ops, jax. Knows nothing of text, files or meshes: ids in, ids out, and parameters may lie
on any mesh.
"""

from lmres.generate.cache import append, cache_bytes, empty_cache, extend, prefill
from lmres.generate.decode import generate, padded_length, serving
from lmres.generate.sampling import Sampling, filter_logits, row_keys

__all__ = [
    "Sampling",
    "append",
    "cache_bytes",
    "empty_cache",
    "extend",
    "filter_logits",
    "generate",
    "padded_length",
    "prefill",
    "row_keys",
    "serving",
]
