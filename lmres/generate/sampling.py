"""From logits to tokens.

The order is: temperature, then top-k, then top-p on what top-k left (its probabilities renormalised), then
one draw. All in float32. Ties are broken towards the lower id, so top-k keeps k tokens, not more.

Every row has a key of its own, made from the seed and the row's prompt alone; what else is in the batch, and
the row's place in it, do not enter.
"""

import dataclasses
import math
import zlib
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is chosen; hashable.

    temperature: divides the logits; 0 takes the most probable token (and the other two then change nothing).
    top_k: draw among the k most probable tokens only; None for all.
    top_p: draw among the fewest most probable tokens whose probabilities sum to p or more; None for all.

    Raises ValueError naming the option.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or a positive number")
        if self.top_k is not None and (self.top_k < 1 or self.top_k != int(self.top_k)):
            raise ValueError(
                f"top_k={self.top_k} must be a whole number, at least 1; leave it out for all tokens"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1; leave it out for all tokens")

    def __call__(self, logits: Array, keys: Array) -> Array:
        """One token per row: logits [B, V], keys [B] -> [B] int32."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits.astype(jnp.float32)
        # A tiny temperature must give 0 for the largest and -inf for the others, never inf - inf or 0 / 0.
        temperature = max(self.temperature, float(jnp.finfo(jnp.float32).tiny))
        logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
        logits = filter_logits(logits, self.top_k, self.top_p)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def filter_logits(logits: Array, top_k: int | None = None, top_p: float | None = None) -> Array:
    """``logits`` [..., V] with -inf in place of the tokens that top-k, and then top-p, rule out. At least one
    is left."""
    size = logits.shape[-1]
    if (top_k is None or top_k >= size) and (top_p is None or top_p >= 1):
        return logits
    order = jnp.argsort(-logits, axis=-1, stable=True)
    falling = jnp.take_along_axis(logits, order, axis=-1)
    keep = jnp.broadcast_to(jnp.arange(size) < (size if top_k is None else top_k), logits.shape)
    if top_p is not None and top_p < 1:
        probability = jax.nn.softmax(falling, axis=-1, where=keep)
        before = jnp.cumsum(probability, axis=-1) - probability
        keep &= (before < top_p).at[..., 0].set(True)
    keep = jnp.take_along_axis(keep, jnp.argsort(order, axis=-1), axis=-1)
    return jnp.where(keep, logits, -jnp.inf)


def row_keys(seed: int, prompts: Sequence[Sequence[int]]) -> Array:
    """One key per prompt, [B]: from the seed, the prompt's tokens and, for equal prompts, which of them it
    is.

    Raises ValueError for a seed outside [0, 2^32).
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must be at least 0 and below {2**32}")
    seen: Counter[tuple[int, ...]] = Counter()
    numbers = []
    for prompt in map(tuple, prompts):
        numbers.append((zlib.crc32(np.asarray(prompt, "<i8").tobytes()), seen[prompt]))
        seen[prompt] += 1
    # Threefry whatever the default: the hardware generators draw differently under vmap, hence by batch.
    root = jax.random.key(seed, impl="threefry2x32")
    return jax.vmap(lambda n: jax.random.fold_in(jax.random.fold_in(root, n[0]), n[1]))(
        np.array(numbers, np.uint32)
    )
