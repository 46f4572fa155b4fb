"""What connections share that carry keys and values up the column beside the plain stream.

The stream itself is the plain pre-norm residual. What is added is that an attention layer uses keys or values of the
layers below (of the same tokens, before positions are applied), so what the cache holds is mixed already and a
decoding step needs nothing more. The unit is the block. The number of key/value heads and their size must be the
model's; left open, the model sets them (``fit``).
"""

import abc
import dataclasses
from typing import ClassVar, Literal

from lmres.residual.interface import Axes

HEADS = Axes("batch", "sequence", "kv_heads", None)  # of keys or values [B, S, G, K]


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
