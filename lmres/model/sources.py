"""Sources of the grid that no layer makes: the output cell, one mixture of all layers, pooled channels.

Each is built along the column: ``open`` what it carries, ``add`` a layer's input to it, and ``keys`` what it puts into
the grid when the column is done.

Legend: B batch, S tokens of a tile, D width, L layers, C channels, R slots, G key/value heads, K head size.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmres.model.config import ModelConfig
from lmres.model.layers import KeyValues, fan_in, rotate
from lmres.ops import rms_norm

Project = Callable[[Any, Array], KeyValues]  # projections and a source [B, S, D] to keys and values [B, S, G, K]


@dataclasses.dataclass(frozen=True)
class Output:
    """The column's output h[., L] as it is; also for geometries that read no such source."""

    config: ModelConfig

    def init(self, key: Array) -> dict[str, Any]:
        """Parameters."""
        return {}

    def open(self, e: Array) -> Any:
        """What is carried from the embeddings [B, S, D] on."""
        return ()

    def add(self, params: Any, carry: Any, x: Array, l: Any) -> Any:
        """The carry with the input [B, S, D] of layer ``l``."""
        return carry

    def keys(self, params: Any, carry: Any, h: Array, position: Array, writers: Any, project: Project) -> KeyValues:
        """What is put into the grid, [R, B, S, G, K], from the column's output [B, S, D]. position: [B, S]. writers:
        the projections of the R slots."""
        return jax.vmap(lambda writer: project(writer, h))(writers)


@dataclasses.dataclass(frozen=True)
class Mixture(Output):
    """One memory per token: the layers' inputs and the output, weighted by softmax(w), which starts uniform. Every
    reader projects it. Source: Feedback Transformer (arXiv:2002.09402)."""

    def init(self, key):
        return {"weights": jnp.zeros(self.config.blocks + 1, jnp.float32)}

    def open(self, e):
        return jnp.zeros_like(e)

    def add(self, params, carry, x, l):
        return (carry + jax.nn.softmax(params["weights"])[l] * x).astype(x.dtype)

    def keys(self, params, carry, h, position, writers, project):
        memory = self.add(params, carry, h, self.config.blocks)
        return super().keys(params, carry, memory, position, writers, project)


@dataclasses.dataclass(frozen=True)
class Channels(Output):
    """C mixtures of the layers' normed inputs, with weights that follow the token; each is normed again and has
    projections of its own, keys and values apart.

    The router, zero at the start, hears every other layer. The bias starts as in the source: one channel is the last
    input; C < L channels take turns, layer l in channel l mod C (where the source is silent: the sum); C = L channels
    are the input one layer further up, the last one its own. Instead of the source's dummy token, a token with nothing
    to read gets zeros. The carry is all inputs, [L, B, S, D].

    Source: WhiteMatter (arXiv:2608.18486).
    """

    channels: int

    def init(self, key):
        c, layers, count = self.config, self.config.blocks, self.channels
        source = jnp.arange(layers)
        start = jnp.zeros((count, layers), jnp.float32)
        if count == 1:
            start = start.at[0, -1].set(1.0)
        elif count < layers:
            start = start.at[source % count, source].set(1.0)
        else:
            start = start.at[source, jnp.minimum(source + 1, layers - 1)].set(1.0)

        def side(key):
            project = lambda key: fan_in(c.weight_std)(key, (c.width, c.kv, c.head_size))  # noqa: E731
            return {
                "gain": jnp.ones((layers, c.width), jnp.float32),
                "router": jnp.zeros((count, layers, (layers + 1) // 2, c.width), jnp.float32),
                "bias": start,
                "channel_gain": jnp.ones((count, c.width), jnp.float32),
                "projection": jax.vmap(project)(jax.random.split(key, count)),
            }

        sides = jax.random.split(key)
        norm = {"key_norm": jnp.ones(c.head_size, jnp.float32)} if c.qk_norm else {}
        return {"key": side(sides[0]), "value": side(sides[1])} | norm

    def open(self, e):
        return jnp.zeros((self.config.blocks, *e.shape), e.dtype)

    def add(self, params, carry, x, l):
        return jax.lax.dynamic_update_index_in_dim(carry, x, l, 0)

    def keys(self, params, carry, h, position, writers, project):
        key, value = (self._side(params[name], carry) for name in ("key", "value"))
        if "key_norm" in params:
            key = rms_norm(key, params["key_norm"], self.config.norm_eps)
        return KeyValues(jax.vmap(lambda k: rotate(k, position, self.config.rope_base))(key), value)

    def _side(self, p, inputs):
        """[C, B, S, G, K] from the layers' inputs [L, B, S, D]."""
        eps, dtype = self.config.norm_eps, inputs.dtype
        normed = jax.vmap(lambda x, gain: rms_norm(x, gain, eps))(inputs, p["gain"])
        weights = jnp.einsum("hbsd,clhd->clbs", normed[::2], p["router"].astype(dtype)) + p["bias"][..., None, None]
        mixed = jnp.einsum("clbs,lbsd->cbsd", weights.astype(dtype), normed)
        mixed = jax.vmap(lambda x, gain: rms_norm(x, gain, eps))(mixed, p["channel_gain"])
        return jnp.einsum("cbsd,cdgk->cbsgk", mixed, p["projection"].astype(dtype))
