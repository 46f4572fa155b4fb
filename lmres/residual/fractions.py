"""Frac-Connections (arXiv:2503.14125) and Generalised Hyper-Connections (arXiv:2511.11238, Virtual Width Networks).

Both are Hyper-Connections (see ``hyper_connections``) over slots of D/m numbers:

    x = concat(A^T H)           m mixes of n slots, end to end: the branch's input
    H <- Ahat^T H + B^T g(x)    g(x) cut into m parts

    Frac           n = m: the state is the D numbers of the plain residual, cut into fractions. B is diagonal:
                   fraction j gets its own part of the output with weight B_j.
    Generalised    n >= m: an over-width state of n D/m numbers; B is [m, n]. n = m is Frac but for B; m = 1 is
                   Hyper-Connections.

Dynamic as there, each slot under a LayerNorm of its own; Generalised: tanh(N(H) W / sqrt(D/m)).

Legend: n slots, m fractions, B batch, S sequence, D width. State: [B, S, n, D/m].
Start: Frac A = Ahat = I, B = 1, W = 0, s = 0.01. Generalised [A | Ahat] = [I 0 | I 0; 0 0 | 0 I] with rows for slots,
that is, the first m slots are read; B[i, j] = 1 where i = j mod m; W = 0, s = 1. The Generalised state opens, which is
our choice, as copies: slot j is part j mod m of the embedding; and closes with the sum over the slots of each part
(times a constant where n is no multiple of m). So both start as exactly pre-norm, and m = 1 opens and closes as
Hyper-Connections.
Cost per sub-layer and token, k = 1 weight per slot for B in Frac and m in Generalised: n (m + n + k) parameters,
dynamic + D/m (m + n + k) + 2; FLOPs about 2 n D/m (2 m + n), dynamic + 2 n D/m (m + n + k + 2); (3 n/m + 2) D moved
when fused.
"""

import dataclasses
import math
from typing import ClassVar, Literal

from lmres.residual.hyper_connections import Slots
from lmres.residual.interface import check_not_negative
from lmres.residual.streams import check_counts


def check_divides(fractions: int, width: int) -> None:
    """Raises ValueError unless the width can be cut into so many fractions."""
    if width % fractions:
        raise ValueError(
            f"model.width={width} is not a multiple of residual.fractions={fractions}; change one of them"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FracConnections(Slots):
    """The plain residual's state cut into fractions that are mixed.

    fractions: m, a divisor of the width.
    dynamic: let the weights depend on the fractions.
    eps: of the norm before the dynamic projection.
    """

    kind: Literal["frac"] = "frac"
    fractions: int = 4
    dynamic: bool = True
    eps: float = 1e-5

    equation: ClassVar[str] = "x = concat(Y' H),  H <- A' H + diag(B) split(g(x)), H = split(h)"
    source: ClassVar[str] = "arXiv:2503.14125"

    @property
    def name(self):
        return f"frac-{'' if self.dynamic else 'static-'}{self.fractions}"

    @property
    def slots(self):
        return self.fractions

    def check(self, depth, width):
        check_counts(fractions=self.fractions)
        check_divides(self.fractions, width)
        check_not_negative(eps=self.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneralizedHyperConnections(Slots):
    """A state that is n/m times as wide as the branches.

    streams: n, the slots, at least m.
    fractions: m, the slots that make up a branch's input; a divisor of the width.
    dynamic: let the weights depend on the slots.
    eps: of the norm before the dynamic projection.
    """

    kind: Literal["ghc"] = "ghc"
    streams: int = 4
    fractions: int = 2
    dynamic: bool = True
    eps: float = 1e-5

    full_write: ClassVar[bool] = True
    first_scale: ClassVar[float] = 1.0
    equation: ClassVar[str] = "x = concat(A' H),  H <- Ahat' H + B' split(g(x)), slots of D/m"
    source: ClassVar[str] = "arXiv:2511.11238"
    left_out: ClassVar[str] = (
        "the embedding table as wide as the state, and the readout Linear(GroupNorm), whose groups are not certain"
    )

    @property
    def name(self):
        return f"ghc-{'' if self.dynamic else 'static-'}{self.streams}-{self.fractions}"

    def temperature(self, width):
        return math.sqrt(width / self.fractions)

    def check(self, depth, width):
        check_counts(streams=self.streams, fractions=self.fractions)
        if self.streams < self.fractions:
            raise ValueError(
                f"residual.streams={self.streams} is less than residual.fractions={self.fractions}: a branch's input "
                "is made of that many slots"
            )
        check_divides(self.fractions, width)
        check_not_negative(eps=self.eps)
