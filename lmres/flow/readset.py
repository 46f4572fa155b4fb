"""The read-set algebra: which cells (token, layer) of the grid a cell may read, as one hashable description.

Tokens t = 1 .. T run along the grid, layers l = 1 .. L up it. Cell (t, l) computes h[t, l]. What it may read are keys
and values kv(s, m), made from h[s, m-1], of source layers m = 1 .. M; M = L + 1 adds the output cell, made from
h[s, L]. A read set is a union of terms. A term allows the source layers low .. high at some distances d = t - s, where
low and high may depend on the reader's layer and on d:

    standard      d >= 0: l                        block(w)     d >= 0: l-w+1 .. l
    diagonal      d >= 0: l + floor(sigma d)       cone         d = 0: l;  d >= 1: 1 .. l + floor(lambda d)

``allows`` evaluates it on arrays of any library; all else here follows from the terms alone: legality, slope, tile,
class, cache. What is counted cell by cell is in ``lmres.flow.counting``.

Source: own definitions of the project, in the notation of LCKV (arXiv:2405.10637) and FBT (arXiv:2608.08888).
"""

import dataclasses
import math
from fractions import Fraction
from typing import Any, Literal, NamedTuple

Class = Literal["parallel", "wavefront", "chunked", "swept"]


class IllegalReadSet(ValueError):
    """A read set in which some cell reads what cannot have been computed before it."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A source layer as a function of the reader's layer l and the distance d = t - s in tokens.

    base: "reader" (l), "bottom" (1), "top" (M), or one source layer per reader, 0 for none.
    offset: added to it. slope: layers per token of distance; what is added is slope x d rounded towards zero.
    """

    base: Literal["reader", "bottom", "top"] | tuple[int, ...] = "reader"
    offset: int = 0
    slope: Fraction = Fraction(0)

    def at(self, l: Any, d: Any, sources: int) -> Any:
        """Source layer, not limited to 1 .. M; l and d are ints or arrays that broadcast, sources is M."""
        if isinstance(self.base, tuple):
            found = l * 0
            for reader, target in enumerate(self.base, 1):
                found = found + (l == reader) * target
        else:
            found = {"reader": l, "bottom": 1, "top": sources}[self.base]
        climbed = abs(self.slope.numerator) * d // self.slope.denominator
        return found + self.offset + (climbed if self.slope >= 0 else -climbed)


READER, BOTTOM, TOP = Layer("reader"), Layer("bottom"), Layer("top")


class Chunks(NamedTuple):
    """Only source tokens of the reader's chunk of ``size`` tokens ("same"), or of the chunks before it ("earlier")."""

    which: Literal["same", "earlier"]
    size: int


@dataclasses.dataclass(frozen=True)
class Term:
    """Source layers low .. high at distances near .. far.

    far: None for no limit. chunks: a further condition, or None. border: what becomes of layers outside 1 .. M: "drop"
    them, or "clip" both ends to 1 .. M.
    """

    low: Layer = READER
    high: Layer = READER
    near: int = 0
    far: int | None = None
    chunks: Chunks | None = None
    border: Literal["clip", "drop"] = "drop"

    def layers_at(self, l: Any, d: Any, sources: int) -> tuple[Any, Any]:
        """(first, last) source layer, both inclusive; an empty range where the first is above the last."""
        low, high = self.low.at(l, d, sources), self.high.at(l, d, sources)
        if self.border == "clip":
            return _limit(low, 1, sources), _limit(high, 1, sources)
        return _limit(low, 1, sources + 1), _limit(high, 0, sources)

    def allows(self, d: Any, l: Any, m: Any, sources: int, chunk_t: Any, chunk_s: Any) -> Any:
        """Elementwise, as ``ReadSet.allows``; chunk_t, chunk_s: 0-based places that chunks are counted in."""
        low, high = self.layers_at(l, d, sources)
        ok = (d >= self.near) & (m >= low) & (m <= high)
        if self.far is not None:
            ok = ok & (d <= self.far)
        if self.chunks is not None:
            here, there = chunk_t // self.chunks.size, chunk_s // self.chunks.size
            ok = ok & ((there == here) if self.chunks.which == "same" else (there < here))
        return ok

    def distances(self, tokens: int | None = None) -> tuple[int, int | None]:
        """(nearest, farthest) distance at which some pair of ``tokens`` tokens meets it.

        tokens: None for any number. farthest: None for no limit, and below nearest where no pair does.
        """
        near, far = self.near, self.far
        if self.chunks is not None:
            if self.chunks.which == "same":
                far = _least(far, self.chunks.size - 1)
            else:
                near = max(near, 1)
                if tokens is not None and tokens <= self.chunks.size:
                    return near, near - 1
        return near, far if tokens is None else _least(far, tokens - 1)


