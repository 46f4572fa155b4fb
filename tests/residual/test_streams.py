"""Connections of constant size, in float64: where they are the plain residual or each other, and against numpy.

The references are written from the papers' equations, one token-wise loop each, and share nothing with the library.
Legend: n streams or slots, m fractions, L sub-layers, B batch, S sequence, D width.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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

L, B, S, D = 4, 2, 3, 8
KINDS = ("sinkhorn", "permutations", "kronecker", "circulant", "identity")
rng = np.random.default_rng(0)
E = rng.normal(size=(B, S, D))
WEIGHTS = rng.normal(size=(L, D, D)) / 2
GAINS, FINAL_GAIN = 1 + rng.normal(size=(L, D)) / 3, 1 + rng.normal(size=D) / 3


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def rms(x, axis=-1):
    return x / np.sqrt(np.mean(x * x, axis=axis, keepdims=True))


def layer_norm(x, eps=1e-5):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x, axis=-1):
    x = np.exp(x - x.max(axis, keepdims=True))
    return x / x.sum(axis, keepdims=True)


def sub_layer(l, x):
    """A branch without a norm of its own."""
    return np.tanh(x @ WEIGHTS[l])


def plain(gains=1.0, final_gain=1.0):
    h, gains = E, np.broadcast_to(gains, (L, D))
    for l in range(L):
        h = h + sub_layer(l, rms(h) * gains[l])
    return rms(h) * final_gain


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


def slots_reference(p, n, m, tau=1.0):
    """Equations of the three papers with explicit sums over slots; B is [m, n] per sub-layer."""
    size = D // m
    H = [E[..., (j % m) * size : (j % m + 1) * size] for j in range(n)]
    for l in range(L):
        q = {k: v[l] for k, v in p["layers"].items()}
        alpha = [[q["static_alpha"][s, c] for c in range(m + n)] for s in range(n)]
        beta = q["static_beta"]
        full = beta.ndim == 2
        write = [[beta[j, i] if full else beta[j] * (j % m == i) for j in range(n)] for i in range(m)]
        if "dynamic_alpha_fn" in q:
            s_a, s_b = q["dynamic_alpha_scale"], q["dynamic_beta_scale"]
            w_b = q["dynamic_beta_fn"].reshape(-1, size)
            for s in range(n):
                normed = layer_norm(H[s])
                for c in range(m + n):
                    alpha[s][c] = alpha[s][c] + s_a * np.tanh(normed @ q["dynamic_alpha_fn"][c] / tau)
                for i in range(m):
                    if full or s % m == i:
                        write[i][s] = write[i][s] + s_b * np.tanh(normed @ w_b[i if full else 0] / tau)
        mix = lambda c, H=H, alpha=alpha: sum(np.asarray(alpha[s][c])[..., None] * H[s] for s in range(n))  # noqa: E731
        y = sub_layer(l, rms(np.concatenate([mix(i) for i in range(m)], -1)))
        parts = [y[..., i * size : (i + 1) * size] for i in range(m)]
        H = [mix(m + j) + sum(np.asarray(write[i][j])[..., None] * parts[i] for i in range(m)) for j in range(n)]
    total = [sum(H[j] for j in range(i, n, m)) * (n / m) / len(range(i, n, m)) for i in range(m)]
    return rms(np.concatenate(total, -1))


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


def reference_mixing(kind, logits, n, iters=20):
    """H_res [target, source] of one token."""
    if kind == "identity":
        return np.eye(n)
    if kind == "sinkhorn":
        return paper_sinkhorn(logits.reshape(n, n).T, iters)
    if kind == "kronecker":
        result, swap = np.eye(1), np.eye(2)[::-1]
        for pair in logits.reshape(-1, 2):
            a, b = softmax(pair)
            result = np.kron(result, a * np.eye(2) + b * swap)
        return result
    if kind == "circulant":  # shift k takes stream s to s + k
        corners = [np.eye(n)[[(t - k) % n for t in range(n)]] for k in range(n)]
    else:
        corners = [np.eye(n)[list(order)] for order in itertools.permutations(range(n))]
    return sum(w * P for w, P in zip(softmax(logits), corners, strict=True))


def paper_sinkhorn(logits, iters):
    """RowNorm(ColNorm(M)), over and over (arXiv:2512.24880, Eq. 9)."""
    M = np.exp(logits - logits.max(axis=0, keepdims=True))
    for _ in range(iters):
        M = M / M.sum(axis=0, keepdims=True)
        M = M / M.sum(axis=1, keepdims=True)
    return M


def mhc_reference(c, p):
    """One token at a time; for reads of the previous sub-layer's weights too."""
    n, result = c.streams, np.zeros_like(E)
    for b, s in np.ndindex(B, S):
        X = np.tile(E[b, s], (n, 1))
        pre_before = np.eye(n)[0]
        for l in range(L):
            q = {k: v[l] for k, v in p["layers"].items()}
            z = q["phi"] @ rms(X.reshape(-1))
            k = len(z) - 2 * n
            alpha = np.repeat(q["alpha"], [n, n, k] if k else [n, n])
            z = alpha * z + q["bias"]
            pre, post = sigmoid(z[:n]), 2 * sigmoid(z[n : 2 * n])
            used = pre if c.reads == "own" else pre_before
            y = sub_layer(l, rms(used @ X))
            X = reference_mixing(c.constraint, z[2 * n :], n, c.iters) @ X + np.outer(post, y)
            pre_before = pre
        head = np.ones(n)
        if c.reads == "previous":
            head = pre_before
        elif c.readout == "head":
            q = p["shared"]
            head = sigmoid(q["head_alpha"] * (q["head_phi"] @ rms(X.reshape(-1))) + q["head_bias"])
        result[b, s] = rms(head @ X)
    return result


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


def gated_reference(p, n):
    def mixer(X, gamma, down, up):
        N = rms(X) * (1 + gamma)
        flat = N.reshape(B, S, -1) / n
        hidden = flat @ down
        gates = sigmoid(hidden * sigmoid(hidden) @ up).reshape(N.shape)
        return (gates * N).mean(-2), flat

    X = np.repeat(E[..., None, :], n, -2)
    for l in range(L):
        q = {k: v[l] for k, v in p["layers"].items()}
        x, flat = mixer(X, q["gamma"], q["down"], q["up"])
        X = X + 2 * sigmoid(flat @ q["inject"])[..., None] * sub_layer(l, x)[..., None, :]
    q = p["shared"]
    return mixer(X, q["head_gamma"], q["head_down"], q["head_up"])[0]


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


def multi_gate_reference(p, n):
    q, slots = p["shared"], [E]
    for l in range(L + 1):
        logits = np.stack([rms(s) @ q["query"][l] / np.sqrt(D) for s in slots])
        x = (softmax(logits, 0)[..., None] * np.stack(slots)).sum(0)
        if l == L:
            return rms(x)
        v = sub_layer(l, rms(x))
        if len(slots) < n:
            slots.append(v)
            continue
        u, b = q["gate"][l - (n - 1)], q["gate_bias"][l - (n - 1)]
        gates = [sigmoid(rms(s) @ u / np.sqrt(D) + b[i])[..., None] for i, s in enumerate(slots)]
        slots = [(1 - g) * s + g * v for g, s in zip(gates, slots)]


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
        (MultiGateResiduals(slots=0), r"residual.slots=0 must be at least 1"),
    ],
    ids=lambda v: getattr(v, "kind", ""),
)
def test_wrong_sizes_are_named_with_their_keys(connection, message):
    with pytest.raises(ValueError, match=message):
        connection.check(L, D)
