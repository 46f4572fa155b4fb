"""What every connection promises as data, and what its functions do at their edges."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import ALL, name, randomised

from lmres.residual import (
    MHC,
    AppendOnly,
    AttentionResiduals,
    Connection,
    DeepCrossAttention,
    DenseFormer,
    History,
    HyperConnections,
    LIMe,
    MUDDFormer,
    Plain,
    RecentDeepCrossAttention,
    Stack,
    layer_params,
    run_layers,
)
from lmres.residual.interface import Exchange, Lent, ways_of

DEPTH, B, S, D, HEADS = 6, 2, 3, 8, 2
FITTED = [c.fit(HEADS, D // HEADS) for c in ALL]


def branches(weights):
    """``tanh(x W)`` of the sum of all inputs; a unit that lends keys and values lends its output."""

    def branch(x, w):
        if isinstance(x, Exchange):
            y = jnp.tanh(x.x @ w)
            return Lent(y, *(y.reshape(B, S, HEADS, -1),) * 2)
        return jnp.tanh(sum(x) @ w) if type(x) is tuple else jnp.tanh(x @ w)

    return [lambda x, w=w: branch(x, w) for w in weights]


def setting(connection, seed=0):
    rng = np.random.default_rng(seed)
    e = jnp.asarray(rng.normal(size=(B, S, D)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(DEPTH, D, D)) / 3, jnp.float32)
    params = randomised(connection.init(jax.random.key(0), DEPTH, D), seed, 0.2)
    return e, weights, params


@pytest.mark.parametrize("connection", FITTED, ids=name)
def test_data(connection):
    params = connection.init(jax.random.key(0), DEPTH, D)
    assert set(params) == {"layers", "shared"}
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(params))
    assert all(p.shape[0] == DEPTH for p in jax.tree.leaves(params["layers"]))
    cost = connection.cost(DEPTH, D)
    assert cost.params == sum(p.size for p in jax.tree.leaves(params))
    assert hash(connection) == hash(type(connection)(**vars(connection)))
    of_kind = [c.init(jax.random.key(0), DEPTH, D) for c in FITTED if c.kind == connection.kind]
    names = {name for p in of_kind for group in p.values() for name in group}
    assert set(connection.no_decay) - {"*"} <= names, "parameters of this or another configuration"
    state = jax.eval_shape(lambda: connection.open(params, jnp.zeros((B, S, D)), DEPTH))
    axes = connection.state_axes()
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(axes), strict=True):
        assert leaf.ndim == len(spec)
        assert leaf.shape[spec.index("batch")] == B and leaf.shape[spec.index("sequence")] == S
    assert isinstance(state, History) == isinstance(connection, AppendOnly)


@pytest.mark.parametrize("connection", [c for c in FITTED if isinstance(c, AppendOnly)], ids=name)
def test_read_vjp_equals_differentiating_read(connection):
    """The override adds in place what the default gets from autodiff; jitted with a traced l, as it is used."""
    e, weights, params = setting(connection)
    _, record = run_layers(connection, params, branches(weights), e)
    slots = record.state.slots
    rng = np.random.default_rng(3)
    noise = lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype)  # noqa: E731
    g_slots, carry = jax.tree.map(noise, slots), jax.tree.map(noise, record.state.carry)

    def both(l, g_x):
        read = layer_params(params, l), History(slots, carry), l, ways_of(g_x)
        pairs = connection.read_vjp(*read), AppendOnly.read_vjp(connection, *read)
        return [(x, back(g_x, g_slots)) for x, back in pairs]

    both = jax.jit(both)
    for l in range(DEPTH):
        actual, expected = both(jnp.int32(l), jax.tree.map(noise, record.reads[l]))
        chex.assert_trees_all_close(actual, expected, atol=3e-5)


@pytest.mark.parametrize(
    "connection", [Plain(), DenseFormer(), AttentionResiduals(block=4), HyperConnections(), MHC()], ids=name
)
def test_run_layers_is_the_stack(connection):
    """The hand-written loop a user would write equals the scanned stack."""
    e, weights, params = setting(connection)
    expected, _ = run_layers(connection, params, branches(weights), e)
    if connection.unit == "block":  # its unit, used as a block, contains the plain skip: give both the same function
        expected, _ = run_layers(connection, params, [lambda x, w=w: x + jnp.tanh(x @ w) for w in weights], e)
    stack = Stack(connection, (lambda p, x, i, args, inputs: (jnp.tanh(x @ p), ()),), DEPTH)
    h, _ = jax.jit(lambda p, w, e: stack(p, (w,), e))(params, weights, e)
    np.testing.assert_allclose(h, expected, atol=1e-5)


def test_misuse_is_explained():
    with pytest.raises(ValueError, match=r"4 streams.*got shape \(2, 3, 8\)"):
        HyperConnections(streams=4).read({}, jnp.zeros((2, 3, 8)), 0)
    for connection, key in (
        (HyperConnections(streams=0), "residual.streams=0"),
        (MHC(iters=0), "residual.iters=0"),
        (AttentionResiduals(block=0), "residual.block=0"),
        (DenseFormer(period=0), "residual.period=0"),
        (MHC(norm_eps=-1.0), "residual.norm_eps=-1.0"),
        (HyperConnections(eps=-5.0), "residual.eps=-5.0"),
        (AttentionResiduals(heads=3), "residual.heads=3 must divide model.width=8"),
        (AttentionResiduals(temperature=0.0), "residual.temperature=0.0"),
        (AttentionResiduals(block=2, eps=0.0), "residual.eps=0.0 must be above 0"),
        (MUDDFormer(ways=(3,)), r"residual.ways=\[3\]"),
        (DeepCrossAttention(ways=(0,)), r"residual.ways=\[0\]"),
        (RecentDeepCrossAttention(last=0), "residual.last=0"),
        (LIMe(kv_heads=0), "residual.kv_heads=0"),
        (Plain(norm="post", eps=float("nan")), "residual.eps=nan"),
    ):
        with pytest.raises(ValueError, match=key):
            connection.check(DEPTH, D)


def test_abstract_interface_cannot_be_half_implemented():
    class Half(Connection):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Half()


def test_first_query_never_gets_a_gradient_and_gains_none_at_the_start():
    connection = AttentionResiduals(key_gain=True)
    e, weights, _ = setting(connection)
    start = connection.init(jax.random.key(0), DEPTH, D)
    grads = jax.grad(lambda p: jnp.sum(jnp.sin(run_layers(connection, p, branches(weights), e)[0])))(start)["shared"]
    sizes = np.abs(np.asarray(grads["query"])).max(-1)
    assert sizes[0] == 0 and np.all(sizes[1:] > 0)
    assert np.all(np.asarray(grads["gain"]) == 0)


def test_mhc_starts_with_separated_streams():
    """One-hot read biases: without them all streams get the same gradient and never part."""
    connection = MHC()
    e, weights, _ = setting(connection)
    start = connection.init(jax.random.key(0), DEPTH, D)
    loss = lambda p: jnp.sum(jnp.sin(run_layers(connection, p, branches(weights), e)[0]))  # noqa: E731
    post = jax.grad(loss)(start)["layers"]["bias"][:-1, 4:8]
    assert np.all(np.asarray(jnp.ptp(post, axis=-1)) > 1e-4)
    equal = start | {"layers": start["layers"] | {"bias": start["layers"]["bias"].at[:, :4].set(-1.0)}}
    post = jax.grad(loss)(equal)["layers"]["bias"][:-1, 4:8]
    assert np.all(np.asarray(jnp.ptp(post, axis=-1)) < 1e-5)


@pytest.mark.parametrize("dilation, period", [(1, 1), (2, 1), (4, 5), (3, 2)])
def test_denseformer_structure(dilation, period):
    """Sources, parameter count and start, against the definition."""
    connection, blocks = DenseFormer(dilation=dilation, period=period), 11
    count = 0
    for i in range(1, blocks + 1):
        expected = [j for j in range(i + 1) if (i - j) % dilation == 0] if i % period == 0 else [i]
        assert connection.sources(i) == expected
        count += len(expected) if i % period == 0 else 0
    params = connection.init(jax.random.key(0), blocks, D)
    assert params["shared"]["alpha"].shape == (count,)
    assert float(params["shared"]["alpha"].sum()) == blocks // period
    assert connection.cost(blocks, D).params == count
