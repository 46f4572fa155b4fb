"""What connections on n streams share: how they open, sum up and start.

Legend: n streams or slots, m slots that make up D numbers (1 for whole streams), B batch, S sequence, D width.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from lmres.ops import combine_streams
from lmres.residual.interface import Axes, Connection, Params

STREAM_AXES = Axes("batch", "sequence", "streams", "embed")


class Streams(Connection):
    """A connection whose state is n streams [B, S, n, D], at first n copies of the embedding; n is a field
    ``streams``."""

    def open(self, params, e, depth):
        return open_slots(e, self.streams)

    def state_axes(self):
        return STREAM_AXES


def open_slots(e: Array, n: int, m: int = 1) -> Array:
    """n slots [..., n, D/m]: slot j is a copy of part j mod m of ``e`` [..., D]."""
    if m == 1:
        return jnp.broadcast_to(e[..., None, :], (*e.shape[:-1], n, e.shape[-1]))
    return jnp.concatenate([split(e, m)] * -(-n // m), axis=-2)[..., :n, :]


def split(x: Array, m: int) -> Array:
    """The m parts of ``x`` [..., D] as [..., m, D/m]."""
    return x.reshape(*x.shape[:-1], m, -1)


def read_slots(weights: Array, slots: Array) -> Array:
    """m mixes of n slots, end to end: weights [..., n, m], or [n, m]; slots [..., n, D/m]. Returns [..., D]."""
    mixes = [combine_streams(weights[..., i], slots) for i in range(weights.shape[-1])]
    return jnp.concatenate(mixes, axis=-1) if len(mixes) > 1 else mixes[0]


def sum_slots(slots: Array, m: int = 1) -> Array:
    """[..., D]: part i is the sum of the slots j with j mod m = i. Where n is no multiple of m, the parts with fewer
    slots are scaled up as if all had n / m."""
    n = slots.shape[-2]
    if n == m:
        return slots.reshape(*slots.shape[:-2], -1)
    same = part_of(n, m)
    return read_slots(jnp.asarray(same * (n / m / same.sum(axis=0)), jnp.float32), slots)


def read_flops(n: int, m: int, size: int) -> float:
    """FLOPs of ``read_slots``: m mixes of n slots of this size."""
    return m * (2.0 * n - 1.0) * size


def logits_flops(slots: int, size: int, rows: int, centre: bool = False) -> float:
    """FLOPs of ``rows`` logits for each of the slots, from a norm (``centre``: LayerNorm) and a projection."""
    return slots * (size * (2.0 * rows + (4.0 if centre else 3.0)) + 5.0 * rows)


def part_of(n: int, m: int) -> np.ndarray:
    """[n, m], 1 where slot j holds part i = j mod m."""
    return np.eye(m, dtype=np.float32)[np.arange(n) % m]


def one_hot(depth: int, n: int) -> Array:
    """[depth, n], 1 at stream l mod n: each sub-layer favours a stream of its own."""
    return jnp.eye(n)[jnp.arange(depth) % n]


def as_float32(params: Params) -> Params:
    """A flat dict of parameters in float32."""
    return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}


def check_counts(**values: int) -> None:
    """Raises ValueError naming a spec's counts if one of them is below one."""
    if min(values.values()) < 1:
        named = " and ".join(f"residual.{key}={value}" for key, value in values.items())
        raise ValueError(f"{named} must be at least 1")


def check_streams(state: Array, n: int) -> None:
    """Raises ValueError unless the state is n streams [..., n, D]."""
    if state.ndim < 2 or state.shape[-2] != n:
        raise ValueError(
            f"the state must be {n} streams, [batch, sequence, {n}, width]; got shape {state.shape}. "
            "Make it with open(params, embedding, depth)"
        )
