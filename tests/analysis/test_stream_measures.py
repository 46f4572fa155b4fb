"""Gains of composites, source entropies and stream similarities, against numpy and against what must hold."""

import json
from math import log

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_model_mixing import SEGMENTS, SMALL, B, D, S, model_and_params, tanh_run, tokens

from lmres.analysis import composite_gains, model_streams, source_entropy, stream_similarity
from lmres.residual import (
    MHC,
    AttentionResiduals,
    DenseFormer,
    HyperConnections,
    Plain,
    RecentDeepCrossAttention,
    ValueResidual,
    depth_mixing,
)
from lmres.residual.transfer import stream_maps, stream_states


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def maps_of(connection, depth=5, **options):
    h, record, e, params = tanh_run(connection, depth, **options)
    maps = np.asarray(stream_maps(connection, record.contexts, record.state, e))
    return maps, record, e, params, h


def doubly_stochastic(rng, *shape, n):
    """Convex combinations of permutations: row and column sums are one without any iteration."""
    weights = rng.dirichlet(np.ones(6), shape)
    permutations = np.stack([np.eye(n)[rng.permutation(n)] for _ in range(6)])
    return np.einsum("...p,pij->...ij", weights, permutations)


# The maps and the states


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_maps_of_hyper_connections_are_the_transposed_mixing_weights(dynamic):
    connection = HyperConnections(streams=3, dynamic=dynamic)
    maps, record, _, params, _ = maps_of(connection)
    for l in range(5):
        alpha = np.asarray(params["layers"]["static_alpha"][l] if not dynamic else record.contexts[l][0])
        expected = np.broadcast_to(np.swapaxes(alpha[..., 1:], -1, -2), (B, S, 3, 3))
        np.testing.assert_allclose(maps[l], expected, atol=1e-14)


@pytest.mark.parametrize(
    "connection",
    [Plain(), Plain(norm="post"), HyperConnections(streams=3), MHC(streams=3, iters=2), HyperConnections(streams=D)],
    ids=lambda c: c.name,
)
def test_states_are_the_maps_of_the_states_before_plus_the_outputs(connection):
    maps, record, e, _, _ = maps_of(connection)
    states = np.asarray(stream_states(connection, record.contexts, e, record.outputs))
    last = np.asarray(record.state)
    np.testing.assert_allclose(states[-1], last if last.ndim == 4 else last[..., None, :], atol=1e-12)
    product = "bstr,bsrc->bstc" if not connection.channelwise else "bstrc,bsrc->bstc"
    for l, y in enumerate(record.outputs):
        rest = states[l + 1] - np.einsum(product, maps[l], states[l])
        # What is left is the output with a weight per stream: every stream is parallel to it.
        y = np.asarray(y)[..., None, :]
        weight = np.sum(rest * y, -1, keepdims=True) / np.sum(y * y, -1, keepdims=True)
        np.testing.assert_allclose(rest, weight * y, atol=1e-11 * np.abs(states).max())


def test_maps_of_a_channelwise_connection_are_its_scales():
    maps, record, *_ = maps_of(Plain(norm="post"))
    assert maps.shape == (5, B, S, 1, 1, D)
    for l in range(5):
        np.testing.assert_allclose(maps[l, :, :, 0, 0], record.contexts[l], rtol=1e-14)


def test_what_has_no_maps_says_why():
    class Turned(Plain):
        has_matrix = False

        def write(self, params_l, state, context, y, l):
            return state @ jnp.ones((D, D)) + y

    _, record, e, _ = tanh_run(Turned())
    with pytest.raises(ValueError, match="plain mixes channels in its state"):
        stream_maps(Turned(), record.contexts, record.state, e)
    connection = AttentionResiduals()
    _, record, e, _ = tanh_run(connection)
    with pytest.raises(ValueError, match="attnres-full appends to its state"):
        stream_maps(connection, record.contexts, record.state, e)


# Composites


