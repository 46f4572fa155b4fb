"""The decoder-only transformer: embedding, a residual stack of attention and MLP, final norm, logits.

Legend: B batch, S sequence, T past positions, D width, V vocabulary, G key/value heads, K head size.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from lmres.flow.config import FlowConfig
from lmres.model.cells import Flow, GridTokens
from lmres.model.config import ModelConfig, check_ways
from lmres.model.grid import Grid, extend_on_grid, run_on_grid
from lmres.model.layers import MLP, Args, Attention, KeyValues, RMSNorm
from lmres.residual import Connection
from lmres.residual.linen import ResidualStack
from lmres.residual.stack import no_constraint


@dataclasses.dataclass(frozen=True)
class AttentionBranch:
    """Attention as a branch of a residual stack; what it may read beyond its own new keys comes per copy."""

    module: Attention
    name: str = "attention"

    def init(self, key, x):
        args = Args(jnp.zeros(jax.tree.leaves(x)[0].shape[:2], jnp.int32))
        past = None if self.module.own_keys else lambda query, _: query
        return self.module.init(key, x, 0, args, past).get("params", {})  # none where heads are cut from the input

    def __call__(self, params_i, x, i, args, inputs_i):
        return self.module.apply({"params": params_i}, x, i, args, inputs_i or None)

    def keys(self, params_i, x, args):
        """The keys and values alone."""
        return self.module.apply({"params": params_i}, x, args, method="keys")


@dataclasses.dataclass(frozen=True)
class MLPBranch:
    """The MLP as a branch of a residual stack."""

    module: MLP
    name: str = "mlp"

    def init(self, key, x):
        return self.module.init(key, x, 0, Args(jnp.zeros(x.shape[:2], jnp.int32)))["params"]

    def __call__(self, params_i, x, i, args, inputs_i):
        return self.module.apply({"params": params_i}, x, i, args), ()


class Past(NamedTuple):
    """What was computed for earlier tokens (see ``lmres.generate.cache``).

    layers: keys and values of all blocks, [blocks, B, T, G, K].
    segment: [B, T] int, 0 where nothing is stored; position: [B, T] int.
    """

    layers: KeyValues
    segment: Array
    position: Array


class Transformer(nn.Module):
    """A decoder-only transformer whose residual connection is a choice.

    config: sizes; ``vocab_size`` must be set. connection: any member of ``lmres.residual``. constrain: pins shardings.
    flow: which cells of the token x layer grid attention reads.
    """

    config: ModelConfig
    connection: Connection
    constrain: Any = no_constraint
    flow: FlowConfig = FlowConfig()

    def __post_init__(self):
        if self.config.heads >= 1:  # otherwise ``setup`` says so
            fitted = self.connection.fit(self.config.kv, self.config.head_size)
            object.__setattr__(self, "connection", fitted)
        super().__post_init__()

    def setup(self):
        c = self.config
        if c.vocab_size is None:
            raise ValueError("model.vocab_size must be set before the model is built (the tokenizer gives it)")
        c.check()
        norms, scale = self.connection.branch_norms, (2 * c.blocks) ** -0.5
        ways = self.connection.ways
        check_ways(self.connection.unit, ways, c.heads_from)
        self.flow.check(c.blocks, c.context, c.kv, c.heads_from)
        own_keys = self.flow.store(c.blocks).has_own
        attention = Attention(c, norms, scale, min(ways[0], 3), own_keys=own_keys, parent=None)
        self.embed = Embedding(c)
        self.stack = ResidualStack(
            connection=self.connection,
            branches=(
                AttentionBranch(attention),
                MLPBranch(MLP(c, norms, scale, parent=None)),
            ),
            repeats=c.blocks,
            scan=c.scan,
            remat=c.remat,
            constrain=self.constrain,
        )
        if not self.flow.is_standard:
            self.cells = Flow(self.flow, c, attention)
        if self.connection.final_norm:
            self.final_norm = RMSNorm(c.norm_eps)
        if not c.tie_embeddings:
            self.head = Head(c)

    def __call__(
        self,
        tokens: Array,
        segments: Array | None = None,
        positions: Array | None = None,
        past: Past | None = None,
        dropout_key: Array | None = None,
    ) -> Array | tuple[Array, KeyValues]:
        """Logits of the next token.

        Args:
          tokens: [B, S] int.
          segments: [B, S] int, the document each token belongs to within its row; 0 is padding. None: one document.
          positions: [B, S] int, counted within each document; None for 0 .. S - 1.
          past: what was computed for earlier tokens.
          dropout_key: raw key data ``[2]`` uint32 in training with dropout.

        Returns: logits [B, S, V] float32; with ``past`` also the new keys and values, [blocks, B, S, G, K].
        """
        if not self.flow.is_standard:
            if past is not None:
                raise ValueError(f"flow.kind={self.flow.kind} goes on from a grid; see extend_grid")
            return self._logits(self._on_grid(tokens, segments, positions, dropout_key)[0])
        e, args = self._start(tokens, segments, positions, past, dropout_key)
        h, (new, _) = self.stack(e, args, None if past is None else (past.layers, ()))
        logits = self._logits(h)
        return logits if past is None else (logits, new)

    def record(self, tokens: Array, segments: Array | None = None, positions: Array | None = None):
        """Logits, the embedding [B, S, D], and the record of every sub-layer's input, output and mixing weights.

        Raises ValueError for a flow: what is recorded is ordinary attention.
        """
        if not self.flow.is_standard:
            raise ValueError(f"only ordinary attention can be recorded, not flow.kind={self.flow.kind}")
        e, args = self._start(tokens, segments, positions, None, None)
        h, record = self.stack.record(e, args)
        return self._logits(h), e, record

    def prefill_grid(self, tokens: Array, segments: Array, positions: Array) -> tuple[Array, KeyValues]:
        """Logits [B, S, V], and the grid of keys and values [P, B, S, G, K] to go on from.

        Arguments as in ``__call__``. Exact, wherever in its place a row begins, with padding before it and none within;
        chunks are counted in positions.
        """
        flow = self.flow.unaligned(self.config.blocks, tokens.shape[1])
        h, grid = self._on_grid(tokens, segments, positions, flow=flow, places=positions)
        return self._logits(h), grid

    def extend_grid(self, tokens: Array, past: Past, slot: Array) -> tuple[Array, KeyValues]:
        """Logits [B, S, V] of S more tokens, and the grid of ``past`` with them in it.

        tokens: [B, S] int. past: its segments and positions are those of the new tokens too. slot: of the first.
        """
        e = self._embedded(tokens)
        h, grid = extend_on_grid(
            self._grid(e, self.flow), e, past.layers, GridTokens(past.position, past.position, past.segment), slot
        )
        return self._logits(h), grid

    def _on_grid(self, tokens, segments, positions, dropout_key=None, flow=None, places=None):
        """The columns' outputs [B, S, D] and the grid where attention reads other cells than its own row's."""
        e, _ = self._start(tokens, None, positions, None, dropout_key)
        places = jnp.arange(tokens.shape[1])[None] if places is None else jnp.asarray(places)
        segments = None if segments is None else jnp.asarray(segments)
        # Masks are made once for all rows where these are alike.
        position = jnp.arange(tokens.shape[1])[None] if positions is None else jnp.asarray(positions)
        where = GridTokens(position, places, segments, dropout_key)
        return run_on_grid(self._grid(e, flow or self.flow), e, where)

    def _grid(self, e, flow):
        return Grid(*self.stack.parts(e), flow, self.config, self.cells(e))

    def _start(self, tokens, segments, positions, past, dropout_key):
        c = self.config
        if tokens.shape[1] > c.context:
            raise ValueError(f"{tokens.shape[1]} tokens are more than model.context={c.context}")
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        own_mask = past_mask = None
        if segments is None and past is not None:
            segments = jnp.ones_like(tokens)
        if segments is not None:
            own_mask = readable(segments, positions, segments, positions)
        if past is not None:
            past_mask = readable(segments, positions, past.segment, past.position)
        e = self._embedded(tokens)
        return e, Args(positions, own_mask, past_mask, dropout_key)

    def _embedded(self, tokens):
        """[B, S, D]."""
        return self.constrain(self.embed(tokens, self.constrain), P("batch", "sequence", None))

    def _logits(self, h):
        c = self.config
        h = self.final_norm(h) if self.connection.final_norm else h
        logits = self.embed.attend(h) if c.tie_embeddings else self.head(h)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        if c.logit_softcap is not None:
            logits = c.logit_softcap * jnp.tanh(logits / c.logit_softcap)
        return self.constrain(logits, P("batch", "sequence", "vocab"))


def readable(segment: Array, position: Array, other_segment: Array, other_position: Array) -> Array:
    """[B, 1, S, T] bool: same document, not later, not padding."""
    same = (segment[:, :, None] == other_segment[:, None, :]) & (other_segment != 0)[:, None, :]
    return (same & (other_position[:, None, :] <= position[:, :, None]))[:, None]


class Embedding(nn.Module):
    """The token table [V, D], which also gives the logits when tied."""

    config: ModelConfig

    def setup(self):
        c = self.config

        def init(key):
            return nn.initializers.normal(c.embedding_std)(key, (c.vocab_size, c.width), jnp.float32)

        self.table = self.param("table", init)

    def __call__(self, tokens: Array, constrain: Any = no_constraint) -> Array:
        # Rows are looked up in a table of their whole width. Left free, XLA turns the axes of the table round instead
        # where data and fsdp are both split, and sends it through the whole mesh: between slices, too.
        return constrain(self.table.astype(self.config.dtype), P("vocab", "embed"))[tokens]

    def attend(self, h: Array) -> Array:
        return jnp.einsum("bsd,vd->bsv", h, self.table.astype(h.dtype), preferred_element_type=_wide(h))


class Head(nn.Module):
    """A free output projection [D, V]."""

    config: ModelConfig

    @nn.compact
    def __call__(self, h: Array) -> Array:
        c = self.config
        init = nn.initializers.normal(c.width**-0.5)
        kernel = self.param("kernel", lambda key: init(key, (c.width, c.vocab_size), jnp.float32))
        return jnp.einsum("bsd,dv->bsv", h, kernel.astype(h.dtype), preferred_element_type=_wide(h))


def _wide(h: Array):
    return jnp.promote_types(h.dtype, jnp.float32)
