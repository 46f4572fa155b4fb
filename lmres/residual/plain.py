"""The plain residual, in its three usual forms.

    pre       h <- h + g(Norm h)                 arXiv:2002.04745
    post      h <- Norm(h + g(h))                arXiv:1706.03762
    sandwich  h <- h + Norm(g(Norm h))           CogView (arXiv:2105.13290), Gemma 2

The norms inside a branch (before g, after g) belong to the branch: ``branch_norms`` says which it must carry.
The post form keeps the *un-normalised* sum u = h + g(h) as its state and normalises it on reading, so that
``write`` stays linear; the embedding is normalised too (as in BERT), and the model's final norm is the norm
after the last sub-layer.

Legend: B batch, S sequence, D width, L sub-layers.
Cost per token: no parameters (post: D gains per sub-layer), D FLOPs (post: 6 D), 3 D moved per
sub-layer (read h and y, write h).
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp

from lmres.ops import rms_scale
from lmres.residual.interface import Connection, Cost, check_not_negative


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain(Connection):
    """The plain residual connection; the identity member of the interface.

    norm: where the branch norms stand: "pre", "post" or "sandwich".
    eps: of the post form's norm.
    """

    kind: Literal["plain"] = "plain"
    norm: Literal["pre", "post", "sandwich"] = "pre"
    eps: float = 1e-6

    equation: ClassVar[str] = "h <- h + g(Norm h)"
    source: ClassVar[str] = "arXiv:2002.04745 (pre), 1706.03762 (post), 2105.13290 (sandwich)"

    @property
    def name(self):
        return "plain" if self.norm == "pre" else f"plain-{self.norm}"

    @property
    def branch_norms(self):
        return {"pre": ("input",), "post": (), "sandwich": ("input", "output")}[self.norm]

    @property
    def start_tolerance(self):
        return 1e-4 if self.norm == "pre" else None  # the others are other functions, at the start too

    @property
    def channelwise(self):
        return self.norm == "post"  # the norm's gain

    def check(self, depth, width):
        check_not_negative(eps=self.eps)

    def init(self, key, depth, width):
        layers = {"gain": jnp.ones((depth, width), jnp.float32)} if self.norm == "post" else {}
        return {"layers": layers, "shared": {}}

    def open(self, params, e, depth):
        return e

    def read(self, params_l, state, l, context=None):
        return normalise(params_l, state, self.eps, context) if self.norm == "post" else (state, ())

    def write(self, params_l, state, context, y, l):
        carried = state if self.norm != "post" else normalise(None, state, self.eps, context)[0]
        return carried + y

    def close(self, params, state, context=None):
        return state, ()

    def cost(self, depth, width):
        post = self.norm == "post"
        return Cost(
            params=depth * width if post else 0,
            flops=depth * (6.0 if post else 1.0) * width,
            moved=3.0 * depth,
            state=1.0,
        )


def normalise(params_l, state, eps: float, context=None):
    """The norm of a sum kept un-normalised, [B, S, D], and the weights [B, S, D] that make it; given weights: replay.

    ``params_l`` holds the gain [D].
    """
    if context is None:
        context = rms_scale(state, eps) * params_l["gain"]
    return (state.astype(context.dtype) * context).astype(state.dtype), context
