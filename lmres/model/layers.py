"""The branches of a block: attention and MLP, each with its own norms, and the parts they are made of.

Legend: B batch, S query positions, T readable positions, D width, H query heads, G key/value heads, K head size, F
hidden.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from lmres.model.config import ModelConfig
from lmres.ops import rms_norm
from lmres.residual.interface import Exchange, Lent, Mix


class KeyValues(NamedTuple):
    """Something an attention layer may read: keys (rotated) and values, [B, T, G, K] each."""

    key: Array
    value: Array


class Args(NamedTuple):
    """What is the same for all layers in one call.

    position: [B, S] int, of the queries, counted within each document.
    own_mask: [B, 1, S, S] bool, which of the layer's own new keys a query may read; None for plain causal.
    past_mask: [B, 1, S, T] bool, which of the past keys it may read; None without a past.
    dropout_key: raw key data, or None for no dropout.
    tokens: [S], which tokens of the row these are, where a call has only some of them; dropout then draws for each
      token alone, so that it does not matter which tokens are run together. None for all of the row.
    """

    position: Array
    own_mask: Array | None = None
    past_mask: Array | None = None
    dropout_key: Array | None = None
    tokens: Array | None = None


def rotate(x: Array, position: Array, base: float) -> Array:
    """Rotary positions (arXiv:2104.09864), halves paired as (i, i + K/2). x: [B, S, heads, K]; position: [B, S]."""
    half = x.shape[-1] // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequency = base ** (-jnp.arange(half, dtype=wide) / half)
    angle = position[:, :, None, None].astype(wide) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half].astype(wide), x[..., half:].astype(wide)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(query: Array, reads: tuple[KeyValues, ...], masks: tuple[Array | None, ...], implementation: str) -> Array:
    """Softmax attention of ``query`` [B, S, H, K] over everything it may read, as one joint softmax.

    reads: sources, each [B, T_i, G, K]. masks: one per source, [B, 1, S, T_i] bool; a single source may have None,
    which is plain causal. Returns [B, S, H, K].
    """
    if any(mask is None for mask in masks) and len(reads) > 1:
        raise ValueError("attention over several sources needs a mask for each of them")
    if len(reads) == 1:
        ((key, value),), (mask,) = reads, masks
    else:
        key = jnp.concatenate([r.key for r in reads], axis=1)
        value = jnp.concatenate([r.value for r in reads], axis=1)
        mask = jnp.concatenate(masks, axis=-1)
    if query.dtype == jnp.float64:
        return _attend_exactly(query, key, value, mask)
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=mask is None, implementation=_implementation(query, key, implementation)
    )


def _attend_exactly(query: Array, key: Array, value: Array, mask: Array | None) -> Array:
    """The same in the dtype of ``query`` throughout: the library's softmax is float32 whatever it is given."""
    size = query.shape[1]
    mask = jnp.tri(size, dtype=bool)[None, None] if mask is None else mask
    batch, _, heads, width = query.shape
    grouped = query.reshape(batch, size, key.shape[2], heads // key.shape[2], width)
    logits = jnp.einsum("bsgrk,btgk->bgrst", grouped, key) * width**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, :, None], logits, jnp.finfo(logits.dtype).min), axis=-1)
    return jnp.einsum("bgrst,btgk->bsgrk", weights, value).reshape(query.shape)


def _implementation(query: Array, key: Array, asked: str) -> str | None:
    """cuDNN's flash attention where it can run: on a GPU, 16-bit floats, head size a multiple of 8 up to 128, and even
    lengths (it refuses odd ones together with a mask)."""
    if asked != "auto":
        return asked
    size = query.shape[-1]
    fits = query.dtype in (jnp.bfloat16, jnp.float16) and size % 8 == 0 and size <= 128
    fits = fits and query.shape[1] % 2 == 0 and key.shape[1] % 2 == 0
    return "cudnn" if fits and jax.default_backend() == "gpu" else "xla"


