"""k-DCA: DeepCrossAttention over the embedding, the last k outputs, and one sum of those between (arXiv:2502.06785).

    x_o = gate_o0 * e + gate_o1 * sum_{0 < y <= l - k} v_y + sum_{y > l - k} gate_oy * v_y

A state of k + 2 tensors in the place of a history. The gates are those of ``depth_gates``.

Legend: L sub-layers, R readers (the inputs of all sub-layers, and the readout), T = k + 2 slots, D width.
Start: b = 1, w = 0: the residual sum, exactly pre-norm.
Cost: R T D (version 1: R T) parameters, + R D in version 3; per reader 2 T D FLOPs (version 3: 6 T D).
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from lmres.ops import weighted_sums
from lmres.residual.depth_gates import Gates, gate
from lmres.residual.interface import Axes, Connection, Cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecentDeepCrossAttention(Gates, Connection):
    """k-DCA: gated sums over the embedding, the last k outputs, and the sum of those between.

    last: k. The other options are those of ``Gates``. The first k sub-layers have fewer sources, and their readers
    biases that are not used.
    """

    kind: Literal["kdca"] = "kdca"
    last: int = 2

    equation: ClassVar[str] = "x_o = gated sum of e, the sum of the older, and the last k outputs"
    source: ClassVar[str] = "arXiv:2502.06785"
    no_decay: ClassVar[tuple[str, ...]] = ("bias", "gain")

    @property
    def name(self):
        return f"kdca{self.last}-v{self.version}"

    def check(self, depth, width):
        self.check_gates()
        if self.last < 1:
            raise ValueError(f"residual.last={self.last} must be at least 1")

    def init(self, key, depth, width):
        readers, slots = int(self.first_reader(depth)[-1]) + 1, self.last + 2
        bias = jnp.ones((readers, slots) if self.version == 1 else (readers, slots, width), jnp.float32)
        return {"layers": {}, "shared": {"bias": bias, **self.gate_params(readers, width)}}

    def open(self, params, e, depth):
        """[k + 2, B, S, D]: the embedding, the sum between, and the last k outputs, the newest first."""
        return jnp.zeros((self.last + 2, *e.shape), e.dtype).at[0].set(e)

    def _context(self, params_l, state, first, ways, l):
        """[biases, gates] of ``ways`` readers from number ``first`` on, zero for sources that are not there."""
        slot = jnp.arange(self.last + 2)
        # v_0 is the embedding; the newest output is v_l. Slot 1 holds outputs once there are more than k.
        there = (slot == 0) | ((slot == 1) & (l > self.last)) | ((slot > 1) & (slot - 2 < l))
        rows = first + jnp.arange(ways)
        bias = jnp.where(there.reshape(-1, *[1] * (self.version > 1)), params_l["bias"][rows], 0)
        if self.version < 3:
            return [bias]
        logits = jnp.moveaxis(self.logits(params_l, state, rows), -1, 0)
        return [bias, jnp.where(there[:, None, None], gate(logits), 0)]

    def read(self, params_l, state, l, context=None, ways=1):
        if context is None:
            context = self._context(params_l, state, self.reader_at(l), ways, l)
        x = weighted_sums(context, state)
        return (x[0] if ways == 1 else tuple(x)), context

    def write(self, params_l, state, context, y, l):
        between = state[1] + state[-1]
        return jnp.concatenate([state[:1], between[None], y[None].astype(state.dtype), state[2:-1]])

    def close(self, params, state, context=None):
        if context is None:
            p = params["shared"]
            readers = len(p["bias"])
            depth = self._depth_of(readers)
            context = self._context(p, state, readers - 1, 1, depth)
        return weighted_sums(context, state)[0], context

    def _depth_of(self, readers: int) -> int:
        """Number of sub-layers with so many readers, the readout's included."""
        copies, rest = divmod(readers - 1, sum(self.ways))
        firsts = list(np.cumsum([0, *self.ways]))
        return copies * len(self.ways) + firsts.index(rest)

    def cost(self, depth, width):
        sources = [min(l, self.last) + 1 + (l > self.last) for l in range(depth + 1)]
        readers, slots = int(self.first_reader(depth)[-1]) + 1, self.last + 2
        params, flops = self.gate_cost([slots] * readers, width)  # slots that hold nothing yet are read too
        flops += depth * width
        if self.version == 3:
            norms = 2.0 * width * (depth + 1) if self.norm == "rms" else 0.0
            flops += slots * (2.0 * readers * width + norms)
        moved = sum(n + self.ways[l % len(self.ways)] for l, n in enumerate(sources[:-1])) + sources[-1] + 4 * depth
        return Cost(params, flops, float(moved), float(self.last + 2))

    def state_axes(self):
        return Axes("slots", "batch", "sequence", "embed")