@dataclasses.dataclass(frozen=True)
class ReadSet:
    """The union of ``terms`` for readers 1 .. ``layers`` (L) and sources 1 .. ``sources`` (M, at most L + 1).

    Raises IllegalReadSet, naming a cell and what it would read, for sets that no order of computation can serve.
    """

    terms: tuple[Term, ...]
    layers: int
    sources: int
    name: str = "read set"

    def __post_init__(self):
        if self.layers < 1 or not self.layers <= self.sources <= self.layers + 1:
            raise IllegalReadSet(
                f"{self.name}: {self.layers} layers need {self.layers} or {self.layers + 1} sources, not {self.sources}"
            )
        for term in self.terms:
            self._check(term)

    def _check(self, term: Term) -> None:
        for end in (term.low, term.high):
            if isinstance(end.base, tuple) and len(end.base) != self.layers:
                raise IllegalReadSet(f"{self.name}: {len(end.base)} source layers are given for {self.layers} readers")
            for target in end.base if isinstance(end.base, tuple) else ():
                if not 0 <= target <= self.sources:
                    raise IllegalReadSet(f"{self.name}: source layer {target} is not in 1 .. {self.sources}")
        if term.chunks is not None and term.chunks.size < 1:
            raise IllegalReadSet(f"{self.name}: chunks of {term.chunks.size} tokens; at least 1 is needed")
        near, far = term.distances()
        for d in range(near, (0 if far is None else min(far, 0)) + 1):
            for l in range(1, self.layers + 1):
                low, high = term.layers_at(l, d, self.sources)
                if low > high or (d == 0 and high <= l):
                    continue
                t = 1 + max(0, -d)
                later = "a token that comes later" if d < 0 else "a layer its own token has not reached"
                raise IllegalReadSet(
                    f"{self.name}: cell (t={t}, l={l}) would read (t={t - d}, l={high}), {later}; allow earlier tokens "
                    "at any layer, the own token up to the own layer"
                )

    def allows(self, t: Any, l: Any, s: Any, m: Any, place_t: Any = None, place_s: Any = None) -> Any:
        """Whether cell (t, l) may read kv(s, m), elementwise.

        t, l, s, m: 1-based ints or arrays that broadcast (numpy or jax, traced or not). place_t, place_s: 0-based
        places of t and s that chunks are counted in, where these are not t - 1 and s - 1.
        """
        chunk_t = t - 1 if place_t is None else place_t
        chunk_s = s - 1 if place_s is None else place_s
        found = (t != t) & (l != l) & (s != s) & (m != m)  # False in the shape of all four
        for term in self.terms:
            found = found | term.allows(t - s, l, m, self.sources, chunk_t, chunk_s)
        return found & (m >= 1) & (m <= self.sources)

    def slope(self, tokens: int | None = None) -> Fraction:
        """lambda: the largest (layers climbed) / (tokens back) of any read of an earlier token, at least 0.

        tokens: T; None for no limit. With chunks it is that of the nearest pair of tokens, whatever the phase.
        """
        return max(
            (Fraction(climbed, d) for term in self.terms for d, climbed in self._climbs(term, tokens)),
            default=Fraction(0),
        )

    def _climbs(self, term: Term, tokens: int | None):
        """(distance, most layers climbed) of earlier tokens, at the first distance of each climb."""
        for d in self.turns(term, tokens, nearest=1):
            ends = [(l, *term.layers_at(l, d, self.sources)) for l in range(1, self.layers + 1)]
            yield d, max([0, *(high - l for l, low, high in ends if low <= high)])

    def turns(self, term: Term, tokens: int | None = None, nearest: int = 0) -> list[int]:
        """The distances from ``nearest`` on at which what a term allows changes, and the first two; few, however gentle
        a slope is."""
        near, far = term.distances(tokens)
        first = max(near, nearest)
        found = {first, first + 1}
        for end in (term.low, term.high):
            if end.slope:
                climbs = range(1, self.layers + self.sources + abs(end.offset) + 2)
                found |= {math.ceil(climb / abs(end.slope)) for climb in climbs}
        return sorted(d for d in found if d >= first and (far is None or d <= far))

    def settled_distance(self, term: Term, tokens: int) -> int:
        """A distance from which on what a term allows stays as it is, for ``tokens`` tokens."""
        near, far = term.distances(tokens)
        ended = near if far is None or far >= tokens - 1 else far + 1
        return max(self._settled(term), ended)

    def _settled(self, term: Term) -> int:
        """A distance from which on the layers of a term stay as they are."""
        steps = [math.ceil((self.sources + 1) / abs(end.slope)) for end in (term.low, term.high) if end.slope]
        return max(steps, default=0) + max(term.near, 1)

    def tile(self, tokens: int) -> int:
        """The largest number of consecutive tokens, counted from the first, that can be run layer by layer at once: no
        upward read leads from one of them to another. ``tokens`` for class "parallel"."""
        nearest, size = tokens, None
        for term in self.terms:
            for d, climbed in self._climbs(term, tokens):
                if climbed > 0:
                    if term.chunks is not None and term.chunks.which == "earlier" and d < term.chunks.size:
                        size = math.gcd(size or 0, term.chunks.size)
                    else:
                        nearest = min(nearest, d)
                    break
        if size is None:
            return nearest
        return max(part for part in range(1, size + 1) if size % part == 0 and part <= nearest)

    def schedule_class(self, tokens: int) -> Class:
        """How T = ``tokens`` tokens are best run exactly: in one "parallel" pass over the layers, as a "wavefront", or
        "chunked"; "swept" where none of these saves at least half of the steps of going token by token."""
        if self.slope(tokens) == 0:
            return "parallel"
        wave, chunk = Fraction(math.ceil(self.slope(tokens))), Fraction(self.layers, self.tile(tokens))
        if min(wave, chunk) * 2 > self.layers:
            return "swept"
        return "wavefront" if wave <= chunk else "chunked"

    def wavefront_steps(self, tokens: int) -> int:
        """Steps of the wavefront schedule: L + lambda (T - 1), for the least integer lambda >= 1 that serves."""
        return self.layers + max(1, math.ceil(self.slope(tokens))) * (tokens - 1)

    def pairs(self, tokens: int | None = None, nearest: int = 0) -> set[tuple[int, int]]:
        """(l, m) for every source layer m that some cell of layer l reads at a distance of ``nearest`` or more, apart
        from its own cell. tokens: None for any number."""
        found = set()
        for term in self.terms:
            for d in self.turns(term, tokens, nearest):
                for l in range(1, self.layers + 1):
                    low, high = term.layers_at(l, d, self.sources)
                    found.update((l, m) for m in range(low, high + 1) if d > 0 or m != l)
        return found

    def cached(self, tokens: int) -> tuple[int, ...]:
        """The source layers whose keys and values later tokens read, in order: what a cache must keep."""
        return tuple(sorted({m for _, m in self.pairs(tokens, nearest=1)}))


def _limit(x: Any, low: int, high: int) -> Any:
    """``x`` limited to low .. high; ints stay ints, arrays of any library stay theirs."""
    if isinstance(x, int):
        return min(max(x, low), high)
    return x.clip(low, high)


def _least(a: int | None, b: int) -> int:
    return b if a is None else min(a, b)
