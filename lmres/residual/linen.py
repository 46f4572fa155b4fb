"""The second door: a Linen module that runs branch modules under a connection.

    stack = ResidualStack(MHC(streams=4), (ModuleBranch("mixer", Mixer()), ModuleBranch("mlp", MLP())), repeats=12)
    params = stack.init(key, x_BSD);  h_BSD = stack.apply(params, x_BSD)

Parameters are plain arrays, no boxes: ``{"mixer": [12, ...], "mlp": [12, ...], "connection": {...}}``, each copy's
stacked along the first axis. Shardings are pinned by the ``constrain`` function, from the connection's own logical
axes.
"""

import dataclasses
from typing import Any, Protocol

import flax.linen as nn
import jax
from jax import Array

from lmres.residual.interface import Connection
from lmres.residual.stack import Remat, Stack, no_constraint


class NamedBranch(Protocol):
    """A branch (see ``lmres.residual.stack``) with a name for its parameters and a way to make them."""

    name: str

    def init(self, key: Array, x: Array) -> Any: ...

    def __call__(self, params_i: Any, x: Array, i: Any, args: Any, inputs_i: Any) -> tuple[Array, Any]: ...


@dataclasses.dataclass(frozen=True)
class ModuleBranch:
    """Any Linen module ``y = module(x)`` as a branch. With a pre-norm connection it must normalise its input itself.

    x is what the connection gives: an array, or a tuple of arrays where it gives several. A module that takes an
    ``Exchange`` is initialised with its x alone.
    """

    name: str
    module: nn.Module

    def init(self, key, x):
        return self.module.init(key, x)["params"]

    def __call__(self, params_i, x, i, args, inputs_i):
        return self.module.apply({"params": params_i}, x), ()


class ResidualStack(nn.Module):
    """``repeats`` copies of ``branches`` under ``connection``; fields as in ``lmres.residual.stack.Stack``."""

    connection: Connection
    branches: tuple[NamedBranch, ...]
    repeats: int
    scan: bool = True
    remat: Remat = "none"
    constrain: Any = no_constraint

    def _stack(self) -> Stack:
        return Stack(self.connection, tuple(self.branches), self.repeats, self.scan, self.remat, self.constrain)

    def _params(self, e: Array) -> tuple[Any, tuple[Any, ...]]:
        """The connection's and the branches' parameters, made on the first call."""
        stack, width = self._stack(), e.shape[-1]
        self.connection.check(stack.depth, width)

        def init_branch(key, branch, x):
            keys = jax.random.split(key, self.repeats)
            return jax.vmap(lambda k: branch.init(k, x))(keys)

        connection = self.param("connection", lambda key: self.connection.init(key, stack.depth, width))
        inputs = stack.inputs_like(e[:1, :1])
        return connection, tuple(
            self.param(b.name, init_branch, b, x) for b, x in zip(self.branches, inputs, strict=True)
        )

    @nn.compact
    def __call__(self, e: Array, args: Any = (), inputs: Any = None) -> tuple[Array, tuple[Any, ...]]:
        """The embedding [B, S, D] to the column's output [B, S, D], and the branches' outputs per copy."""
        connection, branches = self._params(e)
        return self._stack()(connection, branches, e, args, inputs)

    @nn.compact
    def parts(self, e: Array) -> tuple[Stack, Any, tuple[Any, ...]]:
        """The stack with the connection's and the branches' parameters, for another way to run them."""
        return self._stack(), *self._params(e)

    @nn.compact
    def record(self, e: Array, args: Any = ()):
        """Looped, with the record that the depth-mixing matrix needs; see ``Stack.record``."""
        connection, branches = self._params(e)
        return self._stack().record(connection, branches, e, args)
