"""Value residual (ResFormer, arXiv:2410.17897; the authors' code): the first layer's values in every layer.

    v_l <- a_l v_0 + b_l v_l          fixed: a = b = 1/2; learned: a pair per layer; shared (SVFormer): a = 1, b = 0

Legend: B blocks (batch in shapes), S sequence, D width, G key/value heads, K head size.
State: the plain stream [B, S, D] and v_0 [B, S, G, K].
Start: a = b = 1/2 (learned as well), not the plain residual, which is a = 0, b = 1.
Cost per block and token: 2 parameters (learned); 4 G K FLOPs; 3 G K numbers moved.
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp

from lmres.ops import stat_dtype
from lmres.residual.interface import Axes, Connection, Cost, Exchange, Lent, Mix, without_empty
from lmres.residual.key_values import HEADS, KeyValueHeads


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueResidual(KeyValueHeads, Connection):
    """The first layer's values in every layer.

    mode: "fixed" (half of each), "learned" (a pair per layer, from a half each), "shared" (the first layer's values in
      all layers; the value projections above are not used).
    """

    kind: Literal["value_residual"] = "value_residual"
    mode: Literal["fixed", "learned", "shared"] = "learned"

    equation: ClassVar[str] = "v_l <- a_l v_0 + b_l v_l,  h <- Block(h)"
    source: ClassVar[str] = "arXiv:2410.17897"
    start_tolerance: ClassVar[float | None] = None

    @property
    def name(self):
        return f"value-residual-{self.mode}"

    def as_plain(self, params, gains, final_gain):
        if self.mode != "learned":
            return None
        plain = {name: jnp.zeros_like(p).at[:, 1].set(1.0) for name, p in params["shared"].items()}
        return {**params, "shared": plain}

    def init(self, key, depth, width):
        shared = {"weights": jnp.full((depth - 1, 2), 0.5, jnp.float32)} if self.mode == "learned" else {}
        return {"layers": {}, "shared": without_empty(shared)}

    def open(self, params, e, depth):
        return {"stream": e, "value": jnp.zeros((*e.shape[:-1], *self.heads()), e.dtype)}

    def _pair(self, params_l, l, dtype):
        """(weight of the first layer's values, weight of the layer's own)."""
        if "weights" in params_l:
            pair = params_l["weights"][jnp.maximum(l - 1, 0)]
        else:  # fixed, or one block
            pair = jnp.array([1.0, 0.0] if self.mode == "shared" else [0.5, 0.5])
        return jnp.where(l == 0, jnp.array([0.0, 1.0]), pair).astype(dtype)

    def read(self, params_l, state, l, context=None):
        if params_l is None:
            return state["stream"], ()
        first, own = self._pair(params_l, l, stat_dtype(state["value"]))
        gathered = first * state["value"]
        return Exchange(state["stream"], None, Mix(gathered, own)), ()

    def write(self, params_l, state, context, y, l):
        if not isinstance(y, Lent):  # a replay: the stream alone
            return {**state, "stream": y}
        value = jnp.where(l == 0, y.value.astype(state["value"].dtype), state["value"])
        return {"stream": y.y, "value": value}

    def close(self, params, state, context=None):
        return state["stream"], ()

    def cost(self, depth, width):
        g, k = self.kv_heads or 1, self.head_size or width
        return Cost(
            params=2 * (depth - 1) if self.mode == "learned" else 0,
            flops=depth * (2.0 * width + 4.0 * g * k),
            moved=depth * (6.0 + 3.0 * g * k / width),
            state=1.0 + g * k / width,
        )

    def state_axes(self):
        return {"stream": Axes("batch", "sequence", "embed"), "value": HEADS}