@pytest.mark.parametrize("channels", [0, 2])
def test_gains_are_the_norms_of_the_products(channels):
    rng = np.random.default_rng(0)
    units, n = 4, 3
    maps = rng.normal(size=(units, B, S, n, n, *([channels] if channels else [])))
    keep = np.array([[True, False, True], [True, True, False]])
    gains = composite_gains(maps, keep)
    for first in range(units):
        for last in range(units):
            found = [getattr(s, k)[first, last] for s in (gains.forward, gains.backward) for k in vars(s)]
            if last < first:
                assert np.all(np.isnan(found))
                continue
            products = []
            for b, s in zip(*np.nonzero(keep)):
                for c in range(max(channels, 1)):
                    product = np.eye(n)
                    for l in range(first, last + 1):
                        product = (maps[l, b, s, ..., c] if channels else maps[l, b, s]) @ product
                    products.append(product)
            norm = lambda order: [np.linalg.norm(p, order) for p in products]  # noqa: B023, E731
            expected = []
            for most, least in ((np.inf, -np.inf), (1, -1)):  # rows, columns
                expected += [np.mean(norm(most)), np.max(norm(most)), np.min(norm(least))]
            np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_doubly_stochastic_maps_neither_grow_nor_shrink_anything():
    maps = doubly_stochastic(np.random.default_rng(1), 12, B, S, n=4)
    gains = composite_gains(maps)
    upper = np.triu_indices(12)
    for summary in (gains.forward, gains.backward):
        for values in vars(summary).values():
            np.testing.assert_allclose(values[upper], 1, rtol=1e-13)


def test_a_deviation_compounds_with_depth():
    maps = np.broadcast_to(1.1 * np.eye(2), (8, 1, 1, 2, 2))
    gains = composite_gains(maps)
    np.testing.assert_allclose(gains.forward.mean[0], 1.1 ** np.arange(1, 9))
    np.testing.assert_allclose(gains.backward.mean[:, -1], 1.1 ** np.arange(8, 0, -1))


def test_gains_of_mhc_stay_and_those_of_unbound_streams_do_not():
    upper = np.triu_indices(8)
    gains = composite_gains(maps_of(MHC(streams=3), depth=8)[0])
    for values in vars(gains.forward).values():
        np.testing.assert_allclose(values[upper], 1, atol=1e-4)  # what a stream gets is a mean, to eps
    np.testing.assert_allclose(gains.backward.mean[upper], 1, atol=0.1)  # to Sinkhorn's tolerance
    free = composite_gains(maps_of(HyperConnections(streams=3), depth=8)[0])
    assert free.forward.mean[0, -1] > 3 and free.forward.smallest[upper].min() < 0.5


# Entropies


def test_entropy_of_known_rows():
    matrix = np.array([[2.0, 0, 0, 0], [3, 3, 0, 0], [-5, 5, 5, 0], [0.5, 0.25, -0.125, 0.125], [0, 0, 0, 0]])
    found = source_entropy(matrix[:, :, None, None])
    nats = [0, log(2), log(3), 1.75 * log(2), 0]
    for summary, expected in ((found.nats, nats), (found.effective, np.exp(nats))):
        for values in vars(summary).values():
            np.testing.assert_allclose(values, expected, atol=1e-15)


def test_entropy_is_per_token_and_leaves_out_padding():
    matrix = np.random.default_rng(2).normal(size=(4, 4, B, S))
    keep = np.array([[True, False, True], [False, True, False]])
    found = source_entropy(matrix, keep)
    for l in range(4):
        entropies = []
        for b, s in zip(*np.nonzero(keep)):
            p = np.abs(matrix[l, :, b, s]) / np.abs(matrix[l, :, b, s]).sum()
            entropies.append(-sum(x * log(x) for x in p))
        expected = (np.mean(entropies), np.max(entropies), np.min(entropies))
        np.testing.assert_allclose([v[l] for v in vars(found.nats).values()], expected, rtol=1e-12)
        assert found.effective.mean[l] == pytest.approx(np.mean(np.exp(entropies)))


