"""The append-only history and its own backward pass.

A connection that reads all earlier outputs carries a history of L + 1 tensors. Differentiating a scan over it
keeps the whole buffer once per step: memory grows with L^2, whatever is rematerialised. But the history is
append-only, so its final value contains every earlier one: the backward pass keeps the final history alone, walks
the units in reverse, repeats unit l's read on the entries that were there (readers mask the rest), and adds the
cotangents into one running cotangent of the history. Two histories live at once, not L.

    forward   x = read(H, c, l);  y = branch(x);  H[slot], c = emit(c, y, l)
    backward  g_value = g_H[slot] if this was the slot's last write;  (g_c, g_y) = emit^T(g_value, g_c)
              g_x = branch^T(g_y);  (g_params, g_H, g_c) += read^T(g_x)

What is kept between the passes beside the final history: the carry before each unit, where reads use it, and what the
branches keep under the chosen rematerialisation, less what there is anyway: their parameters, and, unless nothing is
rematerialised, their inputs, which are read again.

There is no forward-mode derivative (``jax.jvp``) of this path, nor of the reads and mixes in ``ops``, whose backward
passes are written by hand too.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmres.ops import take
from lmres.residual.interface import History, read_unit, ways_at


def run_append_only(stack, connection_params, branch_params, e: Array, args: Any) -> Array:
    """``stack`` on the embedding ``e`` [B, S, D] for an ``AppendOnly`` connection; returns h [B, S, D]."""
    final = run_history(stack, connection_params, branch_params, e, args)
    return stack.connection.close(connection_params, final)[0]


def run_history(stack, connection_params, branch_params, e: Array, args: Any) -> History:
    """As ``run_append_only``; returns the final history."""
    opened = stack.pin(stack.connection.open(connection_params, e, stack.depth))
    return _run(stack, stack.grouped(connection_params), connection_params["shared"], branch_params, opened, args)


def _unit(layers, shared, s):
    return {**jax.tree.map(lambda p: p[s], layers), **shared}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Kept:
    """A pytree (a vjp closure) without those of its leaves that are there anyway."""

    leaves: list[Any]
    places: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})
    tree: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, closure: Any, there: Any) -> "Kept":
        leaves, tree = jax.tree.flatten(closure)
        known = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(there))}
        places = tuple(known.get(id(leaf)) for leaf in leaves)
        return cls([leaf for leaf, place in zip(leaves, places) if place is None], places, tree)

    def whole(self, there: Any) -> Any:
        known, rest = jax.tree.leaves(there), iter(self.leaves)
        return self.tree.unflatten([next(rest) if place is None else known[place] for place in self.places])


def _branch(stack, s, i, args):
    """Unit ``s`` of copy ``i`` as a function of its parameters and input alone."""
    return lambda p, x: stack.units[s](p, x, i, args, ())[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(stack, layers, shared, branch_params, opened, args):
    return _forward(stack, layers, shared, branch_params, opened, args)[0]


def _forward(stack, layers, shared, branch_params, opened, args):
    connection, per_copy = stack.connection, len(stack.units)

    def body(state, xs):
        layers_i, branch_params_i, i = xs
        kept = []
        for s in range(per_copy):
            l = i * per_copy + s
            params_l = _unit(layers_i, shared, s)
            x, context = read_unit(connection, params_l, state, l, s)
            x = stack.pin_input(x)
            branch, p = _branch(stack, s, i, args), branch_params_i[s]
            if stack.remat == "full":
                y, closure = branch(p, x), ()
            else:
                y, vjp = jax.vjp(stack.checkpointed(branch), p, x)
                closure = Kept.of(vjp, (p, x) if stack.remat != "none" else p)
            kept.append((state.carry if connection.reads_carry else (), closure))
            state = stack.pin(connection.write(params_l, state, context, y, l))
        return state, tuple(kept)

    xs = (layers, branch_params, jnp.arange(stack.repeats))
    state, kept = jax.lax.scan(body, opened, xs)
    return state, (layers, shared, branch_params, state, kept, args)


def _backward(stack, residuals, cotangent):
    layers, shared, branch_params, final, kept, args = residuals
    connection, per_copy = stack.connection, len(stack.units)

    def body(cotangents, xs):
        g_slots, g_carry, g_shared = cotangents
        layers_i, branch_params_i, kept_i, i = xs
        g_layers_i, g_branches_i = [None] * per_copy, [None] * per_copy
        for s in reversed(range(per_copy)):
            l = i * per_copy + s
            carry, closure = kept_i[s]
            params_l, p = _unit(layers_i, shared, s), branch_params_i[s]
            before = History(final.slots, carry if connection.reads_carry else final.carry)
            g_keys, g_carry, g_y = _write_vjp(stack, params_l, final.slots, g_slots, g_carry, l)
            x, read_back = connection.read_vjp(params_l, before, l, ways_at(connection, s))
            x = stack.pin_input(x)
            if stack.remat == "full":
                vjp = jax.vjp(_branch(stack, s, i, args), p, x)[1]
            else:
                vjp = closure.whole((p, x) if stack.remat != "none" else p)
            g_branches_i[s], g_x = vjp(g_y)
            g_params, g_slots, g_carry_read = read_back(stack.pin_input(g_x), g_slots)
            g_slots = stack.pin(History(g_slots, final.carry)).slots
            if connection.reads_carry:
                g_carry = jax.tree.map(jnp.add, g_carry, g_carry_read)
            g_params |= {name: g_params[name] + g for name, g in g_keys.items()}
            g_layers_i[s] = {name: g_params[name] for name in layers_i}
            g_shared = {name: g_shared[name] + g_params[name] for name in shared}
        g_layers_i = jax.tree.map(lambda *leaves: jnp.stack(leaves), *g_layers_i)
        return (g_slots, g_carry, g_shared), (g_layers_i, tuple(g_branches_i))

    start = (*cotangent, jax.tree.map(jnp.zeros_like, shared))
    xs = (layers, branch_params, kept, jnp.arange(stack.repeats))
    (g_slots, g_carry, g_shared), (g_layers, g_branches) = jax.lax.scan(body, start, xs, reverse=True)
    return g_layers, g_shared, g_branches, History(g_slots, g_carry), None


def _write_vjp(stack, params_l, slots, g_slots, g_carry, l):
    """Backward of ``write``: the slot's cotangent, through the keys and the (linear) emit.

    Gives (cotangents of those parameters that keys depend on, of the carry, of the output).

    The cotangent stays where it is, since nothing reads it again: clearing it would make the compiler copy the whole
    buffer. An earlier write of the same slot, which the last one overwrote, gets zeros instead. That choice is a
    ``cond``, and there is one even where it is always true, because its result is computed before the buffer is added
    to. Without it the compiler reads the slot once more where it is used, in the weight gradients of the branch, and
    copies the whole buffer to be able to (XLA for CPU; an optimization barrier does not stop it).
    """
    connection = stack.connection
    # emit is linear in (carry, y), so its transpose may be taken at zero.
    zeros = jax.tree.map(jnp.zeros_like, g_carry), connection.output_like(slots, g_carry)
    slot, value_like, _ = connection.emit(*zeros, l)
    used = _used(connection.keys, params_l, value_like)
    _, emit_vjp = jax.vjp(lambda carry, y: connection.emit(carry, y, l)[1:], *zeros)

    def through_keys():
        g_entry, value = jax.tree.map(lambda buffer: take(buffer, slot), (g_slots, slots["value"]))
        _, keys_vjp = jax.vjp(lambda p, value: connection.keys({**params_l, **p}, value), used, value)
        g_params, g_value = keys_vjp({name: g for name, g in g_entry.items() if name != "value"})
        return g_params, jax.tree.map(jnp.add, g_entry["value"], g_value)

    nothing = lambda: jax.tree.map(jnp.zeros_like, (used, value_like))  # noqa: E731
    last = connection.completes(l) | (l == stack.depth - 1) if connection.rewrites else l >= 0
    g_params, g_value = jax.lax.cond(last, through_keys, nothing)
    g_carry, g_y = emit_vjp((g_value, g_carry))
    return g_params, g_carry, g_y


def _used(keys, params_l, value):
    """The parameters on which ``keys`` depend: a ``cond`` would compile zeros for each of the others, and add them."""
    jaxpr = jax.make_jaxpr(lambda p: keys(p, value))(params_l).jaxpr
    used = {id(v) for equation in jaxpr.eqns for v in equation.invars} | {id(v) for v in jaxpr.outvars}
    return {name: params_l[name] for name, v in zip(sorted(params_l), jaxpr.invars, strict=True) if id(v) in used}


_run.defvjp(_forward, _backward)
