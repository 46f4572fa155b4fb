"""Members whose state is one vector or a matrix, against plain numpy in float64: ReZero, LayerScale, DeepNorm and KEEL,
LAuReL, the Residual Matrix Transformer; and what they are equal to in special cases."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import name

from lmres.residual import (
    DeepNorm,
    LAuReL,
    LayerScale,
    Plain,
    ResidualMatrix,
    ReZero,
    Stack,
    depth_mixing,
    recompose,
    run_layers,
)

DEPTH, B, S, D = 6, 2, 3, 8
EPS = 1e-6
LAURELS = [
    LAuReL(),
    LAuReL(weights="none", rank=2),
    LAuReL(rank=2),
    LAuReL(rank=2, previous=1),
    LAuReL(rank=2, previous=3),
    LAuReL(weights="none", rank=3, previous=9),  # more than there ever are
    LAuReL(weights="softmax", rank=2, previous=2),
    LAuReL(weights="gemma", rank=3, previous=2),
]
SCALED = [ReZero(), ReZero(norm="input"), LayerScale(), DeepNorm(alpha=2.0), DeepNorm(alpha=1.5, norm="input")]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def unit(x):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS)


def setting(connection, move=0.3, seed=0):
    """(embedding, branch weights, parameters moved away from their start), float64."""
    rng = np.random.default_rng(seed)
    start = connection.init(jax.random.key(seed), DEPTH, D)
    params = jax.tree.map(lambda p: jnp.asarray(np.asarray(p, np.float64) + move * rng.normal(size=p.shape)), start)
    return rng.normal(size=(B, S, D)), rng.normal(size=(DEPTH, D, D)) / 2, params


def branch(connection, w, xp=jnp):
    """``tanh(x @ w)``, with the norm before it that the connection asks for, or what takes one input or three."""
    if isinstance(connection, ResidualMatrix):
        return three_way(w, xp)
    size = lambda x: xp.sqrt(xp.mean(x * x, -1, keepdims=True) + EPS)  # noqa: E731
    return lambda x: xp.tanh((x / size(x) if "input" in connection.branch_norms else x) @ w)


def run(connection, params, weights, e):
    return run_layers(connection, params, [branch(connection, w) for w in weights], jnp.asarray(e))


def assert_close(actual, expected, tolerance=1e-12):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.max(np.abs(expected)))


def scaled_reference(connection, params, weights, e):
    p, h = {k: np.asarray(v) for k, v in params["layers"].items()}, e
    for l, w in enumerate(weights):
        if isinstance(connection, DeepNorm):
            h = unit(h) * p["gain"][l]
            h = connection.alpha * h + branch(connection, w, np)(h)
        else:
            h = h + p["scale"][l] * branch(connection, w, np)(h)
    return h


@pytest.mark.parametrize("connection", SCALED, ids=name)
def test_scaled_members_are_their_formulas(connection):
    e, weights, params = setting(connection)
    assert_close(run(connection, params, weights, e)[0], scaled_reference(connection, params, weights, e))


@pytest.mark.parametrize("connection", [ReZero(), ReZero(norm="input")], ids=name)
def test_rezero_starts_as_the_identity(connection):
    e, weights, params = setting(connection, move=0.0)
    np.testing.assert_array_equal(run(connection, params, weights, e)[0], e)


@pytest.mark.parametrize("connection", [ReZero(norm="input"), LayerScale()], ids=name)
def test_scales_of_one_are_the_plain_residual(connection):
    e, weights, params = setting(connection)
    ones = connection.as_plain(params, None, None)
    expected = run(Plain(), {"layers": {}, "shared": {}}, weights, e)[0]
    assert_close(run(connection, ones, weights, e)[0], expected)
    assert ReZero().as_plain(params, None, None) is None, "its branches have no norm"
    assert_close(run(LayerScale(start=1.0), LayerScale(start=1.0).init(None, DEPTH, D), weights, e)[0], expected)


@pytest.mark.parametrize("sublayers, start", [(2, 0.1), (36, 0.1), (37, 1e-5), (48, 1e-5), (50, 1e-6)])
def test_layerscale_starts_by_depth_in_blocks(sublayers, start):
    np.testing.assert_array_equal(LayerScale().init(None, sublayers, D)["layers"]["scale"], np.float32(start))
    assert LayerScale(start=0.5).start_at(sublayers) == 0.5


def test_deepnorm_with_alpha_one_is_postnorm():
    e, weights, params = setting(DeepNorm())
    expected, record = run(Plain(norm="post"), params, weights, e)
    h, own = run(DeepNorm(), params, weights, e)
    np.testing.assert_array_equal(h, expected)
    chex.assert_trees_all_equal(own.reads, record.reads)


def laurel_reference(connection, params, weights, e):
    p = {k: np.asarray(v) for k, v in {**params["layers"], **params["shared"]}.items()}
    xs, used = [e], 0
    for l, w in enumerate(weights):
        x, f = xs[-1], branch(connection, w, np)(xs[-1])
        a = b = 1.0
        if connection.weights in ("unit", "softmax"):
            a, b = np.exp(p["weights"][l]) / np.exp(p["weights"][l]).sum() * (1 + (connection.weights == "unit"))
        z, low = x, 0.0
        if connection.previous:
            before = xs[::-1][: connection.previous]
            z = sum(g * old for g, old in zip(p["gamma"][used : used + len(before)], before, strict=True))
            used += len(before)
        if connection.rank:
            low = z @ p["down"][l] @ p["up"][l]
        if connection.weights == "gemma":
            xs.append((f + 2 * x + unit(low) * p["gain"][l]) / np.sqrt(2))
        else:
            xs.append(a * f + b * (x + low))
    assert used == p.get("gamma", np.zeros(0)).size, "the table holds the weights that are used, and no others"
    return xs[-1]


@pytest.mark.parametrize("connection", LAURELS, ids=name)
def test_laurel_is_its_formula(connection):
    e, weights, params = setting(connection)
    assert_close(run(connection, params, weights, e)[0], laurel_reference(connection, params, weights, e))


@pytest.mark.parametrize("connection", [c for c in LAURELS if c.start_tolerance is not None], ids=name)
def test_laurel_starts_as_the_plain_residual(connection):
    e, weights, params = setting(connection, move=0.0)
    expected = run(Plain(), {"layers": {}, "shared": {}}, weights, e)[0]
    assert_close(run(connection, params, weights, e)[0], expected)


def test_laurel_without_previous_states_is_plain_or_low_rank():
    """gamma = 0: plain whatever A and B; gamma = 1 for x alone: LR."""
    connection = LAuReL(weights="none", rank=2, previous=3)
    e, weights, params = setting(connection)
    gamma = lambda g: params | {"shared": {"gamma": g}}  # noqa: E731
    expected = run(Plain(), {"layers": {}, "shared": {}}, weights, e)[0]
    assert_close(run(connection, gamma(jnp.zeros_like(params["shared"]["gamma"])), weights, e)[0], expected)
    start = connection.init(jax.random.key(0), DEPTH, D)["shared"]["gamma"].astype(float)
    low_rank = run(LAuReL(weights="none", rank=2), params | {"shared": {}}, weights, e)[0]
    assert_close(run(connection, gamma(start), weights, e)[0], low_rank)


def test_laurel_starts_with_orthonormal_columns():
    layers = LAuReL(rank=3).init(jax.random.key(0), DEPTH, D)["layers"]
    products = jnp.einsum("ldr,lds->lrs", layers["down"], layers["down"])
    np.testing.assert_allclose(products, np.broadcast_to(np.eye(3), (DEPTH, 3, 3)), atol=1e-6)
    assert not np.allclose(layers["down"][0], layers["down"][1])


@pytest.mark.parametrize("previous", range(1, 7))
def test_laurel_table_of_weights_has_no_gaps(previous):
    connection, used = LAuReL(rank=1, previous=previous), 0
    for l in range(9):
        first, count = connection._gamma_at(l)
        assert (first, count) == (used, min(l + 1, previous))
        used += int(count)
        assert connection._gamma_count(l + 1) == used


def matrix_reference(connection, params, weights, e):
    """Loops over keys, one outer product at a time."""
    layers = {k: np.asarray(v) for k, v in params["layers"].items()}
    shared = {k: np.asarray(v) for k, v in params["shared"].items()}
    size = connection.value_width(D)
    cut = lambda x: [x[..., r * size : (r + 1) * size] for r in range(D // size)]  # noqa: E731
    norm = lambda m, gain: m / np.sqrt(np.mean(m * m, (-2, -1), keepdims=True) + connection.eps) * gain  # noqa: E731
    retrieve = lambda m, keys: np.concatenate([np.einsum("bskv,k->bsv", m, k) for k in keys], -1)  # noqa: E731
    store = lambda keys, x: sum(k[:, None] * v[..., None, :] for k, v in zip(keys, cut(x), strict=True))  # noqa: E731
    m, used = store(shared["open_keys"], e), 0
    for l, w in enumerate(weights):
        ways = connection.ways[l % len(connection.ways)]
        normed = norm(m, layers["gain"][l])
        xs = [retrieve(normed, keys) for keys in shared["read_keys"][used : used + ways]]
        used += ways
        m = m + store(layers["write_keys"][l], three_way(w, np)(xs)) / np.sqrt(len(weights))
    assert used == len(shared["read_keys"])
    return retrieve(norm(m, shared["close_gain"]), shared["close_keys"])


def three_way(w, xp=jnp):
    """A branch that takes one input or three, all of them for something else."""

    def call(x):
        xs = x if isinstance(x, (tuple, list)) else (x,)
        return sum((i + 1) * xp.tanh(x @ w) ** (i + 1) for i, x in enumerate(xs))

    return call


MATRICES = [
    ResidualMatrix(keys=5, value_size=2),
    ResidualMatrix(keys=7, ways=(1,)),
    ResidualMatrix(keys=3, value_size=4, ways=(1, 3, 1)),
]


@pytest.mark.parametrize("connection", MATRICES, ids=name)
@pytest.mark.parametrize("depth", [6, 5])
def test_residual_matrix_is_its_formula(connection, depth):
    e, weights, _ = setting(connection)
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda p: p + 0.3 * rng.normal(size=p.shape), connection.init(jax.random.key(0), depth, D))
    h, _ = run(connection, params, weights[:depth], e)
    assert_close(h, matrix_reference(connection, params, weights[:depth], e))
    assert connection.cost(depth, D).params == sum(p.size for p in jax.tree.leaves(params))


def test_residual_matrix_starts_without_queries_and_keeps_the_size_of_vectors():
    assert [ResidualMatrix().value_width(n) for n in (8, 32, 768, 1024, 7)] == [2, 8, 64, 64, 1]
    connection = ResidualMatrix(keys=32, value_size=2)
    params = connection.init(jax.random.key(0), 4, 64)
    keys = params["shared"]["read_keys"]
    chex.assert_shape(keys, (8, 32, 32))
    np.testing.assert_array_equal(np.all(np.asarray(keys) == 0, (1, 2)), [1, 0, 0, 0, 1, 0, 0, 0])
    e = jax.random.normal(jax.random.key(1), (B, 50, 64))
    state = connection.open(params, e, 4)
    chex.assert_shape(state, (B, 50, 32, 2))
    params_l = {**jax.tree.map(lambda p: p[0], params["layers"]), **params["shared"]}
    (query, key, value), _ = connection.read(params_l, state, 0, ways=3)
    assert float(jnp.max(jnp.abs(query))) == 0.0
    for x in (state, key, value, connection.close(params, state)[0]):
        assert 0.7 < float(jnp.std(x)) < 1.4


@pytest.mark.parametrize("connection", [SCALED[0], SCALED[-1], LAURELS[4], LAURELS[-1], MATRICES[0]], ids=name)
def test_scanned_stack_is_the_loop(connection):
    """With l traced, values and gradients; every parameter has one."""
    e, weights, params = setting(connection)
    branches = tuple(lambda p, x, i, args, inputs, s=s: (branch(connection, p)(x), ()) for s in range(2))
    by_branch = tuple(jnp.asarray(weights[s::2]) for s in range(2))

    def loss(params, by_branch, scan):
        h, _ = Stack(connection, branches, DEPTH // 2, scan=scan)(params, by_branch, jnp.asarray(e))
        return jnp.sum(jnp.sin(h)), h

    (_, h), grads = jax.jit(jax.value_and_grad(lambda p, w: loss(p, w, True), (0, 1), has_aux=True))(params, by_branch)
    assert_close(h, run(connection, params, weights, e)[0])
    expected = jax.jit(jax.grad(lambda p, w: loss(p, w, False)[0], (0, 1)))(params, by_branch)
    chex.assert_trees_all_close(grads, expected, atol=1e-12)
    for path, g in jax.tree_util.tree_leaves_with_path(grads[0]):
        assert np.all(np.any(np.asarray(g).reshape(g.shape[0], -1) != 0, -1)), jax.tree_util.keystr(path)


@pytest.mark.parametrize("connection", [*SCALED, LAuReL(), LAuReL(weights="softmax")], ids=name)
def test_reads_recompose(connection):
    e, weights, params = setting(connection)
    h, record = run(connection, params, weights, e)
    matrix = depth_mixing(connection, record.contexts, jnp.asarray(e))
    assert_close(recompose(matrix, jnp.asarray(e), record.outputs), np.stack([*record.reads, h]))


@pytest.mark.parametrize("connection", [LAuReL(rank=1), ResidualMatrix()], ids=name)
def test_what_mixes_channels_has_no_matrix(connection):
    assert not connection.has_matrix and LAuReL().has_matrix
    with pytest.raises(ValueError, match=f"{connection.name} mixes channels"):
        depth_mixing(connection, [(), ()], jnp.zeros((B, S, D)))


@pytest.mark.parametrize(
    ("connection", "words"),
    [
        (LayerScale(start=float("inf")), "residual.start=inf"),
        (DeepNorm(alpha=-1.0), r"residual.alpha=-1.0"),
        (LAuReL(rank=9), "residual.rank=9 must be in 0 .. 8"),
        (LAuReL(previous=2), "residual.previous=2 needs .* residual.rank"),
        (LAuReL(weights="gemma"), "residual.weights=gemma needs"),
        (LAuReL(previous=-1), "residual.previous=-1"),
        (ResidualMatrix(keys=0), "residual.keys=0"),
        (ResidualMatrix(value_size=3), "residual.value_size=3 must divide the width 8"),
        (ResidualMatrix(ways=(2, 1)), r"residual.ways=\[2, 1\]"),
    ],
)
def test_misuse_is_explained(connection, words):
    with pytest.raises(ValueError, match=words):
        connection.check(DEPTH, D)
