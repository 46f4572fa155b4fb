"""Schedules against values worked out by hand and in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmres.train.config import ScheduleConfig
from lmres.train.schedule import make_schedule


def values(steps, **config):
    f = make_schedule(ScheduleConfig(**config), steps)
    return np.array([float(f(i)) for i in range(steps)])


def test_linear_by_hand():
    np.testing.assert_allclose(
        values(6, kind="linear", warmup=2, final=0.2), [0.5, 1.0, 0.8, 0.6, 0.4, 0.2], rtol=1e-6
    )


def test_wsd_by_hand():
    np.testing.assert_allclose(
        values(10, kind="wsd", warmup=0.2, final=0.0, decay_fraction=0.4),
        [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0],
        atol=1e-6,
    )


def test_constant_keeps_the_peak():
    np.testing.assert_allclose(values(5, kind="constant", warmup=4), [0.25, 0.5, 0.75, 1, 1], rtol=1e-6)


def test_cosine_against_numpy():
    got = values(100, kind="cosine", warmup=0.1, final=0.1)
    u = np.arange(1, 101)
    want = np.where(u <= 10, u / 10, 0.1 + 0.45 * (1 + np.cos(np.pi * (u - 10) / 90)))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert got[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (0, 7), (7, 7), (0.99, 3)])
def test_finite_in_range_and_held_at_the_end(kind, warmup, steps):
    decay = 0.0 if kind == "wsd" and warmup else 0.5
    f = make_schedule(ScheduleConfig(kind=kind, warmup=warmup, decay_fraction=decay), steps)
    got = [float(f(i)) for i in range(steps + 5)]
    assert all(0.0 < v <= 1.0 for v in got)
    assert got[steps - 1 :] == [got[steps - 1]] * 6


def test_traced_and_host_steps_agree():
    f = make_schedule(ScheduleConfig(warmup=3), 20)
    traced = jax.jit(jax.vmap(f))(jnp.arange(20))
    np.testing.assert_allclose(traced, [float(f(i)) for i in range(20)], rtol=1e-6)
    assert traced.dtype == jnp.float32


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"warmup": 50}, ["schedule.warmup=50", "train.steps=10"]),
        ({"warmup": 2.5}, ["schedule.warmup=2.5"]),
        ({"warmup": -1}, ["schedule.warmup=-1"]),
        ({"final": 1.5}, ["schedule.final=1.5"]),
        ({"kind": "wsd", "decay_fraction": 2.0}, ["schedule.decay_fraction=2.0"]),
        ({"kind": "wsd", "warmup": 5, "decay_fraction": 0.8}, ["schedule.warmup", "schedule.decay_fraction"]),
    ],
)
def test_errors_name_the_keys(config, words):
    with pytest.raises(ValueError) as error:
        make_schedule(ScheduleConfig(**config), 10)
    assert all(word in str(error.value) for word in words)


def test_no_steps():
    with pytest.raises(ValueError, match=r"train\.steps=0"):
        make_schedule(ScheduleConfig(), 0)
