"""ops: numerics with nothing above them.

What is here: norms, the depth softmax, Sinkhorn, stream mixes. Every function takes arrays and returns
arrays; none knows what a layer or a connection is. Statistics, softmaxes and Sinkhorn are computed in
float32 (float64 for float64 input) whatever the dtype of the data; results are cast back at the end.

May import: jax and numpy only.
"""

from lmres.ops.depth import Span, depth_softmax, weighted_sum, weighted_sums, weighted_sums_back
from lmres.ops.heads import mix_heads, mix_heads_back
from lmres.ops.indexing import put, put_window, take, take_window
from lmres.ops.norm import normed_projection, rms_norm, rms_scale, stat_dtype
from lmres.ops.sinkhorn import sinkhorn
from lmres.ops.streams import add_to_streams, combine_streams, mix_streams

__all__ = [
    "Span",
    "add_to_streams",
    "combine_streams",
    "depth_softmax",
    "mix_heads",
    "mix_heads_back",
    "mix_streams",
    "normed_projection",
    "put",
    "put_window",
    "rms_norm",
    "rms_scale",
    "sinkhorn",
    "stat_dtype",
    "take",
    "take_window",
    "weighted_sum",
    "weighted_sums",
    "weighted_sums_back",
]
