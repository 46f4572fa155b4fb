"""Gated Residual (Qwen technical report, arXiv:2608.30320).

    N_j = X_j / rms(X_j) (1 + gamma_j)                      each stream on its own
    mix = sigmoid( silu( vec(N)/n W_down ) W_up )           n D gates, through a bottleneck of r
    x = mean_j( mix_j * N_j )                               goes to g directly: no other norm
    inject = 2 sigmoid( vec(N)/n W_inject )                 n numbers
    X_j <- X_j + inject_j g(x)                              streams are never mixed
    h = mean_j( mix_j * N_j ) with a mixer of its own       in place of the final norm

Legend: n streams, r rank, B batch, S sequence, D width, l sub-layer. State: [B, S, n, D], n copies of the embedding.
Start: W normal with standard deviation ``std`` (the report: the model's), gamma = 0. Not plain: with W = 0 the gates
are 1/2 and inject is 1, that is pre-norm with half the input. ``as_plain`` doubles the gains, which makes it exactly
pre-norm, and takes over the plain model's.
Cost per sub-layer and token: n D (2 r + n + 1) parameters; 4 r n D + 2 n^2 D FLOPs for the products, and 14 n D beside
them; (3 n + 2) D moved when fused. The readout costs one more mixer.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from lmres.ops import add_to_streams, rms_scale, stat_dtype
from lmres.residual.interface import Axes, Cost, check_not_negative
from lmres.residual.streams import Streams, as_float32, check_counts, check_streams, one_hot

RANK = 320


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedResidual(Streams):
    """Streams that are read through gates on every channel, and written with one gate per stream.

    streams: n.
    rank: r; None for 320 as in the report, but at most an eighth of the width.
    std: standard deviation of the matrices at the start.
    eps: of the streams' norms.
    """

    kind: Literal["gr"] = "gr"
    streams: int = 4
    rank: int | None = None
    std: float = 0.02
    eps: float = 1e-10

    equation: ClassVar[str] = "x = mean_j mix_j * Norm X_j,  X_j <- X_j + inject_j g(x)"
    source: ClassVar[str] = "arXiv:2608.30320"
    no_decay: ClassVar[tuple[str, ...]] = ("gamma", "head_gamma")
    start_tolerance: ClassVar[float | None] = None  # inputs of half the size, and random gates
    final_norm: ClassVar[bool] = False

    @property
    def name(self):
        return f"gr-{self.streams}" + ("" if self.rank is None else f"-rank{self.rank}")

    @property
    def branch_norms(self):
        return ()

    @property
    def channelwise(self):
        return True

    def check(self, depth, width):
        check_counts(streams=self.streams)
        if self.rank is not None:
            check_counts(rank=self.rank)
        check_not_negative(std=self.std, eps=self.eps)

    def rank_at(self, width: int) -> int:
        """r for this width."""
        return self.rank if self.rank is not None else min(RANK, max(1, width // 8))

    def init(self, key, depth, width):
        n, r = self.streams, self.rank_at(width)
        shapes = {
            "down": (depth, n * width, r),
            "up": (depth, r, n * width),
            "inject": (depth, n * width, n),
            "head_down": (n * width, r),
            "head_up": (r, n * width),
        }
        keys = jax.random.split(key, len(shapes))
        drawn = {k: self.std * jax.random.normal(one, shape) for one, (k, shape) in zip(keys, shapes.items())}
        shared = {name: drawn.pop(name) for name in ("head_down", "head_up")}
        layers = {"gamma": jnp.zeros((depth, n, width)), **drawn}
        return {"layers": as_float32(layers), "shared": as_float32({"head_gamma": jnp.zeros((n, width)), **shared})}

    def as_plain(self, params, gains, final_gain):
        """W_up = W_inject = 0 and doubled gains. The gains are uneven, stream l mod n has the most in sub-layer l, with
        a mean that leaves the function as it is: with even ones the streams would get the same gradient for ever."""
        n, layers, shared = self.streams, params["layers"], params["shared"]
        uneven = one_hot(gains.shape[0], n) + (1.0 - 1.0 / n)
        layers = layers | {
            "gamma": as_gamma(gains[:, None, :] * uneven[..., None]),
            "up": jnp.zeros_like(layers["up"]),
            "inject": jnp.zeros_like(layers["inject"]),
        }
        shared = shared | {
            "head_gamma": as_gamma(jnp.broadcast_to(final_gain, shared["head_gamma"].shape)),
            "head_up": jnp.zeros_like(shared["head_up"]),
        }
        return {"layers": layers, "shared": shared}

    def _mixer(self, streams, gamma, down, up):
        """Weights [B, S, n, D] of a read, and vec(N)/n [B, S, n D] in the dtype of the streams."""
        n, wide = self.streams, stat_dtype(streams)
        scale = rms_scale(streams, self.eps) * (1.0 + gamma.astype(wide))
        normed = (streams.astype(wide) * (scale / n)).astype(streams.dtype)
        flat = normed.reshape(*streams.shape[:-2], -1)
        hidden = jax.nn.silu(flat @ down.astype(flat.dtype))
        gates = jnp.matmul(hidden, up.astype(flat.dtype), preferred_element_type=wide)
        return jax.nn.sigmoid(gates).reshape(streams.shape) * (scale / n), flat

    def read(self, params_l, state, l, context=None):
        check_streams(state, self.streams)
        if context is None:
            weights, flat = self._mixer(state, params_l["gamma"], params_l["down"], params_l["up"])
            inject = params_l["inject"].astype(flat.dtype)
            gates = jnp.matmul(flat, inject, preferred_element_type=weights.dtype)
            context = weights, 2.0 * jax.nn.sigmoid(gates)
        return weighted(context[0], state), context

    def write(self, params_l, state, context, y, l):
        return add_to_streams(state, context[1], y)

    def close(self, params, state, context=None):
        if context is None:
            p = params["shared"]
            context, _ = self._mixer(state, p["head_gamma"], p["head_down"], p["head_up"])
        return weighted(context, state), context

    def cost(self, depth, width):
        n, r = self.streams, self.rank_at(width)
        size = n * width
        return Cost(
            params=depth * size * (2 * r + n + 1) + size * (2 * r + 1),
            flops=depth * size * (4.0 * r + 2.0 * n + 14.0) + size * (4.0 * r + 12.0),
            moved=depth * (3.0 * n + 2),
            state=float(n),
        )

    def param_axes(self):
        axes = {"down": Axes("embed", None), "up": Axes(None, "embed"), "inject": Axes("embed", None)}
        return {
            "layers": axes | {"gamma": Axes("streams", "embed")},
            "shared": {
                "head_down": axes["down"],
                "head_up": axes["up"],
                "head_gamma": Axes("streams", "embed"),
            },
        }


def as_gamma(gain):
    """The offset ``gamma`` with which gates of 1/2 give a plain norm with ``gain``."""
    return 2.0 * gain - 1.0


def weighted(weights, streams):
    """``sum_j weights_j * streams_j`` with a weight per channel, [..., n, D] both, in the dtype of the streams."""
    return jnp.sum(weights * streams.astype(weights.dtype), axis=-2).astype(streams.dtype)
