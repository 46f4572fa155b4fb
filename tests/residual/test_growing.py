"""Connections that look back over depth, in float64: against their equations, and where they are the plain residual or
each other."""

from functools import partial

import growing_references as reference
import jax
import numpy as np
import pytest
from growing_references import B, D, G, L, N, S, plain
from growing_stack import EPS, gradient, moved, noise, output, same, same_function, start
from hypothesis import given, settings
from hypothesis import strategies as st
from variants import draw

from lmres.model import ModelConfig, Transformer
from lmres.residual import (
    AttentionResiduals,
    DeepCrossAttention,
    DeltaAttentionResiduals,
    DenseFormer,
    DynamicLIMe,
    History,
    LIMe,
    MUDDFormer,
    RecentDeepCrossAttention,
    ValueResidual,
)
from lmres.residual.two_phase import has_two_phases

pytestmark = pytest.mark.usefixtures("x64")


# DenseFormer


@pytest.mark.parametrize("dilation, period", [(1, 1), (2, 1), (2, 2), (3, 2), (9, 1), (1, 9)])
def test_denseformer_is_its_push_form_and_starts_as_prenorm(dilation, period):
    """Also prenorm: a period beyond the depth, which has no weights, a dilation beyond it with weights of one."""
    connection = DenseFormer(dilation=dilation, period=period)
    if period > N:
        assert not start(connection)["shared"], "no weights at all"
        same(output(connection, start(connection)), plain())
        return
    alpha = moved(connection)["shared"]["alpha"]
    rows = reference.denseformer_rows(alpha, dilation, period)
    same(output(connection, start(connection, alpha=alpha)), reference.denseformer_push(rows))
    same(output(connection, start(connection)), plain())
    if dilation > N:
        np.testing.assert_array_equal(start(connection)["shared"]["alpha"], np.ones(N))


def test_denseformer_without_the_other_classes_is_dilated():
    alpha, position, kept = moved(DenseFormer())["shared"]["alpha"], 0, []
    for i in range(1, N + 1):
        for j in range(i + 1):
            if (i - j) % 2:
                alpha[position] = 0
            else:
                kept.append(alpha[position])
            position += 1
    same(
        output(DenseFormer(), start(DenseFormer(), alpha=alpha)),
        output(DenseFormer(dilation=2), start(DenseFormer(dilation=2), alpha=np.array(kept))),
    )


# MUDDFormer


MUDDS = {
    MUDDFormer(eps=EPS): {},
    MUDDFormer(eps=EPS, ways=(1,)): {"ways": 1},
    MUDDFormer(eps=EPS, dynamic="static"): {"dynamic": False},
    MUDDFormer(eps=EPS, norm="prepost"): {"prepost": True},
    MUDDFormer(eps=EPS, ways=(1,), dynamic="static", norm="prepost", expand_last=True): {
        "ways": 1,
        "dynamic": False,
        "prepost": True,
    },
    MUDDFormer(eps=EPS, norm="prepost", expand_last=True): {"prepost": True, "expand": 4},
}


@pytest.mark.parametrize("connection", MUDDS, ids=lambda c: c.name + "-expanded" * c.expand_last)
def test_muddformer_follows_its_equations_and_starts_as_prenorm(connection):
    params = moved(connection, 0.3)
    same(output(connection, params), reference.muddformer(params["shared"], **MUDDS[connection]))
    same(output(connection, start(connection)), plain())
    grads = gradient(connection, start(connection))["shared"]
    if connection.dynamic == "token":
        assert not np.any(grads["w1"]), "behind W2 = 0"
    for name, readout in {"bias": N + 1, "w2": (N + 1) * (4 if connection.expand_last else 1)}.items():
        if name in grads:
            assert np.any(grads[name][:-readout]) and np.any(grads[name][-readout:]), name
    if connection.norm == "prepost" and connection.dynamic == "static":
        assert not np.any(grads["gain"]), "what they multiply is 0"


def static_bias(alpha, ways):
    """The bias of a static MUDDFormer from a DenseFormer's weights."""
    rows = [alpha[i * (i + 1) // 2 - 1 : (i + 1) * (i + 2) // 2 - 1] for i in range(1, N + 1)]
    return np.concatenate([*(np.tile(row, ways) for row in rows[:-1]), rows[-1]])


@pytest.mark.parametrize("ways", [1, 4])
def test_static_muddformer_with_tied_ways_is_denseformer(ways):
    alpha = moved(DenseFormer())["shared"]["alpha"]
    mudd = MUDDFormer(ways=(ways,), dynamic="static")
    same(
        output(mudd, start(mudd, bias=static_bias(alpha, ways))),
        output(DenseFormer(), start(DenseFormer(), alpha=alpha)),
    )


def test_static_muddformer_with_tied_ways_and_gains_is_denseformer_in_the_transformer():
    config = ModelConfig(vocab_size=13, context=4, width=D, blocks=N, heads=2, mlp_hidden=12, dtype="float64")
    models = [Transformer(config, c) for c in (DenseFormer(), MUDDFormer(dynamic="static"))]
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), draw(models[0]))
    alpha = params["stack"]["connection"]["shared"]["alpha"] = moved(DenseFormer())["shared"]["alpha"]
    shapes = jax.eval_shape(lambda: draw(models[1]))

    def tie(path, p, shape):
        return p if p.shape == shape.shape else np.broadcast_to(p[:, None], shape.shape)  # the gain, per input

    mudd = {**params, "stack": {**params["stack"], "connection": shapes["stack"]["connection"]}}
    mudd["stack"]["connection"] = {"layers": {}, "shared": {"bias": static_bias(alpha, 4)}}
    mudd = jax.tree_util.tree_map_with_path(tie, mudd, shapes)
    tokens = np.arange(8).reshape(2, 4)
    logits = [jax.jit(m.apply)({"params": p}, tokens) for m, p in zip(models, (params, mudd))]
    same(*logits)


