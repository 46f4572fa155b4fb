"""Edges of the connections that look back: short depth blocks, one block, starts that learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import name

from lmres.residual import (
    AttentionResiduals,
    DeltaAttentionResiduals,
    DenseFormer,
    LIMe,
    MUDDFormer,
    Stack,
    ValueResidual,
)
from lmres.testing import check_residual


@pytest.mark.parametrize("block, repeats", [(4, 3), (6, 5), (4, 4)])
def test_a_short_last_depth_block_counts_its_copies_on(block, repeats):
    """What a branch is told of its place is the same in both forms (dropout draws its mask by it)."""
    spec, e = AttentionResiduals(block=block), jnp.ones((1, 2, 4))
    branch = lambda p, x, i, args, inputs: (jnp.full_like(x, i + 1.0) * p, ())  # noqa: E731
    params = spec.init(None, 2 * repeats, 4)
    looped, scanned = (Stack(spec, (branch, branch), repeats, scan=scan) for scan in (False, True))
    found = [stack(params, (jnp.ones(repeats),) * 2, e)[0] for stack in (looped, scanned)]
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.parametrize(
    "spec", [DenseFormer(period=3), MUDDFormer(), MUDDFormer(norm="prepost"), ValueResidual(), LIMe()], ids=name
)
def test_one_block_has_no_empty_parameters_and_runs(spec):
    """A checkpoint holds no arrays of size zero."""
    spec = spec.fit(2, 4)
    params = spec.init(jax.random.key(0), 1, 8)
    assert all(p.size for p in jax.tree.leaves(params))
    assert spec.cost(1, 8).params == sum(p.size for p in jax.tree.leaves(params))
    check_residual(spec, only=["shapes", "scan", "gradients"], blocks=2)


def test_ungated_delta_attention_can_be_made_plain_in_its_full_form_only():
    spec = DeltaAttentionResiduals(gate="none")
    plain = spec.as_plain(spec.init(jax.random.key(0), 4, 8), None, None)
    assert not plain["shared"]["query"].any()
    assert DeltaAttentionResiduals(gate="none", block=2).as_plain({}, None, None) is None


def test_delta_gates_can_leave_their_start():
    """With queries at zero the uniform mean would be a multiple of the stream, and no gate would get a gradient."""
    spec, rng = DeltaAttentionResiduals(), np.random.default_rng(0)
    e, weights = rng.normal(size=(2, 3, 16)), rng.normal(size=(3, 16, 16)) / 4

    def branch(p, x, i, args, inputs):
        return jnp.tanh(x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) @ p), ()

    loss = lambda p: jnp.sum(jnp.sin(Stack(spec, (branch, branch), 3)(p, (weights, weights[::-1]), e)[0]))  # noqa: E731
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: p.astype(jnp.float64), spec.init(jax.random.key(0), 6, 16))
        gates = np.abs(np.asarray(jax.jit(jax.grad(loss))(params)["layers"]["gate"]))
    assert np.all(gates[1:] > 1e-4) and gates[0] < 1e-6
