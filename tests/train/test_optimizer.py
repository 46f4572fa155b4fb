"""Roles, decay and both update rules, against a numpy implementation that handles one layer at a time."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import variants
from jax.sharding import PartitionSpec as P

from lmres.model import ModelConfig, Transformer
from lmres.residual.plain import Plain
from lmres.sharding import MeshConfig, make_mesh, param_shardings
from lmres.train.checkpoint import Checkpoints
from lmres.train.config import OptimizerConfig, ScheduleConfig
from lmres.train.optimizer import describe_roles, is_decayed, kind_of, make_optimizer
from lmres.train.schedule import make_schedule

BK, D, H, G, K, F, V = 3, 8, 4, 2, 4, 16, 24


@dataclasses.dataclass(frozen=True)
class Picky(Plain):
    no_decay: ClassVar[tuple[str, ...]] = ("scale",)
    lr_multipliers: ClassVar[dict[str, float]] = {"scale": 0.25}


@dataclasses.dataclass(frozen=True)
class Exempt(Plain):
    no_decay: ClassVar[tuple[str, ...]] = ("*",)


def shapes(blocks=BK):
    lead = () if blocks is None else (blocks,)
    gain = {"gain": (*lead, D)}
    return {
        "embed": {"table": (V, D)},
        "head": {"kernel": (D, V)},
        "final_norm": {"gain": (D,)},
        "stack": {
            "attention": {
                "norm": gain,
                "query": (*lead, D, H, K),
                "key": (*lead, D, G, K),
                "value": (*lead, D, G, K),
                "out": (*lead, H, K, D),
                "query_norm": {"gain": (*lead, K)},
                "output_norm": gain,
            },
            "mlp": {"norm": gain, "gate": (*lead, D, F), "up": (*lead, D, F), "down": (*lead, F, D)},
            "connection": {"layers": {"scale": (2 * BK,), "mix": (2 * BK, D, 3)}, "shared": {"mix": (D, 3)}},
        },
    }


def is_shape(x):
    return isinstance(x, tuple)


def random_tree(seed, scale=1.0, blocks=BK):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: (scale * rng.standard_normal(s)).astype(np.float32), shapes(blocks), is_leaf=is_shape
    )


def flat(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf, np.float64)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


# The reference: written from the papers, knows nothing of lmres.

DECAYED = ("embed/table", "head/kernel", "query", "key", "value", "out", "gate", "up", "down", "mix")
BRANCH = ("query", "key", "value", "out", "gate", "up", "down")


def orthogonalise(m):
    m = m / (np.sqrt((m**2).sum()) + 1e-8)
    for _ in range(5):
        a = m @ m.T
        m = 3.4445 * m + (-4.7750 * a + 2.0315 * a @ a) @ m
    return m


def reference(config, params, grads, fractions):
    """Updates one by one; returns the parameters after all of them."""
    params = dict(params)
    first = {k: np.zeros_like(v) for k, v in params.items()}
    second = {k: np.zeros_like(v) for k, v in params.items()}
    b1, b2, beta = config.beta1, config.beta2, config.muon_momentum
    for t, (g, fraction) in enumerate(zip(grads, fractions), start=1):
        norm = np.sqrt(sum((v**2).sum() for v in g.values()))
        shrink = 1.0 if config.clip is None else min(1.0, config.clip / norm)
        for name, p in params.items():
            grad = g[name] * shrink
            rate = config.learning_rate
            if config.kind == "muon" and name.endswith(BRANCH):
                rate = config.muon_learning_rate or rate
                first[name] = beta * first[name] + (1 - beta) * grad
                nesterov = beta * first[name] / (1 - beta ** (t + 1)) + (1 - beta) * grad / (1 - beta**t)
                rows = H * K if name.endswith("out") else p.shape[1]
                u = np.stack([orthogonalise(m.reshape(rows, -1)) for m in nesterov])
                u = u.reshape(p.shape) * 0.2 * np.sqrt(max(rows, p[0].size // rows))
            else:
                first[name] = b1 * first[name] + (1 - b1) * grad
                second[name] = b2 * second[name] + (1 - b2) * grad**2
                u = (first[name] / (1 - b1**t)) / (np.sqrt(second[name] / (1 - b2**t)) + config.eps)
            decay = config.weight_decay if name.endswith(DECAYED) else 0.0
            rate *= 0.25 if name.endswith("layers/scale") else 1.0
            params[name] = p - rate * fraction * (u + decay * p)
    return params


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(learning_rate=0.01),
        OptimizerConfig(learning_rate=0.01, clip=None, weight_decay=0.0),
        OptimizerConfig(kind="muon", learning_rate=0.01),
        OptimizerConfig(kind="muon", learning_rate=0.01, muon_learning_rate=0.03, muon_momentum=0.8),
    ],
    ids=["adamw", "adamw-plain", "muon", "muon-own-rate"],
)
def test_against_numpy(config):
    schedule = make_schedule(ScheduleConfig(kind="linear", warmup=2, final=0.5), 4)
    params, grads = random_tree(0), [random_tree(i, scale=i) for i in (1, 2, 3)]
    optimizer = make_optimizer(config, schedule, Picky(), params)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    got = params
    for g in grads:
        got, state = update(got, state, g)
    want = reference(config, flat(params), [flat(g) for g in grads], [0.5, 1.0, 0.75])
    for name, value in flat(got).items():
        np.testing.assert_allclose(value, want[name], rtol=2e-4, atol=2e-5, err_msg=name)


def test_decay_is_the_same_for_stacked_and_separate_layers():
    def names(blocks):
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): is_decayed(path, Picky.no_decay)
            for path, _ in jax.tree_util.tree_leaves_with_path(shapes(blocks), is_leaf=is_shape)
        }

    assert names(BK) == names(None)
    decayed = {name for name, yes in names(BK).items() if yes}
    assert decayed == {name for name in names(BK) if name.endswith(DECAYED)}
    assert "stack/mlp/norm/gain" not in decayed and "stack/connection/layers/mix" in decayed


def test_star_exempts_the_whole_connection():
    rows = describe_roles(random_tree(0), Exempt())
    assert [r["decayed"] for r in rows if r["role"] == "connection"] == [False]


def test_table_covers_every_parameter_once():
    params = random_tree(0)
    rows = describe_roles(params, Picky(), kind="muon")
    assert sum(r["parameters"] for r in rows) == sum(x.size for x in jax.tree.leaves(params))
    assert sum(r["arrays"] for r in rows) == len(jax.tree.leaves(params))
    assert sum(r["arrays"] for r in rows if r["rule"] == "muon") == len(BRANCH)
    scale = next(r for r in rows if r["multiplier"] == 0.25)
    assert scale["names"] == ["stack/connection/layers/scale"] and not scale["decayed"]


def test_unknown_parameter_is_refused_by_name():
    with pytest.raises(ValueError, match="stack/attention/sink"):
        describe_roles({"stack": {"attention": {"sink": np.zeros(3)}}}, Plain())
    assert kind_of((jax.tree_util.DictKey("x"), jax.tree_util.DictKey("gain"))).role == "gain"


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_is_sharded_like_its_parameters_and_updates_agree(kind):
    params, grads = random_tree(0), random_tree(1)
    schedule = make_schedule(ScheduleConfig(kind="constant", warmup=0), 10)
    optimizer = make_optimizer(OptimizerConfig(kind=kind), schedule, Picky(), params)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    where = param_shardings(params, mesh)
    state_where = param_shardings(jax.eval_shape(optimizer.init, params), mesh)
    state = jax.jit(optimizer.init, out_shardings=state_where)(jax.device_put(params, where))
    specs = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.sharding.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    moments = [spec for name, spec in specs.items() if name.endswith("attention/query")]
    assert moments == [P(None, "fsdp", "tensor", None)] * (2 if kind == "adamw" else 1)

    update = jax.jit(optimizer.update, out_shardings=(where, state_where))
    got, _ = update(jax.device_put(grads, where), state, jax.device_put(params, where))
    want, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-7), got, want)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"learning_rate": 0.0}, "optimizer.learning_rate=0.0"),
        ({"learning_rate": float("nan")}, "optimizer.learning_rate=nan"),
        ({"clip": 0.0}, "optimizer.clip=0.0"),
        ({"beta2": 1.0}, "optimizer.beta2=1.0"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay=-0.1"),
        ({"muon_learning_rate": 0.1}, "optimizer.muon_learning_rate"),
    ],
)
def test_settings_out_of_range_are_named(config, word):
    with pytest.raises(ValueError, match=word):
        make_optimizer(OptimizerConfig(**config), lambda step: jnp.ones(()), Plain(), random_tree(0))


@pytest.mark.parametrize("connection", variants.ALL, ids=variants.name)
def test_every_parameter_of_a_real_model_has_a_role(connection):
    model = Transformer(ModelConfig(vocab_size=32, width=16, blocks=2, heads=2, qk_norm=True), connection)
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    params = jax.eval_shape(lambda key, t: model.init(key, t)["params"], jax.random.key(0), tokens)
    rows = describe_roles(params, connection, kind="muon")
    assert sum(r["parameters"] for r in rows) == sum(x.size for x in jax.tree.leaves(params))
    own = [r for r in rows if r["role"] == "connection"]
    cost = model.connection.cost(2 if connection.unit == "block" else 4, 16)
    assert sum(r["parameters"] for r in own) == cost.params
    if "*" in connection.no_decay:
        assert not any(r["decayed"] for r in own)
    for row in own:
        assert row["rule"] == "adamw" and all(
            row["decayed"] == (name.split("/")[3] not in connection.no_decay)
            for name in row["names"]
            if "*" not in connection.no_decay
        )


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_survives_a_checkpoint_and_another_mesh(kind, tmp_path):
    params, grads = random_tree(0), random_tree(1)
    schedule = make_schedule(ScheduleConfig(), 10)
    optimizer = make_optimizer(OptimizerConfig(kind=kind), schedule, Picky(), params)

    def on(mesh):
        like = jax.eval_shape(lambda p: {"params": p, "opt_state": optimizer.init(p)}, params)
        where = param_shardings(like, mesh)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), like, where)

    before = on(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))

    @functools.partial(jax.jit, out_shardings=jax.tree.map(lambda x: x.sharding, before))
    def after_one_update(params, grads):
        _, opt_state = optimizer.update(grads, optimizer.init(params), params)
        return {"params": params, "opt_state": opt_state}

    first = after_one_update(params, grads)
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, first, {})
        checkpoints.wait()
        restored = checkpoints.restore(on(make_mesh(MeshConfig(), jax.devices()[:1])))
    assert restored.skipped == () and jax.tree.structure(restored.state) == jax.tree.structure(first)
    first = jax.device_get(first)
    jax.tree.map(np.testing.assert_array_equal, restored.state, first)
    update = jax.jit(lambda g, s: optimizer.update(g, s["opt_state"], s["params"])[0])
    jax.tree.map(np.testing.assert_array_equal, update(grads, restored.state), update(grads, first))
