"""Hyper-Connections, static and dynamic (arXiv:2409.19606, section 2 and appendix).

    u = A_m^T H                 what the branch reads: a mix of n streams
    H <- A_r^T H + B^T g(u)     the streams are mixed, the output is added to each with its own weight
    h = sum of the streams      readout

A_r is used transposed: stream t receives sum_s A_r[s, t] H_s. ``alpha`` is [A_m | A_r], source first.
Dynamic: alpha = static_alpha + s_alpha tanh(N(H) W_alpha), beta = static_beta + s_beta tanh(N(H) w_beta), where N
normalises each stream on its own.

Legend: n streams, B batch, S sequence, D width, l sub-layer. State: [B, S, n, D].
Start: B = 1, A_m = e_{l mod n}, A_r = I, W = 0, s = 0.01: exactly pre-norm for any n.
Cost per sub-layer and token: n (n + 2) parameters, dynamic + D (n + 2) + 2 (+ D with "rms"); FLOPs 4 n D (n + 2),
static half of that; (3 n + 2) D moved when fused.
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp

from lmres.ops import combine_streams, mix_streams, normed_projection, stat_dtype
from lmres.residual.interface import Axes, Connection, Cost, check_not_negative


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperConnections(Connection):
    """n streams with learned read, mix and write weights.

    streams: n.
    dynamic: let the weights depend on the streams.
    tanh: bound the dynamic part.
    norm: of the streams before the dynamic projection: "layer" (paper: LayerNorm without affine part) or "rms"
      (the lucidrains package: no eps, with a gain stored as an offset from 1).
    eps: of the "layer" norm.
    """

    kind: Literal["hc"] = "hc"
    streams: int = 4
    dynamic: bool = True
    tanh: bool = True
    norm: Literal["layer", "rms"] = "layer"
    eps: float = 1e-5

    equation: ClassVar[str] = "u = A_m' H,  H <- A_r' H + B' g(u)"
    source: ClassVar[str] = "arXiv:2409.19606"
    # The paper exempts the static weights from decay and not the projections; the scales are unspecified there.
    no_decay: ClassVar[tuple[str, ...]] = (
        "static_alpha",
        "static_beta",
        "dynamic_alpha_scale",
        "dynamic_beta_scale",
        "gamma",
    )

    @property
    def name(self):
        return f"hc-{'dynamic' if self.dynamic else 'static'}-{self.streams}"

    def check(self, depth, width):
        if self.streams < 1:
            raise ValueError(f"residual.streams={self.streams} must be at least 1")
        check_not_negative(eps=self.eps)

    def init(self, key, depth, width):
        n = self.streams
        reads = jnp.eye(n)[jnp.arange(depth) % n]
        mixes = jnp.broadcast_to(jnp.eye(n), (depth, n, n))
        layers = {
            "static_alpha": jnp.concatenate([reads[:, :, None], mixes], axis=-1),
            "static_beta": jnp.ones((depth, n)),
        }
        if self.dynamic:
            layers |= {
                "dynamic_alpha_fn": jnp.zeros((depth, n + 1, width)),
                "dynamic_beta_fn": jnp.zeros((depth, width)),
                "dynamic_alpha_scale": jnp.full((depth,), 0.01),
                "dynamic_beta_scale": jnp.full((depth,), 0.01),
            }
            if self.norm == "rms":
                layers["gamma"] = jnp.zeros((depth, width))
        return {"layers": {k: v.astype(jnp.float32) for k, v in layers.items()}, "shared": {}}

    def open(self, params, e, depth):
        return jnp.broadcast_to(e[..., None, :], (*e.shape[:-1], self.streams, e.shape[-1]))

    def _weights(self, params_l, streams):
        """(alpha [B, S, n, n + 1], beta [B, S, n]), or without the leading axes when static."""
        alpha, beta = params_l["static_alpha"], params_l["static_beta"]
        if not self.dynamic:
            return alpha, beta
        rows = jnp.concatenate([params_l["dynamic_alpha_fn"], params_l["dynamic_beta_fn"][None]])
        if self.norm == "layer":
            moving = normed_projection(streams, rows, centre=True, eps=self.eps)
        else:
            rows = rows * (1.0 + params_l["gamma"])
            moving = normed_projection(streams, rows, floor=1e-24 / streams.shape[-1])
        if self.tanh:
            moving = jnp.tanh(moving)
        return (
            alpha + params_l["dynamic_alpha_scale"] * moving[..., :-1],
            beta + params_l["dynamic_beta_scale"] * moving[..., -1],
        )

    def read(self, params_l, state, l, context=None):
        check_streams(state, self.streams)
        if context is None:
            context = self._weights(params_l, state)
        return combine_streams(context[0][..., 0], state), context

    def write(self, params_l, state, context, y, l):
        alpha, beta = context
        return mix_streams(alpha[..., 1:], state, beta, y)

    def close(self, params, state, context=None):
        wide = state.astype(stat_dtype(state))
        return jnp.sum(wide, axis=-2).astype(state.dtype), ()

    def cost(self, depth, width):
        n = self.streams
        params = n * (n + 2)
        flops = 2.0 * n * width * (n + 2)
        if self.dynamic:
            params += width * (n + 2) + 2 + (width if self.norm == "rms" else 0)
            flops *= 2
        return Cost(depth * params, depth * flops, depth * (3.0 * n + 2), float(n))

    def state_axes(self):
        return Axes("batch", "sequence", "streams", "embed")


def check_streams(state, n: int) -> None:
    """Raises ValueError unless the state is n streams [..., n, D]."""
    if state.ndim < 2 or state.shape[-2] != n:
        raise ValueError(
            f"the state must be {n} streams, [batch, sequence, {n}, width]; got shape {state.shape}. "
            "Make it with open(params, embedding, depth)"
        )
