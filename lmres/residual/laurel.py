"""LAuReL: learned augmented residual layers (arXiv:2411.07501), and the form that Gemma 3n ships.

    x <- a f(x) + b (x + P)

    RW   (a, b) = softmax(w) ("softmax"), or twice that ("unit"), so that a = b = 1 at the start; 1 without RW
    LR   P = x A B
    PA   P = (sum_{m < k} gamma_m x_{-m}) A B         x_{-m} is x of m sub-layers before; fewer than k at the bottom
    Gemma 3n ("gemma")   x <- (f(x) + 2 x + N(x A B)) / sqrt(2),   N an RMSNorm with gain

The paper leaves the bounding of RW's weights open. ``rank`` switches LR on, ``previous`` (k, x itself included) PA;
they combine as the formula says. f is the branch with its input norm; P takes x as it is.

Legend: B batch, S sequence, D width, r rank, k previous, l sub-layer. A: [D, r], B: [r, D].
State: x, [B, S, D]; with PA the k last x, newest first, [B, S, k, D], zeros where there were none yet.
Start: w = 0; A column-orthogonal and B = 0, so P = 0; gamma = 1 for x itself and 0 for older ones: exactly pre-norm
(not "softmax": a = b = 1/2; not "gemma"). "gemma": B is drawn and N's gain is 0, since at B = 0 the norm has a slope
of 1 / sqrt(eps); the start that Gemma uses is not published.
Cost per sub-layer and token: RW 2 parameters and 3 D FLOPs; LR 2 r D and + (4 r + 1) D; PA + at most k parameters and
(2 k - 1) D FLOPs; 3 D moved, with PA (2 k + 1) D.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from lmres.ops import combine_streams, rms_norm, stat_dtype
from lmres.residual.interface import Axes, Connection, Cost, check_not_negative
from lmres.residual.streams import check_streams


@dataclasses.dataclass(frozen=True, kw_only=True)
class LAuReL(Connection):
    """A plain residual with learned weights, a low-rank map of what is carried, and earlier states.

    weights: of the branch and of what is carried: "none", "unit", "softmax" or "gemma" (fixed; norms the low-rank map).
    rank: r of the low-rank map; 0 is none.
    previous: k, how many states (the present one included) the low-rank map takes; 0 is the present one, unweighted.
    eps: of the norm of "gemma".
    """

    kind: Literal["laurel"] = "laurel"
    weights: Literal["none", "unit", "softmax", "gemma"] = "unit"
    rank: int = 0
    previous: int = 0
    eps: float = 1e-6

    equation: ClassVar[str] = "x <- a f(x) + b (x + sum_m gamma_m x_{-m} A B)"
    source: ClassVar[str] = "arXiv:2411.07501"
    left_out: ClassVar[str] = "Gemma 3n's placement on attention alone and its other parts"

    @property
    def name(self):
        parts = {"none": [], "unit": ["rw"], "softmax": ["softmax"], "gemma": ["gemma"]}[self.weights]
        parts += ([f"lr{self.rank}"] if self.rank else []) + ([f"pa{self.previous}"] if self.previous else [])
        return "-".join(["laurel", *parts])

    @property
    def no_decay(self):
        """All but the low-rank maps; the paper says nothing of decay."""
        return ("weights", *["gain"] * (self.rank > 0), *["gamma"] * (self.previous > 0))

    @property
    def start_tolerance(self):
        return 1e-4 if self.weights in ("none", "unit") else None

    @property
    def has_matrix(self):
        return self.rank == 0

    def check(self, depth, width):
        if not 0 <= self.rank <= width:
            raise ValueError(f"residual.rank={self.rank} must be in 0 .. {width}, the width")
        if self.previous < 0:
            raise ValueError(f"residual.previous={self.previous} must not be negative")
        if self.rank == 0 and (self.previous or self.weights == "gemma"):
            what = f"residual.previous={self.previous}" if self.previous else "residual.weights=gemma"
            raise ValueError(f"{what} needs a low-rank map: set residual.rank to at least 1")
        check_not_negative(eps=self.eps)

    def _gamma_count(self, depth: int) -> int:
        return sum(min(l + 1, self.previous) for l in range(depth))

    def init(self, key, depth, width):
        layers, shared, gemma = {}, {}, self.weights == "gemma"
        if self.weights in ("unit", "softmax"):
            layers["weights"] = jnp.zeros((depth, 2), jnp.float32)
        if self.rank:
            down_key, up_key = jax.random.split(key)
            orthogonal = jax.nn.initializers.orthogonal()
            draw = jax.vmap(lambda k: orthogonal(k, (width, self.rank), jnp.float32))
            up = jax.random.normal(up_key, (depth, self.rank, width), jnp.float32)
            layers["down"] = draw(jax.random.split(down_key, depth))
            layers["up"] = up * self.rank**-0.5 if gemma else jnp.zeros_like(up)
        if gemma:
            layers["gain"] = jnp.zeros((depth, width), jnp.float32)
        if self.previous:
            newest, _ = self._gamma_at(jnp.arange(depth))
            shared["gamma"] = jnp.zeros((self._gamma_count(depth),), jnp.float32).at[newest].set(1.0)
        return {"layers": layers, "shared": shared}

    def _gamma_at(self, l):
        """Where unit ``l``'s weights begin in the flat table, and how many there are; ``l`` may be traced."""
        t = jnp.minimum(l, self.previous - 1)  # units up to t have one more than the one below
        return t * (t + 1) // 2 + (l - t) * self.previous, t + 1

    def open(self, params, e, depth):
        if not self.previous:
            return e
        none_yet = jnp.zeros((*e.shape[:-1], self.previous - 1, e.shape[-1]), e.dtype)
        return jnp.concatenate([e[..., None, :], none_yet], axis=-2)

    def _newest(self, state):
        if not self.previous:
            return state
        check_streams(state, self.previous)
        return state[..., 0, :]

    def read(self, params_l, state, l, context=None):
        if context is None:
            context = ()
            if self.weights in ("unit", "softmax"):
                context = jax.nn.softmax(params_l["weights"]) * (2.0 if self.weights == "unit" else 1.0)
        return self._newest(state), context

    def _low_rank(self, params_l, state, l):
        """P, [B, S, D]."""
        if self.previous:
            first, count = self._gamma_at(l)
            m = jnp.arange(self.previous)
            gamma = jnp.where(m < count, params_l["gamma"].at[first + m].get(mode="clip"), 0.0)
            state = combine_streams(gamma, state)
        down, up = (params_l[k].astype(state.dtype) for k in ("down", "up"))
        p = (state @ down) @ up
        return rms_norm(p, params_l["gain"], self.eps) if self.weights == "gemma" else p

    def write(self, params_l, state, context, y, l):
        x = self._newest(state)
        wide = lambda a: a.astype(stat_dtype(x))  # noqa: E731
        carried = wide(x) * 2.0 if self.weights == "gemma" else wide(x)
        if self.rank:
            carried = carried + wide(self._low_rank(params_l, state, l))
        if self.weights == "gemma":
            new = (wide(y) + carried) * 2.0**-0.5
        elif self.weights == "none":
            new = wide(y) + carried
        else:
            new = context[0] * wide(y) + context[1] * carried
        new = new.astype(x.dtype)
        return jnp.concatenate([new[..., None, :], state[..., :-1, :]], axis=-2) if self.previous else new

    def close(self, params, state, context=None):
        return self._newest(state), ()

    def cost(self, depth, width):
        k, r, gemma = self.previous, self.rank, self.weights == "gemma"
        learned = self.weights in ("unit", "softmax")
        params = depth * (2 * learned + 2 * r * width + width * gemma) + self._gamma_count(depth)
        # Per channel: the additions and weights; A and B; their addition; the weighted sum; the norm.
        flops = (1 if self.weights == "none" else 3) + (4 * r + 1 if r else 0) + max(2 * k - 1, 0) + 4 * gemma
        return Cost(params, float(depth * flops * width), depth * (2.0 * k + 1.0 if k else 3.0), float(max(k, 1)))

    def state_axes(self):
        return Axes("batch", "sequence", "previous", "embed") if self.previous else super().state_axes()
