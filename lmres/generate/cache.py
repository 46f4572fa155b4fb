"""The key/value cache: ``lmres.model.Past`` with room for tokens to come.

A forward call reads the cache and returns the new keys and values apart from it; they are then written at one
slot number with one update per array. So the cache enters the scan over layers as an input only, and with a
donated cache the update happens in place: nothing of the cache's size is ever copied. One slot number for the
whole batch needs rows that end together, hence prompts are padded on the left. A slot is not a position:
positions count a row's real tokens, and what a query may read is decided by segment and position alone
(segment 0: padding, or nothing stored yet).

The residual connection adds nothing here. Its state, growing or not, runs up the column of one token and ends
there.

Legend: L blocks, B batch, S new tokens, T slots, G key/value heads, K head size, V vocabulary.
Memory: 2 L B T G K numbers of the model's dtype and 2 B T of 4 bytes (``cache_bytes``); a forward call needs
one layer's share, 2 B (T + S) G K numbers, on top.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmres.model import KeyValues, ModelConfig, Past, Transformer

Slot = int | Array


def cache_bytes(config: ModelConfig, batch: int, slots: int) -> int:
    """Size in bytes of ``empty_cache(config, batch, slots)``."""
    numbers = 2 * config.blocks * batch * slots * config.kv * config.head_size
    return numbers * jnp.dtype(config.dtype).itemsize + 2 * batch * slots * 4


def empty_cache(config: ModelConfig, batch: int, slots: int) -> Past:
    """A cache with nothing in it: layers [L, B, T, G, K] of ``config.dtype``, the rest [B, T] int32."""
    shape = (config.blocks, batch, slots, config.kv, config.head_size)
    keys, values = jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)
    return Past(KeyValues(keys, values), *(jnp.zeros((batch, slots), jnp.int32) for _ in range(2)))


def append(past: Past, new: KeyValues, segments: Array, positions: Array, slot: Slot) -> Past:
    """The cache with ``new`` [L, B, S, G, K], ``segments`` and ``positions`` [B, S] from slot ``slot`` on.

    Raises ValueError when a slot that is not traced lies outside. A traced one cannot be checked: the caller
    answers for it.
    """
    slots, count = past.segment.shape[1], segments.shape[1]
    if isinstance(slot, int) and not 0 <= slot <= slots - count:
        raise ValueError(f"{count} tokens from slot {slot} on do not fit into a cache of {slots} slots")

    def put(buffer, x, axis):
        return jax.lax.dynamic_update_slice_in_dim(buffer, x.astype(buffer.dtype), slot, axis)

    return Past(
        KeyValues(put(past.layers.key, new.key, 2), put(past.layers.value, new.value, 2)),
        put(past.segment, segments, 1),
        put(past.position, positions, 1),
    )


def extend(
    model: Transformer, params: Any, past: Past, tokens: Array, segments: Array, positions: Array, slot: Slot
) -> tuple[Array, Past]:
    """A forward pass over S new tokens and what the cache holds, and the cache with these tokens in it.

    Any S: 1 in decoding, more to read a prompt in chunks.

    Args:
      params: the model's parameters (its "params" collection).
      tokens, segments, positions: [B, S] int32; segment 0 is padding.
      slot: where the new tokens go.

    Returns: logits [B, S, V] and the cache. Jit with ``past`` donated to have it updated in place.
    """
    logits, new = model.apply({"params": params}, tokens, segments, positions, past)
    return logits, append(past, new, segments, positions, slot)


def prefill(
    model: Transformer, params: Any, tokens: Array, segments: Array, positions: Array, slots: int
) -> tuple[Array, Past]:
    """As ``extend`` from slot 0 of an empty cache of ``slots`` slots, but without reading the empty slots."""
    batch = tokens.shape[0]
    logits, new = model.apply(
        {"params": params}, tokens, segments, positions, empty_cache(model.config, batch, 0)
    )
    return logits, append(empty_cache(model.config, batch, slots), new, segments, positions, 0)
