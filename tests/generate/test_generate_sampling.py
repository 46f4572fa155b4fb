"""Sampling against a slow reference and against the probabilities it should follow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lmres.generate import Sampling, filter_logits, row_keys

rows = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=7, max_size=7)


def allowed(logits, top_k, top_p):
    """The ids left, by the definition, in float64: top-k first, then top-p on what it leaves. Also how near
    the sum of some of their probabilities comes to p."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k]
    weights = [np.exp(logits[i]) for i in order]
    kept, total, margin = [], 0.0, 1.0
    for i, weight in zip(order, weights):
        if top_p is not None and top_p < 1 and total >= top_p:
            break
        kept.append(i)
        total += weight / sum(weights)
        margin = min(margin, abs(total - top_p)) if top_p is not None else margin
    return kept, margin


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows, st.none() | st.integers(1, 9), st.none() | st.floats(0.01, 1.0))
def test_filters_keep_what_the_definition_keeps(logits, top_k, top_p):
    expected, margin = allowed(logits, top_k, top_p)
    assume(margin > 1e-5 or top_p == 1.0)
    found = np.asarray(filter_logits(jnp.asarray([logits], jnp.float32), top_k, top_p))[0]
    assert set(np.flatnonzero(np.isfinite(found))) == set(expected)
    np.testing.assert_array_equal(found[expected], np.asarray(logits, np.float32)[expected])


def test_ties_go_to_the_lower_id():
    assert np.isfinite(filter_logits(jnp.zeros((1, 5)), 2)).tolist() == [[True, True, False, False, False]]
    assert Sampling()(jnp.zeros((1, 5)), row_keys(0, [[1]])).tolist() == [0]


def test_one_and_everything_are_no_filter():
    logits = jnp.log(jnp.full((1, 1000), 1e-3))
    np.testing.assert_array_equal(filter_logits(logits, 1000, 1.0), logits)


LOGITS = np.array([1.5, -0.5, 0.25, 3.0, -2.0, 2.0], np.float32)


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [
        (1.0, None, None),
        (0.5, None, None),
        (3.0, None, None),
        (1.0, 3, None),
        (1.0, None, 0.8),
        (2.0, 4, 0.9),
    ],
)
def test_draws_follow_the_probabilities(temperature, top_k, top_p):
    draws = 20_000
    keys = jax.random.split(jax.random.key(1, impl="threefry2x32"), draws)
    tokens = jax.jit(Sampling(temperature, top_k, top_p))(jnp.broadcast_to(LOGITS, (draws, 6)), keys)
    frequency = np.bincount(tokens, minlength=6) / draws
    scaled = LOGITS.astype(np.float64) / temperature
    kept, _ = allowed(list(scaled), top_k, top_p)
    probability = np.zeros(6)
    probability[kept] = np.exp(scaled[kept]) / np.sum(np.exp(scaled[kept]))
    spread = np.sqrt(probability * (1 - probability) / draws)
    assert np.all(np.abs(frequency - probability) <= 4 * spread)  # 0 where nothing may be drawn


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = np.random.default_rng(0).standard_normal((8, 50)).astype(np.float32) * 100
    keys = row_keys(3, [[i] for i in range(8)])
    assert Sampling(temperature, top_p=0.9)(logits, keys).tolist() == logits.argmax(-1).tolist()


def test_bfloat16_logits_are_sampled_in_float32():
    logits = jnp.asarray(LOGITS, jnp.bfloat16)[None]
    keys = row_keys(0, [[1]])
    wide = Sampling(0.7, 4, 0.9)(logits.astype(jnp.float32), keys)
    assert Sampling(0.7, 4, 0.9)(logits, keys).tolist() == wide.tolist()


def test_a_row_has_its_own_key():
    def data(*args):
        return np.asarray(jax.random.key_data(row_keys(*args))).tolist()

    a, b, again = data(5, [[1, 2], [3], [1, 2]])
    assert a != b and a != again
    assert data(5, [[3]]) == [b] and data(5, [[7], [1, 2], [3]])[1:] == [a, b]
    assert data(6, [[3]]) != [b]
    assert data(5, [[1], [0, 1], [1, 0]]) == data(5, [[1]]) + data(5, [[0, 1]]) + data(5, [[1, 0]])


def test_a_row_is_drawn_the_same_in_any_batch():
    logits = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    prompts = [[i, 1] for i in range(5)]
    sampling = Sampling(1.3, top_k=20)
    together = sampling(logits, row_keys(2, prompts)).tolist()
    backwards = sampling(logits[::-1], row_keys(2, prompts[::-1])).tolist()
    alone = [int(sampling(logits[i : i + 1], row_keys(2, [prompts[i]]))[0]) for i in range(5)]
    assert together == backwards[::-1] == alone


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"top_p": float("nan")}, "top_p=nan"),
    ],
)
def test_values_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_out_of_range_are_named(seed):
    with pytest.raises(ValueError, match=f"seed={seed}"):
        row_keys(seed, [[1]])
