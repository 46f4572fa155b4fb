"""Floating-point operations of a function as XLA counts them, with every loop counted as often as it runs.

XLA's own cost analysis of a whole program counts the body of a loop once, however often it runs, and after fusion
it depends on the backend. Here the function is taken operation by operation, and each is charged with what XLA's
analysis says of it alone: an elementwise operation 1 per entry, a product of matrices 2 per multiply-add, a reduction
1 per entry it takes in beyond the first; moving data is free. Exponentials, logarithms, tanh, roots and reciprocal
roots are counted apart, as transcendentals (a sigmoid is one of those and 3 operations).

An operation is computed only if its value decides how often a loop runs or which branch is taken: to count one it is
lowered, which takes a few milliseconds, and to run it it would have to be compiled.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal


class Count(NamedTuple):
    """What a run did."""

    flops: float = 0.0
    transcendentals: float = 0.0


class _Later:
    """A value of known shape and dtype that is computed when it is asked for."""

    def __init__(self, aval, compute: Callable[[], Any]):
        self.shape, self.dtype = aval.shape, aval.dtype
        self.compute = functools.cache(compute)


def _now(x: Any) -> Any:
    return x.compute() if isinstance(x, _Later) else x


def count(f: Callable, *args: Any) -> Count:
    """Operations of ``f(*args)``."""
    closed = jax.make_jaxpr(f)(*args)
    total = [0.0, 0.0]
    _run(closed.jaxpr, closed.consts, jax.tree.leaves(args), total)
    return Count(*total)


def _run(jaxpr, consts, args, total):
    values = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        inputs = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        outputs = _RULES.get(eqn.primitive.name, _other)(eqn, inputs, total)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def _call(closed, args, total):
    """A jaxpr in a parameter; some carry their constants, some have none."""
    if hasattr(closed, "jaxpr"):
        return _run(closed.jaxpr, closed.consts, args, total)
    return _run(closed, (), args, total)


def _while(eqn, inputs, total):
    p = eqn.params
    a, b = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    cond_consts, body_consts, carry = inputs[:a], inputs[a:b], inputs[b:]
    while _now(_call(p["cond_jaxpr"], [*cond_consts, *carry], total)[0]):
        carry = _call(p["body_jaxpr"], [*body_consts, *carry], total)
    return carry


def _scan(eqn, inputs, total):
    p = eqn.params
    # Constants, carry, slices. How many of each is told by the ranks, since the parameters' names differ by version.
    body = getattr(p["jaxpr"], "jaxpr", p["jaxpr"])
    sliced = sum(v.aval.ndim > w.aval.ndim for v, w in zip(eqn.invars, body.invars, strict=True))
    carried = sum(v.aval.ndim == w.aval.ndim for v, w in zip(eqn.outvars, body.outvars, strict=True))
    a, b = len(inputs) - sliced - carried, len(inputs) - sliced
    consts, carry, xs = inputs[:a], inputs[a:b], inputs[b:]
    order = range(p["length"])
    rows = []
    for i in reversed(order) if p["reverse"] else order:
        slices = [_Later(v.aval, lambda x=x, i=i: _now(x)[i]) for v, x in zip(body.invars[b:], xs, strict=True)]
        out = _call(p["jaxpr"], [*consts, *carry, *slices], total)
        carry = out[:carried]
        rows.append(out[carried:])
    rows = rows[::-1] if p["reverse"] else rows
    stacked = [
        _Later(v.aval, lambda leaves=leaves: np.stack([_now(x) for x in leaves]))
        for v, leaves in zip(eqn.outvars[carried:], zip(*rows), strict=True)
    ]
    return [*carry, *stacked]


def _cond(eqn, inputs, total):
    branches = eqn.params["branches"]
    return _call(branches[int(np.clip(_now(inputs[0]), 0, len(branches) - 1))], inputs[1:], total)


_RULES = {"while": _while, "scan": _scan, "cond": _cond}


def _other(eqn, inputs, total):
    """A call of another function, or one operation."""
    for key in ("jaxpr", "call_jaxpr"):
        if key in eqn.params:
            return _call(eqn.params[key], inputs, total)
    structs = tuple(map(_struct, inputs))
    run, flops, transcendentals = _operation(_Operation(eqn), structs)
    total[0] += flops
    total[1] += transcendentals
    outputs = functools.cache(lambda: run(*map(_now, inputs)))
    return [_Later(v.aval, lambda i=i: outputs()[i]) for i, v in enumerate(eqn.outvars)]


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype if isinstance(x, _Later) else jax.dtypes.result_type(x))


class _Operation:
    """A primitive with its parameters, comparable by what it prints."""

    def __init__(self, eqn):
        self.eqn = eqn
        self.key = (eqn.primitive.name, str(sorted(eqn.params.items())))

    def __hash__(self):
        return hash(self.key)

    def __eq__(self, other):
        return isinstance(other, _Operation) and self.key == other.key

    def __call__(self, *args):
        out = self.eqn.primitive.bind(*args, **self.eqn.params)
        return out if self.eqn.primitive.multiple_results else [out]


@functools.cache
def _operation(operation: _Operation, structs):
    run = jax.jit(operation)
    cost = run.lower(*structs).cost_analysis() or {}
    return run, cost.get("flops", 0.0), cost.get("transcendentals", 0.0)