# Attention over depth

FORMS = [
    *[(1, 1), (3, 1), (4, 1), (L, 1), (L + 3, 1), (1, 2), (2, 4), (3, 2)],
    *(pytest.param(*form, marks=pytest.mark.slow) for form in [(2, 1), (7, 1), (4, 2), (6, 8), (8, 2)]),
]


@pytest.mark.parametrize("size, heads", FORMS)
def test_attention_residuals_follow_their_equations_and_start_as_prenorm(size, heads):
    """Scanned: even sizes run in two phases."""
    connection = AttentionResiduals(block=size, heads=heads, eps=EPS)
    assert has_two_phases(connection, 2, L) == (size % 2 == 0)
    queries = noise(L + 1, D)
    found = output(connection, start(connection, query=queries))
    same(found, reference.block_attention(queries, size, heads=heads))
    if size == 1:
        same(found, reference.full_attention(queries, heads=heads))
    if size == 1 and heads == 1:
        same(found, reference.attention_push(queries))
    if size >= L and heads == 1:
        same(found, reference.two_source_attention(queries))
    same_function(output(connection, start(connection)), plain())


@partial(jax.jit, static_argnums=0)
def read_out(connection, query, values):
    """What the last query reads of ``values`` [M, B, S, D], and the weights."""
    params = {"query": query}
    logits = jax.vmap(lambda v: connection.keys(params, v)["logits"])(values)
    return connection.close({"shared": params}, History({"value": values, "logits": logits}, ()))


