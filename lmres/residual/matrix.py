"""Residual Matrix Transformer: an outer-product memory in place of the residual vector (arXiv:2506.22696).

    M = sum_r o_r e_r'                            the embedding e, cut into R vectors e_r of size D_v, is stored
    N = M / sqrt(mean(M^2) + eps) * gain          one norm over both axes
    x_r = N' k_r                                  what a sub-layer reads: R vectors, one by one retrieved with a key
    M <- M + 1 / sqrt(L) sum_r w_r g_r(x)'        its output, cut likewise, is stored with L = 2 x blocks sub-layers
    h_r = N' c_r                                  readout: norm and retrieval; no final norm follows

Attention reads 3 R vectors: queries, keys and values each with keys of their own; the MLP reads R (``ways``). In the
paper these vectors are attention's heads, with no projections (model.heads_from=input, model.heads=R). The size of M
is free of the width: D_k grows the memory at 2 R D_k parameters per sub-layer and D_k D_v of a gain.

Legend: B batch, S sequence, D = R D_v width, R reads, K = D_k, V = D_v, L sub-layers, W inputs of a sub-layer.
State: M, [B, S, K, V]. Reading mixes channels (within D_v they keep their place), so there is no matrix over depth.
Start: the query's keys k are 0 (paper); the others are normal with standard deviation 1 / sqrt(K), as are c, and those
of o and w with 1 / sqrt(R), which keeps the size of vectors; gains 1. Not the plain residual at the start. A zero query
is where a norm on queries (model.qk_norm) has its steepest slope, 1 / sqrt(eps): leave that norm off.
Cost per sub-layer and token: (W + 1) R K + K V parameters; 2 (W + 1) D K + 5 K V FLOPs; 3 K V + (W + 1) D moved.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from lmres.ops import rms_scale, stat_dtype, take_window
from lmres.residual.interface import Axes, Connection, Cost, check_not_negative


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualMatrix(Connection):
    """A matrix of keys by values that sub-layers read from and write to with learned keys.

    keys: D_k, the size of a key.
    value_size: D_v, the size of what a key retrieves, the paper's head size; None is the largest divisor of the width
      that is at most 64 and at most a quarter of it.
    ways: inputs of the successive sub-layers, over and over: 3 for attention (query, key, value), 1 for an MLP.
    eps: of the norms.
    """

    kind: Literal["rmt"] = "rmt"
    keys: int = 64
    value_size: int | None = None
    ways: tuple[int, ...] = (3, 1)
    eps: float = 1e-6

    equation: ClassVar[str] = "x_r = Norm(M)' k_r,  M <- M + sum_r w_r g_r(x)' / sqrt(L)"
    source: ClassVar[str] = "arXiv:2506.22696"
    no_decay: ClassVar[tuple[str, ...]] = ("gain", "close_gain")
    start_tolerance: ClassVar[float | None] = None
    final_norm: ClassVar[bool] = False
    left_out: ClassVar[str] = "muP scalings"

    @property
    def name(self):
        return f"rmt-{self.keys}"

    @property
    def branch_norms(self):
        return ()

    @property
    def has_matrix(self):
        return False

    def value_width(self, width: int) -> int:
        """D_v at this width."""
        if self.value_size is not None:
            return self.value_size
        return max(v for v in range(1, max(1, min(64, width // 4)) + 1) if width % v == 0)

    def check(self, depth, width):
        if self.keys < 1:
            raise ValueError(f"residual.keys={self.keys} must be at least 1")
        if self.value_size is not None and (self.value_size < 1 or width % self.value_size):
            raise ValueError(f"residual.value_size={self.value_size} must divide the width {width}")
        if not self.ways or any(w not in (1, 3) for w in self.ways):
            raise ValueError(f"residual.ways={list(self.ways)} must be a list of 3 (query, key, value) and 1")
        check_not_negative(eps=self.eps)

    def _first_keys(self, l):
        """Where unit ``l``'s keys begin in the flat table [sum of ways, R, K]; ``l`` may be traced, or be the depth."""
        before = jnp.cumsum(jnp.array((0, *self.ways[:-1])))
        return l // len(self.ways) * sum(self.ways) + before[l % len(self.ways)]

    def _inputs(self, depth: int) -> list[tuple[int, int]]:
        """(way, ways) of every entry of that table."""
        return [(w, n) for l in range(depth) for n in (self.ways[l % len(self.ways)],) for w in range(n)]

    def _depth(self, entries: int) -> int:
        """The number of units whose keys fill a table of ``entries``."""
        depth = entries // sum(self.ways) * len(self.ways)
        while len(self._inputs(depth)) < entries:
            depth += 1
        return depth

    def init(self, key, depth, width):
        v = self.value_width(width)
        r, k = width // v, self.keys
        read, write, first, last = jax.random.split(key, 4)
        normal = lambda key, size, *shape: size * jax.random.normal(key, (*shape, r, k), jnp.float32)  # noqa: E731
        inputs = self._inputs(depth)
        nonzero = jnp.array([float((way, ways) != (0, 3)) for way, ways in inputs], jnp.float32)
        layers = {
            "gain": jnp.ones((depth, k, v), jnp.float32),
            "write_keys": normal(write, r**-0.5, depth),
        }
        shared = {
            "read_keys": normal(read, k**-0.5, len(inputs)) * nonzero[:, None, None],
            "open_keys": normal(first, r**-0.5),
            "close_keys": normal(last, k**-0.5),
            "close_gain": jnp.ones((k, v), jnp.float32),
        }
        return {"layers": layers, "shared": shared}

    def _store(self, keys, vectors):
        """``sum_r keys[r] vectors_r'``, [B, S, K, V]; keys: [R, K], vectors: [B, S, D]."""
        cut = vectors.reshape(*vectors.shape[:-1], keys.shape[0], -1)
        return jnp.einsum("bsrv,rk->bskv", cut, keys.astype(cut.dtype))

    def _retrieve(self, keys, gain, state):
        """The norm of the state, retrieved with keys [W, R, K]: [W, B, S, D]."""
        normed = (state.astype(stat_dtype(state)) * rms_scale(state, self.eps, (-2, -1)) * gain).astype(state.dtype)
        x = jnp.einsum("bskv,wrk->wbsrv", normed, keys.astype(state.dtype))
        return x.reshape(*x.shape[:3], -1)

    def open(self, params, e, depth):
        return self._store(params["shared"]["open_keys"], e)

    def read(self, params_l, state, l, context=None, ways=1):
        keys = take_window(params_l["read_keys"], self._first_keys(l), ways)
        x = self._retrieve(keys, params_l["gain"], state)
        return (x[0] if ways == 1 else tuple(x)), ()

    def write(self, params_l, state, context, y, l):
        scale = self._depth(params_l["read_keys"].shape[0]) ** -0.5
        return (state.astype(stat_dtype(state)) + self._store(scale * params_l["write_keys"], y)).astype(state.dtype)

    def close(self, params, state, context=None):
        shared = params["shared"]
        return self._retrieve(shared["close_keys"][None], shared["close_gain"], state)[0], ()

    def cost(self, depth, width):
        v = self.value_width(width)
        r, k, inputs = width // v, self.keys, len(self._inputs(depth))
        # Reads and writes, the readout's and the embedding's among them; a norm (4) and the sum per sub-layer.
        products = inputs + depth + 2
        return Cost(
            params=products * r * k + (depth + 1) * k * v,
            flops=float(2 * products * width * k + (5 * depth + 4) * k * v),
            moved=(3 * depth + 2) * k * v / width + inputs + depth + 2.0,
            state=k * v / width,
        )

    def state_axes(self):
        return Axes("batch", "sequence", "keys", "values")
