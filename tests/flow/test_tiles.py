"""Tiles in float64 against cells computed one by one: outputs, gradients, sweeps, packing, memory."""

from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid_model import (
    B,
    D,
    H,
    K,
    cell_by_cell,
    dense,
    empty_grid,
    kept,
    made,
    name,
    one_document,
    parameters,
    tiled,
)

from lmres.flow import Tokens, reads_of, sweeps_needed
from lmres.flow.attention import Cells, attend_cells
from lmres.flow.geometry import Cone, Deep, Diagonal, Top

T, L = 6, 3
pytestmark = pytest.mark.usefixtures("x64")

FAST = ["diagonal(-1/2)", "lag(2)", Deep(output=True)]
SLOW = [
    *("standard", "map(1,1,3)", "map(2,3,3)", "block(2)", "moda", "rectangle(2)", "diagonal(-1)"),
    *("diagonal(1)", "diagonal(1/2)", "cone(0)", "cone(1)", "cone(1/2)", "recurrent", "top", "deep", "lag(3)"),
    *("chunk(2)", "chunk(3)", "feedback", "pool(2)"),
    Top(output=True),
    Cone(Fraction(2), output=True),
    Diagonal(Fraction(-1), border="drop"),
    Diagonal(Fraction(1), border="drop"),
    Top(adopt="optional"),
    Deep(adopt="mandatory"),
]


def reads_for(geometry):
    return made(geometry).reads(L)


def embeddings(tokens=T, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, tokens, D)))


def weighted(run):
    """run's results by their own: gradients of a fixed weighting of outputs and grid, in all parameters and in e."""

    def loss(params, e, *args):
        h, grid = run(params, e, *args)
        total = sum((jnp.cos(jnp.arange(x.size)).reshape(x.shape) * x).sum() for x in (h, *grid))
        return total, (h, grid)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


reference = jax.jit(weighted(dense))


@partial(jax.jit, static_argnums=(0, 1))
def by_tiles(reads, count, params, e, tokens):
    return weighted(lambda params, e: tiled(reads, count, params, e, tokens))(params, e)


@partial(jax.jit, static_argnums=(0, 1))
def sweep(reads, groups, params, e, previous):
    return tiled(reads, groups, params, e, previous=previous, strided=True)


def assert_close(got, want, rtol=1e-10):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * float(jnp.abs(b).max() + 1))


@pytest.mark.parametrize("geometry", [*FAST, *(pytest.param(g, marks=pytest.mark.slow) for g in SLOW)], ids=name)
def test_tiles_are_the_cells_one_by_one(geometry):
    reads = reads_for(geometry)
    params, e = parameters(L, reads.sources), embeddings()
    want = reference(params, e, reads_of(reads, T), kept(reads))
    largest = max(n for n in range(1, reads.tile(T) + 1) if T % n == 0)
    for count in {T, T // largest}:
        assert_close(by_tiles(reads, count, params, e, one_document(T)), want)


def test_reference_is_cell_by_cell_in_any_order():
    reads = Deep(output=True).reads(2)
    params, e = parameters(2, 3), embeddings(4)
    run = jax.jit(
        lambda params, e: [cell_by_cell(reads, params, e, o) for o in (None, np.random.default_rng(3).permutation)]
    )
    as_they_come, permuted = run(params, e)
    assert_close(jax.jit(dense)(params, e, reads_of(reads, 4), kept(reads))[0], as_they_come, 1e-12)
    assert_close(permuted, as_they_come, 1e-12)


@pytest.mark.parametrize(
    ("geometry", "groups"),
    [
        *(("deep", 1), ("deep", 2), ("lag(2)", 1)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                *(("deep", 3), ("deep", 6), ("chunk(2)", 2), ("cone(1)", 3), ("block(2)", 2)),
                *(
                    (g, 1)
                    for g in ("top", "lag(3)", "chunk(3)", "recurrent", "feedback", "diagonal(1/2)", "map(2,3,3)")
                ),
                *((g, 1) for g in ("moda", "rectangle(2)", "diagonal(-1)")),
            ]
        ),
    ],
)
def test_sweeps_are_exact_when_counted(geometry, groups):
    reads = reads_for(geometry)
    params, e = parameters(L, reads.sources), embeddings()
    _, (exact, grid) = reference(params, e, reads_of(reads, T), kept(reads))[0]
    rng = np.random.default_rng(5)
    needed = sweeps_needed(reads, T, groups)
    one_pass = dict.fromkeys(("moda", "rectangle(2)", "diagonal(-1)"), T)
    each = {"deep": groups, "top": groups, "lag(2)": 2, "lag(3)": 3, "chunk(3)": 3, **one_pass}.get(geometry, 0)
    for start in (empty_grid(reads, T), tuple(jnp.asarray(rng.normal(size=x.shape)) for x in grid)):
        found = start
        for count in range(1, needed + 1):
            h, found = sweep(reads, groups, params, e, found)
            right = np.abs(np.asarray(h - exact)).max((0, 2)) < 1e-10
            assert right[: count * each].all()
            assert count == needed or not right.all()
            if geometry == "deep":
                assert not right[count * each :].any()
        assert_close((h, found), (exact, grid))


