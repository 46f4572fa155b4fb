"""LIMe: keys and values mixed over the heads of all layers below (arXiv:2502.09245; corl-team/lime).

    k_l[h] <- sum over layers j <= l and heads g of w_l[h, (j, g)] k_j[g], and the same for v

before positions are applied. The first layer uses its own.

Legend: B blocks (batch in shapes), M = B slots, S sequence, D width, G key/value heads, K head size.
State: the plain stream [B, S, D], and a history of keys and values [M, B, S, G, K].
Start: the layer's own heads at the identity; the earlier layers' uniform (the authors'), or 0: the plain residual.
Cost of block l and token: 2 (l + 1) G^2 parameters (one router: half); 2 (2 G + 1) G K (l + 1) FLOPs.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lmres.ops import mix_heads, mix_heads_back, stat_dtype, take
from lmres.residual.interface import AppendOnly, Axes, Cost, Exchange, History, Lent, Mix, without_empty
from lmres.residual.key_values import HEADS, KeyValueHeads


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
        return {"layers": {}, "shared": without_empty({"router": jnp.asarray(router, jnp.float32)})}

    def as_plain(self, params, gains, final_gain):
        if not params["shared"]:  # one layer
            return params
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
        g, router = self.heads()[0], params_l.get("router", jnp.zeros((1, 0)))
        layer, head = jnp.arange(count)[None, :, None], jnp.arange(g)
        at = self._first(l) + head[:, None, None] * ((l + 1) * g) + layer * g + head
        at = jnp.where((layer <= l) & (l > 0), at, router.shape[1])
        weights = jnp.take(router, at, axis=1, mode="fill", fill_value=0) if count > 1 else jnp.zeros((1, *at.shape))
        weights = jnp.broadcast_to(weights, (2, *at.shape)).astype(dtype)
        own = jnp.where(l == 0, jnp.eye(g, dtype=dtype), take(weights, l, 2))
        return jnp.where(layer < l, weights, 0), own

    def read(self, params_l, state, l, context=None):
        if params_l is None:
            return state.carry, ()
        slots = state.slots["value"]
        weights, own = self._router(params_l, l, len(slots["key"]), stat_dtype(slots["key"]))
        return self._gather(weights, own, slots, state.carry, l), ()

    def _gather(self, weights, own, slots, carry, l):
        key, value = (mix_heads(w, slots[name], l) for w, name in zip(weights, ("key", "value")))
        return Exchange(carry, Mix(key, own[0]), Mix(value, own[1]))

    def read_vjp(self, params_l, state, l, ways=1):
        """In place."""
        kept, names = state.slots["value"], ("key", "value")
        router = lambda p: self._router(p, l, len(kept["key"]), stat_dtype(kept["key"]))  # noqa: E731
        (weights, own), vjp = jax.vjp(router, params_l)

        def back(g_x, g_slots):
            g_weights, found = [], dict(g_slots["value"])
            for name, w, g in zip(names, weights, (g_x.key, g_x.value), strict=True):
                g_w, found[name] = mix_heads_back(g.gathered, w, kept[name], found[name], l)
                g_weights.append(g_w)
            (g_params,) = vjp((jnp.stack(g_weights), jnp.stack([g_x.key.own, g_x.value.own])))
            return g_params, {"value": found}, g_x.x

        return self._gather(weights, own, kept, state.carry, l), back

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
        slots = Axes("slots", *HEADS)
        return History({"value": {"key": slots, "value": slots}}, Axes("batch", "sequence", "embed"))
