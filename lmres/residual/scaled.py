"""Connections that scale the branch, or what is carried: ReZero, LayerScale, DeepNorm and KEEL.

    ReZero      h <- h + alpha g(h)              arXiv:2003.04887, as given in arXiv:2103.17239, section 2
    LayerScale  h <- h + diag(lambda) g(Norm h)  arXiv:2103.17239 (CaiT), section 2
    DeepNorm    h <- Norm(alpha h + g(h))        arXiv:2203.00555, as given in arXiv:2603.15031, Table 5
    KEEL        h <- Norm(alpha h + g(Norm h))   arXiv:2603.15031, Table 5

The inner Norm belongs to the branch (``branch_norms``); ReZero is the original without one, ``norm="input"`` adds it.
DeepNorm keeps the *un-normalised* sum u = alpha h + g as its state, as post-norm does (see ``plain``), and normalises
the embedding too: with alpha = 1 it is post-norm.

Legend: B batch, S sequence, D width, l sub-layer. State: [B, S, D].
Start: ReZero alpha = 0, so the network is the identity. LayerScale lambda = 0.1, 1e-5 or 1e-6 by depth: small, not
plain. DeepNorm gains 1.
Cost per sub-layer and token: ReZero 1 parameter, LayerScale and DeepNorm D; ReZero and LayerScale 2 D FLOPs, DeepNorm
7 D (its norm is applied where it is read and where it is carried on); 3 D moved.
"""

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from lmres.ops import stat_dtype
from lmres.residual.interface import Connection, Cost, check_not_negative
from lmres.residual.plain import normalise


class _Scaled(Connection):
    """``h <- h + scale * g``; a subclass says how many numbers a scale is and where they start."""

    def open(self, params, e, depth):
        return e

    def read(self, params_l, state, l, context=None):
        return state, params_l["scale"] if context is None else context

    def write(self, params_l, state, context, y, l):
        return (state.astype(stat_dtype(state)) + context * y).astype(state.dtype)

    def close(self, params, state, context=None):
        return state, ()

    def as_plain(self, params, gains, final_gain):
        return jax.tree.map(jnp.ones_like, params) if self.branch_norms == ("input",) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReZero(_Scaled):
    """One scale per sub-layer, zero at the start.

    norm: "none" (the paper: branches without norms) or "input" (pre-norm branches).
    """

    kind: Literal["rezero"] = "rezero"
    norm: Literal["none", "input"] = "none"

    equation: ClassVar[str] = "h <- h + alpha g(h)"
    source: ClassVar[str] = "arXiv:2003.04887"
    start_tolerance: ClassVar[float | None] = None  # no branch contributes at the start

    @property
    def name(self):
        return "rezero" if self.norm == "none" else "rezero-norm"

    @property
    def branch_norms(self):
        return () if self.norm == "none" else ("input",)

    def init(self, key, depth, width):
        return {"layers": {"scale": jnp.zeros((depth,), jnp.float32)}, "shared": {}}

    def cost(self, depth, width):
        return Cost(params=depth, flops=2.0 * depth * width, moved=3.0 * depth, state=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerScale(_Scaled):
    """One scale per channel and sub-layer, small at the start.

    start: of every scale; None is CaiT's choice by depth: 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 above. A layer of
      CaiT is a block of two sub-layers, so 36 sub-layers are its depth of 18.
    """

    kind: Literal["layerscale"] = "layerscale"
    start: float | None = None

    equation: ClassVar[str] = "h <- h + diag(lambda) g(Norm h)"
    source: ClassVar[str] = "arXiv:2103.17239"

    @property
    def start_tolerance(self):
        return 1e-4 if self.start == 1.0 else None

    @property
    def channelwise(self):
        return True

    def check(self, depth, width):
        if self.start is not None and not math.isfinite(self.start):
            raise ValueError(f"residual.start={self.start} must be a finite number, or null for a start by depth")

    def start_at(self, depth: int) -> float:
        """The start of every scale for ``depth`` sub-layers."""
        if self.start is not None:
            return self.start
        layers = depth / 2
        return 0.1 if layers <= 18 else 1e-5 if layers <= 24 else 1e-6

    def init(self, key, depth, width):
        return {"layers": {"scale": jnp.full((depth, width), self.start_at(depth), jnp.float32)}, "shared": {}}

    def cost(self, depth, width):
        return Cost(params=depth * width, flops=2.0 * depth * width, moved=3.0 * depth, state=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepNorm(Connection):
    """Post-norm that weighs what is carried against the branch.

    alpha: the weight of what is carried; 1 is post-norm.
    norm: "none" (DeepNorm) or "input" (KEEL: the branch normalises its input once more, with a gain of its own).
    eps: of the outer norm.
    """

    kind: Literal["deepnorm"] = "deepnorm"
    alpha: float = 1.0
    norm: Literal["none", "input"] = "none"
    eps: float = 1e-6

    equation: ClassVar[str] = "h <- Norm(alpha h + g(h))"
    source: ClassVar[str] = "arXiv:2203.00555; 2603.15031, Table 5"
    start_tolerance: ClassVar[float | None] = None
    left_out: ClassVar[str] = "DeepNorm's alpha and its scaling of the branches' start by depth, and KEEL's alpha"

    @property
    def name(self):
        return ("deepnorm" if self.norm == "none" else "keel") + ("" if self.alpha == 1.0 else f"-{self.alpha:g}")

    @property
    def branch_norms(self):
        return () if self.norm == "none" else ("input",)

    @property
    def channelwise(self):
        return True  # the norm's gain

    def check(self, depth, width):
        check_not_negative(alpha=self.alpha, eps=self.eps)

    def init(self, key, depth, width):
        return {"layers": {"gain": jnp.ones((depth, width), jnp.float32)}, "shared": {}}

    def open(self, params, e, depth):
        return e

    def read(self, params_l, state, l, context=None):
        return normalise(params_l, state, self.eps, context)

    def write(self, params_l, state, context, y, l):
        return self.alpha * normalise(None, state, self.eps, context)[0] + y

    def close(self, params, state, context=None):
        return state, ()

    def cost(self, depth, width):
        return Cost(params=depth * width, flops=7.0 * depth * width, moved=3.0 * depth, state=1.0)
