"""The transformer's own config."""

import dataclasses
import math
from typing import ClassVar, Literal


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    vocab_size: number of token ids; None takes the tokenizer's.
    context: longest sequence, in tokens.
    width: size D of a residual stream.
    blocks: number of blocks (attention + MLP), so 2 x blocks sub-layers.
    heads: query heads; kv_heads: key/value heads (grouped-query attention), None for as many as heads.
    head_dim: None for width / heads. Even, for the rotary positions.
    mlp: "swiglu" or "gelu".
    mlp_hidden: hidden size; None for 4 x width ("gelu") or 8/3 x width rounded up to a multiple of 32 ("swiglu").
    heads_from: where attention's heads come from: "projections" of its input and back, or the "input" itself, cut into
      heads, with no matrices at all. The latter is the Residual Matrix Transformer (arXiv:2506.22696) and needs a
      connection that reads query, key and value apart (residual.kind=rmt), and as many key/value heads as heads.
    qk_norm: RMSNorm with a gain on queries and keys, per head.
    tie_embeddings: use the embedding table for the output too.
    logit_softcap: None, or c in c tanh(logits / c).
    rope_base: base of the rotary frequencies.
    norm_eps: of every RMSNorm in the model. Small on purpose: connections that average over depth shrink what the
      norms see (uniform weights over 24 sub-layers on embeddings of size 0.02 give a mean square near 1e-6, where
      the usual eps of 1e-6 would move the logits by 4e-2).
    embedding_std, weight_std: standard deviations at the start; weight_std None is 1 / sqrt(fan-in). Projections
      back into the residual are scaled by 1 / sqrt(2 x blocks) in addition.
    dropout: probability with which an entry of a branch's output is dropped in training.
    dtype: in which the branches compute. Parameters, norms' statistics, depth softmax, Sinkhorn and logits are float32.
    scan: one compiled block for all depths; False is a Python loop, for debugging.
    remat: what the backward pass recomputes: "none", "dots" (all but products with weights), "offload" (as "dots",
      and what is kept lies in the host's memory), "full".
    attention: implementation: "xla", "cudnn", or "auto" (cudnn where it can run).
    """

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}

    vocab_size: int | None = None
    context: int = 256
    width: int = 256
    blocks: int = 6
    heads: int = 4
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    mlp_hidden: int | None = None
    heads_from: Literal["projections", "input"] = "projections"
    qk_norm: bool = False
    tie_embeddings: bool = True
    logit_softcap: float | None = None
    rope_base: float = 10000.0
    norm_eps: float = 1e-10
    embedding_std: float = 0.02
    weight_std: float | None = None
    dropout: float = 0.0
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    scan: bool = True
    remat: Literal["none", "dots", "offload", "full"] = "none"
    attention: Literal["auto", "xla", "cudnn"] = "auto"

    @property
    def kv(self) -> int:
        """Number of key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        """Size of one head."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def hidden(self) -> int:
        """Hidden size of the MLP."""
        if self.mlp_hidden is not None:
            return self.mlp_hidden
        return 4 * self.width if self.mlp == "gelu" else math.ceil(8 * self.width / 3 / 32) * 32

    def check(self) -> None:
        """Raises ValueError naming the config keys when sizes do not fit together."""
        for key in ("context", "width", "blocks", "heads"):
            if getattr(self, key) < 1:
                raise ValueError(f"model.{key}={getattr(self, key)} must be at least 1")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"model.width={self.width} is not a multiple of model.heads={self.heads}; "
                "set model.head_dim or change one"
            )
        if self.kv < 1 or self.heads % self.kv:
            raise ValueError(f"model.heads={self.heads} must be a multiple of model.kv_heads={self.kv}")
        if self.heads_from == "input" and (self.kv != self.heads or self.heads * self.head_size != self.width):
            raise ValueError(
                f"model.heads_from=input cuts model.width={self.width} into heads: model.heads={self.heads} of "
                f"{self.head_size} must fill it, and model.kv_heads={self.kv_heads} must be left out"
            )
        if self.head_size % 2:
            raise ValueError(f"rotary positions need an even head size, got {self.head_size} (model.head_dim)")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout={self.dropout} must be in [0, 1)")


def check_ways(unit: str, ways: tuple[int, ...], heads_from: str = "projections") -> None:
    """Raises ValueError unless a transformer's branches can take a connection's inputs.

    Attention takes 1 or 3 (query, key, value), an MLP 1; a block as a unit 1 or 4 (those, and the skip around it).
    """
    fitting = {"sublayer": [(1,), (1, 1), (3, 1)], "block": [(1,), (4,)]}[unit]
    if tuple(ways) not in fitting:
        raise ValueError(
            f"residual.ways={list(ways)} does not fit a transformer; "
            f"give {' or '.join(str(list(known)) for known in fitting)}"
        )
    if heads_from == "input" and ways[0] == 1:
        raise ValueError(
            f"model.heads_from=input needs query, key and value apart, and residual.ways={list(ways)} gives attention "
            "one input: set residual.kind=rmt, or model.heads_from=projections"
        )
