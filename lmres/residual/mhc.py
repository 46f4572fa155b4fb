"""mHC: manifold-constrained Hyper-Connections (arXiv:2512.24880, Eq. 7-9; DeepSeek's reference code), and relatives.

    v = vec(X) / sqrt(mean(vec(X)^2) + norm_eps)          one norm over all n D numbers
    m = alpha * (v phi) + bias                            split in pre (n), post (n), comb (k)
    H_pre = sigmoid(m_pre) + eps    H_post = 2 sigmoid(m_post)    comb = constraint(m_comb)
    u = sum_s H_pre[s] X_s          X[t] <- sum_s comb[s, t] X_s + H_post[t] g(u)

``constraint`` makes comb from the logits (see ``lmres.ops.constraints``): Sinkhorn (mHC, k = n^2), a convex combination
of all permutations (mHC-lite, arXiv:2601.05732) or of cyclic shifts (C-mHC), a Kronecker product (KromHC,
arXiv:2601.21579), or none at all, comb = I (iHC, arXiv:2607.28611; alpha then has two entries).
``comb[source, target]`` is the paper's H_res transposed; under Sinkhorn its sums over the *sources* are one (to eps),
its sums over the targets only to Sinkhorn's tolerance. ``eps = 0`` is the paper, 1e-6 the reference code: different
functions, comb moves by up to 2e-3 at logits of size 3. Readout: "head", a gated sum with weights of its own (DeepSeek
V4), or the plain "sum". ``reads = "previous"`` (DeepSeek V4.1, arXiv:2609.19969, section 2.4.1): H_pre made by
sub-layer l is used by sub-layer l + 1, that of the last one by the readout, and the first reads stream 0; so each
sub-layer passes over the streams once.

Legend: n streams, B batch, S sequence, D width, l sub-layer. State: [B, S, n, D]; "previous": ``Ahead``.
Start (the papers give alpha = 0.01 only): phi = 0; bias_pre = -1 but +1 at stream l mod n, as in mHC-lite and
KromHC; bias_post = 0; bias_comb = 0 for the identity and -8 for the rest. This equals pre-norm up to eps (any bias_pre
and bias_comb do while the streams are alike), and the one-hot bias_pre breaks the symmetry: with equal bias_pre all
streams would get the same gradient and never separate.
Cost per sub-layer and token: (2 n + k) (n D + 1) + 3 parameters; n (4 n + 2 k + 3) D FLOPs for the weights, (2 n - 1) D
to read, n (2 n + 1) D to write (iHC 2 n D) and those of the constraint (Sinkhorn 4 n^2 t, without eps 10 n^2 t);
(3 n + 2) D moved when fused, (2 n + 2) D with "previous".
"""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lmres.ops import add_to_streams, combine_streams, constraints, mix_streams, normed_projection
from lmres.residual.interface import Axes, Cost, check_not_negative
from lmres.residual.streams import (
    STREAM_AXES,
    Streams,
    as_float32,
    check_counts,
    check_streams,
    logits_flops,
    one_hot,
    open_slots,
    read_flops,
    sum_slots,
)

NAMES = {
    "sinkhorn": "mhc",
    "permutations": "mhc-lite",
    "kronecker": "kromhc",
    "circulant": "mhc-circulant",
    "identity": "mhc-identity",
}


