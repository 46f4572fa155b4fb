"""Connections of constant size, in float64: against their equations, and where they are the plain residual or each
other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_references import (
    FINAL_GAIN,
    GAINS,
    WEIGHTS,
    B,
    D,
    E,
    L,
    S,
    gated_reference,
    mhc_reference,
    multi_gate_reference,
    paper_sinkhorn,
    plain,
    reference_mixing,
    rms,
    slots_reference,
    softmax,
    sub_layer,
)
from variants import randomised

from lmres.ops import add_to_streams, constraints, mix_streams
from lmres.residual import (
    MHC,
    AttentionResiduals,
    FracConnections,
    GatedResidual,
    GeneralizedHyperConnections,
    HyperConnections,
    MultiGateResiduals,
    Stack,
)

KINDS = ("sinkhorn", "permutations", "kronecker", "circulant", "identity")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def run(connection, params):
    """The column's output, as a scan."""

    def branch(w, x, i, args, inputs):
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) if connection.branch_norms else x
        return jnp.tanh(x @ w), ()

    return Stack(connection, (branch,), L)(params, (jnp.asarray(WEIGHTS),), jnp.asarray(E))[0]


def output(connection, params):
    """After the final norm, if the connection leaves one to be done."""
    h = np.asarray(jax.jit(lambda p: run(connection, p))(params))
    return rms(h) if connection.final_norm else h


