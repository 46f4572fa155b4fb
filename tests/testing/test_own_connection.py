"""A new user's connection, in 15 lines, through the kit: the README's example, with nothing else of lmres."""

import dataclasses
import inspect
import sys

import jax.numpy as jnp

from lmres.residual import Connection, Cost
from lmres.testing import check_residual


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighted(Connection):
    kind: str = "weighted"
    def init(self, key, depth, width):
        return {"layers": {"weight": jnp.ones(depth)}, "shared": {}}  # equal to plain at the start
    def open(self, params, e, depth):
        return e
    def read(self, params_l, state, l, context=None):  # context: the weights that were used
        return state, params_l["weight"] if context is None else context
    def write(self, params_l, state, context, y, l):
        return (state + context * y).astype(state.dtype)
    def close(self, params, state, context=None):
        return state, ()
    def cost(self, depth, width):
        return Cost(params=depth, flops=2.0 * depth * width, moved=3.0 * depth, state=1.0)


def test_it_passes_the_whole_kit():
    report = check_residual(Weighted())
    print(report)
    assert len(report.passed) == 11 and not report.skipped


def test_it_is_15_lines():
    source = inspect.getsource(sys.modules[__name__]).split("\n\n\n")[1]
    assert source.startswith("@dataclasses.dataclass") and len(source.splitlines()) <= 15
