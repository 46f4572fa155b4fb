"""One model, many ways to run it: looped, scanned, rematerialised, sharded, all with the same loss and gradients."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import KINDS, MEMBERS_SOME_SLOW, draw, name

from lmres.model import ModelConfig, Transformer
from lmres.residual import Plain
from lmres.sharding import MeshConfig, batch_sharding, constrainer, make_mesh, param_shardings

CONFIG = ModelConfig(
    vocab_size=32, context=16, width=32, blocks=3, heads=4, kv_heads=2, mlp_hidden=48, norm_eps=1e-12, qk_norm=True
)


def batch(rows=2, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, CONFIG.vocab_size, (rows, CONFIG.context + 1))
    segments = np.repeat([[1, 2]], 8, axis=1).repeat(rows, 0)
    positions = np.tile(np.arange(8), 2)[None].repeat(rows, 0)
    return jax.tree.map(np.int32, {"x": tokens[:, :-1], "y": tokens[:, 1:], "s": segments, "p": positions})


def loss_of(model, params, data):
    logits = model.apply({"params": params}, data["x"], data["s"], data["p"])
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), data["y"][..., None], -1)
    return -jnp.mean(picked)


def init(connection, config=CONFIG):
    model = Transformer(config, connection)
    params = jax.jit(lambda key: model.init(key, jnp.zeros((1, 1), jnp.int32))["params"])(jax.random.key(0))
    return model, params


def value_and_grad(model, params, data):
    return jax.jit(jax.value_and_grad(lambda p: loss_of(model, p, data)))(params)


def assert_trees_close(actual, expected, tolerance):
    """Relative to the largest entry of each array, and at least a hundredth of the largest of all: what is near zero
    has no relative accuracy."""
    chex.assert_trees_all_equal_shapes(actual, expected)
    floor = 1e-2 * max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(expected[1]))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error, scale = np.max(np.abs(a - b)), np.max(np.abs(b))
        assert error <= tolerance * max(scale, floor), f"{jax.tree_util.keystr(path)}: {error:.2e} of {scale:.2e}"


@pytest.mark.parametrize("connection", KINDS, ids=name)
def test_scanned_equals_looped_and_rematerialised(connection):
    data = batch()
    looped_model = Transformer(dataclasses.replace(CONFIG, scan=False), connection)
    params = draw(looped_model)
    looped = value_and_grad(looped_model, params, data)
    for options in ({}, {"remat": "full"}, {"remat": "dots"}):
        model = Transformer(dataclasses.replace(CONFIG, **options), connection)
        assert_trees_close(value_and_grad(model, params, data), looped, 2e-5)
    for path, g in jax.tree_util.tree_leaves_with_path(looped[1]):
        assert np.all(np.isfinite(g)), jax.tree_util.keystr(path)


@pytest.mark.parametrize("connection", MEMBERS_SOME_SLOW, ids=name)
def test_starts_as_the_plain_residual(connection):
    data = batch()
    plain_model, plain_params = init(Plain())
    model, params = init(connection)
    logits = [m.apply({"params": p}, data["x"]) for m, p in ((plain_model, plain_params), (model, params))]
    difference = float(jnp.max(jnp.abs(logits[0] - logits[1])))
    if connection.start_tolerance is None:
        assert difference > 1e-2, "it says that it is another function at its start"
    else:
        assert difference <= connection.start_tolerance


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("connection", KINDS, ids=name)
def test_sharded_equals_single_device(connection, sizes):
    data = batch(rows=8)
    model = Transformer(CONFIG, connection)
    params = draw(model)
    expected = value_and_grad(model, params, data)
    mesh = make_mesh(MeshConfig(*sizes))
    shardings = param_shardings(params, mesh)
    sharded_model = Transformer(CONFIG, connection, constrainer(mesh))
    step = jax.jit(
        jax.value_and_grad(lambda p, d: loss_of(sharded_model, p, d)),
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(None, shardings),
    )
    loss, grads = step(jax.device_put(params, shardings), data)
    assert_trees_close((loss, grads), expected, 1e-5)
    if sizes != (8, 1, 1):
        split = [g for g in jax.tree.leaves(grads) if not g.sharding.is_fully_replicated]
        assert len(split) >= 7, "the large parameters are split"


@pytest.mark.parametrize("connection", KINDS, ids=name)
def test_causal_by_gradient(connection):
    """The output at position t depends on the embeddings of positions up to t, and on all of them."""
    model = Transformer(CONFIG, connection)
    params = draw(model)
    data = batch(rows=1)

    def at(noise, t):
        bound = model.bind({"params": params})
        e, args = bound._start(data["x"], data["s"], None, None, None)
        h, _ = bound.stack(e + noise, args)
        return jnp.sum(jnp.sin(h[0, t]))

    noise = jnp.zeros((1, CONFIG.context, CONFIG.width))
    grad = jax.jit(jax.vmap(jax.grad(at), in_axes=(None, 0)))(noise, jnp.arange(CONFIG.context))
    reach = np.abs(np.asarray(grad))[:, 0].max(-1)
    # Two documents in one row, with positions that run on: the mask alone must keep them apart.
    same_document = data["s"][0][:, None] == data["s"][0][None, :]
    np.testing.assert_array_equal(reach > 0, same_document & np.tri(CONFIG.context, dtype=bool))


@pytest.mark.parametrize("connection", KINDS, ids=name)
def test_packed_document_does_not_see_its_neighbour(connection):
    model = Transformer(CONFIG, connection)
    params = draw(model)
    a, b = batch(rows=1, seed=0), batch(rows=1, seed=1)
    b["x"][:, 8:] = a["x"][:, 8:]
    run = jax.jit(lambda d: model.apply({"params": params}, d["x"], d["s"], d["p"]))
    np.testing.assert_array_equal(run(a)[:, 8:], run(b)[:, 8:])
    alone = model.apply({"params": params}, a["x"][:, 8:])
    np.testing.assert_allclose(run(a)[:, 8:], alone, atol=2e-5)


@pytest.mark.parametrize("connection", KINDS, ids=name)
def test_every_parameter_gets_a_gradient_by_step_two(connection):
    data = batch()
    model, params = init(connection)
    step = jax.jit(lambda p: jax.tree.map(lambda a, g: a - 0.3 * g, p, jax.grad(lambda p: loss_of(model, p, data))(p)))
    params = step(params)
    grads = jax.grad(lambda p: loss_of(model, p, data))(params)
    for path, g in jax.tree_util.tree_leaves_with_path(grads["stack"]["connection"]):
        where = jax.tree_util.keystr(path)
        assert np.all(np.isfinite(g)), where
        rows = np.abs(np.asarray(g)).reshape(g.shape[0], -1).max(-1) if g.ndim else np.abs(np.asarray(g))
        rows = np.delete(rows, [row for row in connection.no_gradient.get(path[-1].key, ()) if rows.ndim])
        assert np.all(rows > 0), f"{where}: {rows}"
