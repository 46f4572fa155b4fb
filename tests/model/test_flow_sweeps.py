"""Sweeps of the whole model: where they start, what is differentiated; and documents packed in a row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flow_helpers import CONFIG, TOKENS, drawn, logits, same, scheduled, with_gradient
from grid_reference import columns_of

from lmres.flow import exact_prefix
from lmres.flow.config import FlowConfig

L, T = CONFIG.blocks, TOKENS.shape[1]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def name(flow):
    return "-".join([flow.kind, *(["output"] * flow.output), flow.schedule, flow.start])


def swept(flow, sweeps, gradient_sweeps, **more):
    return scheduled(flow, "swept", sweeps=sweeps, gradient_sweeps=gradient_sweeps, **more)


STARTS = [(FlowConfig("deep", output=True), start, []) for start in ("embedding", "plain")]
STARTS += [(FlowConfig("recurrent"), start, pytest.mark.slow) for start in ("zeros", "embedding", "plain")]
STARTS += [(FlowConfig("top"), "plain", pytest.mark.slow), (FlowConfig("feedback"), "plain", pytest.mark.slow)]
STARTS += [(FlowConfig("pool(2)"), "embedding", pytest.mark.slow)]


@pytest.mark.parametrize(
    ("flow", "start"), [pytest.param(f, start, marks=m, id=f"{f.kind}-{start}") for f, start, m in STARTS]
)
def test_every_start_is_forgotten_after_enough_sweeps(flow, start):
    params = drawn(flow)
    exact = logits(scheduled(flow, "sequential"), params)
    same(logits(swept(flow, 1, T - 1, start=start), params), exact)
    found, grads = with_gradient(swept(flow, 0, 1, start=start), params)(np.ones(TOKENS.shape))
    # Ordinary attention has the first token right, where it reads itself: its keys are right before the first sweep.
    known = 2 if start == "plain" and flow.kind != "feedback" else 1
    same(found[:, :known], exact[:, :known])
    assert (np.abs(found[:, known:] - exact[:, known:]).max((0, 2)) > 1e-9).all()
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    assert np.abs(grads["embed"]["table"]).max() > 0


@pytest.mark.parametrize("start", ["plain", pytest.param("embedding", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "flow", [FlowConfig("deep", output=True), pytest.param(FlowConfig("recurrent"), marks=pytest.mark.slow)], ids=name
)
def test_the_first_sweep_reads_upwards_what_the_start_says(flow, start):
    params, tokens, config = drawn(flow), TOKENS[:, :4], CONFIG

    def by_loops(params):
        if start == "plain":  # a pass of ordinary attention
            _, before = columns_of(params, tokens, config, FlowConfig())
        else:
            before = {(s, m): params["embed"]["table"][tokens[:, s - 1]] for s in range(1, 5) for m in range(L + 1)}
        return columns_of(params, tokens, config, flow, flow.kind == "recurrent", before=before)[0]

    found = logits(swept(flow, 0, 1, start=start), params, tokens=tokens)
    same(found, np.asarray(jax.jit(by_loops)(params)))
    assert np.abs(found - logits(scheduled(flow, "sequential"), params, tokens=tokens)).max() > 1e-6


@pytest.mark.parametrize(
    ("flow", "last"),
    [
        (FlowConfig("deep", output=True), 2),
        *(
            pytest.param(flow, last, marks=pytest.mark.slow)
            for flow, last in [
                (FlowConfig("top"), 3),
                (FlowConfig("lag(2)"), 2),
                (FlowConfig("chunk(2)"), 2),
                (FlowConfig("recurrent"), 2),
            ]
        ),
    ],
    ids=lambda x: x.kind if isinstance(x, FlowConfig) else f"{x}",
)
def test_truncated_gradient_is_exact_for_tokens_of_short_chains(flow, last):
    """The loss of tokens that so many sweeps make exact from any start has no longer chain of upward reads."""
    params, count = drawn(flow), exact_prefix(flow.reads(L), T, last)
    assert 0 < count < T
    exact = with_gradient(scheduled(flow, "sequential"), params)
    truncated = with_gradient(swept(flow, T, last), params)
    early = np.arange(T) < count
    same(truncated(np.broadcast_to(early, TOKENS.shape)), exact(np.broadcast_to(early, TOKENS.shape)))
    following = np.broadcast_to(np.arange(T) == T - 1, TOKENS.shape)
    (found, short), (want, whole) = truncated(following), exact(following)
    same(found, want)
    assert max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(short), jax.tree.leaves(whole))) > 1e-6


PACKED = [
    FlowConfig("recurrent"),
    *(FlowConfig("feedback"), FlowConfig("pool(2)"), FlowConfig("top", output=True)),
    FlowConfig("cone(1)", output=True, schedule="wavefront"),
    FlowConfig("recurrent", schedule="sequential"),
    FlowConfig("deep", combine="gated"),
    *(FlowConfig("deep", schedule="swept", sweeps=0, gradient_sweeps=2, start=s) for s in ("embedding", "plain")),
    FlowConfig("pool(2)", schedule="swept", sweeps=0, gradient_sweeps=2, groups=2),
]


@pytest.mark.parametrize(
    "flow", [pytest.param(f, id=name(f), marks=pytest.mark.slow if i > 0 else []) for i, f in enumerate(PACKED)]
)
def test_documents_in_a_row_are_what_each_is_alone(flow):
    config = dataclasses.replace(CONFIG, qk_norm=True)
    params, (one, other) = drawn(flow, config), (TOKENS[0, :3], TOKENS[1, :2])
    # A row of both and padding; a row of each, padded before and behind; one program for all.
    rows, segments, positions = (np.zeros((3, T), int) for _ in range(3))
    places = [(0, 0, one, 1), (0, 3, other, 2), (1, 1, one, 1), (2, 4, other, 7)]
    if flow.groups > 1:  # a sweep depends on which tokens run together, so on the place
        places = [(0, 0, one, 1), (0, 3, other, 2), (1, 0, one, 1), (2, 3, other, 7)]
    for row, start, document, number in places:
        at = slice(start, start + len(document))
        rows[row, at], segments[row, at], positions[row, at] = document, number, np.arange(len(document))
    run = with_gradient(flow, params, segments, positions, config=config, tokens=rows)
    real = segments > 0
    (found, packed), (_, apart) = run(real * np.array([[1], [0], [0]])), run(real * np.array([[0], [1], [1]]))
    same(packed, apart)
    for (_, start, document, _), (row, place, *_) in zip(places[:2], places[2:]):
        same(found[0, start : start + len(document)], found[row, place : place + len(document)])
    if flow.groups == 1:
        same(found[0, :3], logits(flow, params, config=config, tokens=one[None])[0])
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(run(jnp.ones_like(real, float))[1]))