def fan_in(std: float | None, axes: int = 1, scale: float = 1.0):
    """Normal initialiser with standard deviation ``scale / sqrt(fan-in)``; the fan-in is the product of the first
    ``axes`` axes. A given ``std`` takes the place of ``1 / sqrt(fan-in)``."""

    def init(key, shape):
        size = 1
        for n in shape[:axes]:
            size *= n
        return jax.random.normal(key, shape, jnp.float32) * ((size**-0.5 if std is None else std) * scale)

    return init


class RMSNorm(nn.Module):
    """RMSNorm with a gain over the last axis; with several ways, of a tuple of arrays with a gain for each."""

    eps: float
    ways: int = 1

    @nn.compact
    def __call__(self, x: Array | tuple[Array, ...]) -> Array | tuple[Array, ...]:
        width = (x if self.ways == 1 else x[0]).shape[-1]
        shape = (width,) if self.ways == 1 else (self.ways, width)
        gain = self.param("gain", lambda _: jnp.ones(shape, jnp.float32))
        if self.ways == 1:
            return rms_norm(x, gain, self.eps)
        return tuple(rms_norm(jnp.stack(x), gain[:, None, None], self.eps))  # together: a third as much to compile


class SubLayer(nn.Module):
    """What both branches share: the norms the connection asks for, and dropout on the output.

    norms: any of "input" and "output". residual_scale: of the start of the projection back into the residual. ways:
    number of inputs; the input norm has a gain for each, [ways, D] if there are several.
    """

    config: ModelConfig
    norms: tuple[str, ...] = ("input",)
    residual_scale: float = 1.0
    ways: int = 1

    def enter(self, x: Array | tuple[Array, ...]) -> Array | tuple[Array, ...]:
        if "input" not in self.norms:
            return x
        return RMSNorm(self.config.norm_eps, self.ways, name="norm")(x)

    def leave(self, y: Array, sublayer: Any, args: Args) -> Array:
        if "output" in self.norms:
            y = RMSNorm(self.config.norm_eps, name="output_norm")(y)
        rate = self.config.dropout
        if rate == 0.0 or args.dropout_key is None:
            return y
        key = jax.random.fold_in(jax.random.wrap_key_data(args.dropout_key), sublayer)
        if args.tokens is None:
            keep = jax.random.bernoulli(key, 1.0 - rate, y.shape)
        else:
            batch, _, width = y.shape
            draw = lambda token: jax.random.bernoulli(jax.random.fold_in(key, token), 1.0 - rate, (batch, width))  # noqa: E731
            keep = jax.vmap(draw, out_axes=1)(args.tokens)
        return jnp.where(keep, y / (1.0 - rate), 0)


