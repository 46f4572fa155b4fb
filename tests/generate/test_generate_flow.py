"""Cached decode against the full forward pass where attention reads other cells than its own row's."""

import jax
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
)

from lmres.flow import GEOMETRIES, FlowConfig, parse
from lmres.generate import cache_bytes, empty_cache, generate
from lmres.residual import MHC, AttentionResiduals, Plain, ValueResidual

T = 7
FLOWS = [
    FlowConfig("chunk(3)", bias=0.5),
    FlowConfig("recurrent"),
    FlowConfig("block(2)"),
    FlowConfig("standard", bias=0.0, schedule="sequential"),
    FlowConfig("map(2,3,1)"),
    FlowConfig("moda"),
    FlowConfig("rectangle(3)"),
    FlowConfig("diagonal(-1/2)"),
    FlowConfig("diagonal(1)", border="drop"),
    FlowConfig("cone(1)", output=True),
    FlowConfig("top", schedule="swept", sweeps=0, gradient_sweeps=T),
    FlowConfig("top", adopt="optional", output=True),
    FlowConfig("deep", projection="consumer"),
    FlowConfig("deep", combine="gated"),
    FlowConfig("lag(2)"),
    FlowConfig("feedback"),
    FlowConfig("pool(2)"),
    FlowConfig("standard + cone(1)"),
]


def test_every_geometry_is_here():
    assert {parse(flow.kind).kind for flow in FLOWS if "+" not in flow.kind} == set(GEOMETRIES)


@pytest.mark.parametrize(
    "flow", [pytest.param(f, id=f.kind, marks=[pytest.mark.slow] * (i > 2)) for i, f in enumerate(FLOWS)]
)
def test_cached_logits_are_the_full_ones_at_every_prompt_length(flow):
    with jax.enable_x64(True):
        model = make_model(Plain(), flow, dtype="float64", context=T)
        params, tokens = jax.tree.map(np.float64, random_params(model)), random_tokens(T, T)
        expected = full_logits(model, params, tokens)
        assert_close(logits_by_cache(model, params, tokens), expected, 1e-12)

        # In pieces of three tokens, one row with a column of padding.
        lengths, past = [6, 5], empty_cache(model.config, 2, 6, flow)
        at, segments, positions = padded(tokens[:2], lengths, 6)
        pieces = []
        for start in (0, 3):
            part = slice(start, start + 3)
            logits, past = run_extend(model, params, past, at[:, part], segments[:, part], positions[:, part], start)
            pieces.append(np.asarray(logits))
    pieces = np.concatenate(pieces, axis=1)
    for row, length in enumerate(lengths):
        assert_close(pieces[row, 6 - length :], expected[row, :length], 1e-12, f"pieces, row {row}")


@pytest.mark.parametrize("connection", [pytest.param(c, id=c.name, marks=pytest.mark.slow) for c in (
    MHC(), AttentionResiduals(), ValueResidual()
)])  # fmt: skip
def test_decoding_goes_with_any_connection(connection):
    with jax.enable_x64(True):
        model = make_model(connection, FlowConfig("cone(1)"), dtype="float64", context=T)
        params, tokens = jax.tree.map(np.float64, random_params(model)), random_tokens(T, T)
        assert_close(logits_by_cache(model, params, tokens), full_logits(model, params, tokens), 1e-12)


@pytest.mark.parametrize(
    ("flow", "rows"),
    [
        (FlowConfig("top"), 1),
        (FlowConfig("map(1,1,3)"), 2),
        (FlowConfig("recurrent"), 3),
        (FlowConfig("pool(2)"), 2),
        (FlowConfig("deep", output=True), 4),
        (FlowConfig("block(2)", projection="consumer"), 5),
        (FlowConfig(), 3),
    ],
    ids=lambda x: x.kind if isinstance(x, FlowConfig) else str(x),
)
def test_the_cache_holds_what_is_read_and_no_more(flow, rows):
    config = make_model(Plain()).config
    past = empty_cache(config, 2, 10, flow)
    assert past.layers.key.shape == (rows, 2, 10, 4, 4)
    assert cache_bytes(config, 2, 10, flow) == sum(x.nbytes for x in jax.tree.leaves(past))


def test_generation_is_greedy_decoding_of_the_full_model():
    flow = FlowConfig("cone(1)", schedule="swept")
    model = make_model(Plain(), flow, context=24)
    exact = make_model(Plain(), FlowConfig("cone(1)", schedule="sequential"), context=24)
    params = random_params(model)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    for prompt, new in zip(prompts, generate(model, params, prompts, 4)):
        row = np.array([prompt + new])
        logits = full_logits(exact, params, row)[0]
        np.testing.assert_array_equal(new, logits[len(prompt) - 1 : -1].argmax(-1))
