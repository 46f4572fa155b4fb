"""One function behind three doors: pure functions, the Linen module, the NNX module, with the same weights."""

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from variants import name, randomised

from lmres.residual import (
    MHC,
    AttentionResiduals,
    DeepCrossAttention,
    DenseFormer,
    HyperConnections,
    MUDDFormer,
    Plain,
    depth_mixing,
    layer_params,
    recompose,
    run_layers,
)
from lmres.residual import linen as linen_door
from lmres.residual import nnx as nnx_door

REPEATS, B, S, D = 2, 2, 4, 8
EXAMPLES = sorted(Path(__file__).parent.glob("example_*.py"))
CONNECTIONS = [
    Plain(),
    DenseFormer(),
    AttentionResiduals(block=2),
    HyperConnections(streams=2),
    MHC(streams=2, iters=3),
]


def branch(x, gain, kernel):
    return jnp.tanh(x * gain @ kernel)


class LinenBranch(nn.Module):
    @nn.compact
    def __call__(self, x):
        gain = self.param("gain", nn.initializers.ones, (D,))
        return branch(x, gain, self.param("kernel", nn.initializers.lecun_normal(), (D, D)))


class NNXBranch(nnx.Module):
    def __init__(self, rngs):
        self.gain = nnx.Param(jnp.ones(D))
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (D, D)))

    def __call__(self, x):
        return branch(x, self.gain[...], self.kernel[...])


def block(x, first, second):
    """Two branches with plain skips: the unit of connections on blocks."""
    x = x + first(x)
    return x + second(x)


def by_functions(connection, params, e):
    def one(which, i):
        own = layer_params({"layers": params[which], "shared": {}}, i)
        return lambda x: branch(x, own["gain"], own["kernel"])

    pairs = [(one("first", i), one("second", i)) for i in range(REPEATS)]
    if connection.unit == "block":
        units = [lambda x, pair=pair: block(x, *pair) for pair in pairs]
    else:
        units = [unit for pair in pairs for unit in pair]
    return run_layers(connection, params["connection"], units, e)[0]


def nnx_params(stack):
    """The NNX module's values, arranged as the Linen module arranges its own."""
    state = nnx.to_pure_dict(nnx.state(stack, nnx.Param))
    groups = {group: dict(state.get(group, {})) for group in ("layers", "shared")}
    return {"connection": groups, "first": state["branches"][0], "second": state["branches"][1]}


def with_params(stack, params):
    """The NNX module holding ``params``."""
    for group in ("layers", "shared"):
        for key, value in getattr(stack, group).items():
            value[...] = params["connection"][group][key]
    for module, which in zip(stack.branches, ("first", "second")):
        for key in ("gain", "kernel"):
            getattr(module, key)[...] = params[which][key]
    return stack


def close(actual, expected, what):
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(expected))
    actual, expected = jax.tree.map(np.asarray, (actual, expected))
    assert jax.tree.structure(actual) == jax.tree.structure(expected), what
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, atol=1e-5 * scale, err_msg=f"{what} {jax.tree_util.keystr(path)}")


@pytest.mark.parametrize("connection", CONNECTIONS, ids=name)
def test_three_doors_one_function(connection):
    e = jnp.asarray(np.random.default_rng(0).normal(size=(B, S, D)), jnp.float32)
    g = jnp.asarray(np.random.default_rng(1).normal(size=(B, S, D)), jnp.float32)
    branches = tuple(linen_door.ModuleBranch(key, LinenBranch()) for key in ("first", "second"))
    linen = linen_door.ResidualStack(connection, branches, REPEATS)
    params = randomised(linen.init(jax.random.key(0), e)["params"], size=0.1)

    def of(run):
        loss = jax.value_and_grad(lambda p, e: (run(p, e) * g).sum(), argnums=(0, 1))
        return jax.jit(loss)(params, e)

    expected = of(lambda p, e: by_functions(connection, p, e))
    close(of(lambda p, e: linen.apply({"params": p}, e)[0]), expected, "Linen")

    made = nnx_door.ResidualStack(connection, (NNXBranch, NNXBranch), REPEATS, D, rngs=nnx.Rngs(0))
    assert jax.tree.map(jnp.shape, nnx_params(made)) == jax.tree.map(jnp.shape, params)
    stack = with_params(made, params)
    loss = nnx.jit(nnx.value_and_grad(lambda stack, e: (stack(e) * g).sum(), argnums=(0, 1)))
    value, (g_stack, g_e) = loss(stack, e)
    g_pure = nnx.to_pure_dict(g_stack)
    found = {
        "connection": {group: dict(g_pure.get(group, {})) for group in ("layers", "shared")},
        "first": g_pure["branches"][0],
        "second": g_pure["branches"][1],
    }
    close((value, (found, g_e)), expected, "NNX")


