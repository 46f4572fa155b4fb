"""Gates over earlier outputs: what the two forms of DeepCrossAttention share (arXiv:2502.06785).

    gate_oy = b_oy                         version 1: a scalar per source; version 2: a vector over channels
    gate_oy = b_oy + ReLU(w_o . v_y)       version 3: a vector and a scalar

for reader o (an input of a sub-layer, or the readout) and source y. ``norm = "rms"`` puts an RMSNorm with a gain into
the product, which is not in the paper but in a package (deep-cross-attention 0.1). ReLU's derivative at 0 is taken as
1, or w, which starts at 0, would stay there.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np

from lmres.ops import normed_projection, stat_dtype
from lmres.residual.interface import check_not_negative


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
        return params, 3.0 * sum(sources) * (width + 1)

    def logit_flops(self, entries: int, readers: int, width: int) -> float:
        """FLOPs per token of the logits of ``readers`` readers for ``entries`` entries."""
        if self.version < 3:
            return 0.0
        return entries * (2.0 * readers * width + (2.0 * width + readers if self.norm == "rms" else 0.0))

    @property
    def channelwise(self) -> bool:
        return self.version > 1

    @property
    def no_gradient(self) -> dict[str, tuple[int, ...]]:
        """The first sub-layer has one source. A scalar gate can only change its size, which the branch's norm hides;
        beside a vector that starts at ones it is late: w moves from the second step on, its norm's gain after that."""
        first = tuple(range(self.ways[0]))
        return {1: {"bias": first}, 2: {}, 3: {"gain": first}}[self.version]
