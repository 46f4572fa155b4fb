"""Constraints on the matrix that mixes n streams, as functions: any numbers in, a matrix of the wanted kind out.

    doubly_stochastic   Sinkhorn of exp(logits)                          n^2 logits   arXiv:2512.24880 (mHC)
    permutations        sum_k softmax(logits)_k P_k over all n! of them  n!           arXiv:2601.05732 (mHC-lite)
    kronecker           product of such 2 x 2 matrices, n = 2^k          2 k          arXiv:2601.21579 (KromHC)
    circulant           sum_k softmax(logits)_k (cyclic shift by k)      n            C-mHC
    identity            no mixing                                        0            iHC

All but the last two reach a mix of any two streams in one step. Every matrix is doubly stochastic (non-negative, rows
and columns sum to one), so its spectral norm is 1, the mean of the streams is kept, and products of them are of the
same kind. With Sinkhorn the axis normalised last sums to one exactly and the other to a tolerance; the others are
exact. Sinkhorn and permutations reach every doubly stochastic matrix, the others a subset.

Matrices are [source, target]: stream t gets ``sum_s matrix[s, t] * stream s``.

Start: logits of 0 where only the identity is, -8 elsewhere (mHC-lite, KromHC), so the matrix is the identity to 1e-3.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmres.ops.norm import stat_dtype
from lmres.ops.sinkhorn import sinkhorn

OFF = -8.0
MOST_PERMUTED = 6  # streams; 720 logits


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A way to make a mixing matrix.

    start: [k] logits at the start; their number is how many the constraint takes.
    matrix: logits [..., k] -> [..., n, n], float32 or wider; without the leading axes if k = 0.
    flops: of one matrix.
    """

    start: np.ndarray
    matrix: Callable[[Array], Array]
    flops: float

    @property
    def count(self) -> int:
        """k, the number of logits."""
        return len(self.start)


def doubly_stochastic(n: int, iters: int = 20, *, first: int = 1, eps: float = 0.0) -> Constraint:
    """Sinkhorn's iteration of a full matrix of logits, row-major; see ``lmres.ops.sinkhorn`` for the options. With
    ``first=1`` the sums over the sources are the exact ones: streams that are alike stay as they are."""

    def matrix(logits):
        # Sinkhorn wants the small matrix first.
        square = jnp.moveaxis(logits, -1, 0).reshape(n, n, *logits.shape[:-1])
        return jnp.moveaxis(sinkhorn(square, iters, first=first, eps=eps), (0, 1), (-2, -1))

    per_entry = 4.0 if eps else 10.0  # in an iteration; without eps on logarithms
    return Constraint(OFF * (1.0 - np.eye(n)).reshape(-1), matrix, per_entry * n * n * iters)


def convex(corners: np.ndarray) -> Constraint:
    """Convex combinations of ``corners`` [k, n, n], of which the first is the identity."""
    k, n, _ = corners.shape
    flat = corners.reshape(k, n * n).astype(np.float32)

    def matrix(logits):
        weights = jax.nn.softmax(logits.astype(stat_dtype(logits)), axis=-1)
        mixed = jnp.matmul(weights, flat.astype(weights.dtype), precision=jax.lax.Precision.HIGHEST)
        return mixed.reshape(*logits.shape[:-1], n, n)

    return Constraint(np.where(np.arange(k) == 0, 0.0, OFF), matrix, 2.0 * k * n * n)


def permutations(n: int) -> Constraint:
    """Convex combinations of all permutations, in lexicographic order: stream t gets stream ``order[t]``.

    Raises ValueError for more than 6 streams.
    """
    if n > MOST_PERMUTED:
        raise ValueError(
            f"residual.streams={n} have {math.factorial(n)} permutations; residual.constraint=permutations takes "
            f"at most {MOST_PERMUTED} streams ({math.factorial(MOST_PERMUTED)})"
        )
    return convex(np.stack([np.eye(n)[:, order] for order in itertools.permutations(range(n))]))


def circulant(n: int) -> Constraint:
    """Convex combinations of the cyclic shifts: shift k moves stream s to s + k mod n."""
    return convex(np.stack([np.roll(np.eye(n), k, axis=1) for k in range(n)]))


def kronecker(n: int) -> Constraint:
    """Kronecker products of convex combinations of the two 2 x 2 permutations.

    Raises ValueError unless n is a power of 2.
    """
    factors = n.bit_length() - 1
    if n != 1 << factors:
        raise ValueError(f"residual.streams={n} must be a power of 2 for residual.constraint=kronecker")
    small = permutations(2)

    def matrix(logits):
        product = jnp.ones((*logits.shape[:-1], 1, 1), stat_dtype(logits))
        for i in range(factors):
            factor = small.matrix(logits[..., 2 * i : 2 * i + 2])
            product = product[..., :, None, :, None] * factor[..., None, :, None, :]
            size = 2 << i
            product = product.reshape(*logits.shape[:-1], size, size)
        return product

    return Constraint(np.tile(small.start, factors), matrix, 16.0 * factors + 4.0 * n * n / 3)


def identity(n: int) -> Constraint:
    """The identity matrix, from no logits."""
    return Constraint(np.zeros(0), lambda logits: jnp.eye(n), 0.0)
