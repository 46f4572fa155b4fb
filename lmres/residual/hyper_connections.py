"""Hyper-Connections, static and dynamic (arXiv:2409.19606, section 2 and appendix), over slots of any size.

    u = A_m^T H                 what the branch reads: mixes of n slots
    H <- A_r^T H + B^T g(u)     the slots are mixed, the output is added to each with its own weight
    h = sum of the slots        readout

In general the n slots hold D/m numbers each: A_m gives m of them, which end to end are the branch's input, and g(u) is
cut into m parts. Hyper-Connections have m = 1, Frac-Connections n = m (see ``fractions``). A_r is used transposed: slot
t receives sum_s A_r[s, t] H_s. ``alpha`` is [A_m | A_r], source first; ``beta`` is B, one weight per slot, or one per
slot and part of the output.
Dynamic: alpha = static_alpha + s_alpha tanh(N(H) W_alpha), beta = static_beta + s_beta tanh(N(H) w_beta), where N
normalises each slot on its own.

Legend: n slots, B batch, S sequence, D width, l sub-layer. State: [B, S, n, D/m].
Start: B = 1, A_m = e_{l mod n}, A_r = I, W = 0, s = 0.01: exactly pre-norm for any n.
Cost per sub-layer and token, m = 1: n (n + 2) parameters, dynamic + D (n + 2) + 2 (+ D with "rms"); FLOPs
(2 n - 1) D to read and n (2 n + 1) D to write, dynamic + 2 n (n + 4) D ("rms" 3 n D for the norm, not 4 n D);
(3 n + 2) D moved when fused.
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp

from lmres.ops import mix_streams, normed_projection
from lmres.residual.interface import Connection, Cost, check_not_negative
from lmres.residual.streams import (
    STREAM_AXES,
    as_float32,
    check_counts,
    check_streams,
    logits_flops,
    one_hot,
    open_slots,
    part_of,
    read_flops,
    read_slots,
    split,
    sum_slots,
)


class Slots(Connection):
    """n slots of D/m numbers with learned read, mix and write weights. A member has, as a field or fixed:

    slots (n), fractions (m); dynamic: whether weights depend on the slots; tanh: whether the dynamic part is bounded;
    norm, eps: of the slots before the dynamic projection; full_write: whether a slot takes from all m parts of the
    output (beta [n, m]) or from its own only (beta [n]); first_scale: of the dynamic part.
    """

    fractions: ClassVar[int] = 1
    dynamic: ClassVar[bool] = True
    tanh: ClassVar[bool] = True
    norm: ClassVar[Literal["layer", "rms"]] = "layer"
    full_write: ClassVar[bool] = False
    first_scale: ClassVar[float] = 0.01

    # The papers exempt the static weights from decay and not the projections; the scales are unspecified there.
    no_decay: ClassVar[tuple[str, ...]] = (
        "static_alpha",
        "static_beta",
        "dynamic_alpha_scale",
        "dynamic_beta_scale",
    )

    @property
    def slots(self) -> int:
        """n."""
        return self.streams

    @property
    def has_matrix(self):
        return self.fractions == 1  # else parts of the width are mixed

    def first_reads(self, depth: int):
        """A_m at the start, [depth, n, m]: the first m slots."""
        return jnp.broadcast_to(jnp.eye(self.slots, self.fractions), (depth, self.slots, self.fractions))

    def temperature(self, width: int) -> float:
        """What the dynamic logits are divided by."""
        return 1.0

    def init(self, key, depth, width):
        n, m = self.slots, self.fractions
        beta = jnp.asarray(part_of(n, m)) if self.full_write else jnp.ones(n)
        mixes = jnp.broadcast_to(jnp.eye(n), (depth, n, n))
        layers = {
            "static_alpha": jnp.concatenate([self.first_reads(depth), mixes], axis=-1),
            "static_beta": jnp.broadcast_to(beta, (depth, *beta.shape)),
        }
        if self.dynamic:
            layers |= {
                "dynamic_alpha_fn": jnp.zeros((depth, m + n, width // m)),
                "dynamic_beta_fn": jnp.zeros((depth, *beta.shape[1:], width // m)),
                "dynamic_alpha_scale": jnp.full((depth,), self.first_scale),
                "dynamic_beta_scale": jnp.full((depth,), self.first_scale),
            }
            if self.norm == "rms":
                layers["gamma"] = jnp.zeros((depth, width // m))
        return {"layers": as_float32(layers), "shared": {}}

    def open(self, params, e, depth):
        return open_slots(e, self.slots, self.fractions)

    def _weights(self, params_l, state):
        """(alpha [B, S, n, m + n], beta [B, S, n] or [B, S, n, m]), or without the leading axes when static."""
        alpha, beta = params_l["static_alpha"], params_l["static_beta"]
        if not self.dynamic:
            return alpha, beta
        size = state.shape[-1]
        rows = jnp.concatenate([params_l["dynamic_alpha_fn"], params_l["dynamic_beta_fn"].reshape(-1, size)])
        if self.norm == "layer":
            moving = normed_projection(state, rows, centre=True, eps=self.eps)
        else:
            moving = normed_projection(state, rows * (1.0 + params_l["gamma"]), floor=1e-24 / size)
        if self.tanh:
            moving = jnp.tanh(moving / self.temperature(self.fractions * size))
        alphas = alpha.shape[-1]
        moving_beta = moving[..., alphas:].reshape(*state.shape[:-1], *beta.shape[1:])
        return (
            alpha + params_l["dynamic_alpha_scale"] * moving[..., :alphas],
            beta + params_l["dynamic_beta_scale"] * moving_beta,
        )

    def read(self, params_l, state, l, context=None):
        check_streams(state, self.slots)
        if context is None:
            context = self._weights(params_l, state)
        return read_slots(context[0][..., : self.fractions], state), context

    def write(self, params_l, state, context, y, l):
        alpha, beta = context
        mixing, m = alpha[..., self.fractions :], self.fractions
        if m == 1 and not self.full_write:
            return mix_streams(mixing, state, beta, y)
        # Part i goes to slot j with weight to_slots[i, j]. All parts but the last are sources beside the slots.
        parts = split(y, m).astype(state.dtype)
        to_slots = jnp.swapaxes(beta if self.full_write else beta[..., None] * part_of(self.slots, m), -1, -2)
        sources = jnp.concatenate([state, parts[..., :-1, :]], axis=-2)
        mixing = jnp.concatenate([mixing, to_slots[..., :-1, :]], axis=-2)
        return mix_streams(mixing, sources, to_slots[..., -1, :], parts[..., -1, :])

    def close(self, params, state, context=None):
        return sum_slots(state, self.fractions), ()

    def cost(self, depth, width):
        n, m = self.slots, self.fractions
        betas, size = m if self.full_write else 1, width // m
        params = n * (m + n + betas)
        flops = read_flops(n, m, size) + n * (2.0 * (n + m) - 1.0) * size
        if self.dynamic:
            params += size * (m + n + betas) + 2 + (size if self.norm == "rms" else 0)
            flops += logits_flops(n, size, m + n + betas, self.norm == "layer")
        readout = read_flops(n, m, size) if n > m else 0.0
        return Cost(depth * params, depth * flops + readout, depth * (3.0 * n / m + 2), n / m)

    def state_axes(self):
        return STREAM_AXES


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperConnections(Slots):
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
    left_out: ClassVar[str] = "the factor sqrt(n) on the start of the branches' last matrices: up or down is unclear"
    no_decay: ClassVar[tuple[str, ...]] = (*Slots.no_decay, "gamma")

    @property
    def name(self):
        return f"hc-{'dynamic' if self.dynamic else 'static'}-{self.streams}"

    def check(self, depth, width):
        check_counts(streams=self.streams)
        check_not_negative(eps=self.eps)

    def first_reads(self, depth):
        return one_hot(depth, self.streams)[:, :, None]
