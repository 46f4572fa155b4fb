"""Attention of one reader over cells of the grid: one softmax over own keys, gathered rows and gathered near cells.

Legend: B batch, S queries of a tile, T tokens, H query heads, G key/value heads, K head size, W rows, N near tokens, V
cells per near token. Masks are [B or 1, S, ...].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Cells(NamedTuple):
    """Keys and values to attend to.

    key, value: own cells [B, S, G, K]; rows [W, B, T, G, K]; near cells [N, V, S, B, G, K].
    mask: [., S, S]; [., S, W, T]; [., S, N, V]. bias: added to the logits, broadcasts over the mask's axes after S;
    None for none.
    """

    key: Array
    value: Array
    mask: Array
    bias: Array | None = None


_KEYS = {4: "btgk", 5: "wbtgk", 6: "nvsbgk"}
_LOGITS = {4: "bgrst", 5: "bgrswt", 6: "bgrsnv"}


def own_cells(key: Array, value: Array, mask: Array, bias: Array | None = None) -> Cells:
    """A tile's own keys and values [B, S, G, K] as cells: all of the tile, or, where the mask has the axes of near
    cells, each query's own."""
    if mask.ndim == 3:
        return Cells(key, value, mask, bias)
    one_each = lambda x: jnp.moveaxis(x, 1, 0)[None, None]  # noqa: E731
    return Cells(one_each(key), one_each(value), mask, bias)


def attend_cells(query: Array, cells: tuple[Cells, ...]) -> Array:
    """Softmax attention of ``query`` [B, S, H, K] over all ``cells`` jointly; returns [B, S, H, K].

    A query with nothing to read gets zeros, not a uniform read. Logits and weights are float32, or wider where the
    query is.
    """
    batch, size, _, width = query.shape
    wide = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(batch, size, cells[0].key.shape[-2], -1, width)
    logits, masks = [], []
    for each in cells:
        axes = each.key.ndim
        scores = jnp.einsum(f"bsgrk,{_KEYS[axes]}->{_LOGITS[axes]}", grouped, each.key, preferred_element_type=wide)
        scores = scores * width**-0.5
        if each.bias is not None:
            scores = scores + each.bias.astype(wide)
        mask = jnp.broadcast_to(each.mask[:, None, None], scores.shape)
        logits.append(scores.reshape(*scores.shape[:4], -1))
        masks.append(mask.reshape(logits[-1].shape))
    mask = jnp.concatenate(masks, axis=-1)
    joint = jnp.where(mask, jnp.concatenate(logits, axis=-1), jnp.finfo(wide).min)
    top = jax.lax.stop_gradient(joint.max(axis=-1, keepdims=True, initial=jnp.finfo(wide).min))
    weights = jnp.where(mask, jnp.exp(joint - top), 0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = (weights / jnp.where(total > 0, total, 1)).astype(query.dtype)
    found, start = 0, 0
    for each, scores in zip(cells, logits):
        end = start + scores.shape[-1]
        axes = each.key.ndim
        part = weights[..., start:end].reshape(*weights.shape[:4], *each.mask.shape[2:])
        found = found + jnp.einsum(f"{_LOGITS[axes]},{_KEYS[axes]}->bsgrk", part, each.value)
        start = end
    return found.reshape(query.shape)
