"""Delta Attention Residuals (arXiv:2605.18855 and the authors' code): depth attention beside the residual stream.

    x_l = h_l + g_l sum_i a_i v_i,    a = softmax_i( w_l . RMSNorm(v_i) ),    h_{l+1} = h_l + f(x_l)

The sources are the embedding and the branch outputs so far, or, in the block form, the changes over the completed
depth blocks (the running block is in h anyway). The readout is h. The authors' code leaves out the embedding at
the first sub-layer only, where it is a multiple of h and the norm hides it.

Legend: L sub-layers and readers, N = ceil(L / block), M = N + 1 slots; B batch, S sequence, D width.
Start: a scalar gate g = 0 per sub-layer: exactly pre-norm, which also converts trained models. Queries are normal with
standard deviation 0.02, as linear layers in the authors' code: at w = 0 the uniform mean of the sources is a multiple
of h (in the full form), which the norms hide, and neither gate nor query would ever get a gradient. The gate of the
first sub-layer gets none in any case. Without gates (g = 1, the form trained from scratch in the paper) the start is
another function.
Cost per token: L (D + 1) parameters; 2 L D FLOPs per entry for the logits and 2 k D per read of k slots.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from lmres.residual.depth_attention import DepthAttention
from lmres.residual.interface import Axes, Cost, History


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaAttentionResiduals(DepthAttention):
    """The residual stream plus gated softmax attention over what the sub-layers changed.

    gate: "learned" (a scalar per sub-layer from 0) or "none" (1).
    The other options are those of ``DepthAttention``.
    """

    kind: Literal["delta_attnres"] = "delta_attnres"
    gate: Literal["learned", "none"] = "learned"

    equation: ClassVar[str] = "x_l = h_l + g_l sum_i softmax_i(w_l . RMSNorm(v_i)) v_i,  h <- h + f(x)"
    source: ClassVar[str] = "arXiv:2605.18855"

    @property
    def name(self):
        return f"delta-attnres-{self.form}" + ("" if self.gate == "learned" else "-ungated")

    @property
    def no_gradient(self):
        """The readers of the first depth block have one source, the embedding."""
        first = tuple(range(self.block))
        return {"query": first, "gain": first, "gate": (0,)}

    @property
    def start_tolerance(self):
        return 1e-4 if self.gate == "learned" else None

    def init(self, key, depth, width):
        gate = {"gate": jnp.zeros(depth, jnp.float32)} if self.gate == "learned" else {}
        shared = self.query_params(depth, width)
        shared["query"] = 0.02 * jax.random.normal(key, shared["query"].shape, jnp.float32)
        return {"layers": gate, "shared": shared}

    def as_plain(self, params, gains, final_gain):
        if self.gate == "learned":
            return params
        if self.block > 1:
            return None
        return {**params, "shared": {**params["shared"], "query": jnp.zeros_like(params["shared"]["query"])}}

    def first_carry(self, e) -> Any:
        return {"stream": e} | ({"running": jnp.zeros_like(e)} if self.block > 1 else {})

    def emit(self, carry, y, l):
        slot, value = self.running(carry.get("running"), y, l)
        return slot, value, {"stream": carry["stream"] + y} | ({"running": value} if self.block > 1 else {})

    @property
    def sees(self):
        return ("logits", "carry")

    def weigh(self, params_l, seen, l, ways, count):
        weights = self.softmax(seen["logits"][:, 0], jnp.arange(count) <= l // self.block)
        return [weights[None] * params_l["gate"] if self.gate == "learned" else weights[None]], ()

    def finish(self, params_l, x, seen, extra):
        return seen["carry"]["stream"] + x[0], extra

    def close(self, params, state, context=None):
        return state.carry["stream"], ()

    def cost(self, depth, width):
        slots = self.read_slots(depth)
        adds = depth * (4.0 if self.block > 1 else 2.0)
        return Cost(
            params=depth * (width * (2 if self.key_gain else 1) + (self.gate == "learned")),
            flops=self.attention_flops(depth, depth, width) + (2.0 * sum(slots) + adds) * width,
            moved=float(sum(slots) + 5 * depth),
            state=float(self.slot_count(depth) + 1 + (self.block > 1)),
        )

    def state_axes(self):
        carry = jax.tree.map(lambda _: Axes("batch", "sequence", "embed"), self.first_carry(jnp.zeros(())))
        return History(self.slot_axes(), carry)