def test_heads_read_apart():
    """A query in the first head's channels alone: the first head is as if it were the only one, the other even."""
    query, values = noise(1, D), np.random.default_rng(8).normal(size=(4, B, S, D))
    query[:, D // 2 :] = 0
    single, _ = read_out(AttentionResiduals(eps=EPS), query, values)
    same(single, reference.attend(query[0], values))
    both, _ = read_out(AttentionResiduals(heads=2, eps=EPS), query, values)
    same(both, np.concatenate([np.asarray(single)[..., : D // 2], values.mean(0)[..., D // 2 :]], -1))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_key_gain_and_temperature_fold_into_the_query(size):
    plain_form = AttentionResiduals(block=size, eps=EPS)
    full = AttentionResiduals(block=size, key_gain=True, temperature=1.7, eps=EPS)
    params = moved(full)
    folded = params["shared"]["query"] * params["shared"]["gain"] / 1.7
    same(output(full, params), output(plain_form, start(plain_form, query=folded)))


DELTA_FORMS = [(1, 1, "learned"), (1, 2, "none"), (2, 1, "learned"), (3, 2, "learned"), (4, 1, "none"), (L, 1, "none")]


@pytest.mark.parametrize("size, heads, gate", DELTA_FORMS)
def test_delta_attention_residuals_follow_their_equations(size, heads, gate):
    connection = DeltaAttentionResiduals(block=size, heads=heads, gate=gate, temperature=1.3, eps=EPS)
    params = moved(connection)
    gates = params["layers"].get("gate", np.ones(L))
    expected = reference.delta_attention(params["shared"]["query"], gates, size, heads=heads, temperature=1.3)
    same(output(connection, params), expected)
    if gate == "learned":  # closed gates: prenorm with any queries
        same(output(connection, {**params, "layers": {"gate": np.zeros(L)}}), plain())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), heads=st.sampled_from([1, 2]), spread=st.floats(0, 3))
def test_attention_over_depth_knows_sources_by_their_direction(seed, heads, spread):
    """Any order of the sources gives the same; lengths change what is taken up but not the weights."""
    draw = np.random.default_rng(seed)
    connection = AttentionResiduals(heads=heads, eps=0.0)
    query, values = draw.normal(size=(1, D)), draw.normal(size=(5, B, S, D))
    order, scales = draw.permutation(5), np.exp(spread * draw.normal(size=(5, B, S, 1)))
    with jax.enable_x64(True):
        h, weights = read_out(connection, query, values)
        same(read_out(connection, query, values[order])[0], h)
        scaled_h, scaled_weights = read_out(connection, query, values * scales)
    same(scaled_weights, weights)
    same(np.sum(weights, 0), np.ones(weights.shape[1:]))
    wide = np.repeat(weights, D // heads, -1) if heads > 1 else np.asarray(weights)[..., None]
    same(scaled_h, np.sum(wide * scales * values, 0))


# DeepCrossAttention

DCAS = [
    {"version": 1},
    {"version": 2},
    {"version": 3},
    {"version": 3, "ways": (1,)},
    {"version": 3, "norm": "rms"},
]


@pytest.mark.parametrize("options", DCAS, ids=str)
def test_deep_cross_attention_follows_its_equations_and_starts_as_prenorm(options):
    connection = DeepCrossAttention(eps=EPS, **options)
    params = moved(connection)
    same(output(connection, params), reference.deep_cross_attention(params["shared"], **options))
    same(output(connection, start(connection)), plain())
    if options["version"] == 3:
        rows = np.abs(gradient(connection, start(connection))["shared"]["w"]).max(-1)
        assert np.all(rows > 0), "ReLU at 0 lets the first gradient through"


@pytest.mark.parametrize("last", [1, 3])
@pytest.mark.parametrize("options", [DCAS[0], DCAS[3], DCAS[4]], ids=str)
def test_recent_cross_attention_sums_the_middle_and_starts_as_prenorm(options, last):
    connection = RecentDeepCrossAttention(last=last, eps=EPS, **options)
    params = moved(connection)
    same(output(connection, params), reference.recent_cross_attention(params["shared"], last, **options))
    same(output(connection, start(connection)), plain())


@pytest.mark.parametrize("last", [L, L + 2])
@pytest.mark.parametrize("version", [1, 3])
def test_recent_cross_attention_of_everything_is_the_whole(version, last):
    whole, recent = DeepCrossAttention(version=version), RecentDeepCrossAttention(version=version, last=last)
    params = moved(whole)
    biases, rows, used = params["shared"]["bias"], start(recent)["shared"]["bias"], 0
    ways = [(3, 1)[l % 2] for l in range(L)] + [1]
    for reader, l in enumerate(np.repeat(np.arange(L + 1), ways)):
        own = biases[used : used + l + 1]
        rows[reader, 0], rows[reader, 2 : 2 + l] = own[0], own[:0:-1]  # e, nothing between, the newest first
        used += l + 1
    shared = {**params["shared"], "bias": rows}
    same(output(recent, {"layers": {}, "shared": shared}), output(whole, params))


# The stream at all depths, and keys and values


@pytest.mark.parametrize("ways", [(1,), (3, 1)])
def test_dynamic_lime_is_prenorm_where_only_the_newest_counts(ways):
    connection = DynamicLIMe(ways=ways)
    params = connection.as_plain(moved(connection), None, None)
    same(output(connection, params), plain(), 1e-10)  # e^-30 of the others is left
    params["shared"]["bias"] = 100 * params["shared"]["bias"]
    same(output(connection, params), plain())


HEADS = {"kv_heads": G, "head_size": D // G}


@pytest.mark.parametrize("routers", ["separate", "shared"])
def test_lime_follows_its_equations_and_its_identity_is_standard_attention(routers):
    connection = LIMe(routers=routers, **HEADS)
    params = moved(connection, 0.3)
    router = np.broadcast_to(params["shared"]["router"], (2, params["shared"]["router"].shape[1]))
    same(output(connection, params), reference.attention_column(reference.lime_mix(router)))
    standard = reference.attention_column(reference.own)
    same(output(connection, connection.as_plain(params, None, None)), standard)
    identity = LIMe(routers=routers, start="identity", **HEADS)
    same(output(identity, start(identity)), standard)
    grads = gradient(identity, start(identity))["shared"]["router"]
    assert np.all(grads != 0) if routers == "shared" else np.all(grads[1] != 0)


@pytest.mark.parametrize("mode", ["fixed", "learned", "shared"])
def test_value_residual_follows_its_equations_and_is_standard_attention_with_own_values_only(mode):
    connection = ValueResidual(mode=mode, **HEADS)
    params = moved(connection)
    pairs = {"fixed": np.full((N - 1, 2), 0.5), "shared": np.tile([1.0, 0.0], (N - 1, 1))}
    pairs = params["shared"]["weights"] if mode == "learned" else pairs[mode]
    same(output(connection, params), reference.attention_column(reference.value_mix(pairs)))
    standard = connection.as_plain(params, None, None)
    if mode != "learned":
        assert standard is None
        return
    np.testing.assert_array_equal(standard["shared"]["weights"], np.tile([0.0, 1.0], (N - 1, 1)))
    same(output(connection, standard), reference.attention_column(reference.own))
    assert np.all(gradient(connection, params)["shared"]["weights"] != 0)
