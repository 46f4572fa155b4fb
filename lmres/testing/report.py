"""What a check says: figures when it holds, why it was skipped, or a ``ResidualCheckError``."""

import dataclasses
from typing import Any

import chex
import jax
import numpy as np


class ResidualCheckError(AssertionError):
    """A connection breaks a promise of the interface; the message says which, where, by how much and what is right.

    check: name of the check, a key of ``lmres.testing.CHECKS``.
    """

    def __init__(self, check: str, connection: Any, message: str):
        super().__init__(f"{check}: {type(connection).__name__}: {message}")
        self.check = check


class Wrong(Exception):
    """Raised inside a check, with what is wrong."""


class Skipped(Exception):
    """Raised inside a check that cannot be run here, with the reason."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``check_residual`` ran on a connection that passed.

    connection: the spec.
    passed: check -> its figures (largest errors, counts, the tolerance).
    skipped: check -> why it could not be run. A skipped check says nothing about the connection.
    """

    connection: Any
    passed: dict[str, dict[str, Any]]
    skipped: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.connection!r}: {len(self.passed)} checks passed, {len(self.skipped)} skipped"]
        for name, figures in self.passed.items():
            shown = ", ".join(f"{key} {_shown(value)}" for key, value in figures.items())
            lines.append(f"  passed   {name:9s} {shown}")
        lines += [f"  skipped  {name:9s} {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def where(path: tuple[Any, ...]) -> str:
    """A tree path as ``layers/weight``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def compare(actual: Any, expected: Any, tolerance: float, what: str, hint: str) -> float:
    """The largest error of ``actual`` against ``expected``, relative to the largest entry of each leaf.

    A leaf's scale is at least a hundredth of the largest of all, since what is near zero has no relative accuracy.
    Raises Wrong, naming the leaf and the entry, above ``tolerance``; ``hint`` ends the message.
    """
    try:
        chex.assert_trees_all_equal_shapes(actual, expected)
    except AssertionError as error:
        raise Wrong(f"{what} differ in structure. {hint} {error}") from None
    floor = 1e-2 * max((float(np.max(np.abs(leaf), initial=0)) for leaf in jax.tree.leaves(expected)), default=0.0)
    largest, message = 0.0, ""
    leaves = jax.tree_util.tree_leaves_with_path(actual)
    for (path, a), b in zip(leaves, jax.tree.leaves(expected), strict=True):
        if not np.size(a):
            continue
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        gap = np.abs(a - b)
        gap = np.where(np.isfinite(gap), gap, np.inf)
        at = np.unravel_index(np.argmax(gap), gap.shape)
        scale = max(float(np.max(np.abs(b))), floor) or 1.0
        error = float(gap[at]) / scale
        if error > largest:
            entry = f"[{', '.join(str(int(i)) for i in at)}]" if at else ""
            message = (
                f"{what} differ at {where(path)}{entry}: {a[at]:.6g} against {b[at]:.6g}, "
                f"{error:.1e} of the largest entry; at most {tolerance:.0e} is rounding. {hint}"
            )
            largest = error
    if largest > tolerance:
        raise Wrong(message)
    return largest
