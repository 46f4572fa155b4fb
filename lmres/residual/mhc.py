"""mHC: manifold-constrained Hyper-Connections (arXiv:2512.24880, Eq. 7-9; DeepSeek's reference code).

    v = vec(X) / sqrt(mean(vec(X)^2) + norm_eps)          one norm over all n D numbers
    m = alpha * (v phi) + bias                            split in pre (n), post (n), comb (n n, row-major)
    H_pre = sigmoid(m_pre) + eps    H_post = 2 sigmoid(m_post)    comb = Sinkhorn(m_comb)
    u = sum_s H_pre[s] X_s          X[t] <- sum_s comb[s, t] X_s + H_post[t] g(u)

``comb[source, target]`` is the paper's H_res transposed; its sums over the *sources* are one (to eps), its sums over
the targets only to Sinkhorn's tolerance. ``eps = 0`` is the paper, 1e-6 the reference code: different functions,
comb moves by up to 2e-3 at logits of size 3. Readout: "head", a gated sum with weights of its own (DeepSeek V4),
or the plain "sum".

Legend: n streams, B batch, S sequence, D width, l sub-layer. State: [B, S, n, D].
Start (the papers give alpha = 0.01 only): phi = 0; bias_pre = -1 but +1 at stream l mod n, as in mHC-lite and
KromHC; bias_post = 0; bias_comb = 0 on the diagonal and -8 off it. This equals pre-norm up to eps (any bias_pre and
bias_comb do while the streams are alike), and the one-hot bias_pre breaks the symmetry: with equal bias_pre all
streams would get the same gradient and never separate.
Cost per sub-layer and token: (n^2 + 2 n) (n D + 1) + 3 parameters; 2 n (n + 1) (n + 2) D + 4 n^2 t FLOPs; (3 n + 2) D
moved when fused.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from lmres.ops import combine_streams, mix_streams, normed_projection, sinkhorn, stat_dtype
from lmres.residual.hyper_connections import check_streams
from lmres.residual.interface import Axes, Connection, Cost, check_not_negative


@dataclasses.dataclass(frozen=True, kw_only=True)
class MHC(Connection):
    """Streams whose mixing matrix is (nearly) doubly stochastic.

    streams: n.
    iters: Sinkhorn iterations.
    eps: added in the read weights and in Sinkhorn; 0 for the paper's equations.
    norm_eps: of the norm over all streams.
    norm_gain: give that norm a gain (redundant with phi).
    readout: "head" (gated, learned) or "sum".
    """

    kind: Literal["mhc"] = "mhc"
    streams: int = 4
    iters: int = 20
    eps: float = 1e-6
    norm_eps: float = 1e-10
    norm_gain: bool = False
    readout: Literal["head", "sum"] = "head"

    equation: ClassVar[str] = "u = H_pre X,  X <- Sinkhorn(.) X + H_post' g(u)"
    source: ClassVar[str] = "arXiv:2512.24880"

    @property
    def name(self):
        return f"mhc-{self.streams}" + ("" if self.readout == "head" else "-sum")

    def check(self, depth, width):
        if self.streams < 1 or self.iters < 1:
            raise ValueError(f"residual.streams={self.streams} and residual.iters={self.iters} must be at least 1")
        check_not_negative(eps=self.eps, norm_eps=self.norm_eps)

    def init(self, key, depth, width):
        n = self.streams
        one_hot = jnp.eye(n)[jnp.arange(depth) % n]
        off_diagonal = jnp.broadcast_to(-8.0 * (1.0 - jnp.eye(n)).reshape(-1), (depth, n * n))
        layers = {
            "phi": jnp.zeros((depth, n * (n + 2), n * width)),
            "alpha": jnp.full((depth, 3), 0.01),
            "bias": jnp.concatenate([2.0 * one_hot - 1.0, jnp.zeros((depth, n)), off_diagonal], axis=-1),
        }
        if self.norm_gain:
            layers["gain"] = jnp.ones((depth, n * width))
        shared = {}
        if self.readout == "head":
            shared = {
                "head_phi": jnp.zeros((n, n * width)),
                "head_alpha": jnp.full((), 0.01),
                "head_bias": jnp.zeros((n,)),
            }
        to_f32 = lambda tree: {k: v.astype(jnp.float32) for k, v in tree.items()}  # noqa: E731
        return {"layers": to_f32(layers), "shared": to_f32(shared)}

    def open(self, params, e, depth):
        return jnp.broadcast_to(e[..., None, :], (*e.shape[:-1], self.streams, e.shape[-1]))

    def _project(self, phi, streams):
        """``(vec(X) / rms) phi``, [B, S, columns]; the division after the product, as in the reference code."""
        flat = streams.reshape(*streams.shape[:-2], -1)
        return normed_projection(flat, phi, eps=self.norm_eps)

    def _weights(self, params_l, streams):
        """(pre [B, S, n], post [B, S, n], comb [B, S, n, n])."""
        n = self.streams
        phi = params_l["phi"] * params_l["gain"] if self.norm_gain else params_l["phi"]
        alpha = jnp.repeat(params_l["alpha"], jnp.array([n, n, n * n]), total_repeat_length=n * (n + 2))
        logits = alpha * self._project(phi, streams) + params_l["bias"]
        pre = jax.nn.sigmoid(logits[..., :n]) + self.eps
        post = 2.0 * jax.nn.sigmoid(logits[..., n : 2 * n])
        # Sinkhorn wants the small matrix first. The targets are normalised first, the sources last.
        comb = jnp.moveaxis(logits[..., 2 * n :], -1, 0).reshape(n, n, *logits.shape[:-1])
        comb = sinkhorn(comb, self.iters, first=1, eps=self.eps)
        return pre, post, jnp.moveaxis(comb, (0, 1), (-2, -1))

    def read(self, params_l, state, l, context=None):
        check_streams(state, self.streams)
        if context is None:
            context = self._weights(params_l, state)
        return combine_streams(context[0], state), context

    def write(self, params_l, state, context, y, l):
        _, post, comb = context
        return mix_streams(comb, state, post, y)

    def close(self, params, state, context=None):
        if self.readout == "sum":
            wide = state.astype(stat_dtype(state))
            return jnp.sum(wide, axis=-2).astype(state.dtype), ()
        if context is None:
            p = params["shared"]
            logits = p["head_alpha"] * self._project(p["head_phi"], state) + p["head_bias"]
            context = jax.nn.sigmoid(logits) + self.eps
        return combine_streams(context, state), context

    def cost(self, depth, width):
        n = self.streams
        per_layer = n * (n + 2) * (n * width + 1) + 3 + (n * width if self.norm_gain else 0)
        head = (n * n * width + n + 1) if self.readout == "head" else 0
        flops = 2.0 * n * (n + 1) * (n + 2) * width + 4.0 * n * n * self.iters
        return Cost(depth * per_layer + head, depth * flops, depth * (3.0 * n + 2), float(n))

    def state_axes(self):
        return Axes("batch", "sequence", "streams", "embed")
