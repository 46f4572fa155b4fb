"""Numerics against independent numpy in float64: values, gradients, and the algebra that must hold."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from lmres.ops import (
    Span,
    combine_streams,
    depth_softmax,
    mix_heads,
    mix_streams,
    normed_projection,
    rms_norm,
    sinkhorn,
    weighted_sum,
    weighted_sums,
    weighted_sums_back,
)

few = settings(max_examples=15, deadline=None)
M, B, S, D, N = 6, 2, 3, 4, 3


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def numeric_gradient(f, x, step=1e-6):
    """Central differences of a scalar function."""
    g = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        g[i] = (f(up) - f(down)) / (2 * step)
    return g


def check_gradients(f, *arrays, tolerance=1e-7):
    """``jax.grad`` of every argument against central differences."""
    loss = jax.jit(lambda *a: jnp.sum(jnp.sin(f(*a))))
    grads = jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), argnums=tuple(range(len(arrays))))(*arrays)
    for i, g in enumerate(grads):
        numeric = numeric_gradient(lambda x, i=i: float(loss(*arrays[:i], x, *arrays[i + 1 :])), arrays[i])
        np.testing.assert_allclose(g, numeric, atol=tolerance * max(1, np.abs(numeric).max()))


spans = [Span(0, 1, 4), Span(1, 2, 3), Span(5, 1, 1), Span(0, 1, M)]


R = 2
# Shapes of the weights, how to write them per channel, and the axes of their cotangents.
FORMS = {
    "scalar": ((R, M), lambda w: w[..., None, None, None], lambda p: p.sum((2, 3, 4))),
    "channel": ((R, M, D), lambda w: w[:, :, None, None, :], lambda p: p.sum((2, 3))),
    "token": ((R, M, B, S), lambda w: w[..., None], lambda p: p.sum(4)),
    "head": (
        (R, M, B, S, 2),
        lambda w: np.repeat(w, D // 2, axis=-1),
        lambda p: p.reshape(*p.shape[:4], 2, -1).sum(-1),
    ),
}


def history(form, span):
    """slots, g, the slots used, weights that are 0 outside the span, and the weights per channel, [R, M, B, S, D]."""
    shape, spread, _ = FORMS[form]
    rng = np.random.default_rng(0)
    slots, g = rng.normal(size=(M, B, S, D)), rng.normal(size=(R, B, S, D))
    used = np.array([span.first + span.stride * t for t in range(span.count)])
    weights = np.zeros(shape)
    weights[:, used] = rng.normal(size=weights[:, used].shape)
    return slots, g, used, weights, np.broadcast_to(spread(weights), (R, *slots.shape))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("span", spans, ids=str)
def test_history_reads(span, form):
    slots, g, used, weights, wide = history(form, span)
    traced = jax.jit(weighted_sums)(weights, slots, span)
    np.testing.assert_allclose(traced, np.sum(wide * slots, axis=1), atol=1e-14)
    np.testing.assert_allclose(weighted_sum(weights[1], slots, span), traced[1], atol=1e-14)
    dots = FORMS[form][2](g[:, None] * slots)
    dots[:, np.setdiff1d(np.arange(M), used)] = 0
    outer = np.sum(wide * g[:, None], axis=0)
    (found,), added = jax.jit(weighted_sums_back)(g, [weights], slots, slots, span)
    np.testing.assert_allclose(found, dots, atol=1e-13)
    np.testing.assert_allclose(added, slots + outer, atol=1e-14)
    _, vjp = jax.vjp(lambda w, h: weighted_sums(w, h, span), weights, slots)
    g_weights, g_slots = vjp(jnp.asarray(g))
    np.testing.assert_allclose(g_weights, dots, atol=1e-13)
    np.testing.assert_allclose(g_slots, outer, atol=1e-14)


@pytest.mark.parametrize("form", FORMS)
def test_history_reads_are_the_same_where_there_are_no_cheap_loops(form):
    """The fused form of accelerators, run on the CPU."""
    span = Span(1, 2, 2)
    slots, g, _, weights, _ = history(form, span)
    calls = [
        lambda: weighted_sums(weights, slots, span),
        lambda: weighted_sums_back(jnp.asarray(g), [weights], jnp.asarray(slots), jnp.asarray(slots), span),
    ]
    looped = [call() for call in calls]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "platform_dependent", lambda *a, cpu, default: default(*map(_as_array, a)))
        for call, expected in zip(calls, looped):
            for found, wanted in zip(jax.tree.leaves(call()), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(found, wanted, atol=1e-13)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("count", [0, 2, M])
def test_mixes_over_heads(count, fused):
    rng, g_heads, size = np.random.default_rng(0), 3, 2
    slots, g = rng.normal(size=(M, B, S, g_heads, size)), rng.normal(size=(B, S, g_heads, size))
    weights = rng.normal(size=(g_heads, M, g_heads)) * (np.arange(M) < count)[:, None]
    dots = np.einsum("bshk,mbsgk->hmg", g, slots) * (np.arange(M) < count)[:, None]
    outer = np.einsum("hmg,bshk->mbsgk", weights, g)
    with pytest.MonkeyPatch.context() as patch:
        if fused:
            patch.setattr(jax.lax, "platform_dependent", lambda *a, cpu, default: default(*map(jnp.asarray, a)))
        out, vjp = jax.vjp(lambda w, x: mix_heads(w, x, count), jnp.asarray(weights), jnp.asarray(slots))
        np.testing.assert_allclose(out, np.einsum("hmg,mbsgk->bshk", weights, slots), atol=1e-13)
        for actual, expected in zip(vjp(jnp.asarray(g)), (dots, outer), strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-13)


def _as_array(x):
    return x if isinstance(x, Span) else jax.tree.map(jnp.asarray, x)


@few
@given(st.integers(0, 2**31), st.integers(1, M))
def test_depth_softmax(seed, valid):
    logits = np.random.default_rng(seed).normal(0, 5, (M, B))
    a = np.asarray(depth_softmax(logits, (np.arange(M) < valid)[:, None]))
    assert np.all(a[valid:] == 0)
    np.testing.assert_allclose(a.sum(0), 1, atol=1e-14)
    e = np.exp(logits[:valid])
    np.testing.assert_allclose(a[:valid], e / e.sum(0), rtol=1e-12)


@pytest.mark.parametrize("shared", [False, True])
def test_stream_mixes(shared):
    rng = np.random.default_rng(0)
    lead = () if shared else (B, S)
    x, y = rng.normal(size=(B, S, N, D)), rng.normal(size=(B, S, D))
    w, m = rng.normal(size=(*lead, N)), rng.normal(size=(*lead, N, N))
    np.testing.assert_allclose(combine_streams(w, x), np.einsum("...n,bsnd->bsd" if shared else "bsn,bsnd->bsd", w, x))
    if shared:
        expected = np.einsum("nm,bsnd->bsmd", m, x) + np.einsum("m,bsd->bsmd", w, y)
    else:
        expected = np.einsum("bsnm,bsnd->bsmd", m, x) + np.einsum("bsm,bsd->bsmd", w, y)
    np.testing.assert_allclose(mix_streams(m, x, w, y), expected, atol=1e-13)
    check_gradients(combine_streams, w, x)
    check_gradients(mix_streams, m, x, w, y)


@pytest.mark.parametrize(
    "centre, eps, floor", [(False, 1e-3, 0.0), (True, 1e-3, 0.0), (False, 0.0, 1e-9), (True, 1e-5, 2.0)]
)
def test_normed_projection(centre, eps, floor):
    rng = np.random.default_rng(0)
    x, w = rng.normal(0.5, 1, (B, S, D)), rng.normal(size=(N, D))
    c = x - x.mean(-1, keepdims=True) if centre else x
    normed = c / np.sqrt(np.maximum((c**2).mean(-1, keepdims=True), floor) + eps)
    np.testing.assert_allclose(normed_projection(x, w, centre=centre, eps=eps, floor=floor), normed @ w.T, atol=1e-13)
    check_gradients(lambda x, w: normed_projection(x, w, centre=centre, eps=eps, floor=floor), x, w)


def test_rms_norm_in_sixteen_bits_has_wide_statistics():
    x = jnp.full((4, 512), 300.0, jnp.float16)  # the sum of squares overflows float16
    y = rms_norm(x, jnp.full(512, 2.0), 1e-6)
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(y, np.float64), 2.0, rtol=1e-3)


@few
@given(st.integers(0, 2**31), st.sampled_from([0.3, 1.0, 3.0]), st.integers(2, 5), st.sampled_from([0, 1]))
def test_sinkhorn_algebra(seed, size, n, first):
    z = np.random.default_rng(seed).normal(0, size, (n, n, 2))
    m = np.asarray(sinkhorn(z, 20, first=first))
    assert np.all(m >= 0)
    np.testing.assert_allclose(m.sum(1 - first), 1, atol=1e-12)  # the axis normalised last
    # Adding a constant to what is divided out first changes nothing, exactly as in exact arithmetic.
    shift = np.random.default_rng(seed + 1).normal(0, 50, (n, 2))
    moved = z + np.expand_dims(shift, first)
    np.testing.assert_allclose(sinkhorn(moved, 20, first=first), m, atol=1e-9)
    # A transposed problem is the other order.
    np.testing.assert_allclose(sinkhorn(z.swapaxes(0, 1), 20, first=1 - first), m.swapaxes(0, 1), atol=1e-12)
    # Products of matrices with unit sums along an axis keep them, so the mean over streams cannot blow up.
    product = np.einsum("abt,bct->act", m, m)
    np.testing.assert_allclose(product.sum(1 - first), 1, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"eps": 1e-6}, {"floor": 1e-12}, {"first": 1, "eps": 1e-3}], ids=str)
@pytest.mark.parametrize("iters", [1, 4])
def test_sinkhorn_gradient(options, iters):
    z = np.random.default_rng(0).normal(size=(N, N, 2))
    check_gradients(lambda z: sinkhorn(z, iters, **options), z)


def test_sinkhorn_in_float32_reaches_its_accuracy():
    z = np.random.default_rng(0).normal(size=(4, 4, 1000)).astype(np.float32)
    m = np.asarray(sinkhorn(z, 20))
    assert m.dtype == np.float32
    deviation = max(np.abs(m.sum(axis) - 1).max() for axis in (0, 1))
    assert deviation < 1e-2
    assert np.median(np.abs(m.sum(0) - 1)) < 1e-5
    low = np.asarray(sinkhorn(z.astype(jnp.bfloat16), 20))
    assert low.dtype == np.float32, "the iteration is float32 whatever the input"
    huge = np.asarray(sinkhorn((1e4 * z), 20))
    assert np.all(np.isfinite(huge))


def test_sinkhorn_says_what_is_wrong():
    for bad in ({"iters": 0}, {"first": 2}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            sinkhorn(jnp.zeros((2, 2)), **bad)
    with pytest.raises(ValueError, match=r"square.*\(2, 3\)"):
        sinkhorn(jnp.zeros((2, 3)))
