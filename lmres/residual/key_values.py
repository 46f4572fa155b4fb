"""Connections that carry keys and values up the column beside the plain stream: value residual and LIMe.

The stream itself is the plain pre-norm residual. What is added is that an attention layer uses keys or values of the
layers below (of the same tokens, before positions are applied), so what the cache holds is mixed already and a
decoding step needs nothing more.

Value residual (ResFormer, arXiv:2410.17897; the authors' code):
    v_l <- a_l v_0 + b_l v_l          fixed: a = b = 1/2; learned: a pair per layer; shared (SVFormer): a = 1, b = 0
LIMe (arXiv:2502.09245; corl-team/lime):
    k_l[h] <- sum over layers j <= l and heads g of w_l[h, (j, g)] k_j[g], and the same for v

The unit is the block. The number of key/value heads and their size must be the model's; left open, the model sets
them.

Legend: B blocks (batch in shapes), S sequence, D width, G key/value heads, K head size.
"""

import abc
import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lmres.ops import mix_heads, mix_heads_back, stat_dtype
from lmres.residual.interface import AppendOnly, Axes, Connection, Cost, Exchange, History, Lent, Mix

_HEADS = Axes("batch", "sequence", "kv_heads", None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyValueHeads(abc.ABC):
    """kv_heads: G; head_size: K, of the model's keys and values; None until the model says."""

    kv_heads: int | None = None
    head_size: int | None = None

    unit: ClassVar[Literal["sublayer", "block"]] = "block"
    equation: ClassVar[str]

    def fit(self, kv_heads, head_size):
        for key, here, there in (("kv_heads", self.kv_heads, kv_heads), ("head_size", self.head_size, head_size)):
            if here not in (None, there):
                raise ValueError(f"residual.{key}={here} must be the model's, {there}; leave it out to take that")
        return dataclasses.replace(self, kv_heads=kv_heads, head_size=head_size)

    def check(self, depth, width):
        for key in ("kv_heads", "head_size"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(f"residual.{key}={getattr(self, key)} must be at least 1")

    def heads(self) -> tuple[int, int]:
        """(G, K). Raises ValueError while they are open."""
        if self.kv_heads is None or self.head_size is None:
            raise ValueError("residual.kv_heads and residual.head_size are not set: give the attention's")
        return self.kv_heads, self.head_size


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
        return {**params, "shared": {"weights": jnp.zeros_like(params["shared"]["weights"]).at[:, 1].set(1.0)}}

    def init(self, key, depth, width):
        shared = {"weights": jnp.full((depth - 1, 2), 0.5, jnp.float32)} if self.mode == "learned" else {}
        return {"layers": {}, "shared": shared}

    def open(self, params, e, depth):
        return {"stream": e, "value": jnp.zeros((*e.shape[:-1], *self.heads()), e.dtype)}

    def _pair(self, params_l, l, dtype):
        """(weight of the first layer's values, weight of the layer's own)."""
        if self.mode == "learned" and not len(params_l["weights"]):  # one block
            pair = jnp.array([0.0, 1.0])
        elif self.mode == "learned":
            pair = params_l["weights"][jnp.maximum(l - 1, 0)]
        else:
            pair = jnp.array([0.5, 0.5] if self.mode == "fixed" else [1.0, 0.0])
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
        return {"stream": Axes("batch", "sequence", "embed"), "value": _HEADS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LIMe(KeyValueHeads, AppendOnly):
    """Every layer's keys and values are mixes over the heads of all layers up to it.

    routers: "separate" for keys and values (paper) or one "shared" (as the code's fused form).
    start: of the weights of earlier layers: "uniform" (the authors': +-sqrt(3 / fan-in), fan-in the number of weights
      of a head) or "identity" (zero, which is the plain residual). The layer's own heads start at the identity.

    The first layer uses its own keys and values.
    """

    kind: Literal["lime"] = "lime"
    routers: Literal["separate", "shared"] = "separate"
    start: Literal["uniform", "identity"] = "uniform"

    equation: ClassVar[str] = "k_l[h] <- sum_jg w_l[h, (j, g)] k_j[g], same for v,  h <- Block(h)"
    source: ClassVar[str] = "arXiv:2502.09245"
    no_decay: ClassVar[tuple[str, ...]] = ("*",)

    @property
    def lr_multipliers(self):
        """The authors' learning rate of 0.01 beside their 0.001."""
        return {"router": 10.0}

    @property
    def name(self):
        return "lime" + ("" if self.routers == "separate" else "-shared") + ("-identity" * (self.start == "identity"))

    @property
    def start_tolerance(self):
        return 1e-4 if self.start == "identity" else None

    def _first(self, l):
        """Where layer ``l``'s weights [G, (l + 1) G] begin in the flat router; layer 0 has none."""
        return self.heads()[0] ** 2 * (l * (l + 1) // 2 - 1)

    def _identity(self, depth: int) -> np.ndarray:
        g = self.heads()[0]
        own = [np.concatenate([np.zeros((g, l * g)), np.eye(g)], axis=1).ravel() for l in range(1, depth)]
        return np.concatenate([*own, np.zeros(0)]).astype(np.float32)

    def init(self, key, depth, width):
        g, identity = self.heads()[0], self._identity(depth)
        rows = 2 if self.routers == "separate" else 1
        router = np.broadcast_to(identity, (rows, len(identity)))
        if self.start == "uniform":
            bounds = [np.full((g, (l + 1) * g), (3.0 / ((l + 1) * g)) ** 0.5) for l in range(1, depth)]
            earlier = [np.concatenate([np.ones((g, l * g)), np.zeros((g, g))], axis=1) for l in range(1, depth)]
            size = np.concatenate([*[(b * m).ravel() for b, m in zip(bounds, earlier)], np.zeros(0)])
            router = router + size * jax.random.uniform(key, router.shape, jnp.float32, -1.0, 1.0)
        return {"layers": {}, "shared": {"router": jnp.asarray(router, jnp.float32)}}

    def as_plain(self, params, gains, final_gain):
        router = params["shared"]["router"]
        depth = round(((8 * router.shape[1] / self.heads()[0] ** 2 + 9) ** 0.5 - 1) / 2)
        return {**params, "shared": {"router": jnp.broadcast_to(self._identity(depth), router.shape)}}

    def slot_count(self, depth):
        return depth

    def open(self, params, e, depth):
        empty = jnp.zeros((depth, *e.shape[:-1], *self.heads()), e.dtype)
        return History({"value": {"key": empty, "value": empty}}, e)

    def emit(self, carry, y, l):
        if not isinstance(y, Lent):  # a replay: the stream alone
            y = Lent(y, *(jnp.zeros((*y.shape[:-1], *self.heads()), y.dtype),) * 2)
        return l, {"key": y.key, "value": y.value}, y.y

    def output_like(self, slots, carry):
        one = jax.tree.map(lambda buffer: jnp.zeros(buffer.shape[1:], buffer.dtype), slots["value"])
        return Lent(jnp.zeros_like(carry), one["key"], one["value"])

    def _router(self, params_l, l, count, dtype):
        """[2, G, M, G] weights of key and value for the layers before ``l``, zero from l on, and [2, G, G] its own."""
        g, router = self.heads()[0], params_l["router"]
        layer, head = jnp.arange(count)[None, :, None], jnp.arange(g)
        at = self._first(l) + head[:, None, None] * ((l + 1) * g) + layer * g + head
        at = jnp.where((layer <= l) & (l > 0), at, router.shape[1])
        weights = jnp.take(router, at, axis=1, mode="fill", fill_value=0) if count > 1 else jnp.zeros((1, *at.shape))
        weights = jnp.broadcast_to(weights, (2, *at.shape)).astype(dtype)
        own = jnp.where(l == 0, jnp.eye(g, dtype=dtype), jax.lax.dynamic_index_in_dim(weights, l, 2, keepdims=False))
        return jnp.where(layer < l, weights, 0), own

    def read(self, params_l, state, l, context=None):
        if params_l is None:
            return state.carry, ()
        return self._gather(params_l, state.slots["value"], state.carry, l), ()

    def _gather(self, params_l, slots, carry, l):
        weights, own = self._router(params_l, l, len(slots["key"]), stat_dtype(slots["key"]))
        key, value = (mix_heads(w, slots[name], l) for w, name in zip(weights, ("key", "value")))
        return Exchange(carry, Mix(key, own[0]), Mix(value, own[1]))

    def accumulate(self, params_l, slots, carry, l, g_x, g_slots):
        """Backward of ``read``, in place."""
        kept, found = slots["value"], dict(g_slots["value"])
        router = lambda p: self._router(p, l, len(kept["key"]), stat_dtype(kept["key"]))  # noqa: E731
        (weights, _), vjp = jax.vjp(router, params_l)
        g_weights, names = [], ("key", "value")
        for name, w, g in zip(names, weights, (g_x.key, g_x.value), strict=True):
            g_w, found[name] = mix_heads_back(g.gathered, w, kept[name], found[name], l)
            g_weights.append(g_w)
        (g_params,) = vjp((jnp.stack(g_weights), jnp.stack([g_x.key.own, g_x.value.own])))
        return g_params, {"value": found}, g_x.x

    def close(self, params, state, context=None):
        return state.carry, ()

    def cost(self, depth, width):
        g, k = self.kv_heads or 1, self.head_size or width
        sources = depth * (depth + 1) // 2 - 1  # layers that the layers from the second on mix
        rows = 2 if self.routers == "separate" else 1
        return Cost(
            params=rows * g * g * sources,
            flops=2.0 * depth * width + 2.0 * (2 * g + 1) * g * k * (depth * (depth + 1) // 2),
            moved=depth * 6.0 + 2.0 * g * k * (sources + depth) / width,
            state=1.0 + 2.0 * depth * g * k / width,
        )

    def state_axes(self):
        slots = Axes("slots", *_HEADS)
        return History({"value": {"key": slots, "value": slots}}, Axes("batch", "sequence", "embed"))
