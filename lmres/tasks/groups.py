"""Small finite groups as multiplication tables.

Elements are numbers 0 .. order - 1, and 0 is the identity. The order is part of what a trained model means and does
not change:

    Zn       k stands for k mod n, written additively: table[a, b] = (a + b) mod n
    Sn, An   the permutations (the even ones) of 0 .. n - 1 in lexicographic order of their images
             (p(0), p(1), ...); table[a, b] is "b, then a": i -> a(b(i))

A name also fixes the letters of the word problem: all elements, or for ``swap-Sn`` the identity and the n(n-1)/2
transpositions of Sn.
"""

import dataclasses
import functools
import itertools
from typing import Literal, get_args

import numpy as np

Name = Literal["Z2", "Z6", "S3", "A4", "S4", "A5", "swap-S4", "swap-S5"]
GROUPS: tuple[str, ...] = get_args(Name)

_SWAPS = "swap-"


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """A group and its letters.

    table: int32 [order, order], table[a, b] = the number of the product a b; read-only. letters: int32 [G], ascending,
    the elements that words are made of; read-only. permutations: int8 [order, n], row a holds the images of element
    a, read-only, or None for a cyclic group.
    """

    name: str
    table: np.ndarray
    letters: np.ndarray
    permutations: np.ndarray | None

    @property
    def order(self) -> int:
        """Number of elements."""
        return len(self.table)


@functools.cache
def group(name: str) -> Group:
    """The group of a name in ``GROUPS``. Raises ValueError for any other."""
    if name not in GROUPS:
        raise ValueError(f"no group {name!r} (groups: {', '.join(GROUPS)})")
    family, n = name.removeprefix(_SWAPS)[0], int(name[-1])
    if family == "Z":
        permutations, table = None, np.add.outer(np.arange(n), np.arange(n)) % n
    else:
        every = np.array(list(itertools.permutations(range(n))), np.int8)
        permutations = every[[_is_even(p) for p in every]] if family == "A" else every
        numbers = {p.tobytes(): k for k, p in enumerate(permutations)}
        table = np.array([[numbers[a[b].tobytes()] for b in permutations] for a in permutations])
    letters = np.arange(len(table))
    if name.startswith(_SWAPS):
        moved = (permutations != np.arange(n)).sum(1)
        letters = letters[moved <= 2]  # none moves a single point
    table, letters = table.astype(np.int32), letters.astype(np.int32)
    for array in (table, letters, permutations):
        if array is not None:
            array.setflags(write=False)
    return Group(name, table, letters, permutations)


def _is_even(permutation: np.ndarray) -> bool:
    inversions = sum(a > b for a, b in itertools.combinations(permutation.tolist(), 2))
    return inversions % 2 == 0