class Attention(SubLayer):
    """Grouped-query attention with rotary positions.

    own_keys: False where all that is read is made elsewhere; the layer then has no projections for it.
    """

    own_keys: bool = True

    @nn.compact
    def __call__(
        self,
        x: Array | tuple[Array, ...] | Exchange,
        i: Any,
        args: Args,
        past: KeyValues | Callable[[Array, KeyValues], Array] | None = None,
    ) -> tuple[Array | Lent, KeyValues]:
        """Attention of block ``i``.

        x: [B, S, D], or the inputs of query, key and value apart, or with the keys and values of other layers. past:
        keys and values from before this call, [B, T, G, K]; or what takes the place of attention over the row: a
        function of the query [B, S, H, K] and the layer's own keys and values.

        Returns the output [B, S, D], with the layer's own keys and values if it was given others', and its new keys
        and values as they are used, [B, S, G, K].
        """
        c = self.config
        entered = self._enter(x)
        query = self._query(entered[0], args)
        new, own = self._keys(entered, x, args) if self.own_keys else (None, None)
        width = entered[0].shape[-1]
        if callable(past):
            y = past(query, new)
        elif past is None:
            y = attend(query, (new,), (args.own_mask,), c.attention)
        else:
            y = attend(query, (past, new), (args.past_mask, args.own_mask), c.attention)
        if c.heads_from == "projections":
            out_init = fan_in(c.weight_std, 2, self.residual_scale)
            w_out = self.param("out", out_init, (c.heads, c.head_size, width)).astype(query.dtype)
            y = jnp.einsum("bshk,hkd->bsd", y, w_out)
        else:
            y = y.reshape(*y.shape[:2], width)
        y = self.leave(y, 2 * i, args)
        return (Lent(y, own.key, own.value) if isinstance(x, Exchange) else y), new

    @nn.compact
    def keys(self, x: Array | tuple[Array, ...] | Exchange, args: Args) -> KeyValues:
        """The layer's new keys and values alone, [B, S, G, K]."""
        return self._keys(self._enter(x), x, args)[0]

    def _enter(self, x) -> tuple[Array, Array, Array]:
        """The normed inputs of query, key and value."""
        x = self.enter(x.x if isinstance(x, Exchange) else x)
        return (x, x, x) if self.ways == 1 else x

    def _query(self, x: Array, args: Args) -> Array:
        c = self.config
        if c.heads_from == "projections":
            shape = (x.shape[-1], c.heads, c.head_size)
            query = jnp.einsum("bsd,dhk->bshk", x, self.param("query", fan_in(c.weight_std), shape).astype(x.dtype))
        else:
            query = x.reshape(*x.shape[:2], c.heads, c.head_size)
        if c.qk_norm:
            query = RMSNorm(c.norm_eps, name="query_norm")(query)
        return rotate(query, args.position, c.rope_base)

    def _keys(self, entered: tuple[Array, Array, Array], x: Any, args: Args) -> tuple[KeyValues, KeyValues]:
        """The keys and values as they are used, and the layer's own, before positions and other layers'."""
        c, (_, x_key, x_value) = self.config, entered
        if c.heads_from == "projections":
            shape, dtype = (x_key.shape[-1], c.kv, c.head_size), x_key.dtype
            w_key = self.param("key", fan_in(c.weight_std), shape).astype(dtype)
            w_value = self.param("value", fan_in(c.weight_std), shape).astype(dtype)
            key = jnp.einsum("bsd,dgk->bsgk", x_key, w_key)
            value = jnp.einsum("bsd,dgk->bsgk", x_value, w_value)
        else:
            key, value = (a.reshape(*a.shape[:2], c.kv, c.head_size) for a in (x_key, x_value))
        own = KeyValues(key, value)
        if isinstance(x, Exchange):
            key, value = mixed(key, x.key), mixed(value, x.value)
        if c.qk_norm:
            key = RMSNorm(c.norm_eps, name="key_norm")(key)
        return KeyValues(rotate(key, args.position, c.rope_base), value), own


def mixed(own: Array, mix: Mix | None) -> Array:
    """Keys or values [B, S, G, K] of a layer together with those of others."""
    if mix is None:
        return own
    kept = mix.own * own if mix.own.ndim == 0 else jnp.einsum("gh,bshk->bsgk", mix.own, own)
    return (mix.gathered + kept).astype(own.dtype)


class MLP(SubLayer):
    """SwiGLU (arXiv:2002.05202) or GELU."""

    @nn.compact
    def __call__(self, x: Array, i: Any, args: Args) -> Array:
        """x: [B, S, D]; i: number of the block. Returns [B, S, D]."""
        c, width = self.config, x.shape[-1]
        init = fan_in(c.weight_std)
        w_up = self.param("up", init, (width, c.hidden)).astype(x.dtype)
        down_init = fan_in(c.weight_std, 1, self.residual_scale)
        w_down = self.param("down", down_init, (c.hidden, width)).astype(x.dtype)

        x = self.enter(x)
        if c.mlp == "swiglu":
            w_gate = self.param("gate", init, (width, c.hidden)).astype(x.dtype)
            hidden = jax.nn.silu(x @ w_gate) * (x @ w_up)
        else:
            hidden = jax.nn.gelu(x @ w_up)
        return self.leave(hidden @ w_down, 2 * i + 1, args)
