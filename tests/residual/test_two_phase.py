"""Block Attention Residuals in two phases, in float64: the same function and gradients as the direct form."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from growing_references import D, E
from growing_stack import EPS, same

from lmres.residual import AttentionResiduals, Stack
from lmres.residual.two_phase import has_two_phases

pytestmark = pytest.mark.usefixtures("x64")


def compare_two_phases(size, per_copy, repeats, **options):
    """Values and all gradients of the scan, which runs in two phases, and of the loop, which does not."""
    connection = AttentionResiduals(block=size, eps=EPS, **options)
    depth = per_copy * repeats
    assert has_two_phases(connection, per_copy, depth)
    draw = np.random.default_rng(size)
    params = connection.init(jax.random.key(0), depth, D)
    params = jax.tree.map(lambda p: np.asarray(p, np.float64) + draw.normal(size=p.shape), params)
    weights = tuple(draw.normal(size=(repeats, D, D)) / 2 for _ in range(per_copy))
    branches = (lambda p, x, i, args, inputs: (jnp.tanh(x @ p), ()),) * per_copy

    def loss(arguments, **how):
        h, _ = Stack(connection, branches, repeats, **how)(*arguments)
        return jnp.sum(jnp.sin(h)), h

    ways = [{"scan": False}, *({"remat": remat} for remat in ("none", "full", "dots"))]
    run_all = jax.jit(lambda *a: [jax.value_and_grad(partial(loss, **how), has_aux=True)(a) for how in ways])
    ((_, expected), expected_grads), *found = run_all(params, weights, jnp.asarray(E))
    for (_, h), grads in found:
        same(h, expected)
        for (path, g), wanted in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected_grads)):
            assert np.any(g), jax.tree_util.keystr(path)
            same(g, wanted, 1e-11)


@pytest.mark.parametrize(
    "size, per_copy, repeats, options",
    [
        (2, 2, 3, {}),
        (3, 1, 5, {"heads": 2}),  # a short block at the end
        (4, 2, 3, {}),  # the same
        (6, 2, 4, {"heads": 4, "key_gain": True}),
    ],
    ids=str,
)
def test_two_phases_are_the_direct_form(size, per_copy, repeats, options):
    compare_two_phases(size, per_copy, repeats, **options)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    "size, per_copy, repeats",
    [(2, 1, 7), (2, 2, 4), (3, 1, 7), (3, 3, 3), (4, 1, 6), (4, 2, 5), (4, 4, 2), (6, 2, 5), (6, 3, 2), (6, 1, 8)],
)
def test_two_phases_are_the_direct_form_in_all_shapes(size, per_copy, repeats, heads):
    compare_two_phases(size, per_copy, repeats, heads=heads, temperature=1.5)
