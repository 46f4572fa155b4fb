"""DeepCrossAttention: gated sums of all earlier outputs, one for each input of a sub-layer (arXiv:2502.06785).

    x_o = sum_y gate_oy * v_y                           v_0 = e, v_y the branch outputs; no other skip
    version 1   gate = b_oy                             a scalar per source
    version 2   gate = b_oy                             a vector over channels
    version 3   gate = b_oy + ReLU(w_o . v_y)           vector and scalar

Attention reads query, key and value apart, the MLP one input; the readout is one more reader. ``norm = "rms"`` puts
RMSNorm with a gain inside the gate's product, which is not in the paper but in a package (deep-cross-attention 0.1).

k-DCA keeps the embedding and the last k outputs as they are and one sum of those between: a state of k + 2 tensors.

Legend: L sub-layers, R readers (the inputs of all sub-layers, and the readout), M = L + 1 slots, D width.
Start: b = 1, w = 0: the residual sum, exactly pre-norm. ReLU's derivative at 0 is taken as 1, or w would stay 0.
Cost of a reader of t sources: t D (version 1: t) parameters, + D in version 3; 2 t D FLOPs (version 3: 4 t D, and
2 (L + 1) D for its logits, made for all entries).
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from lmres.ops import Span, normed_projection, stat_dtype, weighted_sums
from lmres.residual.interface import Axes, Connection, Cost, History, check_not_negative
from lmres.residual.weighted import WeightedReads


def _total(sums):
    return sums[0] if len(sums) == 1 else sums[0] + sums[1]


def gate(logits):
    """ReLU whose derivative at 0 is 1."""
    return jnp.where(logits >= 0, logits, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gates:
    """What both forms share: the readers, their parameters and their gates.

    ways: inputs of the successive sub-layers, repeated: [3, 1] for attention (query, key, value) and MLP.
    version: of the gate, 1 to 3.
    norm: inside the gate's product: "none" (paper) or "rms".
    eps: of that norm.
    """

    ways: tuple[int, ...] = (3, 1)
    version: Literal[1, 2, 3] = 3
    norm: Literal["none", "rms"] = "none"
    eps: float = 1e-6

    def check_gates(self) -> None:
        if not self.ways or min(self.ways) < 1:
            raise ValueError(f"residual.ways={list(self.ways)} must be numbers of inputs, at least 1 each")
        check_not_negative(eps=self.eps)

    def first_reader(self, depth: int) -> np.ndarray:
        """[depth + 1]: the number of each sub-layer's first reader; the last entry is the readout's."""
        return np.cumsum([0] + [self.ways[l % len(self.ways)] for l in range(depth)])

    def reader_at(self, l):
        """The same for one sub-layer ``l``, which may be traced."""
        pattern = jnp.asarray(np.cumsum([0, *self.ways]))
        return l // len(self.ways) * pattern[-1] + pattern[l % len(self.ways)]

    def gate_params(self, readers: int, width: int) -> dict:
        if self.version < 3:
            return {}
        gain = {"gain": jnp.ones((readers, width), jnp.float32)} if self.norm == "rms" else {}
        return {"w": jnp.zeros((readers, width), jnp.float32), **gain}

    def logits(self, params_l, value, rows=slice(None)):
        """``w . v`` for ``value`` [..., D]: [..., readers], in the statistics dtype."""
        w = params_l["w"][rows]
        if self.norm == "rms":
            return normed_projection(value, w * params_l["gain"][rows], eps=self.eps)
        wide = stat_dtype(value)
        return jnp.einsum("...d,rd->...r", value.astype(wide), w.astype(wide), precision="highest")

    def gate_cost(self, sources: list[int], width: int) -> tuple[int, float]:
        """(parameters, FLOPs per token but for the logits) of readers with so many sources."""
        params = sum(sources) * (1 if self.version == 1 else width)
        if self.version < 3:
            return params, 2.0 * sum(sources) * width
        params += len(sources) * width * (2 if self.norm == "rms" else 1)
        return params, (4.0 * sum(sources) + len(sources)) * width + 3.0 * sum(sources)

    def logit_flops(self, entries: int, readers: int, width: int) -> float:
        """FLOPs per token of the logits of ``readers`` readers for ``entries`` entries."""
        if self.version < 3:
            return 0.0
        return entries * (2.0 * readers * width + (2.0 * width + readers if self.norm == "rms" else 0.0))

    def no_gradient_rows(self) -> dict[str, tuple[int, ...]]:
        """The first sub-layer has one source. A scalar gate can only change its size, which the branch's norm hides;
        beside a vector that starts at ones it is late: w moves from the second step on, its norm's gain after that."""
        first = tuple(range(self.ways[0]))
        return {1: {"bias": first}, 2: {}, 3: {"gain": first}}[self.version]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepCrossAttention(Gates, WeightedReads):
    """Gated sums over all earlier outputs; options as in ``Gates``."""

    kind: Literal["dca"] = "dca"

    equation: ClassVar[str] = "x_o = sum_y (b_oy + ReLU(w_o . v_y)) * v_y,  o = query, key, value"
    source: ClassVar[str] = "arXiv:2502.06785"
    no_decay: ClassVar[tuple[str, ...]] = ("bias", "gain")

    @property
    def name(self):
        return f"dca-v{self.version}" + ("" if self.ways == (3, 1) else f"-{'x'.join(map(str, self.ways))}way")

    @property
    def no_gradient(self):
        return self.no_gradient_rows()

    @property
    def channelwise(self):
        return self.version > 1

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

    def finish(self, params_l, sums, seen, extra):
        x = _total(sums)
        return (x[0] if len(x) == 1 else tuple(x)), extra

    def close(self, params, state, context=None):
        values = state.slots["value"]
        if context is None:
            context = [params["shared"]["bias"][-len(values) :][None]]
            if self.version == 3:
                context.append(gate(state.slots["logits"][:, -1])[None])
        return _total([weighted_sums(w, values) for w in context])[0], context

    def cost(self, depth, width):
        sources = [l + 1 for l in range(depth) for _ in range(self.ways[l % len(self.ways)])] + [depth + 1]
        params, flops = self.gate_cost(sources, width)
        flops += self.logit_flops(depth + 1, len(sources), width)
        moved = sum(l + 1 + self.ways[l % len(self.ways)] + 2 for l in range(depth)) + depth + 2
        return Cost(params, flops, float(moved), float(depth + 1))

    def state_axes(self):
        logits = {"logits": Axes("slots", None, "batch", "sequence")} if self.version == 3 else {}
        return History({"value": Axes("slots", "batch", "sequence", "embed")} | logits, ())


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

    @property
    def no_gradient(self):
        return self.no_gradient_rows()

    @property
    def channelwise(self):
        return self.version > 1

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
        x = _total([weighted_sums(w, state) for w in context])
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
        return _total([weighted_sums(w, state) for w in context])[0], context

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
