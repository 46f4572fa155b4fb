"""mHC as the hyper-connections package (lucidrains, 0.4.11) has it, which is NOT the published form (see ``mhc``).

These are dynamic Hyper-Connections (see ``hyper_connections``) whose weights are bounded at the end:

    N(H_s) = H_s / |H_s| sqrt(D) (1 + gamma)       each stream on its own; the paper: one norm over all n D numbers
    [a | r] = static_alpha + [s_pre | s_res] N(H) W_alpha        b = static_beta + s_post N(H) w_beta
    H_pre = sigmoid(a),  H_res = Sinkhorn(r),  H_post = 2 sigmoid(b)
    u = sum_s H_pre[s] H_s      H_t <- sum_s H_res[s, t] H_s + H_post[t] g(u)      h = sum of the streams

Sinkhorn ends on the targets, so that what each source gives away sums to one exactly; in the paper it is what each
target receives, and streams that are alike stay so only there. The package's logarithmic form is the same function.

Legend: n streams, B batch, S sequence, D width, l sub-layer. State: [B, S, n, D].
Start: that of ``mhc``, W = 0, static reads +1 at stream l mod n and -1 elsewhere, mixes 0 on the diagonal and -8 off
it, writes 0: exactly pre-norm, since a symmetric matrix has both sums equal. The package starts with the ones, identity
and one-hot of Hyper-Connections as logits, which is not plain.
Cost per sub-layer and token: (n + D) (n + 2) + D + 3 parameters; FLOPs of ``hyper_connections`` and 10 n^2 t;
(3 n + 2) D moved when fused.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from lmres.ops.constraints import OFF, doubly_stochastic
from lmres.residual.hyper_connections import Slots
from lmres.residual.streams import check_counts, one_hot


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerStreamMHC(Slots):
    """The hyper-connections package's mHC: norm and projection per stream. Not the published form.

    streams: n.
    iters: Sinkhorn iterations.
    """

    kind: Literal["mhc_per_stream"] = "mhc_per_stream"
    streams: int = 4
    iters: int = 20

    tanh: ClassVar[bool] = False
    norm: ClassVar[Literal["layer", "rms"]] = "rms"
    equation: ClassVar[str] = "as mhc, with weights from each stream's own norm (not the published form)"
    source: ClassVar[str] = "the hyper-connections package 0.4.11, after arXiv:2512.24880"
    no_decay: ClassVar[tuple[str, ...]] = (*Slots.no_decay, "gamma")

    @property
    def name(self):
        return f"mhc-per-stream-{self.streams}"

    def check(self, depth, width):
        check_counts(streams=self.streams, iters=self.iters)

    @property
    def _mixing(self):
        return doubly_stochastic(self.streams, self.iters, first=0)

    def init(self, key, depth, width):
        params, n = super().init(key, depth, width), self.streams
        mixes = jnp.broadcast_to(OFF * (1.0 - jnp.eye(n)), (depth, n, n))
        reads = 2.0 * one_hot(depth, n)[..., None] - 1.0
        params["layers"] |= {
            "static_alpha": jnp.concatenate([reads, mixes], axis=-1),
            "static_beta": jnp.zeros((depth, n)),
            "dynamic_alpha_scale": jnp.full((depth, 2), self.first_scale),  # of reads, of mixes
        }
        return params

    def _weights(self, params_l, state):
        n = self.streams
        read, mix = params_l["dynamic_alpha_scale"]
        scale = jnp.concatenate([read[None], jnp.broadcast_to(mix, n)])
        alpha, beta = super()._weights({**params_l, "dynamic_alpha_scale": scale}, state)
        logits = alpha[..., 1:].reshape(*alpha.shape[:-2], n * n)
        bounded = [jax.nn.sigmoid(alpha[..., :1]), self._mixing.matrix(logits)]
        return jnp.concatenate(bounded, axis=-1), 2.0 * jax.nn.sigmoid(beta)

    def cost(self, depth, width):
        cost = super().cost(depth, width)
        return dataclasses.replace(
            cost, params=cost.params + depth, flops=cost.flops + depth * self._mixing.flops
        )
