"""The key/value cache: ``lmres.model.Past`` with room for tokens to come.

A forward call reads the cache and returns the new keys and values apart from it; they are then written at one
slot number with one update per array. So the cache enters the scan over layers as an input only, and with a
donated cache the update happens in place: nothing of the cache's size is ever copied. One slot number for the
whole batch needs rows that end together, hence prompts are padded on the left. A slot is not a position:
positions count a row's real tokens, and what a query may read is decided by segment and position alone
(segment 0: padding, or nothing stored yet).

Where attention reads other cells of the token x layer grid than its own row's (``lmres.flow``), the cache is the grid:
it has a row for what is read and no more; nothing may lie between a row's tokens, which are near each other by slot;
and a forward call writes the new tokens into it as it goes, since what one
layer of a token makes may be read by another.

The residual connection adds nothing here. Its state, growing or not, runs up the column of one token and ends
there.

Legend: L blocks, B batch, S new tokens, T slots, G key/value heads, K head size, V vocabulary.
Memory: 2 L B T G K numbers (in a flow, as many rows as it reads instead of L) of the model's dtype and 2 B T of 4
bytes (``cache_bytes``); a forward call needs one layer's share, 2 B (T + S) G K numbers, on top.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmres.flow import FlowConfig
from lmres.model import KeyValues, ModelConfig, Past, Transformer

Slot = int | Array
STANDARD = FlowConfig()


def stored_rows(config: ModelConfig, flow: FlowConfig) -> int:
    """Keys (and values) that are kept of each token and key/value head: one per block, or what a flow reads."""
    return config.blocks if flow.is_standard else len(flow.store(config.blocks).slots)


def cache_bytes(config: ModelConfig, batch: int, slots: int, flow: FlowConfig = STANDARD) -> int:
    """Size in bytes of ``empty_cache(config, batch, slots, flow)``."""
    numbers = 2 * stored_rows(config, flow) * batch * slots * config.kv * config.head_size
    return numbers * jnp.dtype(config.dtype).itemsize + 2 * batch * slots * 4


def empty_cache(config: ModelConfig, batch: int, slots: int, flow: FlowConfig = STANDARD) -> Past:
    """A cache with nothing in it: layers [L, B, T, G, K] of ``config.dtype``, the rest [B, T] int32."""
    shape = (stored_rows(config, flow), batch, slots, config.kv, config.head_size)
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

    past = _noted(past, segments, positions, slot)
    return past._replace(layers=jax.tree.map(lambda buffer, x: _put(buffer, x, slot, 2), past.layers, new))


def _noted(past: Past, segments: Array, positions: Array, slot: Slot) -> Past:
    """The cache with the new tokens' ``segments`` and ``positions`` alone."""
    return past._replace(
        segment=_put(past.segment, segments, slot, 1), position=_put(past.position, positions, slot, 1)
    )


def _put(buffer: Array, x: Array, slot: Slot, axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(buffer, x.astype(buffer.dtype), slot, axis)


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
    if not model.flow.is_standard:
        past = _noted(past, segments, positions, slot)
        logits, layers = model.apply({"params": params}, tokens, past, slot, method="extend_grid")
        return logits, past._replace(layers=layers)
    logits, new = model.apply({"params": params}, tokens, segments, positions, past)
    return logits, append(past, new, segments, positions, slot)


def prefill(
    model: Transformer, params: Any, tokens: Array, segments: Array, positions: Array, slots: int
) -> tuple[Array, Past]:
    """As ``extend`` from slot 0 of an empty cache of ``slots`` slots, but without reading the empty slots."""
    batch = tokens.shape[0]
    if model.flow.is_standard:
        nothing = empty_cache(model.config, batch, 0)
        logits, new = model.apply({"params": params}, tokens, segments, positions, nothing)
    else:
        logits, new = model.apply({"params": params}, tokens, segments, positions, method="prefill_grid")
    return logits, append(empty_cache(model.config, batch, slots, model.flow), new, segments, positions, 0)