def test_gradient_of_sweeps():
    reads = reads_for(Top(output=True))
    params, e = parameters(L, reads.sources), embeddings()

    def all_sweeps(params, e):
        def once(grid, _):
            h, grid = tiled(reads, 1, params, e, previous=grid, strided=True)
            return grid, h

        grid, h = jax.lax.scan(once, empty_grid(reads, T), None, length=T)
        return h[-1], grid

    want = reference(params, e, reads_of(reads, T), kept(reads))
    assert_close(jax.jit(weighted(all_sweeps))(params, e), want)
    grid = want[0][1][1]

    # One sweep from the exact grid: the output cell's projections are read upwards only.
    def loss(params, previous):
        return (tiled(reads, 1, params, e, previous=previous, strided=True)[0] ** 2).sum()

    g_params, g_previous = jax.jit(jax.grad(loss, (0, 1)))(params, grid)
    assert not g_params[0]["key"].any() and not g_params[0]["value"].any()
    assert g_params[1]["query"].any() and g_previous[0].any()
    assert np.abs(want[1][0][0]["key"]).max() > 1e-3

    # By finite differences: a key and a value read upwards.
    at, step = (0, 0, 2, 1, 3), 1e-5
    for kind in (0, 1):
        moved = [tuple(x.at[at].add(sign * step * (i == kind)) for i, x in enumerate(grid)) for sign in (1, -1)]
        up, down = ((sweep(reads, 1, params, e, g)[0] ** 2).sum() for g in moved)
        np.testing.assert_allclose(g_previous[kind][at], (up - down) / (2 * step), rtol=1e-6)


def test_causality_and_finite_differences():
    reads = reads_for(Deep(output=True))
    params, e = parameters(L, reads.sources), embeddings()
    run = partial(by_tiles, reads, T, tokens=one_document(T))
    (_, (h, grid)), (g_params, _) = run(params, e)
    for j in (0, 2, 5):
        _, (moved, moved_grid) = run(params, e.at[:, j].add(0.1))[0]
        np.testing.assert_array_equal(moved[:, :j], h[:, :j])
        np.testing.assert_array_equal(moved_grid[0][:, :, :j], grid[0][:, :, :j])
        assert (moved[:, j:] != h[:, j:]).any((0, 2)).all()
    # Keys of layer 3 reach the shallow layers of later tokens, and none of their own token's.
    shared, layers = params
    _, (_, moved) = run((shared, {**layers, "key": layers["key"].at[2].multiply(1.5)}), e)[0]
    np.testing.assert_array_equal(moved[1][:3, :, 0], grid[1][:3, :, 0])
    assert (moved[1][1:3, :, 1] != grid[1][1:3, :, 1]).any((1, 2, 3)).all()
    # beta, by finite differences.
    step = 1e-5
    for at in ((0, 0), (0, 3), (1, 2), (2, 1)):
        total = [run(({**shared, "beta": shared["beta"].at[at].add(x)}, layers), e)[0][0] for x in (step, -step)]
        np.testing.assert_allclose(g_params[0]["beta"][at], (total[0] - total[1]) / (2 * step), rtol=1e-5, atol=1e-8)


