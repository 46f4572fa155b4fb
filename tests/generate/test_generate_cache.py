"""The cached forward pass against the full one: every connection, prompt length, padded rows, chunks."""

import typing
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generate_helpers import (
    assert_close,
    full_logits,
    logits_by_cache,
    make_model,
    padded,
    random_params,
    random_tokens,
    run_extend,
    run_prefill,
)
from variants import ALL, KINDS, name

from lmres.generate import append, cache_bytes, empty_cache, extend
from lmres.model import KeyValues
from lmres.residual import AttentionResiduals, DenseFormer, HyperConnections, Plain, Residual


def test_every_connection_is_here():
    assert {type(c) for c in ALL} == set(typing.get_args(Residual))


@pytest.mark.parametrize("connection", KINDS, ids=name)
def test_cached_logits_are_the_full_ones_at_every_prompt_length(connection):
    with jax.enable_x64(True):
        model = make_model(connection, dtype="float64")
        params, tokens = jax.tree.map(np.float64, random_params(model)), random_tokens(12, 12)
        expected = full_logits(model, params, tokens)
        assert_close(logits_by_cache(model, params, tokens), expected, 1e-12)

        # In chunks of three, one row with two columns of padding.
        lengths, past = [12, 10], empty_cache(model.config, 2, 12)
        at, segments, positions = padded(tokens[:2], lengths, 12)
        chunks = []
        for start in range(0, 12, 3):
            part = slice(start, start + 3)
            logits, past = run_extend(model, params, past, at[:, part], segments[:, part], positions[:, part], start)
            chunks.append(np.asarray(logits))
    chunks = np.concatenate(chunks, axis=1)
    for row, length in enumerate(lengths):
        assert_close(chunks[row, 12 - length :], expected[row, :length], 1e-12, f"chunks, row {row}")


VARIANTS = {
    "grouped-query": {"kv_heads": 2},
    "one key head, qk norm, softcap, free head": {
        "kv_heads": 1, "qk_norm": True, "logit_softcap": 3.0, "tie_embeddings": False, "head_dim": 6,
    },
    "looped": {"scan": False},
    "gelu, remat": {"mlp": "gelu", "remat": "full"},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_variants(variant):
    connection = AttentionResiduals(block=3) if variant == "looped" else Plain()
    model = make_model(connection, **VARIANTS[variant])
    params, tokens = random_params(model), random_tokens(12, 12)
    assert_close(logits_by_cache(model, params, tokens), full_logits(model, params, tokens), 1e-5)


@pytest.mark.parametrize("connection", [DenseFormer(), HyperConnections()], ids=lambda c: c.name)
def test_bfloat16(connection):
    """Cached and full results round differently; both must be as near to float32 as bfloat16 allows."""
    model = make_model(connection, dtype="bfloat16")
    params, tokens = random_params(model, 0.1), random_tokens(12, 12)
    exact = full_logits(make_model(connection), params, tokens)
    cached = logits_by_cache(model, params, tokens)
    assert cached.dtype == np.float32
    full_error = np.max(np.abs(full_logits(model, params, tokens) - exact))
    assert np.max(np.abs(cached - exact)) < 2 * full_error


def test_a_row_is_the_same_alone_and_in_a_batch():
    """Float32 logits of prompts padded by different amounts: in a batch, reversed, alone, and unpadded."""
    for connection in (Plain(), AttentionResiduals(block=3), HyperConnections()):
        model = make_model(connection)
        params, tokens, lengths = random_params(model), random_tokens(4, 12), np.array([1, 3, 8, 12])
        batch, _ = run_prefill(model, params, *padded(tokens, lengths, 12), 12)
        reverse, _ = run_prefill(model, params, *padded(tokens[::-1], lengths[::-1], 12), 12)
        assert_close(reverse[::-1], batch, 1e-5, connection.name)
        for row, length in enumerate(lengths):
            one = slice(row, row + 1)
            alone, _ = run_prefill(model, params, *padded(tokens[one], lengths[one], 12), 12)
            assert_close(
                batch[row, 12 - length :],
                alone[0, 12 - length :],
                1e-5,
                f"{connection.name}, row {row} alone",
            )
        unpadded = full_logits(model, params, tokens)
        for row, length in enumerate(lengths):
            assert_close(
                batch[row, 12 - length :],
                unpadded[row, :length],
                1e-5,
                f"{connection.name}, row {row} unpadded",
            )


def test_what_padding_holds_does_not_matter():
    model = make_model(Plain())
    params, tokens = random_params(model), random_tokens(2, 12)
    at, segments, positions = padded(tokens, [4, 9], 12)
    other = np.where(segments, at, 5)
    zero, _ = run_prefill(model, params, at, segments, positions, 12)
    five, _ = run_prefill(model, params, other, segments, positions, 12)
    np.testing.assert_array_equal(np.asarray(zero)[segments == 1], np.asarray(five)[segments == 1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_bytes(dtype):
    config = make_model(Plain(), kv_heads=2, dtype=dtype).config
    past = empty_cache(config, 3, 40)
    assert past.layers.key.shape == past.layers.value.shape == (3, 3, 40, 2, 4)
    assert cache_bytes(config, 3, 40) == sum(x.nbytes for x in jax.tree.leaves(past))


def test_append_writes_where_it_is_told():
    config = make_model(Plain()).config
    past = empty_cache(config, 2, 10)
    new = KeyValues(*(jnp.full((3, 2, 3, 4, 4), v) for v in (1.0, 2.0)))
    ones = jnp.ones((2, 3), jnp.int32)
    filled = append(past, new, ones, 7 * ones, 6)
    inside = (np.arange(10) >= 6) & (np.arange(10) < 9)
    assert (filled.segment == inside).all() and (filled.position == 7 * inside).all()
    assert (filled.layers.key == inside[:, None, None]).all()
    assert (filled.layers.value == 2 * inside[:, None, None]).all()
    append(past, new, ones, ones, 7)
    for slot in (8, -1):
        with pytest.raises(ValueError, match=f"3 tokens from slot {slot} on .* 10 slots"):
            append(past, new, ones, ones, slot)


def test_the_cache_is_updated_in_place():
    """No buffer of the cache's size beside the cache, and the same memory after the step."""
    model = make_model(AttentionResiduals(), blocks=8)
    params, past = random_params(model), empty_cache(model.config, 2, 4096)
    one = jnp.ones((2, 1), jnp.int32)
    step = jax.jit(partial(extend, model), donate_argnums=1)
    memory = step.lower(params, past, one, one, one, 5).compile().memory_analysis()
    size = cache_bytes(model.config, 2, 4096)
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 3
    before = past.layers.key.unsafe_buffer_pointer()
    _, after = step(params, past, one, one, one, 5)
    assert after.layers.key.unsafe_buffer_pointer() == before
    assert past.layers.key.is_deleted()
