"""Softmax attention over depth: the part that Attention Residuals and their relatives share.

A source is the embedding or the sum of the branch outputs of one depth block (``block = 1``: of one sub-layer). A
reader's logit for a source is ``w . RMSNorm(v)``. A query is a parameter, so the logits of *all* readers for a new
entry are one matrix product when the entry is complete (the first phase of arXiv:2603.15031, Algorithm 1); they
are stored beside it, and a read is a softmax over stored numbers and one pass over the values.

With H heads (arXiv:2607.27230) queries and values are split into H heads of D / H channels, each with a softmax of its
own; the key norm stays over all D, and there are no more parameters.

Legend: R readers, M slots, H heads, B batch, S sequence, D width.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from lmres.ops import Span, depth_softmax, normed_projection, rms_scale, stat_dtype
from lmres.residual.interface import Axes, check_not_negative
from lmres.residual.weighted import WeightedReads


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthAttention(WeightedReads):
    """Softmax attention over depth.

    block: sub-layers per depth block; 1 is the full form. The last block may be short.
    heads: H.
    temperature: divides the logits.
    key_gain: give each reader's key norm a gain. It is redundant with the query (only w * gain enters) and off by
      default; its gradient is 0 while the query is 0.
    eps: of the key norm.
    """

    block: int = 1
    heads: int = 1
    temperature: float = 1.0
    key_gain: bool = False
    eps: float = 1e-10

    @property
    def form(self) -> str:
        """Part of the name."""
        return ("full" if self.block == 1 else f"block{self.block}") + (f"-h{self.heads}" if self.heads > 1 else "")

    @property
    def channelwise(self):
        return self.heads > 1

    def check(self, depth, width):
        if self.block < 1:
            raise ValueError(f"residual.block={self.block} must be at least 1 (1 is the full form)")
        if self.heads < 1 or width % self.heads:
            raise ValueError(f"residual.heads={self.heads} must divide model.width={width}")
        if not self.temperature > 0:
            raise ValueError(f"residual.temperature={self.temperature} must be above 0")
        check_not_negative(eps=self.eps)

    def slot_count(self, depth):
        return math.ceil(depth / self.block) + 1

    def query_params(self, readers: int, width: int) -> dict:
        """The readers' queries [R, D], zero at the start, and gains."""
        params = {"query": jnp.zeros((readers, width), jnp.float32)}
        return params | ({"gain": jnp.ones((readers, width), jnp.float32)} if self.key_gain else {})

    def queries(self, params_l):
        """[R, D], the key norm's gain folded in."""
        return params_l["query"] * params_l["gain"] if self.key_gain else params_l["query"]

    def project(self, queries, value):
        """Logits [R, B, S], or [R, H, B, S], of ``queries`` [R, D] for ``value`` [B, S, D]."""
        if self.heads == 1:
            return jnp.moveaxis(normed_projection(value, queries, eps=self.eps), -1, 0)
        # The norm is over the whole width, the products are per head.
        split = lambda x: x.reshape(*x.shape[:-1], self.heads, -1).astype(stat_dtype(value))  # noqa: E731
        products = jnp.einsum("bshd,rhd->rhbs", split(value), split(queries), precision=jax.lax.Precision.HIGHEST)
        return products * rms_scale(value, self.eps)[..., 0]

    def keys(self, params_l, value):
        """Logits of every reader for this entry."""
        return {"logits": self.project(self.queries(params_l), value)}

    @property
    def rewrites(self):
        return self.block > 1  # the running sum of a block

    def completes(self, l):
        return (l + 1) % self.block == 0

    def running(self, before, y, l):
        """(slot, the running sum of the depth block with ``y``): what unit l's output changes."""
        if self.block == 1:
            return l + 1, y
        return l // self.block + 1, jnp.where(l % self.block == 0, 0, before) + y

    def span(self, l):
        """The complete depth blocks."""
        return Span(0, 1, l // self.block + 1)

    def softmax(self, logits, valid):
        """Over the leading axis; heads, if any, go to the end: [M, B, S] or [M, B, S, H]."""
        logits = logits if self.temperature == 1.0 else logits / self.temperature
        weights = depth_softmax(logits, valid.reshape(-1, *[1] * (logits.ndim - 1)))
        return jnp.moveaxis(weights, 1, -1) if self.heads > 1 else weights

    def slot_axes(self) -> dict:
        """Logical axes of the slots."""
        return {
            "value": Axes("slots", "batch", "sequence", "embed"),
            "logits": Axes("slots", *[None] * (1 + (self.heads > 1)), "batch", "sequence"),
        }

    def read_slots(self, depth: int) -> list[int]:
        """How many complete slots each sub-layer reads."""
        return [l // self.block + 1 for l in range(depth)]

    def attention_flops(self, readers: int, depth: int, width: int) -> float:
        """FLOPs per token of ``readers`` queries: the complete slots' logits, and the softmaxes."""
        complete, slots = depth // self.block + 1, self.slot_count(depth)
        per_entry = (2.0 * readers + 2.0) * width + readers * self.heads
        return complete * per_entry + 5.0 * readers * slots * self.heads