def test_an_empty_read_set_gives_zero():
    reads = reads_for("feedback")
    (shared, layers), e = parameters(L, reads.sources), embeddings()
    (_, (h, _)), (grads, _) = by_tiles(reads, T, (shared, layers), e, one_document(T))
    x = np.asarray(e[:, 0])
    for up, down in zip(np.asarray(layers["up"]), np.asarray(layers["down"])):
        x = x + np.tanh(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) @ up) @ down
    np.testing.assert_allclose(h[:, 0], x, rtol=0, atol=1e-12)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_attention_to_nothing_is_zero():
    query, key = jnp.ones((B, 2, H, K)), jnp.ones((B, 2, H, K))
    mask = jnp.asarray([[[True, False], [False, False]]])
    loss = lambda q, k: attend_cells(q, (Cells(k, k, mask),))  # noqa: E731
    found = jax.jit(loss)(query, key)
    np.testing.assert_array_equal(found[:, 1], 0)
    np.testing.assert_allclose(found[:, 0], 1)
    for g in jax.jit(jax.grad(lambda q, k: loss(q, k).sum(), (0, 1)))(query, key):
        assert np.isfinite(g).all() and not g[:, 1].any()


SLOW_PACKED = [pytest.param(g, marks=pytest.mark.slow) for g in ("deep", "chunk(2)")]


@pytest.mark.parametrize("geometry", ["lag(2)", *SLOW_PACKED])
@pytest.mark.parametrize("one_by_one", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_packed_documents(geometry, one_by_one):
    reads = reads_for(geometry)
    params, e = parameters(L, reads.sources), embeddings()
    position, segment = jnp.asarray([[0, 1, 2, 0, 1, 0]]), jnp.asarray([[1, 1, 1, 2, 2, 0]])
    # Chunks that are tiles too are counted along the row; else along the document.
    place = position if one_by_one else jnp.arange(T)[None]
    allowed = np.zeros((T, L, T, reads.sources), bool)
    for start, end in ((0, 3), (3, 5)):
        n, phase = end - start, 0 if one_by_one else start
        allowed[start:end, :, start:end] = reads_of(reads, n)
        if geometry.startswith("chunk"):
            allowed[start:end, :, start:end] = reads_of(reads, n + phase)[phase:, :, phase:]
    want = reference(params, e, allowed, kept(reads))
    got = by_tiles(reads, T if one_by_one else T // reads.tile(T), params, e, Tokens(position, place, segment))
    assert_close(got, want)


def gradient(reads, tokens):
    params, e = parameters(reads.layers, reads.sources), embeddings(tokens)
    run = weighted(lambda params, e: tiled(reads, tokens, params, e))
    return jax.jit(run).lower(params, e)


def test_memory_is_linear_and_the_program_does_not_grow():
    lowered = {n: gradient(reads_for("deep"), n) for n in (32, 64)}
    lines = {n: len(x.as_text().splitlines()) for n, x in lowered.items()}
    assert lines[32] == lines[64] == len(gradient(Deep().reads(5), 32).as_text().splitlines())
    small, large = (lowered[n].compile().memory_analysis().temp_size_in_bytes for n in (32, 64))
    grid = 2 * L * B * 64 * H * K * 8
    assert large < 2.4 * small
    assert large < 12 * grid