def start(connection, **layers):
    """Parameters at their start in float64, entries of ``layers`` replaced."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), connection.init(jax.random.key(0), L, D))
    assert set(layers) <= set(params["layers"])
    return {**params, "layers": {**params["layers"], **layers}}


def moved(connection, size=0.5):
    """Parameters far from their start, as numpy arrays."""
    return jax.tree.map(np.array, randomised(start(connection), 1, size))


def noise(*shape):
    return np.random.default_rng(7).normal(size=shape)


def same(a, b, tolerance=1e-12):
    np.testing.assert_allclose(a, b, atol=tolerance, rtol=0)


# Hyper-, Frac- and Generalised Hyper-Connections


@pytest.mark.parametrize(
    "connection, n, m, tau",
    [
        (FracConnections(), 4, 4, 1.0),
        (FracConnections(fractions=2, dynamic=False), 2, 2, 1.0),
        (GeneralizedHyperConnections(streams=3), 3, 2, 2.0),
        (GeneralizedHyperConnections(streams=4, fractions=4), 4, 4, np.sqrt(2.0)),
        (HyperConnections(streams=3), 3, 1, 1.0),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_slots_follow_their_equations(connection, n, m, tau):
    params = moved(connection, 0.3)
    same(output(connection, params), slots_reference(params, n, m, tau))


@pytest.mark.parametrize(
    "connection",
    [
        *(HyperConnections(streams=n) for n in (1, 2, 4, 8)),
        *(FracConnections(fractions=m) for m in (1, 2, 4, 8)),
        GeneralizedHyperConnections(streams=3),
        GeneralizedHyperConnections(streams=8, fractions=4),
    ],
    ids=lambda c: c.name,
)
def test_slots_start_as_prenorm_with_any_scales(connection):
    scales = {"dynamic_alpha_scale": noise(L), "dynamic_beta_scale": noise(L)}
    same(output(connection, start(connection, **scales)), plain())


def test_static_streams_can_be_parallel_branches():
    """Two streams with these matrices run sub-layers 0 | 1, 2 | 3 in parallel: the transpose and the parity matter."""
    connection = HyperConnections(streams=2, dynamic=False)
    first = ([[0.0, 1, 0], [1, 0, 1]], [1.0, 0])  # [A_m | A_r], B
    second = ([[0.0, 1, 1], [1, 0, 0]], [1.0, 1])
    pairs = [first, second, first, second]
    alpha, beta = (np.array([pair[i] for pair in pairs]) for i in (0, 1))
    h = E
    for group in ((0, 1), (2, 3)):
        h = h + sum(sub_layer(l, rms(h)) for l in group)
    same(output(connection, start(connection, static_alpha=alpha, static_beta=beta)), rms(h))


def test_frac_and_generalised_are_hyper_connections_and_each_other_at_the_ends():
    static = {"dynamic": False}
    hc, frac = HyperConnections(streams=1, **static), FracConnections(fractions=1, **static)
    params = moved(hc)
    same(output(frac, params), output(hc, params), 0)

    frac, ghc = FracConnections(), GeneralizedHyperConnections(streams=4, fractions=4)
    params = moved(frac)
    params["layers"]["dynamic_beta_fn"] = np.zeros((L, D // 4))  # the generalised form has none that are diagonal
    wide = dict(params["layers"])
    wide["static_beta"] = wide["static_beta"][..., None] * np.eye(4)
    wide["dynamic_beta_fn"] = np.zeros((L, 4, D // 4))
    wide["dynamic_alpha_fn"] = wide["dynamic_alpha_fn"] * np.sqrt(D / 4)
    same(output(ghc, {"layers": wide, "shared": {}}), output(frac, params))

    hc, ghc = HyperConnections(streams=3), GeneralizedHyperConnections(streams=3, fractions=1)
    params = moved(hc)
    wide = dict(params["layers"])
    wide["static_beta"] = wide["static_beta"][..., None]
    wide["dynamic_alpha_fn"] = wide["dynamic_alpha_fn"] * np.sqrt(D)
    wide["dynamic_beta_fn"] = wide["dynamic_beta_fn"][:, None] * np.sqrt(D)
    same(output(ghc, {"layers": wide, "shared": {}}), output(hc, params))


def test_published_parameter_counts():
    assert HyperConnections().cost(32, 2048).params == 394_048  # OLMo-1B, DHC x 4
    m, d, n = 4, 2048, 4
    assert FracConnections().cost(1, d).params == m * (2 * m + 1) + d // m * (2 * m + 1) + 2
    assert MHC(readout="sum").cost(1, d).params == 24 * (4 * d + 1) + 3
    assert MHC(constraint="permutations", readout="sum").cost(1, d).params == (2 * n + 24) * (n * d + 1) + 3
    one_more = [GatedResidual(rank=320).cost(depth, d).params for depth in (1, 2)]
    assert one_more[1] - one_more[0] == (2 * 320 + n + 1) * n * d


# mHC and its relatives


@pytest.mark.parametrize("reads", ["own", "previous"])
@pytest.mark.parametrize("kind", KINDS)
def test_mhc_follows_its_equations_and_starts_as_prenorm(kind, reads):
    connection = MHC(constraint=kind, reads=reads, eps=0.0, norm_eps=0.0)
    params = moved(connection)
    same(output(connection, params), mhc_reference(connection, params), 1e-11)
    n = connection.streams
    bias = params["layers"]["bias"].copy()
    bias[:, n : 2 * n] = 0  # any pre and comb do
    same(output(connection, start(connection, bias=bias)), plain())


@pytest.mark.parametrize("iters", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_mhc_starts_as_prenorm_after_any_number_of_iterations(n, iters):
    connection = MHC(streams=n, iters=iters, norm_eps=0.0)
    bias = noise(L, n * (n + 2))
    bias[:, n : 2 * n] = 0
    params = start(connection, bias=bias)
    same(output(connection, params), plain(), 1e-4)  # the reference code's eps
    same(output(MHC(streams=n, iters=iters, eps=0.0, norm_eps=0.0), params), plain())


def test_reads_of_the_previous_sub_layer_are_own_reads_if_the_weights_are_constant():
    shifted = MHC(reads="previous", norm_eps=0.0)
    own, n = MHC(norm_eps=0.0), 4
    params = moved(own)
    params["layers"]["phi"][:, :n] = 0
    params["layers"]["bias"][:, :n] = weights = noise(n)
    params["shared"] = {"head_phi": np.zeros((n, n * D)), "head_alpha": np.ones(()), "head_bias": weights}
    same(output(shifted, {**params, "shared": {}}), output(own, params))


def test_two_streams_have_one_swap():
    lite, kron = (MHC(streams=2, constraint=c) for c in ("permutations", "kronecker"))
    params = moved(lite)
    same(output(kron, params), output(lite, params))


LOGITS = {"sinkhorn": 16, "permutations": 24, "kronecker": 4, "circulant": 4}
MAKE = {
    "sinkhorn": constraints.doubly_stochastic,
    **{kind: getattr(constraints, kind) for kind in KINDS if kind != "sinkhorn"},
}


@pytest.mark.parametrize("kind", LOGITS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), size=st.floats(0, 4))
def test_mixing_is_doubly_stochastic(kind, seed, size):
    """Sums, products, spectral norm and mean; Sinkhorn is exact in what each target receives only."""
    with jax.enable_x64(True):
        logits = size * np.random.default_rng(seed).normal(size=(3, LOGITS[kind]))
        assert MAKE[kind](4).count == LOGITS[kind]
        matrices = np.asarray(MAKE[kind](4).matrix(logits))
    H = np.swapaxes(matrices, -1, -2)
    assert np.all(H >= 0)
    same(H.sum(-1), 1, 1e-14)
    same((H[0] @ H[1] @ H[2]).sum(-1), 1, 1e-14)
    if kind != "sinkhorn":
        for M in (*H, H[0] @ H[1] @ H[2]):
            same(M.sum(-2), 1, 1e-14)
            same(np.linalg.norm(M, 2), 1, 1e-12)
            x = np.random.default_rng(seed).normal(size=(4, 5))
            same((M @ x).mean(0), x.mean(0), 1e-13)
            assert np.linalg.norm(M @ x) <= np.linalg.norm(x) * (1 + 1e-12)
    for M, z in zip(H, logits):
        same(M, reference_mixing(kind, z, 4), 1e-12)


def test_reference_code_and_paper_are_one_function_but_for_eps():
    """DeepSeek's comb: softmax over the targets + eps, columns, then (rows, columns) again, each denominator + eps."""

    def comb(z, iters, eps):
        M = softmax(z) + eps
        M = M / (M.sum(0, keepdims=True) + eps)
        for _ in range(iters - 1):
            M = M / (M.sum(1, keepdims=True) + eps)
            M = M / (M.sum(0, keepdims=True) + eps)
        return M

    z = noise(4, 4)
    same(comb(z, 20, 0.0).T, paper_sinkhorn(z.T, 20), 1e-14)
    for eps in (0.0, 1e-6):
        same(constraints.doubly_stochastic(4, eps=eps).matrix(z.reshape(-1)), comb(z, 20, eps), 1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_constraints_start_near_the_identity(kind):
    constraint = MAKE[kind](4)
    same(constraint.matrix(constraint.start), np.eye(4), 1e-2)


# Gated Residual and Multi-Gate Residuals


def test_gated_residual_follows_its_equations():
    connection = GatedResidual(rank=3, eps=0.0)
    params = moved(connection)
    same(output(connection, params), gated_reference(params, 4))


def test_gated_residual_with_doubled_gains_is_prenorm_and_its_streams_can_part():
    connection = GatedResidual(eps=0.0)
    zero = jax.tree.map(np.zeros_like, start(connection))
    zero["layers"]["gamma"] += 1
    zero["shared"]["head_gamma"] += 1
    same(output(connection, zero), plain())
    params = connection.as_plain(start(connection), GAINS, FINAL_GAIN)
    same(output(connection, params), plain(GAINS, FINAL_GAIN))
    inject = np.asarray(gradient(connection, params)["layers"]["inject"])[:-1]
    assert np.all(np.ptp(inject, axis=-1).max(-1) > 1e-4), "the last sub-layer's reader is the even readout"


@pytest.mark.parametrize("n", [1, 3, 4, 8])
def test_multi_gate_follows_its_equations_and_starts_as_prenorm(n):
    connection = MultiGateResiduals(slots=n, eps=1e-30)
    params = moved(connection)
    same(output(connection, params), multi_gate_reference(params, n))
    same(output(connection, start(connection)), plain(), 1e-6)  # the gates' start is a float32


def test_multi_gate_with_free_slots_is_attention_over_depth_with_a_temperature():
    connection, eps = MultiGateResiduals(slots=L + 1, eps=1e-12), 1e-12
    params = moved(connection, 1.0)
    attention = {"layers": {}, "shared": {"query": params["shared"]["query"] / np.sqrt(D)}}
    same(output(connection, params), output(AttentionResiduals(eps=eps), attention))


# Gradients


def gradient(connection, params):
    def loss(p):
        h = run(connection, p)
        return jnp.sum(jnp.sin(h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True))))

    return jax.jit(jax.grad(loss))(jax.tree.map(jnp.asarray, params))


