"""The transformer on the token x layer grid: one model, whatever schedule runs it, together with any connection."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid_reference import logits_of

from lmres.flow.config import FlowConfig
from lmres.model import ModelConfig, Transformer
from lmres.residual import MHC, AttentionResiduals, MUDDFormer, Plain, ValueResidual

CONFIG = ModelConfig(vocab_size=17, context=8, width=16, blocks=3, heads=2, dtype="float64")
TOKENS = np.random.default_rng(0).integers(0, 17, (2, 6))
# Two documents and padding in one row, one document in the other.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1] * 6])
POSITIONS = np.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
REAL = (SEGMENTS > 0)[..., None]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def parameters(connection=Plain(), flow=FlowConfig(), config=CONFIG):  # noqa: B008 - frozen
    params = Transformer(config, connection, flow=flow).init(jax.random.key(0), TOKENS)["params"]
    rng = np.random.default_rng(1)
    # Away from the start, where many gradients vanish.
    return jax.tree.map(lambda p: jnp.asarray(p + 0.1 * rng.normal(size=p.shape)), params)


def run(connection, flow, params, config=CONFIG, dropout_key=None):
    """(logits, gradients) of real tokens."""

    @jax.jit
    def both(params):
        def loss(params):
            model = Transformer(config, connection, flow=flow)
            logits = model.apply({"params": params}, TOKENS, SEGMENTS, POSITIONS, dropout_key=dropout_key)
            logits = jnp.where(REAL, logits, 0)
            return (logits**2).sum(), logits

        (_, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return logits, grads

    return both(params)


def same(a, b):
    chex.assert_trees_all_close(a, b, rtol=1e-8, atol=1e-10)


SLOW = [pytest.param(c, marks=pytest.mark.slow, id=c.name) for c in (MHC(), AttentionResiduals(), MUDDFormer())]


@pytest.mark.parametrize("connection", [Plain(), ValueResidual(), *SLOW])
def test_one_layer_wide_block_is_the_ordinary_transformer(connection):
    params = parameters(connection)
    ordinary = run(connection, FlowConfig(), params)
    same(run(connection, FlowConfig(kind="block(1)"), params), ordinary)
    same(run(connection, FlowConfig(schedule="sequential"), params), ordinary)


@pytest.mark.parametrize(
    ("kind", "schedules"),
    [
        ("cone(1)", ["wavefront", "swept"]),
        ("chunk(3)", ["chunked"]),
        ("chunk(4)", ["chunked"]),  # 6 tokens: the last chunk is not full
        pytest.param("top", ["wavefront", "swept"], marks=pytest.mark.slow),
        pytest.param("diagonal(-1/2)", ["parallel"], marks=pytest.mark.slow),
        pytest.param("moda", ["parallel", "wavefront"], marks=pytest.mark.slow),
        pytest.param("rectangle(2)", ["parallel"], marks=pytest.mark.slow),
        pytest.param("lag(2)", ["chunked", "wavefront"], marks=pytest.mark.slow),
    ],
)
def test_every_exact_schedule_is_the_same_model(kind, schedules):
    flow = FlowConfig(kind=kind, bias=0.5, schedule="sequential")
    params = parameters(flow=flow)
    token_by_token = run(Plain(), flow, params)
    for schedule in schedules:
        other = dataclasses.replace(flow, schedule=schedule, sweeps=0, gradient_sweeps=6)
        same(run(Plain(), other, params), token_by_token)


@pytest.mark.slow
@pytest.mark.parametrize("connection", [ValueResidual(), *SLOW])
def test_wavefront_carries_the_state_of_every_connection(connection):
    flow = FlowConfig(kind="cone(1)", schedule="sequential")
    params = parameters(connection, flow)
    same(run(connection, dataclasses.replace(flow, schedule="wavefront"), params), run(connection, flow, params))


@pytest.mark.slow
def test_dropout_draws_the_same_however_the_tokens_are_run():
    config = dataclasses.replace(CONFIG, dropout=0.5)
    flow = FlowConfig(kind="cone(1)", schedule="sequential")
    params = parameters(flow=flow)
    key = jax.random.key_data(jax.random.key(3))
    sequential = run(Plain(), flow, params, config, key)
    same(run(Plain(), dataclasses.replace(flow, schedule="wavefront"), params, config, key), sequential)
    assert not np.allclose(sequential[0], run(Plain(), flow, params, config)[0])


FORMS = [
    (FlowConfig("recurrent"), {"recurrent": True}),
    (FlowConfig("feedback"), {"feedback": True}),
    (FlowConfig("pool(1)"), {"channels": 1}),
    (FlowConfig("pool(2)"), {"channels": 2}),
    (FlowConfig("pool(3)"), {"channels": 3}),
    (FlowConfig("top", output=True), {}),
    (FlowConfig("cone(1)", output=True, bias=-1.0, bias_upward=1.0), {}),
    (FlowConfig("deep", output=True, projection="consumer"), {}),
    (FlowConfig("block(2)", projection="consumer"), {}),
    (FlowConfig("deep", combine="gated", bias=0.5), {}),
    (FlowConfig("diagonal(-1)", combine="gated"), {}),
    (FlowConfig("standard + cone(1)"), {}),
    (FlowConfig("block(2) + diagonal(-1/2)", bias=0.5), {}),
    (FlowConfig("deep", bias=0.5), {}),
]
FORM_SCHEDULES = {"pool(2)": ["swept"], "recurrent": ["wavefront"], "feedback": ["swept"]}


@pytest.mark.parametrize(
    ("flow", "form"),
    [pytest.param(*case, marks=[] if i in (0, 2) else pytest.mark.slow) for i, case in enumerate(FORMS)],
    ids=lambda x: f"{x.kind}-{x.combine}-{x.projection}" if isinstance(x, FlowConfig) else "",
)
def test_every_form_is_its_definition_in_plain_loops(flow, form):
    config = dataclasses.replace(CONFIG, qk_norm=flow.kind in ("recurrent", "pool(2)"))
    params, tokens = parameters(flow=flow, config=config), TOKENS[:, :4]

    def both(run):
        def loss(params):
            found = run(params)
            return (found**2).sum(), found

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    want = both(lambda p: logits_of(p, tokens, config, flow, **form))
    schedules = ["sequential", *FORM_SCHEDULES.get(flow.kind, ["auto", "swept"])]
    for schedule in schedules:
        model = Transformer(config, Plain(), flow=dataclasses.replace(flow, schedule=schedule, gradient_sweeps=4))
        same(both(lambda p, model=model: model.apply({"params": p}, tokens)), want)


def test_wider_reads_change_the_model_and_add_the_bias_alone():
    ordinary, wide = parameters(), parameters(flow=FlowConfig(kind="block(2)", bias=0.0))
    assert set(wide) - set(ordinary) == {"cells"}
    assert wide["cells"]["bias"].shape == (3, 3)
    assert set(parameters(flow=FlowConfig(kind="block(2)"))) == set(ordinary)
    found = run(Plain(), FlowConfig(kind="block(2)"), ordinary)[0]
    assert not np.allclose(found, run(Plain(), FlowConfig(), ordinary)[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "blok(2)"}, r"flow.kind='blok\(2\)' is no geometry"),
        ({"kind": "block(0)"}, "at least 1 layer wide"),
        ({"kind": "map(1,2)"}, "2 target layers are given for 3 layers"),
        ({"kind": "deep", "schedule": "parallel"}, "flow.schedule=parallel cannot run flow.kind=deep exactly"),
        ({"kind": "top", "border": "drop"}, "flow.border=drop has no meaning for flow.kind=top"),
        ({"kind": "top", "groups": 0}, "flow.groups=0 must be at least 1"),
        ({"kind": "pool(2)", "schedule": "wavefront"}, "flow.schedule=wavefront cannot run flow.kind=pool"),
        ({"kind": "block(2)", "output": True}, "flow.output=True has no meaning for flow.kind=block"),
        ({"kind": "recurrent", "combine": "gated"}, "flow.combine=gated needs a geometry that reads the layers' own"),
        ({"kind": "pool(2)", "projection": "consumer"}, "flow.projection=consumer cannot be had"),
        ({"kind": "standard + top + deep"}, "shares 2 key/value heads among 3"),
        ({"kind": "standard + recurrent"}, "only geometries that read the layers' own keys"),
        ({"kind": "standard + top", "adopt": "optional"}, "flow.adopt=optional has no meaning for heads"),
        ({"kind": "standard", "adopt": "mandatory"}, "leaves no token anything of another to read"),
        ({"kind": "pool(2)", "adopt": "optional"}, r"nor for a pool: flow.kind=pool\(2\)"),
        ({"kind": "map(1,2)"}, r"flow.kind=map\(1,2\): map.* \(model.blocks=3\)"),
        ({"kind": "standard + top", "output": True}, r"standard \+ top\(output\): the parts have 3, 4 source layers"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        parameters(flow=FlowConfig(**settings))


def test_only_ordinary_attention_is_recorded():
    model = Transformer(CONFIG, Plain(), flow=FlowConfig("block(2)"))
    with pytest.raises(ValueError, match=r"only ordinary attention can be recorded, not flow.kind=block\(2\)"):
        jax.eval_shape(lambda key: model.init(key, TOKENS, method="record"), jax.random.key(0))


def test_heads_cut_from_the_input_need_no_keys_that_are_projected():
    for flow in (FlowConfig(), FlowConfig("block(2)"), FlowConfig("deep")):
        flow.check(3, 8, 2, "input")
    for flow in (FlowConfig("recurrent"), FlowConfig("pool(2)"), FlowConfig("deep", output=True)):
        with pytest.raises(ValueError, match=r"needs keys that are projected, and model.heads_from=input has none"):
            flow.check(3, 8, 2, "input")
