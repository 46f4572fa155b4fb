"""DeepCrossAttention: gated sums of all earlier outputs, one for each input of a sub-layer (arXiv:2502.06785).

    x_o = sum_y gate_oy * v_y                           v_0 = e, v_y the branch outputs; no other skip

Attention reads query, key and value apart, the MLP one input; the readout is one more reader. The gates are those of
``depth_gates``.

Legend: L sub-layers, R readers (the inputs of all sub-layers, and the readout), M = L + 1 slots, D width.
Start: b = 1, w = 0: the residual sum, exactly pre-norm.
Cost of a reader of t sources: t D (version 1: t) parameters, + D in version 3; 2 t D FLOPs (version 3: 4 t D, and
2 (L + 1) D for its logits, made for all entries).
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from lmres.ops import Span, weighted_sums
from lmres.residual.depth_gates import Gates, gate
from lmres.residual.interface import Axes, Cost, History
from lmres.residual.weighted import WeightedReads


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepCrossAttention(Gates, WeightedReads):
    """Gated sums over all earlier outputs.

    The options are those of ``Gates``.
    """

    kind: Literal["dca"] = "dca"

    equation: ClassVar[str] = "x_o = sum_y (b_oy + ReLU(w_o . v_y)) * v_y,  o = query, key, value"
    source: ClassVar[str] = "arXiv:2502.06785"
    no_decay: ClassVar[tuple[str, ...]] = ("bias", "gain")

    @property
    def name(self):
        return f"dca-v{self.version}" + ("" if self.ways == (3, 1) else f"-{'x'.join(map(str, self.ways))}way")

    def check(self, depth, width):
        self.check_gates()

    def _firsts(self, depth: int) -> np.ndarray:
        """[depth + 1]: where each sub-layer's biases begin in the flat array; the readout's last."""
        return np.cumsum([0] + [self.ways[l % len(self.ways)] * (l + 1) for l in range(depth)])

    def init(self, key, depth, width):
        count = int(self._firsts(depth)[-1]) + depth + 1
        bias = jnp.ones(count if self.version == 1 else (count, width), jnp.float32)
        readers = int(self.first_reader(depth)[-1]) + 1
        return {"layers": {}, "shared": {"bias": bias, **self.gate_params(readers, width)}}

    def emit(self, carry, y, l):
        return l + 1, y, ()

    def keys(self, params_l, value):
        """Logits [R, B, S] of every reader for this entry."""
        return {"logits": jnp.moveaxis(self.logits(params_l, value), -1, 0)} if self.version == 3 else {}

    @property
    def sees(self):
        return ("logits",) if self.version == 3 else ()

    def span(self, l):
        return Span(0, 1, l + 1)

    def reader(self, l):
        return self.reader_at(l)

    def weigh(self, params_l, seen, l, ways, count):
        column = jnp.arange(count)
        at = jnp.asarray(self._firsts(count - 1))[l] + jnp.arange(ways)[:, None] * (l + 1) + column
        bias = params_l["bias"]
        b = jnp.take(bias, jnp.where(column <= l, at, len(bias)), axis=0, mode="fill", fill_value=0)
        if self.version < 3:
            return [b], ()
        gates = jnp.where((column <= l)[:, None, None], gate(jnp.moveaxis(seen["logits"], 1, 0)), 0)
        return [b, gates], ()

    def close(self, params, state, context=None):
        values = state.slots["value"]
        if context is None:
            context = [params["shared"]["bias"][-len(values) :][None]]
            if self.version == 3:
                context.append(gate(state.slots["logits"][:, -1])[None])
        return weighted_sums(context, values)[0], context

    def cost(self, depth, width):
        sources = [l + 1 for l in range(depth) for _ in range(self.ways[l % len(self.ways)])] + [depth + 1]
        params, flops = self.gate_cost(sources, width)
        flops += self.logit_flops(depth + 1, len(sources), width)
        moved = sum(l + 1 + self.ways[l % len(self.ways)] + 2 for l in range(depth)) + depth + 2
        return Cost(params, flops, float(moved), float(depth + 1))

    def state_axes(self):
        logits = {"logits": Axes("slots", None, "batch", "sequence")} if self.version == 3 else {}
        return History({"value": Axes("slots", "batch", "sequence", "embed")} | logits, ())
