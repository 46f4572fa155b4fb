"""The depth-mixing matrix recomposes the real reads of every connection, and is the known one where one is known."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import MEMBERS_SOME_SLOW, name

from lmres.analysis import MixingResult, model_mixing
from lmres.model import ModelConfig, Transformer
from lmres.residual import (
    AttentionResiduals,
    DenseFormer,
    HyperConnections,
    Plain,
    depth_mixing,
    recompose,
    run_layers,
)
from lmres.residual.interface import Exchange, Lent
from lmres.residual.mixing import pick_way

each_connection = pytest.mark.parametrize(
    "connection",
    [p for p in MEMBERS_SOME_SLOW if getattr(p, "values", (p,))[0].has_matrix],
    ids=name,
)
B, S, D = 2, 3, 8
SMALL = ModelConfig(vocab_size=11, context=5, width=8, blocks=2, heads=2, mlp_hidden=16, dtype="float64")
SEGMENTS = np.array([[1, 1, 1, 2, 2], [1, 1, 1, 0, 0]])


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def randomised(params, key, scale=0.5):
    """The parameters moved away from their start, where many connections are the plain residual."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, max(1, len(leaves)))
    moved = [
        p.astype(jnp.float64) + scale * jax.random.normal(k, p.shape, jnp.float64)
        for p, k in zip(leaves, keys)
    ]
    return jax.tree.unflatten(tree, moved)


def tanh_branch(w):
    """Of the product of all inputs; keys and values are lent and mixed in where that is asked for."""

    def branch(x):
        if not isinstance(x, Exchange):
            return jnp.tanh(math.prod(x) @ w) if type(x) is tuple else jnp.tanh(x @ w)
        y = jnp.tanh(x.x @ w)
        heads = y.reshape(B, S, 2, -1)
        used = sum(m.gathered for m in (x.key, x.value) if m is not None)
        return Lent(y + used.reshape(y.shape), heads, heads**2)

    return branch


def tanh_run(connection, depth=5, move=True):
    """(h, record, e, params) of a run over tanh branches."""
    keys = jax.random.split(jax.random.key(0), depth + 2)
    params = connection.init(keys[0], depth, D)
    params = randomised(params, keys[0]) if move else jax.tree.map(lambda p: p.astype(jnp.float64), params)
    weights = [jax.random.normal(k, (D, D), jnp.float64) / D**0.5 for k in keys[2:]]
    e = jax.random.normal(keys[1], (B, S, D), jnp.float64)
    branches = [tanh_branch(w) for w in weights]
    h, record = jax.jit(lambda params, e: run_layers(connection, params, branches, e))(params, e)
    return h, record, e, params


def model_and_params(connection, move=True):
    """A transformer and parameters drawn without running it: only shapes come from ``init``."""
    model = Transformer(SMALL, connection)
    connection = model.connection  # which knows the model's heads
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) * 0.4), shapes)
    units = SMALL.blocks * (1 if connection.unit == "block" else 2)
    start = jax.tree.map(
        lambda p: p.astype(jnp.float64), connection.init(jax.random.key(0), units, SMALL.width)
    )
    used = randomised(start, jax.random.key(7)) if move else start
    return model, {**params, "stack": {**params["stack"], "connection": used}}


def tokens(rows=B, length=5):
    return jax.random.randint(jax.random.key(3), (rows, length), 0, SMALL.vocab_size)


def ways_of_attention(connection):
    """Query, key and value where they are read apart."""
    return range(min(3, max(connection.ways)))


@each_connection
def test_reads_recompose_over_tanh_branches(connection, x64):
    connection = connection.fit(2, D // 2)
    h, record, e, _ = tanh_run(connection)
    for way in ways_of_attention(connection):
        matrix = depth_mixing(connection, record.contexts, e, way=way)
        assert matrix.shape == (6, 6, B, S, *([D] if connection.channelwise else []))
        reads = np.stack([*(pick_way(getattr(x, "x", x), way) for x in record.reads), h])
        outputs = [getattr(y, "y", y) for y in record.outputs]
        assert np.max(np.abs(recompose(matrix, e, outputs) - reads)) <= 1e-12 * np.max(np.abs(reads))
        above = np.triu_indices(6, 1)
        assert np.all(np.asarray(matrix)[above] == 0), (
            "a reader has a share in something that is not yet computed"
        )


@each_connection
def test_reads_recompose_in_the_transformer(connection, x64):
    model, params = model_and_params(connection)
    for way in ways_of_attention(connection):
        result = model_mixing(model, params, tokens(), SEGMENTS, way=way)
        assert result.error <= 1e-12
    assert result.mean.shape == result.spread.shape == (5, 5)
    assert result.readers == ("attn 1", "mlp 1", "attn 2", "mlp 2", "out")
    assert result.sources == ("embed", *result.readers[:-1])
    assert np.all(np.triu(result.mean, 1) == 0) and np.all(np.triu(result.spread, 1) == 0)
    np.testing.assert_allclose(np.abs(result.normalised).sum(axis=1), 1, rtol=1e-12)
    said = (result.connection, result.equation, result.source, result.channelwise)
    assert said == (connection.name, connection.equation, connection.source, connection.channelwise)


@pytest.mark.parametrize(
    "connection", [Plain(norm="post"), DenseFormer(), HyperConnections(streams=3)], ids=lambda c: c.name
)
def test_mean_and_spread_are_those_of_the_full_matrix_without_padding(connection, x64):
    model, params = model_and_params(connection)

    @jax.jit
    def full(params):
        _, e, record = model.apply({"params": params}, tokens(), SEGMENTS, method="record")
        return depth_mixing(connection, record.contexts, e, inner=2 if connection.unit == "block" else 1)

    matrix = np.asarray(full(params))
    if connection.channelwise:
        matrix = matrix.mean(axis=-1)
    matrix = matrix[:, :, SEGMENTS != 0]
    result = model_mixing(model, params, tokens(), SEGMENTS)
    assert result.tokens == 8
    np.testing.assert_allclose(result.mean, matrix.mean(axis=-1), atol=1e-13)
    np.testing.assert_allclose(result.spread, matrix.std(axis=-1), atol=1e-13)
    shares = matrix / np.abs(matrix).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(result.share_spread, shares.std(axis=-1), atol=1e-13)


def test_a_wrong_matrix_is_given_away_by_the_error(x64):
    class Wrong(Plain):
        def write(self, params_l, state, context, y, l):
            return state + y**2 / (1 + y)  # not linear in y: no matrix can recompose it

    assert model_mixing(*model_and_params(Wrong()), tokens()).error > 1e-3


def test_plain_prenorm_reads_the_sum_of_everything_before(x64):
    result = model_mixing(*model_and_params(Plain()), tokens())
    np.testing.assert_array_equal(result.mean, np.tri(5))
    np.testing.assert_array_equal(result.spread, 0)
    np.testing.assert_allclose(result.normalised[-1], 1 / 5)


@pytest.mark.parametrize("block", [1, 3])
def test_attention_residual_rows_sum_to_one(block, x64):
    connection = AttentionResiduals(block=block)
    _, record, e, _ = tanh_run(connection)
    matrix = np.asarray(depth_mixing(connection, record.contexts, e))
    if block == 1:
        np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=1e-12)
        assert np.all(matrix >= 0)
        return
    # Every source is a sum of a block's outputs with one weight: the first output of each block carries it.
    for l in range(6):
        firsts = [0, *(1 + b for b in range(0, l, block))]
        np.testing.assert_allclose(matrix[l, firsts].sum(axis=0), 1, rtol=1e-12)


