"""Mixes of n residual streams, written as sums over streams that compile to one fused pass.

n is 2 to 8, so a batched matrix product of [n, n] by [n, D] per token would be all overhead.
"""

import jax.numpy as jnp
from jax import Array

from lmres.ops.norm import stat_dtype


def combine_streams(weights: Array, streams: Array) -> Array:
    """``sum_s weights[s] * streams[s]``: what a branch reads.

    weights: [..., n], with the leading axes of ``streams`` or none; streams: [..., n, D].
    Returns [..., D] in the dtype of ``streams``.
    """
    wide = stat_dtype(streams)
    total = sum(
        weights[..., s, None].astype(wide) * streams[..., s, :].astype(wide) for s in range(streams.shape[-2])
    )
    return total.astype(streams.dtype)


def mix_streams(mixing: Array, streams: Array, weights: Array, y: Array) -> Array:
    """``out[t] = sum_s mixing[s, t] * streams[s] + weights[t] * y``: streams after a branch returned ``y``.

    mixing: [..., n, n], source first; streams: [..., n, D]; weights: [..., n]; y: [..., D]. ``mixing`` and
    ``weights`` have the leading axes of ``streams`` or none. Returns [..., n, D] in the dtype of ``streams``.
    """
    wide = stat_dtype(streams)
    n = streams.shape[-2]
    out = weights[..., :, None].astype(wide) * y[..., None, :].astype(wide)
    for s in range(n):
        out = out + mixing[..., s, :, None].astype(wide) * streams[..., s, None, :].astype(wide)
    return out.astype(streams.dtype)
