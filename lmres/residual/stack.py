"""Running a stack of branches under a connection.

A stack is ``repeats`` copies of the same sequence of branches (in a transformer: attention, MLP). The units of the
connection are the branches, or, for a connection on blocks, the whole copy with a plain residual inside. Three ways to
run the same function:

- scanned (default): one compiled body, so compile time does not grow with depth;
- looped: a plain Python loop, for debugging, and the independent check of the scanned form;
- for growing states, scanned with the append-only backward of ``lmres.residual.append``: reverse-mode
  differentiation of a scan that carries a history would keep every version of the history.

A branch is any callable ``y, out = branch(params_i, x, i, args, inputs_i)``: ``params_i`` its parameters in copy i,
``args`` the same for all copies and not differentiated (positions, masks), ``inputs_i`` and ``out`` whatever it takes
and gives per copy (key/value caches), ``()`` in training.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lmres.residual.append import run_append_only
from lmres.residual.interface import (
    AppendOnly,
    Axes,
    Connection,
    Exchange,
    Lent,
    Mix,
    Params,
    layer_params,
    read_unit,
    split_skip,
)
from lmres.residual.two_phase import has_two_phases, run_two_phases

Branch = Callable[[Params, Array, Any, Any, Any], tuple[Array, Any]]
Remat = Literal["none", "full", "dots", "offload", "inputs"]


def no_constraint(x: Array, axes: Any) -> Array:
    """The identity: shardings are left to the compiler."""
    return x


@dataclasses.dataclass(frozen=True)
class PlainBlock:
    """The branches of one copy with a plain residual inside: the unit of connections that are defined on blocks.

    The first branch may take several inputs, of which the last is where its skip starts, or lend its keys and values.
    """

    branches: tuple[Branch, ...]

    def __call__(self, params_i, x, i, args, inputs_i):
        (_, _, x), outputs = self._run(params_i, x, i, args, inputs_i)
        return x, outputs

    def parts(self, params_i, x, i, args):
        """What each branch reads and returns, and the block's output."""
        return self._run(params_i, x, i, args, None)[0]

    def _run(self, params_i, x, i, args, inputs_i):
        reads, ys, outputs, lent = [], [], [], None
        for s, branch in enumerate(self.branches):
            x, skip = split_skip(x)
            y, out = branch(params_i[s], x, i, args, inputs_i[s] if inputs_i else ())
            if isinstance(y, Lent):
                y, lent = y.y, y
            reads.append(x.x if isinstance(x, Exchange) else x), ys.append(y), outputs.append(out)
            x = skip + y
        return (reads, ys, x if lent is None else lent._replace(y=x)), tuple(outputs)


