"""The third door: an NNX module that runs branch modules under a connection.

    stack = ResidualStack(MHC(streams=4), (make_mixer, make_mlp), repeats=12, width=256, rngs=nnx.Rngs(0))
    h_BSD = stack(x_BSD)

A branch is given as a function ``make(rngs) -> module`` and called once per copy; the copies' parameters are stacked
along a first axis, and depth is scanned as in the other two doors, by the same ``lmres.residual.stack``. All
parameters are ``nnx.Param``: ``stack.branches[b]`` is a module with a first axis of size ``repeats`` on everything,
``stack.layers`` and ``stack.shared`` hold the connection's by name.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax import Array

from lmres.residual.interface import Connection, Params
from lmres.residual.stack import Remat, Stack, no_constraint


@dataclasses.dataclass(frozen=True)
class ModuleBranch:
    """An NNX module ``y = module(x)`` as a branch of ``lmres.residual.stack``; its parameters are an ``nnx.State``."""

    graph: Any

    def __call__(self, params_i, x, i, args, inputs_i):
        return nnx.merge(self.graph, params_i)(x), ()


class ResidualStack(nnx.Module):
    """``repeats`` copies of branches under ``connection``.

    With a pre-norm connection (``connection.branch_norms``) a branch normalises its input itself. Branches hold
    parameters only: the copies are run by pure functions, which would lose what a batch norm or a dropout's random
    state writes. Give dropout its key through the input, or keep it outside.

    Args:
      connection: any member of ``lmres.residual``, or your own.
      branches: functions ``make(rngs) -> module`` with ``y = module(x)``, in the order of one copy.
      repeats: number of copies. width: D. rngs: for all parameters (the stream "params").
      scan, remat, constrain: as in ``lmres.residual.stack.Stack``.

    Raises: ValueError when the connection refuses the size, or a branch holds variables other than ``nnx.Param``.
    """

    def __init__(
        self,
        connection: Connection,
        branches: Sequence[Callable[[nnx.Rngs], nnx.Module]],
        repeats: int,
        width: int,
        *,
        rngs: nnx.Rngs,
        scan: bool = True,
        remat: Remat = "none",
        constrain: Callable[[Array, Any], Array] = no_constraint,
    ):
        self.connection, self.repeats = connection, repeats
        self.scan, self.remat, self.constrain = scan, remat, constrain
        per_copy = len(branches) if connection.unit == "sublayer" else 1
        connection.check(repeats * per_copy, width)
        params = connection.init(rngs.params(), repeats * per_copy, width)
        self.layers = nnx.Dict({name: nnx.Param(p) for name, p in params["layers"].items()})
        self.shared = nnx.Dict({name: nnx.Param(p) for name, p in params["shared"].items()})
        self.branches = nnx.List([_stacked(make, repeats, rngs) for make in branches])

    def __call__(self, e: Array) -> Array:
        """The embedding [B, S, D] to the column's output [B, S, D]."""
        stack, params, branch_params = self._pure()
        return stack(params, branch_params, e)[0]

    def record(self, e: Array):
        """Looped, with the record that the depth-mixing matrix needs; see ``Stack.record``."""
        stack, params, branch_params = self._pure()
        return stack.record(params, branch_params, e)

    def _pure(self) -> tuple[Stack, Params, tuple[nnx.State, ...]]:
        """The stack of pure functions, and the parameters it takes."""
        graphs, states = zip(*(nnx.split(branch) for branch in self.branches))
        branches = tuple(ModuleBranch(graph) for graph in graphs)
        stack = Stack(self.connection, branches, self.repeats, self.scan, self.remat, self.constrain)
        of = lambda group: {name: p[...] for name, p in group.items()}  # noqa: E731
        return stack, {"layers": of(self.layers), "shared": of(self.shared)}, states


def _stacked(make: Callable[[nnx.Rngs], nnx.Module], repeats: int, rngs: nnx.Rngs) -> nnx.Module:
    """``repeats`` copies as one module whose arrays have a first axis of that size."""
    keys = jax.random.split(rngs.params(), repeats)
    branch = nnx.vmap(lambda key: make(nnx.Rngs(key)))(keys)
    others = {type(v).__name__ for _, v in nnx.to_flat_state(nnx.state(branch)) if not isinstance(v, nnx.Param)}
    if others:
        raise ValueError(
            f"{type(branch).__name__} holds {sorted(others)} beside nnx.Param; a branch of a residual stack must hold "
            "parameters only, since its copies are run by pure functions"
        )
    return branch
