"""Attention Residuals, full and block form (arXiv:2603.15031, Eq. 1-6).

    h_l = sum_i a_i v_i,    a = softmax_i( w_l . RMSNorm(v_i) )        values raw, no 1/sqrt(D), no other skip

Sources of sub-layer l: the embedding e, one entry per completed depth block (the sum of that block's branch
outputs), and, except at the first sub-layer of a block, the running sum of the block. ``block = 1`` is the full
form: every branch output is a source. The last block may be short. The readout is one more reader with a
query of its own over all entries, an unfinished last block included.

A query is a parameter, so the logits of *all* readers for a new entry are one matrix product at the moment the
entry is complete (the first phase of the paper's Algorithm 1); they are stored beside it, and a read is a
softmax over stored numbers and one pass over the values.

Legend: L sub-layers, R = L + 1 readers, N = ceil(L / block), M = N + 1 slots; B batch, S sequence, D width.
Start: w = 0, hence uniform weights, hence exactly pre-norm up to the norms' eps (every reader feeds a
scale-invariant norm). The first reader has one source only, so its query never gets a gradient.
Cost per token: R D parameters (twice with ``key_gain``); 2 R D FLOPs per entry for the logits and 2 (k + 1) D per
read with k slots; k + 3 vectors moved per sub-layer.
"""

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from lmres.ops import Span, add_outer, depth_softmax, normed_projection, slot_dots, stat_dtype, weighted_sum
from lmres.residual.interface import AppendOnly, Axes, Cost, History, check_not_negative


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionResiduals(AppendOnly):
    """Softmax attention over depth.

    block: sub-layers per depth block; 1 is the full form.
    key_gain: give each reader's key norm a gain. It is redundant with the query (only w * gain enters) and off by
      default; its gradient is 0 while the query is 0.
    eps: of the key norm.
    """

    kind: Literal["attnres"] = "attnres"
    block: int = 1
    key_gain: bool = False
    eps: float = 1e-10

    equation: ClassVar[str] = "h_l = sum_i softmax_i(w_l . RMSNorm(v_i)) v_i"
    source: ClassVar[str] = "arXiv:2603.15031"

    @property
    def name(self):
        return "attnres-full" if self.block == 1 else f"attnres-block{self.block}"

    def check(self, depth, width):
        if self.block < 1:
            raise ValueError(f"residual.block={self.block} must be at least 1 (1 is the full form)")
        check_not_negative(eps=self.eps)

    def slot_count(self, depth):
        return math.ceil(depth / self.block) + 1

    def init(self, key, depth, width):
        shared = {"query": jnp.zeros((depth + 1, width), jnp.float32)}
        if self.key_gain:
            shared["gain"] = jnp.ones((depth + 1, width), jnp.float32)
        return {"layers": {}, "shared": shared}

    def _queries(self, params_l):
        """[R, D], the key norm's gain folded in."""
        return params_l["query"] * params_l["gain"] if self.key_gain else params_l["query"]

    def keys(self, params_l, value):
        """Logits [R, B, S] of every reader for this entry."""
        logits = normed_projection(value, self._queries(params_l), eps=self.eps)
        return {"logits": jnp.moveaxis(logits, -1, 0)}

    def first_carry(self, e):
        return jnp.zeros_like(e) if self.block > 1 else ()

    @property
    def rewrites(self):
        return self.block > 1  # the running sum of a block

    def is_last_write(self, l, depth):
        return ((l + 1) % self.block == 0) | (l == depth - 1)

    def emit(self, carry, y, l):
        if self.block == 1:
            return l + 1, y, ()
        running = jnp.where(l % self.block == 0, 0, carry) + y
        return l // self.block + 1, running, running

    def _span(self, l):
        """The slots that are complete before unit ``l``."""
        return Span(0, 1, l // self.block + 1)

    def _weights(self, params_l, state, l):
        """Softmax weights of reader ``l``: [M, B, S] for the slots, and [B, S] for the running sum or None."""
        logits = jax.lax.dynamic_index_in_dim(state.slots["logits"], l, 1, keepdims=False)
        slot = jnp.arange(logits.shape[0])[:, None, None]
        valid = slot <= l // self.block
        if self.block == 1:
            return depth_softmax(logits, valid), None
        running = self._running_logit(params_l, state.carry, l)
        logits = jnp.concatenate([logits, running[None]])
        weights = depth_softmax(logits, jnp.concatenate([valid, jnp.full((1, 1, 1), l % self.block != 0)]))
        return weights[:-1], weights[-1]

    def _running_logit(self, params_l, running, l):
        query = jax.lax.dynamic_index_in_dim(self._queries(params_l), l, 0, keepdims=False)
        return normed_projection(running, query[None], eps=self.eps)[..., 0]

    def read(self, params_l, state, l, context=None):
        if context is None:
            context = self._weights(params_l, state, l)
        over_slots, over_running = context
        x = weighted_sum(over_slots, state.slots["value"], self._span(l))
        if over_running is not None:
            x = x + (over_running[..., None] * state.carry.astype(over_running.dtype)).astype(x.dtype)
        return x, context

    def close(self, params, state, context=None):
        values = state.slots["value"]
        if context is None:
            logits = state.slots["logits"][:, -1]
            context = depth_softmax(logits, jnp.ones((1, 1, 1), bool))
        return weighted_sum(context, values), context

    def accumulate(self, params_l, slots, carry, l, g_x, g_slots):
        """Backward of ``read`` in two passes over the slots; the logits' cotangent goes to reader l's row only."""
        values = slots["value"]
        wide = stat_dtype(values)
        g = g_x.astype(wide)
        over_slots, over_running = self._weights(params_l, History(slots, carry), l)
        span = self._span(l)
        d_slots = slot_dots(g, values, span)
        dot = jnp.sum(over_slots * d_slots, axis=0)
        g_params, g_carry = jax.tree.map(jnp.zeros_like, params_l), ()
        if over_running is not None:
            d_running = jnp.sum(carry.astype(wide) * g, axis=-1)
            dot = dot + over_running * d_running
            _, vjp = jax.vjp(lambda p, c: self._running_logit(p, c, l), params_l, carry)
            g_params, g_carry = vjp(over_running * (d_running - dot))
            g_carry = g_carry + (over_running[..., None] * g).astype(carry.dtype)
        g_values = add_outer(g_slots["value"], over_slots, g, span)
        g_logits = g_slots["logits"].at[:, l].add(over_slots * (d_slots - dot))
        return g_params, {"value": g_values, "logits": g_logits}, g_carry

    def cost(self, depth, width):
        slots = [l // self.block + 1 + (l % self.block != 0) for l in range(depth)] + [self.slot_count(depth)]
        readers = depth + 1
        return Cost(
            params=readers * width * (2 if self.key_gain else 1),
            flops=2.0 * readers * width * self.slot_count(depth) + 2.0 * sum(slots) * width,
            moved=float(sum(slots) + 3 * depth),
            state=float(self.slot_count(depth) + (self.block > 1)),
        )

    def state_axes(self):
        slots = {
            "value": Axes("slots", "batch", "sequence", "embed"),
            "logits": Axes("slots", None, "batch", "sequence"),
        }
        return History(slots, Axes("batch", "sequence", "embed") if self.block > 1 else ())