class Ahead(NamedTuple):
    """The state when reads are made one sub-layer ahead: streams [B, S, n, D], and the next input [B, S, D]."""

    streams: Any
    input: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class MHC(Streams):
    """Streams whose mixing matrix is (nearly) doubly stochastic.

    streams: n.
    iters: Sinkhorn iterations.
    eps: added in the read weights and in Sinkhorn; 0 for the papers' equations.
    norm_eps: of the norm over all streams.
    norm_gain: give that norm a gain (redundant with phi).
    readout: "head" (gated, learned) or "sum"; with reads="previous" neither is used.
    constraint: how the mixing matrix is kept doubly stochastic.
    reads: whose read weights a sub-layer uses, its "own" or the "previous" one's.
    """

    kind: Literal["mhc"] = "mhc"
    streams: int = 4
    iters: int = 20
    eps: float = 1e-6
    norm_eps: float = 1e-10
    norm_gain: bool = False
    readout: Literal["head", "sum"] = "head"
    constraint: Literal["sinkhorn", "permutations", "kronecker", "circulant", "identity"] = "sinkhorn"
    reads: Literal["own", "previous"] = "own"

    equation: ClassVar[str] = "u = H_pre X,  X <- H_res X + H_post' g(u),  H_res doubly stochastic"
    source: ClassVar[str] = "arXiv:2512.24880; lite 2601.05732, Kronecker 2601.21579, single pass 2609.19969"
    left_out: ClassVar[str] = "other constraints (go-mHC, TBP-mHC, JPmHC, oHC, sHC), and xHC's sparse slots"

    @property
    def name(self):
        shifted = "" if self.reads == "own" else "-single-pass"
        return f"{NAMES[self.constraint]}{shifted}-{self.streams}" + ("" if self.readout == "head" else "-sum")

    def check(self, depth, width):
        check_counts(streams=self.streams, iters=self.iters)
        check_not_negative(eps=self.eps, norm_eps=self.norm_eps)
        if self.reads == "previous" and self.readout != "head":
            raise ValueError(
                f"residual.readout={self.readout} cannot be had with residual.reads=previous, where the last "
                "sub-layer's read weights are the readout; leave one of them out"
            )
        self.mixing  # noqa: B018 - says so if it cannot have this many streams

    @property
    def mixing(self) -> constraints.Constraint:
        """What makes the mixing matrix."""
        if self.constraint == "sinkhorn":
            return constraints.doubly_stochastic(self.streams, self.iters, eps=self.eps)
        return getattr(constraints, self.constraint)(self.streams)

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Columns of phi for pre, post and, if there are any, comb: one alpha each."""
        n, k = self.streams, self.mixing.count
        return (n, n, k) if k else (n, n)

    @property
    def _has_head(self) -> bool:
        return self.readout == "head" and self.reads == "own"

    def init(self, key, depth, width):
        n, columns = self.streams, sum(self._sizes)
        start = jnp.broadcast_to(self.mixing.start, (depth, self.mixing.count))
        layers = {
            "phi": jnp.zeros((depth, columns, n * width)),
            "alpha": jnp.full((depth, len(self._sizes)), 0.01),
            "bias": jnp.concatenate([2.0 * one_hot(depth, n) - 1.0, jnp.zeros((depth, n)), start], axis=-1),
        }
        if self.norm_gain:
            layers["gain"] = jnp.ones((depth, n * width))
        shared = {}
        if self._has_head:
            shared = {
                "head_phi": jnp.zeros((n, n * width)),
                "head_alpha": jnp.full((), 0.01),
                "head_bias": jnp.zeros((n,)),
            }
        return {"layers": as_float32(layers), "shared": as_float32(shared)}

    def open(self, params, e, depth):
        streams = open_slots(e, self.streams)
        return streams if self.reads == "own" else Ahead(streams, e)

    def _project(self, phi, streams):
        """``(vec(X) / rms) phi``, [B, S, columns]; the division after the product, as in the reference code."""
        flat = streams.reshape(*streams.shape[:-2], -1)
        return normed_projection(flat, phi, eps=self.norm_eps)

    def _weights(self, params_l, streams) -> tuple[Array, Array, Array]:
        """(pre [B, S, n], post [B, S, n], comb [B, S, n, n], or [n, n] if it is the identity)."""
        n, sizes = self.streams, self._sizes
        phi = params_l["phi"] * params_l["gain"] if self.norm_gain else params_l["phi"]
        alpha = jnp.repeat(params_l["alpha"], jnp.array(sizes), total_repeat_length=sum(sizes))
        logits = alpha * self._project(phi, streams) + params_l["bias"]
        pre = jax.nn.sigmoid(logits[..., :n]) + self.eps
        post = 2.0 * jax.nn.sigmoid(logits[..., n : 2 * n])
        return pre, post, self.mixing.matrix(logits[..., 2 * n :])

    def read(self, params_l, state, l, context=None):
        streams = state if self.reads == "own" else state.streams
        check_streams(streams, self.streams)
        if context is None:
            context = self._weights(params_l, streams)
        return combine_streams(context[0], streams) if self.reads == "own" else state.input, context

    def write(self, params_l, state, context, y, l):
        pre, post, comb = context
        streams = state if self.reads == "own" else state.streams
        if self.constraint == "identity":
            streams = add_to_streams(streams, post, y)
        else:
            streams = mix_streams(comb, streams, post, y)
        return streams if self.reads == "own" else Ahead(streams, combine_streams(pre, streams))

    def close(self, params, state, context=None):
        if self.reads == "previous":
            return state.input, ()
        if self.readout == "sum":
            return sum_slots(state), ()
        if context is None:
            p = params["shared"]
            logits = p["head_alpha"] * self._project(p["head_phi"], state) + p["head_bias"]
            context = jax.nn.sigmoid(logits) + self.eps
        return combine_streams(context, state), context

    def cost(self, depth, width):
        n, columns, own = self.streams, sum(self._sizes), self.reads == "own"
        per_layer = columns * (n * width + 1) + len(self._sizes) + (n * width if self.norm_gain else 0)
        head = (n * n * width + n + 1) if self._has_head else 0
        writes = 2.0 if self.constraint == "identity" else 2.0 * n + 1.0
        flops = logits_flops(1, n * width, columns) + read_flops(n, 1, width) + writes * n * width + self.mixing.flops
        readout = (read_flops(n, 1, width) if own else 0.0) + (logits_flops(1, n * width, n) if head else 0.0)
        moved = (3.0 if own else 2.0) * n + 2
        return Cost(depth * per_layer + head, depth * flops + readout, depth * moved, float(n if own else n + 1))

    def state_axes(self):
        return STREAM_AXES if self.reads == "own" else Ahead(STREAM_AXES, Axes("batch", "sequence", "embed"))
