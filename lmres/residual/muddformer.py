"""MUDDFormer: multiway dynamic dense connections (arXiv:2502.12170, section 3; Caiyun-AI/MUDDFormer).

    X_0 = e,   X_i = Block_i(ways of i - 1),   all ways of 0 are e
    way_c of i = sum_{j <= i} A[c, j] X_j,   A = GELU(RMSNorm(X_i) W1_i) W2_i + a_i,   c = query, key, value, residual

The unit is the whole block: attention reads query, key and value apart, each with a norm gain of its own, and its
skip starts from the residual way. A differs from token to token and is computed from the newest output alone. The
readout is one way after the last block, with four times the hidden size if ``expand_last`` (the released models).

With ``norm = "prepost"`` (the large models, which diverge without at 24 layers) every way is
X_i + gain * RMSNorm(sum_j A[c, j] RMSNorm(X_j)), with gains that start at 0.001 and a that starts at 0. The
authors' JAX code has the outer norm on the residual way only; here all ways have it, as the paper writes.

Legend: B blocks (units), M = B + 1 slots, C ways, K = C (i + 1) hidden at depth i, D width.
Parameters are flat arrays that hold reader after reader, of one its ways, of one way its sources (or D numbers); the
readout is the last reader. So few arrays: an optimiser compiles some dozen kernels for each.
Start: W1 normal with variance 1 / D, W2 = 0, a one-hot at X_i: exactly pre-norm.
Cost at depth i and token: K D + K^2 + K parameters; 2 K D + 2 K^2 + 2 K D FLOPs (where the weights are computed, one
compiled block serves all depths: i + 1 is B in K, and B + 1 for the rows of W2); (i + 1) D read and C D written.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lmres.ops import Span, normed_projection, rms_scale, take, take_window, weighted_sums
from lmres.residual.interface import Axes, Cost, History, check_not_negative
from lmres.residual.weighted import WeightedReads

_GELU_FLOPS = 68.0  # of one exact GELU: XLA's erfc is a polynomial
_WINDOWS = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,))


def _windows(flat, starts, size):
    """``flat[start : start + size]`` of each of the starts [R], as [R, size]; none may end beyond ``flat``."""
    return jax.lax.gather(flat, starts[:, None], _WINDOWS, (size,), mode="promise_in_bounds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MUDDFormer(WeightedReads):
    """Token-dependent weighted sums of all earlier block outputs, one for each input of a block.

    ways: inputs of a block: [4] (query, key, value, residual) or [1].
    dynamic: "token" (the weights depend on the token) or "static" (a alone).
    norm: "none" or "prepost".
    expand_last: hidden size of the readout times four.
    eps: of the norms.
    """

    kind: Literal["mudd"] = "mudd"
    ways: tuple[int, ...] = (4,)
    dynamic: Literal["token", "static"] = "token"
    norm: Literal["none", "prepost"] = "none"
    expand_last: bool = False
    eps: float = 1e-6

    unit: ClassVar[Literal["sublayer", "block"]] = "block"
    equation: ClassVar[str] = "way_c = sum_j (GELU(Norm(X_i) W1) W2 + a)_cj X_j,  X_{i+1} = Block(ways)"
    source: ClassVar[str] = "arXiv:2502.12170"
    left_out: ClassVar[str] = "re-allocation of MLP sizes over depth (a matter of the model, not of the connection)"
    # The weight matrices decay like any other; the biases, which hold the start, and the gains do not.
    no_decay: ClassVar[tuple[str, ...]] = ("bias", "gain")

    @property
    def name(self):
        parts = ["mudd", "ppn" * (self.norm == "prepost"), "static" * (self.dynamic == "static")]
        return "-".join([p for p in parts if p] + [f"{self.ways[0]}way"] * (self.ways != (4,)))

    @property
    def channelwise(self):
        return self.norm == "prepost"  # the gain

    def check(self, depth, width):
        if self.ways not in ((1,), (4,)):
            raise ValueError(f"residual.ways={list(self.ways)} must be [4] (query, key, value, residual) or [1]")
        check_not_negative(eps=self.eps)

    def _readers(self, depth: int) -> list[tuple[int, int, int]]:
        """(ways, sources of each, hidden units) of the blocks from the second on, and of the readout."""
        ways, slots = self.ways[0], depth + 1
        blocks = [(ways, i + 1, ways * (i + 1)) for i in range(1, depth)]
        return [*blocks, (1, slots, slots * (4 if self.expand_last else 1))]

    def init(self, key, depth, width):
        readers = self._readers(depth)
        last = np.concatenate([np.tile(np.arange(n) == n - 1, ways) for ways, n, _ in readers]).astype(np.float32)
        shared = {"bias": jnp.asarray(last if self.norm == "none" else 0 * last)}
        if self.dynamic == "token":
            hidden = sum(units for *_, units in readers)
            shared["w1"] = jax.random.normal(key, (hidden, width), jnp.float32) * width**-0.5
            shared["w2"] = jnp.zeros(sum(ways * n * units for ways, n, units in readers), jnp.float32)
        if self.norm == "prepost":
            shared["gain"] = jnp.full((sum(ways for ways, *_ in readers), width), 1e-3, jnp.float32)
        return {"layers": {}, "shared": shared}

    def emit(self, carry, y, l):
        return l + 1, y, ()

    @property
    def sees(self):
        return ("newest", "scale") if self.norm == "prepost" else ("newest",)

    def keys(self, params_l, value):
        return {"scale": rms_scale(value, self.eps)[..., 0]} if self.norm == "prepost" else {}

    def span(self, l):
        return Span(0, 1, l + 1)

    def weigh(self, params_l, seen, l, ways, count):
        """A of reader ``l``, [C, M, B, S], or [C, M] where static, zero for entries to come; the extra is the gain."""
        if count == 2:  # one block: its ways are e
            a, gain = jnp.eye(1, count).repeat(ways, 0), jnp.zeros((ways, seen["newest"].shape[-1]))
        else:
            a, gain = self._rows(params_l, seen["newest"], l, ways, count), ()
            if self.norm == "prepost":
                gain = take_window(params_l["gain"], ways * jnp.maximum(l - 1, 0), ways)
                gain = jnp.where(l > 0, gain, 0)
        return self._normed(a, seen, gain)

    def _normed(self, a, seen, gain):
        if self.norm == "none":
            return [a], ()
        return [(a if a.ndim == 4 else a[..., None, None]) * seen["scale"]], gain

    def _rows(self, params_l, newest, l, ways, count):
        """A of block ``l`` before any norm."""
        column = jnp.arange(count)
        valid = (column <= l) & (l > 0)
        sizes = np.array([(0, 0), *((c * n, c * n * units) for c, n, units in self._readers(count - 1))])
        first, before = take(jnp.asarray(np.cumsum(sizes[:-1], 0) - sizes[:-1], jnp.int32), l)
        # Windows as wide as the last block's rows, after which come the readout's: none ends beyond the array. What
        # they hold of later rows is masked, and later hidden units meet zeros in W2.
        way = jnp.arange(ways)[:, None]
        a = _windows(params_l["bias"], first + way[:, 0] * (l + 1), count)
        a = jnp.where(valid, a, column == 0)  # before the first block all ways are e
        if self.dynamic == "static":
            return a
        units, unit = ways * (l + 1), jnp.arange(ways * (count - 1))
        w1 = take_window(params_l["w1"], first, len(unit))
        row = jnp.where(valid, before + (way * (l + 1) + column) * units, 0)
        w2 = _windows(params_l["w2"], row.reshape(-1), len(unit))
        w2 = jnp.where(jnp.tile(valid, ways)[:, None] & (unit < units), w2, 0)
        return self._moving(newest, w1, w2, a)

    def _moving(self, newest, w1, w2, a):
        """A [C, M, B, S] from w1 [K, D], w2 [C M, K] and a [C, M]."""
        hidden = jax.nn.gelu(normed_projection(newest, w1, eps=self.eps), approximate=False)
        moving = jnp.einsum("bsk,rk->rbs", hidden, w2, precision=jax.lax.Precision.HIGHEST)
        return moving.reshape(*a.shape, *newest.shape[:2]) + a[..., None, None]

    def finish(self, params_l, x, seen, extra):
        if self.norm == "prepost":
            if params_l is None:
                gained = extra * x
            else:  # in this order the backward pass holds no gain for every token
                gain, scale = extra[:, None, None], rms_scale(x, self.eps)
                gained, extra = gain * (scale * x), gain * scale
            x = seen["newest"] + gained.astype(x.dtype)
        return super().finish(params_l, x, seen, extra)

    def close(self, params, state, context=None):
        values = state.slots["value"]
        seen = {"newest": values[-1], "scale": state.slots.get("scale")}
        if context is None:
            p, (_, slots, hidden) = params["shared"], self._readers(len(values) - 1)[-1]
            a = p["bias"][None, -slots:]
            if self.dynamic == "token":
                a = self._moving(values[-1], p["w1"][-hidden:], p["w2"][-slots * hidden :].reshape(slots, hidden), a)
            weights, extra = self._normed(a, seen, p["gain"][-1:] if self.norm == "prepost" else ())
        else:
            weights, extra = context
        x = weighted_sums(weights, values)
        h, extra = self.finish(None if context else params, x, seen, extra)
        return h, (weights, extra)

    def cost(self, depth, width):
        ways, slots, readers = self.ways[0], depth + 1, self._readers(depth)
        params, sums = sum(c * sources for c, sources, _ in readers), ways + sum(c * n for c, n, _ in readers)
        flops = 2.0 * (sums + depth) * width  # and the plain skips inside a block of two sub-layers
        if self.dynamic == "token":
            params += sum(hidden * (width + c * sources) for c, sources, hidden in readers)
            # One compiled block for all depths: every reader has the hidden units of the last.
            for hidden, rows, times in ((ways * depth, ways * slots, depth), (readers[-1][2], slots, 1)):
                flops += times * ((2.0 * hidden + 2.0) * width + (2.0 * rows + _GELU_FLOPS) * hidden)
        if self.norm == "prepost":
            params += sum(c for c, _, _ in readers) * width
            flops += (2.0 * slots + 5.0 * (ways * depth + 1)) * width
        return Cost(params, flops, float(sums + sum(c for c, _, _ in readers) + 6 * depth), float(slots))

    def state_axes(self):
        scale = {"scale": Axes("slots", "batch", "sequence")} if self.norm == "prepost" else {}
        return History({"value": Axes("slots", "batch", "sequence", "embed")} | scale, ())
