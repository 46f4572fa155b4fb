"""Attention Residuals, full and block form (arXiv:2603.15031, Eq. 1-6), and their multi-head form (arXiv:2607.27230).

    h_l = sum_i a_i v_i,    a = softmax_i( w_l . RMSNorm(v_i) )        values raw, no 1/sqrt(D), no other skip

Sources of sub-layer l: the embedding e, one entry per completed depth block (the sum of that block's branch
outputs), and, except at the first sub-layer of a block, the running sum of the block. ``block = 1`` is the full
form: every branch output is a source. The last block may be short. The readout is one more reader with a
query of its own over all entries, an unfinished last block included.

A scanned block form runs in two phases (``two_phase``), which is the same function.

Legend: L sub-layers, R = L + 1 readers, N = ceil(L / block), M = N + 1 slots; B batch, S sequence, D width.
Start: w = 0, hence uniform weights, hence exactly pre-norm up to the norms' eps (every reader feeds a
scale-invariant norm). The first reader has one source only, so its query never gets a gradient.
Cost per token: R D parameters (twice with ``key_gain``); 2 R D FLOPs per entry for the logits and 2 (k + 1) D per
read with k slots; k + 3 vectors moved per sub-layer, k + 4 in the block form.
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp

from lmres.ops import take_window, weighted_sum
from lmres.residual.depth_attention import DepthAttention
from lmres.residual.interface import Axes, Cost, History


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionResiduals(DepthAttention):
    """Softmax attention over depth in the place of the residual stream.

    The options are those of ``DepthAttention``.
    """

    kind: Literal["attnres"] = "attnres"

    equation: ClassVar[str] = "h_l = sum_i softmax_i(w_l . RMSNorm(v_i)) v_i"
    source: ClassVar[str] = "arXiv:2603.15031; heads: 2607.27230"
    no_gradient: ClassVar[dict[str, tuple[int, ...]]] = {"query": (0,), "gain": (0,)}  # that reader has one source
    two_phase: ClassVar[bool] = True

    @property
    def name(self):
        return f"attnres-{self.form}"

    def check(self, depth, width):
        super().check(depth, width)
        if self.block > 1 and not self.eps > 0:  # the running sum, whose logit is taken, starts at zero
            raise ValueError(f"residual.eps={self.eps} must be above 0 with residual.block={self.block}")

    def init(self, key, depth, width):
        return {"layers": {}, "shared": self.query_params(depth + 1, width)}

    def first_carry(self, e):
        return jnp.zeros_like(e) if self.block > 1 else ()

    def emit(self, carry, y, l):
        slot, value = self.running(carry, y, l)
        return slot, value, (value if self.block > 1 else ())

    @property
    def sees(self):
        return ("logits", "carry") if self.block > 1 else ("logits",)

    def weigh(self, params_l, seen, l, ways, count):
        """Weights of reader ``l``: per slot, and for the running sum (the extra)."""
        logits = seen["logits"][:, 0]
        valid = jnp.arange(count) <= l // self.block
        if self.block == 1:
            return [self.softmax(logits, valid)[None]], ()
        query = take_window(self.queries(params_l), l, 1)
        logits = jnp.concatenate([logits, self.project(query, seen["carry"])])
        weights = self.softmax(logits, jnp.append(valid, l % self.block != 0))
        return [weights[None, :-1]], weights[-1]

    def finish(self, params_l, x, seen, extra):
        (x,) = x
        if self.block > 1:
            x = x + weighted_sum(extra[None], seen["carry"][None])
        return x, extra

    def close(self, params, state, context=None):
        values = state.slots["value"]
        if context is None:
            p, logits = params["shared"], state.slots["logits"][:, -1]
            if (len(p["query"]) - 1) % self.block:  # the last depth block is not complete: its sum is the carry
                last = self.project(self.queries(p)[-1:], state.carry)
                logits = jnp.concatenate([logits[:-1], last])
            context = self.softmax(logits, jnp.ones(len(values), bool))
        return weighted_sum(context, values), context

    def cost(self, depth, width):
        slots = [*self.read_slots(depth), self.slot_count(depth)]
        readers, running = depth + 1, depth * (self.block > 1)
        # Where there is a running sum: adding to it, its logit (also of the readout, if it is not complete), its share.
        flops = self.attention_flops(readers, depth, width) + 2.0 * sum(slots) * width
        flops += (9.0 * running + 4.0 * bool(depth % self.block)) * width
        return Cost(
            params=readers * width * (2 if self.key_gain else 1),
            flops=flops,
            moved=float(sum(slots) + 3 * depth + running),
            state=float(self.slot_count(depth) + (self.block > 1)),
        )

    def state_axes(self):
        return History(self.slot_axes(), Axes("batch", "sequence", "embed") if self.block > 1 else ())