@pytest.mark.parametrize(
    "connection", [HyperConnections(), FracConnections(), GeneralizedHyperConnections()], ids=lambda c: c.name
)
def test_dynamic_weights_get_gradients_at_their_start_and_scales_none(connection):
    grads = gradient(connection, start(connection))["layers"]
    for name in ("dynamic_alpha_scale", "dynamic_beta_scale"):
        same(grads[name], 0, 0)
    for name in ("dynamic_alpha_fn", "dynamic_beta_fn"):
        assert np.all(np.abs(grads[name]).reshape(L, -1).max(-1) > 0)


@pytest.mark.parametrize("reads", ["own", "previous"])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_reads_keep_streams_alike_and_the_start_parts_them(kind, reads):
    connection, n = MHC(constraint=kind, reads=reads, eps=0.0, norm_eps=0.0), 4
    begin = start(connection)
    equal = begin["layers"]["bias"].copy()
    equal[:, :n] = -1
    grads = gradient(connection, start(connection, bias=equal))["layers"]
    bias = np.asarray(grads["bias"])
    same(bias[:, :n], 0), same(bias[:, 2 * n :], 0), same(grads["alpha"], 0)
    post = bias[:, n : 2 * n]
    assert np.abs(post).max() > 1e-3 and np.ptp(post, axis=-1).max() < 1e-12
    post = np.asarray(gradient(connection, begin)["layers"]["bias"])[:, n : 2 * n]
    assert np.all(np.ptp(post, axis=-1)[: L - 1] > 1e-3)