def test_nnx_copies_differ_and_options_change_nothing():
    e = jnp.ones((B, S, D))
    make = lambda **options: nnx_door.ResidualStack(  # noqa: E731
        MHC(streams=2), (NNXBranch, NNXBranch), REPEATS, D, rngs=nnx.Rngs(3), **options
    )
    stack = make()
    kernel = stack.branches[0].kernel[...]
    assert kernel.shape == (REPEATS, D, D) and not np.allclose(kernel[0], kernel[1])
    assert not np.allclose(kernel, stack.branches[1].kernel[...])
    for options in ({"scan": False}, {"remat": "full"}):
        np.testing.assert_allclose(make(**options)(e), stack(e), atol=1e-6)
    h, record = stack.record(e)
    np.testing.assert_allclose(h, stack(e), atol=1e-6)
    matrix = depth_mixing(stack.connection, record.contexts, e)
    np.testing.assert_allclose(recompose(matrix, e, record.outputs)[-1], h, atol=1e-5)


def test_nnx_refuses_what_it_would_lose():
    class Dropping(NNXBranch):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    with pytest.raises(ValueError, match=r"Dropping holds \['RngCount', 'RngKey'\] beside nnx.Param"):
        nnx_door.ResidualStack(Plain(), (Dropping,), REPEATS, D, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"residual\.streams=0"):
        nnx_door.ResidualStack(MHC(streams=0), (NNXBranch,), REPEATS, D, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_learn(path, capsys):
    before, after = runpy.run_path(str(path))["main"]()
    assert after < 0.3 * before
    assert capsys.readouterr().out == f"loss {before:.4f} before, {after:.4f} after 200 steps\n"
    imported = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, (ast.Import, ast.ImportFrom))]
    rooms = {n.module for n in imported if isinstance(n, ast.ImportFrom) and n.module.startswith("lmres")}
    assert rooms and all(room.startswith("lmres.residual") for room in rooms)


def test_no_door_asks_for_the_rest():
    """The pure functions import no Flax, the adapters no other room of lmres than ops."""
    for module, unwanted in (
        ("lmres.residual", ("flax", "lmres.model", "lmres.train", "pydantic")),
        ("lmres.residual.linen", ("lmres.model", "lmres.train", "pydantic")),
        ("lmres.residual.nnx", ("lmres.model", "lmres.train", "pydantic")),
    ):
        code = f"import sys, {module}; print([m for m in {unwanted!r} if m in sys.modules])"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert out.stdout.strip() == "[]", module


def test_three_examples():
    assert [path.stem for path in EXAMPLES] == ["example_functions", "example_linen", "example_nnx"]


class ThreeInputs(nn.Module):
    """A branch that takes query, key and value apart."""

    @nn.compact
    def __call__(self, inputs):
        q, k, v = (nn.Dense(8, name=name)(x) for name, x in zip("qkv", inputs, strict=True))
        return jnp.tanh(q + k + v)


@pytest.mark.parametrize("connection", [DeepCrossAttention(), MUDDFormer()], ids=name)
def test_linen_modules_are_initialised_with_what_the_connection_gives(connection):
    branches = (linen_door.ModuleBranch("first", ThreeInputs()), linen_door.ModuleBranch("second", nn.Dense(8)))
    stack = linen_door.ResidualStack(connection, branches, repeats=2)
    e = jnp.ones((2, 3, 8))
    variables = stack.init(jax.random.key(0), e)
    assert variables["params"]["first"]["q"]["kernel"].shape == (2, 8, 8)
    assert stack.apply(variables, e)[0].shape == e.shape