@pytest.mark.parametrize(
    "connection", [DenseFormer(), DenseFormer(dilation=2, period=2)], ids=lambda c: c.name
)
def test_denseformer_at_its_start_is_plain(connection, x64):
    result = model_mixing(*model_and_params(connection, move=False), tokens())
    np.testing.assert_array_equal(result.mean, np.tri(5))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_hyper_connections_composite_formula(dynamic, x64):
    """M[l, j] = A_m,l' (A_r,l-1' ... A_r,j+1') B_j' (arXiv:2409.19606), evaluated in numpy.

    Ones stand for B_0, since the embedding is copied to all streams, and for the readout, which sums them.
    """
    connection = HyperConnections(streams=3, dynamic=dynamic)
    _, record, e, params = tanh_run(connection, depth=4)
    n, depth = 3, 4
    streams = np.broadcast_to(np.asarray(e)[:, :, None], (B, S, n, D))
    reads, writes, mixes = [], [], []
    p = {k: np.asarray(v) for k, v in params["layers"].items()}
    for l in range(depth):
        alpha, beta = (
            np.broadcast_to(p[k][l], (B, S, *p[k][l].shape)) for k in ("static_alpha", "static_beta")
        )
        if dynamic:
            normed = streams - streams.mean(-1, keepdims=True)
            normed = normed / np.sqrt(normed.var(-1, keepdims=True) + 1e-5)
            alpha = alpha + p["dynamic_alpha_scale"][l] * np.tanh(normed @ p["dynamic_alpha_fn"][l].T)
            beta = beta + p["dynamic_beta_scale"][l] * np.tanh(normed @ p["dynamic_beta_fn"][l])
        reads.append(alpha[..., 0]), mixes.append(np.swapaxes(alpha[..., 1:], -1, -2)), writes.append(beta)
        streams = mixes[-1] @ streams + beta[..., None] * np.asarray(record.outputs[l])[:, :, None]
    reads.append(np.ones((B, S, n)))
    expected = np.zeros((depth + 1, depth + 1, B, S))
    for l in range(depth + 1):
        for j in range(l + 1):
            carried = np.ones((B, S, n)) if j == 0 else writes[j - 1]
            for r in range(j, l):
                carried = np.einsum("bsnm,bsm->bsn", mixes[r], carried)
            expected[l, j] = np.sum(reads[l] * carried, axis=-1)
    matrix = depth_mixing(connection, record.contexts, e)
    np.testing.assert_allclose(matrix, expected, atol=1e-12 * np.abs(expected).max())


def test_a_bfloat16_model_is_measured_without_its_rounding(x64):
    model, params = model_and_params(HyperConnections(streams=2))
    model = model.clone(config=dataclasses.replace(SMALL, dtype="bfloat16"))
    assert model_mixing(model, params, tokens()).error < 1e-5


def test_nothing_but_padding_is_refused():
    model = Transformer(SMALL, Plain())
    with pytest.raises(ValueError, match="padding"):
        model_mixing(model, {}, tokens(), jnp.zeros((B, 5), jnp.int32))


def test_round_trip_through_json():
    none = np.zeros((3, 3))
    readers, sources = ("a", "b", "out"), ("e", "a", "b")
    result = MixingResult("plain", "h <- h + g", "a paper", np.tri(3), none, none, readers, sources, 1e-7, 6)
    again = MixingResult.from_dict(json.loads(json.dumps(result.to_dict())))
    np.testing.assert_array_equal(again.mean, result.mean)
    assert again.to_dict() == result.to_dict() and again.readers == result.readers
