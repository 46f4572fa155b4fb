"""Flows that must equal ordinary attention or one another, and what each adds to the model: parameters, rows, steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flow_helpers import CONFIG, TOKENS, drawn, logits, same, scheduled, with_gradient

from lmres.flow import reads_of
from lmres.flow.config import FlowConfig
from lmres.generate import empty_cache
from lmres.model import Transformer
from lmres.residual import Plain

# Two documents and padding in one row, one document in the other.
PACKED = (
    np.array([[1, 1, 1, 2, 2, 0], [1] * 6]),
    np.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]),
)
L, T = CONFIG.blocks, TOKENS.shape[1]

PARALLEL = [
    *(FlowConfig(kind) for kind in ("block(2)", "block(3)", "moda", "rectangle(2)", "diagonal(-1)", "diagonal(-1/2)")),
    *(FlowConfig(kind) for kind in ("map(1,1,3)", "cone(0)", f"lag({T})", f"chunk({T})", "standard")),
    FlowConfig("diagonal(-1)", border="drop"),
]
UPWARD = [
    *(FlowConfig(kind) for kind in ("cone(1)", "map(2,3,1)", "diagonal(1)", "diagonal(1/2)", "cone(1/2)", "top")),
    *(FlowConfig(kind) for kind in ("deep", "lag(2)", "chunk(2)")),
    *(FlowConfig("top", output=True), FlowConfig("deep", output=True), FlowConfig("cone(2)", output=True)),
    FlowConfig("diagonal(1)", border="drop"),
]
ROW = FlowConfig("standard", schedule="sequential")


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def name(flow):
    words = [flow.kind, *(["output"] * flow.output), *([flow.border] * (flow.border == "drop"))]
    return "-".join([*words, *([flow.projection] * (flow.projection == "consumer"))])


def some(flows, *fast):
    """All of them; only those of the kinds ``fast`` are in the fast selection."""
    return [pytest.param(f, id=name(f), marks=[] if name(f) in fast else pytest.mark.slow) for f in flows]


def closed_gate(flow, dtype):
    """(the gated flow, its parameters with the gate shut, those of the ordinary transformer, config)."""
    flow, config = dataclasses.replace(flow, combine="gated"), dataclasses.replace(CONFIG, dtype=dtype)
    params = drawn(flow, config)
    params["cells"]["gate"] = jnp.zeros_like(params["cells"]["gate"])
    return flow, params, {k: v for k, v in params.items() if k != "cells"}, config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("flow", some(PARALLEL, "block(2)"))
def test_a_shut_gate_is_the_ordinary_transformer_bit_for_bit(flow, dtype):
    flow, params, ordinary, config = closed_gate(flow, dtype)
    want = logits(FlowConfig(), ordinary, *PACKED, config=config)
    np.testing.assert_array_equal(logits(flow, params, *PACKED, config=config), want)


@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
@pytest.mark.parametrize("flow", some(UPWARD, "cone(1)"))
def test_a_shut_gate_is_standard_by_the_same_schedule_bit_for_bit(flow, schedule):
    flow, params, ordinary, config = closed_gate(flow, "float32")
    want = logits(scheduled(ROW, schedule), ordinary, *PACKED, config=config)
    np.testing.assert_array_equal(logits(scheduled(flow, schedule), params, *PACKED, config=config), want)


OPTIONAL = [
    *PARALLEL,
    *UPWARD,
    *(FlowConfig("recurrent"), FlowConfig("feedback")),
    *(FlowConfig("deep", projection="consumer"), FlowConfig("block(2)", projection="consumer")),
]


@pytest.mark.parametrize("flow", some(OPTIONAL, "block(2)", "deep"))
def test_optional_reads_of_foreign_layers_with_no_weight_are_standard(flow):
    flow = dataclasses.replace(flow, adopt="optional", bias=-1e9)
    params = drawn(flow)
    ordinary = {k: v for k, v in params.items() if k != "cells"}
    own = jnp.eye(L, flow.reads(L).sources)
    params["cells"]["bias"] = jnp.where(own == 1, 0, -1e9)
    same(logits(flow, params, *PACKED)[PACKED[0] > 0], logits(FlowConfig(), ordinary, *PACKED)[PACKED[0] > 0])
    # Not for want of reading them.
    if flow.kind not in ("standard", f"lag({T})", f"chunk({T})"):
        params["cells"]["bias"] = jnp.zeros_like(params["cells"]["bias"])
        difference = logits(flow, params, *PACKED) - logits(FlowConfig(), ordinary, *PACKED)
        assert np.abs(difference[PACKED[0] > 0]).max() > 1e-6


SHARED = [FlowConfig("block(2) + diagonal(-1/2)"), FlowConfig("block(2)", projection="consumer")]


@pytest.mark.parametrize("flow", some([*PARALLEL, *SHARED], "block(2)"))
def test_wavefront_is_layer_by_layer_where_no_read_goes_up(flow):
    flow = dataclasses.replace(flow, bias=0.5)
    params = drawn(flow)
    assert flow.resolve(flow.reads(L), T) == "parallel"
    if flow.kind != "block(2)":
        same(logits(scheduled(flow, "wavefront"), params, *PACKED), logits(flow, params, *PACKED))
        return
    weights = PACKED[0] > 0
    wave, ordinary = (with_gradient(f, params, *PACKED)(weights) for f in (scheduled(flow, "wavefront"), flow))
    same(wave, ordinary)


def parameter_count(flow, config=CONFIG):
    model = Transformer(config, Plain(), flow=flow)
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_flows_of_the_layers_own_keys_add_the_bias_or_the_gates_alone():
    ordinary, heads = parameter_count(FlowConfig()), CONFIG.heads
    for flow in (*PARALLEL, *UPWARD):
        if flow.output:
            continue
        assert parameter_count(flow) == ordinary
        assert parameter_count(dataclasses.replace(flow, bias=0.0)) == ordinary + L * L
        assert parameter_count(dataclasses.replace(flow, combine="gated")) == ordinary + L * heads
        assert parameter_count(dataclasses.replace(flow, combine="gated", bias=0.0)) == ordinary + L * (L + heads)
        assert parameter_count(dataclasses.replace(flow, projection="consumer")) == ordinary
        past = flow.kind not in ("standard", f"lag({T})")  # else nothing is left of it
        for adopt in ("optional", "mandatory")[: 1 + past]:
            assert parameter_count(dataclasses.replace(flow, adopt=adopt)) == ordinary
    assert parameter_count(FlowConfig("standard + cone(1)", bias=0.0)) == ordinary + L * L


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("blocks", [3, 4])
def test_what_other_forms_add(blocks, qk_norm):
    config = dataclasses.replace(CONFIG, blocks=blocks, heads=4, kv_heads=2, qk_norm=qk_norm)
    ordinary, D, K = parameter_count(FlowConfig(), config), config.width, config.head_size
    projections = 2 * D * config.kv * K  # of a key and a value
    norms = K if qk_norm else 0

    def added(*args, **options):
        return parameter_count(FlowConfig(*args, **options), config) - ordinary

    assert added("recurrent") == 0
    assert added("recurrent", bias=0.0) == blocks * (blocks + 1)
    assert added("feedback") == blocks + 1  # the weights of the mixture
    for kind in ("top", "deep", "cone(1)"):  # the output cell's projections, with its norms
        assert added(kind, output=True) == D + projections + norms
        assert added(kind, output=True, combine="gated") == D + projections + norms + blocks * config.heads
        assert added(kind, output=True, projection="consumer") == 0
        assert added(kind, output=True, bias=0.0) == D + projections + norms + blocks * (blocks + 1)
    for k in (1, 2, blocks):
        # Gains, of every layer's input and of the channels; the router hears every other layer; the weights' bias.
        side = blocks * D + k * D + k * blocks * ((blocks + 1) // 2) * D + k * blocks
        # Projections and the key's norm by channel, instead of by layer.
        assert added(f"pool({k})") == 2 * side + (k - blocks) * projections + (1 - blocks) * norms


STORED = [
    *PARALLEL,
    *UPWARD,
    *(FlowConfig(kind) for kind in ("recurrent", "feedback", "pool(2)", "pool(3)", "map(1,1,1)", "standard + top")),
    *(FlowConfig("deep", projection="consumer"), FlowConfig("block(2)", projection="consumer")),
    *(FlowConfig("deep", combine="gated"), FlowConfig("top", adopt="optional"), FlowConfig("deep", adopt="mandatory")),
]


@pytest.mark.parametrize("flow", STORED, ids=lambda f: f"{name(f)}-{f.combine}-{f.adopt}")
def test_grid_and_cache_hold_a_row_for_every_source_that_is_read_and_no_other(flow):
    reads = flow.reads(L)
    allowed = reads_of(reads, 4 * T)  # far enough for every layer that is ever read
    t, l, s, m = np.ogrid[: 4 * T, :L, : 4 * T, : reads.sources]
    readers, sources = np.nonzero((allowed & ((s < t) | (m != l))).any((0, 2)))
    pairs = set(zip(readers.tolist(), sources.tolist()))
    if flow.kind.startswith("pool"):
        expected = len({l % flow.geometry.channels for l, _ in pairs})
    elif flow.projection == "consumer" or flow.kind in ("recurrent", "feedback"):
        expected = len(pairs)
    else:
        expected = len({m for _, m in pairs})
    model = Transformer(CONFIG, Plain(), flow=flow)
    if flow.is_standard:
        assert empty_cache(CONFIG, 2, T, flow).layers.key.shape[0] == expected
        return
    _, grid = jax.eval_shape(lambda p: model.apply({"params": p}, TOKENS, *PACKED, method="prefill_grid"), drawn(flow))
    assert grid.key.shape == grid.value.shape == (expected, 2, T, CONFIG.kv, CONFIG.head_size)
    cache = empty_cache(CONFIG, 2, T, flow).layers
    assert cache.key.shape == grid.key.shape and cache.value.shape == grid.value.shape


def scans_of(jaxpr, inside=()):
    """The lengths of all loops, each with those it is inside of."""
    found = []
    for eqn in jaxpr.eqns:
        at = (*inside, eqn.params["length"]) if eqn.primitive.name == "scan" else inside
        found += [at] if eqn.primitive.name == "scan" else []
        for param in eqn.params.values():
            body = getattr(param, "jaxpr", param)
            found += scans_of(body, at) if hasattr(body, "eqns") else []
    return found


@pytest.mark.parametrize(("blocks", "tokens"), [(3, 11), (5, 8), (5, 16)])
def test_wavefront_of_slope_one_runs_layers_and_tokens_less_one_steps(blocks, tokens):
    config = dataclasses.replace(CONFIG, blocks=blocks, context=tokens)
    flow = FlowConfig("cone(1)", schedule="wavefront")
    model, row = Transformer(config, Plain(), flow=flow), np.zeros((1, tokens), int)
    forward = jax.make_jaxpr(lambda p: model.apply({"params": p}, row))(drawn(flow, config))
    assert scans_of(forward.jaxpr) == [(blocks + tokens - 1,)]
    step = jax.make_jaxpr(jax.grad(lambda p: model.apply({"params": p}, row).sum()))(drawn(flow, config))
    outer = [at for at in scans_of(step.jaxpr) if len(at) == 1]
    assert outer == [(blocks + tokens - 1,)] * 2  # there and back


def lines_of_a_step(flow, blocks, tokens):
    config = dataclasses.replace(CONFIG, blocks=blocks, context=tokens)
    model, row = Transformer(config, Plain(), flow=flow), np.zeros((1, tokens), int)
    step = jax.jit(jax.value_and_grad(lambda p: model.apply({"params": p}, row).sum()))
    return len(step.lower(drawn(flow, config)).as_text().splitlines())


@pytest.mark.parametrize(
    ("schedule", "flow"),
    [
        ("parallel", FlowConfig("block(2)")),
        *(
            pytest.param(schedule, flow, marks=pytest.mark.slow)
            for schedule, flow in [
                ("wavefront", FlowConfig("cone(1)")),
                ("chunked", FlowConfig("chunk(4)")),
                ("sequential", FlowConfig("deep", output=True)),
                ("swept", FlowConfig("top", schedule="swept", groups=2)),
            ]
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_program_of_a_step_does_not_grow_with_tokens_or_layers(schedule, flow):
    for blocks, tokens in ((4, 12), (4, 24), (8, 12)):
        assert flow.resolve(flow.reads(blocks), tokens) == schedule
    lines = [lines_of_a_step(flow, blocks, tokens) for blocks, tokens in ((4, 12), (4, 24), (8, 12))]
    assert len(set(lines)) == 1, lines