def test_the_plain_residual_spreads_over_all_there_is():
    _, record, e, _ = tanh_run(Plain())
    found = source_entropy(depth_mixing(Plain(), record.contexts, e))
    np.testing.assert_allclose(found.effective.mean, np.arange(1, 7), rtol=1e-13)


# Similarities


def test_cosines_of_known_streams():
    e1, e2 = np.eye(4)[:2]
    states = np.array([[e1, 5 * e1, 2 * e1], [e1, e2, -3 * e1], [e1, e1 + e2, 0 * e1]])[:, None, None]
    found = stream_similarity(states)
    np.testing.assert_allclose(found.mean, [1, -1 / 3, 0.5**0.5 / 3], atol=1e-15)
    np.testing.assert_allclose(found.largest, [1, 0, 0.5**0.5], atol=1e-15)
    np.testing.assert_allclose(found.smallest, [1, -1, 0], atol=1e-15)
    with pytest.raises(ValueError, match="between streams, and there is 1"):
        stream_similarity(states[..., :1, :])


def test_streams_start_alike_and_separate():
    for move in (False, True):
        connection = HyperConnections(streams=3)
        _, record, e, _ = tanh_run(connection, move=move)
        states = stream_states(connection, record.contexts, e, record.outputs)
        found = stream_similarity(states)
        np.testing.assert_allclose(found.smallest[: 1 if move else None], 1, rtol=1e-12)
        assert not move or found.mean[-1] < 0.9


# The model


@pytest.mark.parametrize(
    "connection",
    [Plain(), Plain(norm="post"), DenseFormer(), AttentionResiduals(block=3), HyperConnections(streams=3), MHC()],
    ids=lambda c: c.name,
)
def test_all_measures_of_a_transformer(connection):
    model, params = model_and_params(connection)
    result = model_streams(model, params, tokens(), SEGMENTS)
    growing, streams = isinstance(connection, (DenseFormer, AttentionResiduals)), getattr(connection, "streams", 1)
    assert result.connection == connection.name and result.tokens == 8
    assert result.readers == ("attn 1", "mlp 1", "attn 2", "mlp 2", "out")
    assert result.units == (("block 1", "block 2") if connection.unit == "block" else result.readers[:-1])
    assert (result.gains is None) == growing and (result.similarity is None) == (streams == 1)
    assert result.entropy.effective.mean[0] == pytest.approx(1) and result.entropy.effective.largest.max() <= 5 + 1e-9
    if not growing:
        assert result.gains.forward.mean.shape == (4, 4)
    if streams > 1:
        assert result.similarity.mean.shape == (5,) and result.similarity.smallest[0] == pytest.approx(1)
    again = json.loads(json.dumps(result.to_dict()))
    np.testing.assert_array_equal(again["entropy"]["nats"]["mean"], result.entropy.nats.mean)


def test_padding_does_not_count_and_alone_is_refused():
    model, params = model_and_params(HyperConnections(streams=2))
    other = np.where(SEGMENTS == 0, (tokens() + 1) % SMALL.vocab_size, tokens())
    one, two = (model_streams(model, params, t, SEGMENTS) for t in (tokens(), other))
    np.testing.assert_array_equal(one.similarity.largest, two.similarity.largest)
    np.testing.assert_array_equal(one.gains.forward.largest, two.gains.forward.largest)
    with pytest.raises(ValueError, match="padding"):
        model_streams(model, params, tokens(), np.zeros_like(SEGMENTS))


@pytest.mark.parametrize("connection", [RecentDeepCrossAttention(), ValueResidual()], ids=lambda c: c.name)
def test_a_state_that_is_no_streams_has_its_matrix_alone(connection):
    model, params = model_and_params(connection)
    result = model_streams(model, params, tokens(), SEGMENTS)
    assert result.gains is None and result.similarity is None and result.entropy is not None
