"""Dynamic layer mixing: every sub-layer reads softmax mixes of the residual stream at all earlier depths.

    x_l = sum_{j <= l} a_j X_j,    a = softmax_j( (N(X_l) W_l + b_l)_j ),    X_{l+1} = X_l + f(x_l)

This is the dynamic router of a package (DynamicLIMe of x-transformers 2.31), beside LIMe's paper (arXiv:2502.09245),
which routes keys and values; N is an RMSNorm without eps, with a gain. The sources are *cumulative* streams X, not
branch outputs: Attention Residuals are something else.

Legend: L sub-layers, M = L + 1 slots, C inputs of a sub-layer, D width.
Start (ours; none is published): W = 0 and b = 0, uniform weights: not the plain residual. b = 30 on the newest stream
is, to 1e-12 per source, and converts trained models.
Cost of sub-layer l: C (l + 1) (D + 1) + D parameters; 2 C (M + l + 1) D FLOPs per token.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lmres.ops import Span, normed_projection
from lmres.residual.interface import Axes, Cost, History
from lmres.residual.weighted import WeightedReads


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicLIMe(WeightedReads):
    """Softmax mixes of the stream at all depths so far.

    ways: inputs of the successive sub-layers, repeated: [1], or [3, 1] for attention with query, key and value apart.
    """

    kind: Literal["dynamic_lime"] = "dynamic_lime"
    ways: tuple[int, ...] = (1,)

    equation: ClassVar[str] = "x_l = sum_j softmax_j(N(X_l) W + b) X_j,  X <- X + f(x)"
    source: ClassVar[str] = "x-transformers 2.31 (DynamicLIMe); cf. arXiv:2502.09245"
    start_tolerance: ClassVar[float | None] = None
    no_decay: ClassVar[tuple[str, ...]] = ("bias", "gain")

    @property
    def no_gradient(self):
        """The first sub-layer has one source."""
        first = tuple(range(self.ways[0]))
        return {"weight": first, "bias": first, "gain": (0,)}

    @property
    def name(self):
        return "dynamic-lime" + ("" if self.ways == (1,) else f"-{'x'.join(map(str, self.ways))}way")

    def check(self, depth, width):
        if not self.ways or min(self.ways) < 1:
            raise ValueError(f"residual.ways={list(self.ways)} must be numbers of inputs, at least 1 each")

    def _firsts(self, depth: int) -> np.ndarray:
        """[depth + 1]: where each sub-layer's rows begin in the flat router."""
        return np.cumsum([0] + [self.ways[l % len(self.ways)] * (l + 1) for l in range(depth)])

    def init(self, key, depth, width):
        rows = int(self._firsts(depth)[-1])
        shared = {"weight": jnp.zeros((rows, width), jnp.float32), "bias": jnp.zeros(rows, jnp.float32)}
        return {"layers": {"gain": jnp.ones((depth, width), jnp.float32)}, "shared": shared}

    def as_plain(self, params, gains, final_gain):
        depth = len(params["layers"]["gain"])
        firsts = self._firsts(depth)
        newest = [firsts[l] + w * (l + 1) + l for l in range(depth) for w in range(self.ways[l % len(self.ways)])]
        shared = {
            "weight": jnp.zeros_like(params["shared"]["weight"]),
            "bias": jnp.zeros_like(params["shared"]["bias"]).at[np.array(newest)].set(30.0),
        }
        return {**params, "shared": shared}

    def first_carry(self, e):
        return e

    def emit(self, carry, y, l):
        stream = carry + y
        return l + 1, stream, stream

    @property
    def sees(self):
        return ("newest",)

    def span(self, l):
        return Span(0, 1, l + 1)

    def weigh(self, params_l, seen, l, ways, count):
        column, newest = jnp.arange(count), seen["newest"]
        at = jnp.asarray(self._firsts(count - 1))[l] + jnp.arange(ways)[:, None] * (l + 1) + column
        at = jnp.where(column <= l, at, len(params_l["bias"]))
        take = lambda name: jnp.take(params_l[name], at, axis=0, mode="fill", fill_value=0)  # noqa: E731
        rows = (take("weight") * params_l["gain"]).reshape(ways * count, -1)
        # A floor of 1e-12 on the norm of the vector, as in the package.
        logits = normed_projection(newest, rows, floor=1e-24 / newest.shape[-1])
        logits = jnp.moveaxis(logits, -1, 0).reshape(ways, count, *newest.shape[:2]) + take("bias")[..., None, None]
        return [jax.nn.softmax(jnp.where((column <= l)[:, None, None], logits, -jnp.inf), axis=1)], ()

    def close(self, params, state, context=None):
        return state.carry, ()

    def cost(self, depth, width):
        rows = int(self._firsts(depth)[-1])
        # Logits are computed for all slots; those of slots to come are masked.
        logits = (depth + 1) * sum(self.ways[l % len(self.ways)] for l in range(depth))
        return Cost(
            params=rows * (width + 1) + depth * width,
            flops=2.0 * (logits + rows) * width + 3.0 * depth * width + 7.0 * logits,
            moved=float(rows + 4 * depth),
            state=float(depth + 2),
        )

    def state_axes(self):
        return History({"value": Axes("slots", "batch", "sequence", "embed")}, Axes("batch", "sequence", "embed"))
