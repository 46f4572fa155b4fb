"""Multi-Gate Residuals (arXiv:2605.23259): attention over depth with a bounded number of slots.

    h_l = sum_i a_i s_i,   a = softmax_i( w_l . N(s_i) / sqrt(D) )       over the slots that are filled
    s_i <- v_l                                                          if slot i = l + 1 is free; else, for all i,
    s_i <- (1 - g_i) s_i + g_i v_l,   g_i = sigmoid( u_l . N(s_i) / sqrt(D) + b_i )

N is RMSNorm without a gain. Slot 0 is the embedding; the first n - 1 outputs fill the others. With at most n - 1
sub-layers nothing is ever overwritten, and the method is Attention Residuals with a temperature of sqrt(D).

Legend: n slots (at most L + 1), L sub-layers, B batch, S sequence, D width, l sub-layer from 0. State: [B, S, n, D].
Start: w = u = 0, b = -log(l + 1). The value of b is our choice: every gate is then 1/(l + 2), so all slots take part in
one running mean, and a uniform read is the mean of the embedding and all outputs: exactly pre-norm, up to the norms'
eps, as Attention Residuals are. With another b it is not. The first reader has one source only, so its query never
gets a gradient.
Cost per token: (L + 1) D parameters for the readers (the readout is one), D + n per sub-layer that overwrites; 11 n D
FLOPs and (3 n + 2) D moved per sub-layer.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from lmres.ops import combine_streams, normed_projection, stat_dtype
from lmres.residual.interface import Connection, Cost, check_not_negative
from lmres.residual.streams import STREAM_AXES, as_float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiGateResiduals(Connection):
    """Softmax attention over slots that later outputs are blended into.

    slots: n.
    eps: of the slots' norm.
    """

    kind: Literal["mgr"] = "mgr"
    slots: int = 4
    eps: float = 1e-10

    equation: ClassVar[str] = "h = sum_i softmax_i(w . Norm s_i / sqrt(D)) s_i,  s_i <- (1 - g_i) s_i + g_i g(h)"
    source: ClassVar[str] = "arXiv:2605.23259"
    left_out: ClassVar[str] = "the paper's start of the gates' biases, which is not known here"
    no_gradient: ClassVar[dict[str, tuple[int, ...]]] = {"query": (0,)}  # one source only

    @property
    def name(self):
        return f"mgr-{self.slots}"

    def check(self, depth, width):
        if self.slots < 2:
            raise ValueError(f"residual.slots={self.slots} must be at least 2: one slot has no weights to learn")
        check_not_negative(eps=self.eps)

    def _overwrites(self, depth: int) -> int:
        """Number of sub-layers that find no free slot."""
        return max(0, depth + 1 - self.slots)

    def init(self, key, depth, width):
        count = self._overwrites(depth)
        shared = {"query": jnp.zeros((depth + 1, width))}
        if count:
            shared |= {
                "gate": jnp.zeros((count, width)),
                "gate_bias": jnp.tile(-jnp.log(jnp.arange(self.slots, depth + 1.0))[:, None], (1, self.slots)),
            }
        return {"layers": {}, "shared": as_float32(shared)}

    def open(self, params, e, depth):
        n = min(self.slots, depth + 1)
        return jnp.zeros((*e.shape[:-1], n, e.shape[-1]), e.dtype).at[..., 0, :].set(e)

    def _weights(self, params_l, slots, l):
        """(a [B, S, n], g [B, S, n]); g is one-hot, [n], if every sub-layer finds a free slot."""
        *_, n, width = slots.shape
        slot, rows = jnp.arange(n), [params_l["query"][l]]
        gated = "gate" in params_l
        if gated:  # row 0 belongs to the first sub-layer that finds no free slot, number n - 1
            row = jnp.maximum(l - (n - 1), 0)
            rows.append(params_l["gate"][row])
        logits = normed_projection(slots, jnp.stack(rows) * width**-0.5, eps=self.eps)
        reads = masked_softmax(logits[..., 0], slot <= l)
        gates = (slot == l + 1).astype(logits.dtype)
        if gated:
            gates = jnp.where(l < n - 1, gates, jax.nn.sigmoid(logits[..., 1] + params_l["gate_bias"][row]))
        return reads, gates

    def read(self, params_l, state, l, context=None):
        if context is None:
            context = self._weights(params_l, state, l)
        return combine_streams(context[0], state), context

    def write(self, params_l, state, context, y, l):
        gates = context[1][..., None]
        wide = stat_dtype(state)
        return ((1.0 - gates) * state.astype(wide) + gates * y.astype(wide)[..., None, :]).astype(state.dtype)

    def close(self, params, state, context=None):
        if context is None:
            query = params["shared"]["query"][-1:] * state.shape[-1] ** -0.5
            context = jax.nn.softmax(normed_projection(state, query, eps=self.eps)[..., 0], axis=-1)
        return combine_streams(context, state), context

    def cost(self, depth, width):
        n, count = min(self.slots, depth + 1), self._overwrites(depth)
        return Cost(
            params=(depth + 1) * width + count * (width + n),
            flops=((11.0 if count else 9.0) * depth + 6.0) * n * width,
            moved=depth * (3.0 * n + 2),
            state=float(n),
        )

    def state_axes(self):
        return STREAM_AXES


def masked_softmax(logits, valid):
    """Softmax over the last axis among the entries where ``valid``; 0 elsewhere."""
    return jax.nn.softmax(jnp.where(valid, logits, jnp.finfo(logits.dtype).min), axis=-1)
