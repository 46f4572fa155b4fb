"""Reads that are weighted sums of the history: what all connections of this kind share.

    x = finish( sum_m w[m] H[m] ),    w = weigh( what the weights depend on )

The weights may be constants, or depend on the newest entry or on logits stored beside the entries. The backward pass
goes over the slots once (dot products for the weights, outer products for the slots), and adds in place.
"""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmres.ops import Span, put, put_window, take, take_window, weighted_sums, weighted_sums_back
from lmres.residual.interface import AppendOnly, Index, Params

Seen = dict[str, Any]


class WeightedReads(AppendOnly):
    """An append-only connection whose reads are weighted sums of slots, one per input.

    The context is ``(weights, extra)``: a list of weights that are added up, each in any form that
    ``lmres.ops.weighted_sums`` takes, and whatever else ``finish`` needs to be replayed.
    """

    @abc.abstractmethod
    def weigh(self, params_l: Params, seen: Seen, l: Index, ways: int, count: int) -> tuple[list[Array], Any]:
        """The weights, zero outside ``span``, and the extra. ``count`` is the number of slots."""

    @abc.abstractmethod
    def span(self, l: Index) -> Span:
        """The slots that unit ``l`` reads; they are complete before it."""

    @property
    def sees(self) -> tuple[str, ...]:
        """What weights and ``finish`` depend on beside the parameters, any of

        "newest": the entry [B, S, D] of slot ``l``;
        "logits": the stored logits [M, rows, ..., B, S] of unit l's readers, ``rows(ways)`` from ``reader(l)`` on;
        "scale": what is stored under this name beside the entries, [M, B, S];
        "carry": the carry.
        """
        return ()

    @property
    def reads_carry(self):
        return "carry" in self.sees

    def reader(self, l: Index) -> Index:
        """The first row of unit ``l`` among the stored logits; ``l`` may be the depth, for the readout."""
        return l

    def rows(self, ways: int) -> int:
        """How many readers a unit with so many inputs has."""
        return ways

    def finish(self, params_l: Params | None, x: Array, seen: Seen, extra: Any) -> tuple[Any, Any]:
        """(what the unit reads, the extra that replays it) from the weighted sums ``x`` [R, B, S, D].

        Linear in (x, seen) given the extra. ``params_l`` is None in a replay; then ``seen`` holds no logits.
        """
        ways = tuple(way[0] for way in jax.lax.split(x, [1] * len(x)))  # its transpose is one concatenation
        return (ways[0] if len(ways) == 1 else ways), extra

    def _seen(self, slots: Any, carry: Any, l: Index, ways: int) -> Seen:
        found = {}
        if "newest" in self.sees:
            found["newest"] = take(slots["value"], l)
        if "logits" in self.sees and "logits" in slots:
            found["logits"] = take_window(slots["logits"], self.reader(l), self.rows(ways), 1)
        if "scale" in self.sees and "scale" in slots:
            found["scale"] = slots["scale"]
        if "carry" in self.sees:
            found["carry"] = carry
        return found

    def read(self, params_l, state, l, context=None, ways=1):
        seen = self._seen(state.slots, state.carry, l, ways)
        values, span = state.slots["value"], self.span(l)
        weights, extra = self.weigh(params_l, seen, l, ways, len(values)) if context is None else context
        x = weighted_sums(weights, values, span)
        x, extra = self.finish(params_l if context is None else None, x, seen, extra)
        return x, (weights, extra)

    def read_vjp(self, params_l, state, l, ways=1):
        """In place: only what was read is touched."""
        values, span = state.slots["value"], self.span(l)
        seen = self._seen(state.slots, state.carry, l, ways)
        weigh = lambda p, seen: self.weigh(p, seen, l, ways, len(values))  # noqa: E731
        (weights, extra), weigh_vjp = jax.vjp(weigh, params_l, seen)
        sums = weighted_sums(weights, values, span)
        finish = lambda p, x, seen, extra: self.finish(p, x, seen, extra)[0]  # noqa: E731
        x, finish_vjp = jax.vjp(finish, params_l, sums, seen, extra)

        def back(g_x, g_slots):
            g_params, g_sums, g_seen, g_extra = finish_vjp(g_x)
            g_weights, g_values = weighted_sums_back(g_sums, weights, values, g_slots["value"], span)
            g_weights = [g.astype(w.dtype) for g, w in zip(g_weights, weights, strict=True)]
            g_more, g_seen_more = weigh_vjp((g_weights, g_extra))
            g_params, g_seen = jax.tree.map(jnp.add, (g_params, g_seen), (g_more, g_seen_more))
            g_slots = {**g_slots, "value": g_values}
            if "newest" in g_seen:
                new = take(g_values, l) + g_seen["newest"]
                g_slots["value"] = put(g_values, new, l, 0)
            if "logits" in g_seen:
                rows, first = g_slots["logits"], self.reader(l)
                new = take_window(rows, first, self.rows(ways), 1) + g_seen["logits"]
                g_slots["logits"] = put_window(rows, new, first, 1)
            if "scale" in g_seen:
                g_slots["scale"] = g_slots["scale"] + g_seen["scale"]
            g_carry = g_seen["carry"] if "carry" in g_seen else jax.tree.map(jnp.zeros_like, state.carry)
            return g_params, g_slots, g_carry

        return x, back
