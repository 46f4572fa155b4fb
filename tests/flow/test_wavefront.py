"""The wavefront in float64 against the same model token by token: outputs, grid, gradients, and the number of steps."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid_model import B, D, Program, empty_grid, made, one_document, parameters, tiled

from lmres.flow import Reader, Wavefront, critical_path, parse, run_wavefront
from lmres.flow.geometry import Cone, Deep, Diagonal, Top

T = 6
pytestmark = pytest.mark.usefixtures("x64")


def plan(reads, slope=None, tokens=T):
    reader = Reader(reads, tokens, one_tile=False)
    return Wavefront(Program(reader), reader, reads.layers, tokens, slope or max(1, math.ceil(reads.slope(tokens))))


# Slopes that do and do not divide the number of layers; slope above what is needed; reads of the own column.
@pytest.mark.parametrize(
    ("kind", "layers", "slope"),
    [
        ("cone(1)", 3, None),
        ("lag(2)", 4, None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("standard", 3, None), ("block(2)", 4, 3), ("diagonal(1)", 4, None), ("diagonal(2)", 5, None),
                ("cone(2)", 5, None), ("cone(1/2)", 4, None), ("top", 4, None), ("deep", 3, None),
                ("chunk(3)", 4, None), ("moda", 3, None), ("map(3,1,5,4,5)", 5, None), (Top(output=True), 3, None),
                (Cone(Fraction(1), output=True), 3, None), (Cone(Fraction(2), output=True), 5, None),
                ("rectangle(2)", 3, None), ("diagonal(-1/2)", 4, None), ("diagonal(1/2)", 4, None),
                (Diagonal(Fraction(1), border="drop"), 4, None), ("recurrent", 3, None), ("feedback", 3, None),
                ("cone(0)", 3, None), (Deep(output=True), 3, None),
            ]
        ),
    ],
)  # fmt: skip
def test_wavefront_is_the_model_token_by_token(kind, layers, slope):
    reads = made(kind).reads(layers)
    params = parameters(layers, reads.sources)
    e = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, D)))
    weight = jnp.asarray(np.random.default_rng(2).normal(size=e.shape))

    def both(run):
        def loss(params, e):
            h, grid = run(params, e)
            return (weight * h).sum() + sum((leaf**2).sum() for leaf in grid), (h, grid)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, e)

    wave = both(lambda p, e: run_wavefront(plan(reads, slope), *p, e, empty_grid(reads, T), one_document(T)))
    column = both(lambda p, e: tiled(reads, T, p, e))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11), wave, column)


@pytest.mark.parametrize(("layers", "tokens"), [(2, 9), (4, 9), (6, 3)])
def test_slope_one_takes_layers_and_tokens_less_one_steps(layers, tokens):
    reads = parse("cone(1)").reads(layers)
    schedule = plan(reads, tokens=tokens)
    assert schedule.steps == layers + tokens - 1 == critical_path(reads, tokens)
    # Every cell is in exactly one step, as many at a time as the schedule says.
    seen = []
    for u in range(schedule.steps):
        token, layer, exists = (np.asarray(x) for x in schedule.cells(u))
        assert len(token) == schedule.running
        seen += [(t, l) for t, l, there in zip(token.tolist(), layer.tolist(), exists.tolist()) if there]
    assert sorted(seen) == [(t, l) for t in range(tokens) for l in range(layers)]


def test_program_is_one_body_whatever_the_size():
    def lines(tokens, layers):
        reads = parse("cone(1)").reads(layers)
        e = jnp.zeros((B, tokens, D))

        def loss(params):
            schedule = plan(reads, tokens=tokens)
            return run_wavefront(schedule, *params, e, empty_grid(reads, tokens), one_document(tokens))[0].sum()

        return len(jax.jit(jax.grad(loss)).lower(parameters(layers, layers)).as_text().splitlines())

    assert lines(32, 4) == lines(64, 4) == lines(64, 8)


def test_what_a_wavefront_cannot_run_is_refused():
    with pytest.raises(ValueError, match=r"diagonal\(2\) needs a wavefront of slope 2 or more, not 1"):
        plan(parse("diagonal(2)").reads(4), slope=1)