def test_stream_operations_have_the_gradients_of_their_sums():
    """More sources than targets, and weights shared by all tokens."""
    streams, y, g = noise(B, S, 5, D), noise(B, S, D), noise(B, S, 3, D)
    for mixing, weights in ((noise(B, S, 5, 3), noise(B, S, 3)), (noise(5, 3), noise(3))):
        plain_mix = lambda m, x, w, y: jnp.einsum("...st,...sd->...td", m, x) + w[..., None] * y[..., None, :]  # noqa: E731
        plain_add = lambda x, w, y: x + w[..., None] * y[..., None, :]  # noqa: E731
        for ours, theirs, arguments in (
            (mix_streams, plain_mix, (mixing, streams, weights, y)),
            (add_to_streams, plain_add, (g, weights, y)),
        ):
            for a, b in zip(*(jax.vjp(f, *map(jnp.asarray, arguments)) for f in (ours, theirs))):
                if callable(a):
                    a, b = a(jnp.asarray(g)), b(jnp.asarray(g))
                jax.tree.map(same, a, b)


@pytest.mark.parametrize(
    "connection, message",
    [
        (FracConnections(fractions=3), r"model.width=8 is not a multiple of residual.fractions=3"),
        (FracConnections(fractions=0), r"residual.fractions=0 must be at least 1"),
        (GeneralizedHyperConnections(streams=2, fractions=4), r"residual.streams=2 is less than residual.fractions=4"),
        (MHC(constraint="kronecker", streams=6), r"residual.streams=6 must be a power of 2"),
        (MHC(constraint="permutations", streams=8), r"residual.streams=8 have 40320 permutations.*at most 6"),
        (MHC(reads="previous", readout="sum"), r"residual.readout=sum cannot be had with residual.reads=previous"),
        (GatedResidual(rank=0), r"residual.rank=0 must be at least 1"),
        (MultiGateResiduals(slots=1), r"residual.slots=1 must be at least 2"),
    ],
    ids=lambda v: getattr(v, "kind", ""),
)
def test_wrong_sizes_are_named_with_their_keys(connection, message):
    with pytest.raises(ValueError, match=message):
        connection.check(L, D)