@dataclasses.dataclass(frozen=True)
class Stack:
    """A connection, its branches, and how to run them; hashable.

    connection: the residual connection.
    branches: the branches of one copy, in order.
    repeats: number of copies.
    scan: one compiled body; False is a Python loop.
    remat: what the backward pass recomputes: "none", "full" (everything inside a copy), "dots" (all but the
      results of matrix products with weights), "offload" (as "dots", but these are kept in the host's memory and
      fetched back). "inputs" is for growing histories: the units' inputs are read again, nothing else.
    constrain: ``f(array, logical axes) -> array`` that pins shardings; the identity by default.
    """

    connection: Connection
    branches: tuple[Branch, ...]
    repeats: int
    scan: bool = True
    remat: Remat = "none"
    constrain: Callable[[Array, Any], Array] = no_constraint

    def __post_init__(self):
        ways = self.connection.ways
        if len(self.units) % len(ways):
            raise ValueError(
                f"residual.ways={list(ways)} repeats every {len(ways)} units, and a copy has {len(self.units)}; "
                "give one number, or one per unit of a copy"
            )

    @property
    def units(self) -> tuple[Branch, ...]:
        """One callable per unit of the connection in one copy."""
        return self.branches if self.connection.unit == "sublayer" else (PlainBlock(self.branches),)

    @property
    def depth(self) -> int:
        """Number of units."""
        return self.repeats * len(self.units)

    def __call__(
        self,
        connection_params: Params,
        branch_params: Sequence[Params],
        e: Array,
        args: Any = (),
        inputs: Sequence[Any] | None = None,
    ) -> tuple[Array, tuple[Any, ...]]:
        """Runs the stack.

        Args:
          connection_params: from ``connection.init(key, depth, width)``.
          branch_params: one pytree per branch, each leaf stacked to [repeats, ...].
          e: the embedding [B, S, D].
          args: see the head of this file.
          inputs: one pytree per branch, each leaf stacked to [repeats, ...], or None.

        Returns: the column's output h [B, S, D], and the branches' outputs, stacked like ``inputs``.
        """
        if self.scan and inputs is None and isinstance(self.connection, AppendOnly):
            two_phases = has_two_phases(self.connection, len(self.units), self.depth)
            run = run_two_phases if two_phases else run_append_only
            h = run(self, connection_params, self.by_unit(branch_params), e, args)
            return h, tuple(() for _ in self.branches)
        inputs = inputs if inputs is not None else tuple(() for _ in self.branches)
        state = self.pin(self.connection.open(connection_params, e, self.depth))
        run = self._scanned if self.scan else self._looped
        state, outputs = run(connection_params, self.by_unit(branch_params), state, args, self.by_unit(inputs))
        if len(self.units) != len(self.branches):
            (outputs,) = outputs
        return self.connection.close(connection_params, state)[0], outputs

    def record(self, connection_params: Params, branch_params: Sequence[Params], e: Array, args: Any = ()):
        """As ``__call__``, looped, with a record of every *branch*'s input and output and every unit's context.

        Returns: h [B, S, D] and a ``Record``; ``depth_mixing(connection, record.contexts, e, inner)`` takes it on, with
        ``inner`` the number of branches inside a unit.
        """
        reads, outputs = [], []
        layers = self.grouped(connection_params)
        units, by_unit = self.units, self.by_unit(branch_params)
        state, contexts = self.connection.open(connection_params, e, self.depth), []
        for i in range(self.repeats):
            for s, unit in enumerate(units):
                params_l = {**jax.tree.map(lambda p, i=i, s=s: p[i, s], layers), **connection_params["shared"]}
                l = i * len(units) + s
                x, context = read_unit(self.connection, params_l, state, l, s)
                params_i = jax.tree.map(lambda p, i=i: p[i], by_unit[s])
                if isinstance(unit, PlainBlock):
                    inner_reads, inner_outputs, y = unit.parts(params_i, x, i, args)
                else:
                    y, _ = unit(params_i, x, i, args, ())
                    inner_reads, inner_outputs = [x], [y]
                state = self.connection.write(params_l, state, context, y, l)
                reads += inner_reads
                outputs += inner_outputs
                contexts.append(context)
        h, context = self.connection.close(connection_params, state)
        return h, Record(reads, outputs, [*contexts, context], state)

    def inputs_like(self, x: Array) -> list[Any]:
        """``x`` in the form in which each branch gets its input: itself, or a tuple where there are several."""
        ways = self.connection.ways
        if self.connection.unit == "block":
            first, _ = split_skip(x if ways[0] == 1 else (x,) * ways[0])
            return [first, *[x] * (len(self.branches) - 1)]
        counts = [ways[s % len(ways)] for s in range(len(self.branches))]
        return [x if count == 1 else (x,) * count for count in counts]

    def pin(self, state):
        """The state with its shardings pinned."""
        return jax.tree.map(self.constrain, state, self.connection.state_axes())

    def pin_input(self, x):
        """A unit's input [B, S, D], or a tuple of them, with its sharding pinned, and so that of its cotangent. Left
        free it takes up the one of the weights that it is multiplied with, and the state's is given up for it.

        What mixes over heads, which may be split, is pinned whole: its sum is sent, where else all that it sums is."""
        rows = Axes("batch", "sequence", "embed")
        if isinstance(x, Exchange):
            return Exchange(self.constrain(x.x, rows), self._pin_mix(x.key), self._pin_mix(x.value))
        if isinstance(x, tuple):
            return tuple(self.constrain(each, rows) for each in x)
        return self.constrain(x, rows) if isinstance(x, Array) else x  # what a unit makes its inputs of, as it is

    def _pin_mix(self, mix: Mix | None) -> Mix | None:
        if mix is None or mix.own.ndim == 0:
            return mix
        return Mix(
            self.constrain(mix.gathered, Axes("batch", "sequence", None, None)),
            self.constrain(mix.own, Axes(None, None)),
        )

    def grouped(self, connection_params: Params) -> Params:
        """Per-layer parameters as [repeats, units per copy, ...]."""
        per_copy = len(self.units)
        return jax.tree.map(lambda p: p.reshape(self.repeats, per_copy, *p.shape[1:]), connection_params["layers"])

    def by_unit(self, per_branch: Sequence[Any]) -> tuple[Any, ...]:
        """One entry per unit from one entry per branch."""
        return tuple(per_branch) if self.connection.unit == "sublayer" else (tuple(per_branch),)

    def copy(self, shared, state, layers, branch_params, i, args, inputs):
        """One copy: every unit read from and written to the state."""
        outputs = []
        for s, unit in enumerate(self.units):
            l = i * len(self.units) + s
            params_l = {**jax.tree.map(lambda p, s=s: p[s], layers), **shared}
            x, context = read_unit(self.connection, params_l, state, l, s)
            y, out = unit(branch_params[s], self.pin_input(x), i, args, inputs[s])
            state = self.pin(self.connection.write(params_l, state, context, y, l))
            outputs.append(out)
        return state, tuple(outputs)

    def first_input(self, shared, state, layers, i):
        """What the first branch of copy ``i`` reads; arguments as in ``copy``."""
        params_l = {**jax.tree.map(lambda p: p[0], layers), **shared}
        x, _ = read_unit(self.connection, params_l, state, i * len(self.units), 0)
        return x if self.connection.unit == "sublayer" else split_skip(x)[0]

    def _scanned(self, params, branch_params, state, args, inputs):
        def body(state, xs):
            layers, branch_params_i, inputs_i, i = xs
            return self.copy(params["shared"], state, layers, branch_params_i, i, args, inputs_i)

        body = self.checkpointed(body)
        xs = (self.grouped(params), branch_params, inputs, jnp.arange(self.repeats))
        return jax.lax.scan(body, state, xs)

    def _looped(self, params, branch_params, state, args, inputs):
        def copy(i, state, layers, branch_params_i, inputs_i):
            return self.copy(params["shared"], state, layers, branch_params_i, i, args, inputs_i)

        collected = []
        layers = self.grouped(params)
        for i in range(self.repeats):
            layers_i, params_i, inputs_i = jax.tree.map(lambda p, i=i: p[i], (layers, branch_params, inputs))
            state, outputs = self.checkpointed(partial(copy, i))(state, layers_i, params_i, inputs_i)
            collected.append(outputs)
        return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *collected)

    def checkpointed(self, f: Callable) -> Callable:
        """``f`` under the stack's rematerialisation."""
        if self.remat in ("none", "inputs"):
            return f
        policies = jax.checkpoint_policies
        keep = {
            "dots": policies.dots_with_no_batch_dims_saveable,
            "offload": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
        }.get(self.remat)
        # Inside a scan the barriers against common-subexpression elimination are not needed and cost speed.
        return jax.checkpoint(f, policy=keep, prevent_cse=not self.scan)


def run_layers(connection: Connection, params: Params, branches: Sequence[Callable[[Array], Array]], e: Array):
    """The shortest honest way to run a connection: ``branches`` is a flat list of ``y = branch(x)``, one per unit.

    Returns the column's output and a record for tests and pictures: the inputs each unit read, the outputs, the
    contexts (the readout's last).
    """
    state = connection.open(params, e, len(branches))
    reads, outputs, contexts = [], [], []
    for l, branch in enumerate(branches):
        params_l = layer_params(params, l)
        x, context = read_unit(connection, params_l, state, l, l)
        y = branch(x)
        state = connection.write(params_l, state, context, y, l)
        reads.append(x), outputs.append(y), contexts.append(context)
    h, context = connection.close(params, state)
    return h, Record(reads, outputs, [*contexts, context], state)


class Record(NamedTuple):
    """What ``run_layers`` saw: per unit the input, the output and the context; the last context is the readout's."""

    reads: list[Array]
    outputs: list[Array]
    contexts: list[Any]
    state: Any
