"""DenseFormer: depth-weighted averaging with fixed weights (arXiv:2402.02622, section 3).

    X_0 = e,   X_i = Block_i(Y_{i-1}),   Y_0 = X_0
    Y_i = sum_{j <= i, j = i mod k} alpha_ij X_j     if i mod p = 0,   else Y_i = X_i

The unit is the whole block, with its own additive skips inside. What is kept is X (block outputs), never Y.
k is the dilation, p the period; the last period may be short, and then the last block's output is read as it is.
The readout is Y_B, then the final norm.

Legend: B blocks (units), M = B + 1 slots, D width.
Start: alpha_ii = 1, all others 0: exactly pre-norm. alpha is unconstrained.
Cost: sum_i (floor(i/k) + 1) parameters over the averaged depths; 2 (floor(i/k) + 1) D FLOPs and
(floor(i/k) + 3) D moved per averaged block and token (the average is written and read again).
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from lmres.ops import Span
from lmres.residual.interface import Axes, Cost, History, without_empty
from lmres.residual.weighted import WeightedReads


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseFormer(WeightedReads):
    """Weighted averages of all earlier block outputs.

    dilation: k, read every k-th block output only.
    period: p, average after every p-th block only.
    """

    kind: Literal["denseformer"] = "denseformer"
    dilation: int = 1
    period: int = 1

    unit: ClassVar[Literal["sublayer", "block"]] = "block"
    equation: ClassVar[str] = "Y_i = sum_j alpha_ij X_j,  X_i = Block_i(Y_{i-1})"
    source: ClassVar[str] = "arXiv:2402.02622"

    @property
    def name(self):
        return f"denseformer-{self.dilation}x{self.period}"

    def check(self, depth, width):
        if self.dilation < 1 or self.period < 1:
            raise ValueError(f"residual.dilation={self.dilation} and residual.period={self.period} must be at least 1")

    def sources(self, i: int) -> list[int]:
        """The slots that Y_i averages, for i from 1; [i] alone where no average is taken."""
        if i % self.period:
            return [i]
        return [j for j in range(i + 1) if (i - j) % self.dilation == 0]

    def _table(self, depth: int) -> tuple[np.ndarray, int]:
        """[depth + 1, M] positions in [alpha..., 0, 1], and how many alphas there are."""
        averaged = [(i, j) for i in range(1, depth + 1) if i % self.period == 0 for j in self.sources(i)]
        table = np.full((depth + 1, depth + 1), len(averaged))
        for i in range(depth + 1):
            if i == 0 or i % self.period:
                table[i, i] = len(averaged) + 1
        for position, (i, j) in enumerate(averaged):
            table[i, j] = position
        return table, len(averaged)

    def init(self, key, depth, width):
        table, count = self._table(depth)
        alpha = np.zeros(count, np.float32)
        diagonal = np.diagonal(table)
        alpha[diagonal[diagonal < count]] = 1.0
        return {"layers": {}, "shared": without_empty({"alpha": jnp.asarray(alpha)})}

    def weigh(self, params_l, seen, l, ways, count):
        """alpha_l as a dense row of M weights; ``l`` may be traced."""
        alpha = params_l.get("alpha", jnp.zeros(0))  # none where the period is longer than the depth
        table, _ = self._table(count - 1)
        return [jnp.concatenate([alpha, jnp.array([0.0, 1.0], alpha.dtype)])[jnp.asarray(table)[l]][None]], ()

    def span(self, l):
        averaged = (l % self.period == 0) & (l > 0)
        first = jnp.where(averaged, l % self.dilation, l)
        return Span(first, self.dilation, jnp.where(averaged, l // self.dilation + 1, 1))

    def emit(self, carry, y, l):
        return l + 1, y, ()

    def close(self, params, state, context=None):
        shared = None if params is None else params["shared"]
        return self.read(shared, state, state.slots["value"].shape[0] - 1, context)

    def cost(self, depth, width):
        reads = [len(self.sources(i)) for i in range(1, depth + 1) if i % self.period == 0]
        walked = sum(len(self.sources(i)) if i else 1 for i in range(depth + 1))
        # The plain skips inside a block of two sub-layers: 3 vectors moved and one addition each.
        return Cost(
            params=sum(reads),
            flops=2.0 * (walked + depth) * width,
            moved=float(sum(reads) + 2 * len(reads) + 6 * depth),
            state=float(depth + 1),
        )

    def state_axes(self):
        return History({"value": Axes("slots", "batch", "sequence", "embed")}, ())
