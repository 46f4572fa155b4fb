"""The known read sets by name, as frozen specs: ``geometry.reads(layers)`` gives the read set for L layers.

Each also has a short notation, ``diagonal(-1/2)``, that ``parse`` reads and ``str`` writes; a layer map is
``map(1,1,3,3)``, one source layer per reader.
"""

import abc
import dataclasses
import re
from fractions import Fraction
from typing import Any, ClassVar, Literal

from lmres.flow.readset import BOTTOM, READER, TOP, Chunks, Layer, ReadSet, Term
from lmres.flow.store import Projection

OWN_ROW = Term()  # the own layer of all tokens so far: what every ordinary decoder reads
SELF = Term(far=0)


@dataclasses.dataclass(frozen=True)
class Geometry(abc.ABC):
    """adopt: "optional" keeps the own layer's past readable, "mandatory" leaves the past readable only through what the
    geometry adds; None is what the geometry is by nature.
    """

    kind: ClassVar[str]
    equation: ClassVar[str]  # of the read set, for tables
    source: ClassVar[str] = "own"
    projection: ClassVar[Projection] = "producer"  # who makes the keys and values, by nature

    adopt: Literal["optional", "mandatory"] | None = dataclasses.field(default=None, kw_only=True)

    @abc.abstractmethod
    def terms(self, layers: int) -> tuple[Term, ...]:
        """The terms of the read set by nature."""

    def source_layers(self, layers: int) -> int:
        """M, the number of source layers: L, or L + 1 with an output cell."""
        return layers

    def reads(self, layers: int) -> ReadSet:
        """The read set for ``layers`` layers. Raises IllegalReadSet or ValueError where the spec does not fit them."""
        terms = self.terms(layers)
        if self.adopt == "optional":
            terms = (*terms, OWN_ROW)
        elif self.adopt == "mandatory":
            terms = tuple(part for term in terms for part in without_own_past(term))
        return ReadSet(terms, layers, self.source_layers(layers), self.name)

    def __str__(self) -> str:
        return self._with(self._given())

    @property
    def name(self) -> str:
        """The short notation, with what it leaves out where that is set: ``top(output)``, ``diagonal(1,drop)``."""
        options = [(f, getattr(self, f.name)) for f in dataclasses.fields(self) if f.default is not dataclasses.MISSING]
        chosen = [f.name if value is True else value for f, value in options if value != f.default]
        return self._with([*self._given(), *chosen])

    def _given(self) -> list[Any]:
        """The values of the short notation."""
        values = [getattr(self, f.name) for f in dataclasses.fields(self) if f.default is dataclasses.MISSING]
        return [x for value in values for x in (value if isinstance(value, tuple) else (value,))]

    def _with(self, values: list[Any]) -> str:
        return f"{self.kind}({','.join(map(str, values))})" if values else self.kind


def without_own_past(term: Term) -> tuple[Term, ...]:
    """``term`` without the own layer of earlier tokens: below the own layer, the own token, and above."""
    lower = Layer("reader", -1)
    if term.low == READER and term.high == READER:
        return (dataclasses.replace(term, far=0),) if term.near <= 0 else ()
    if not (term.low in (BOTTOM, TOP) or _below(term.low)) or term.high.slope < 0 or isinstance(term.high.base, tuple):
        return (term,)  # a single slanted or mapped layer: the own layer is not its past
    own = (dataclasses.replace(term, far=0),) if term.near <= 0 else ()
    past = dataclasses.replace(term, near=max(term.near, 1))
    parts = [dataclasses.replace(past, high=lower)] if term.low != TOP else []
    if term.high != READER:
        parts.append(dataclasses.replace(past, low=Layer("reader", 1)) if term.low != TOP else past)
    return (*own, *parts)


def _below(layer: Layer) -> bool:
    return layer.base == "reader" and layer.offset < 0 and not layer.slope


@dataclasses.dataclass(frozen=True)
class Standard(Geometry):
    """Along the row of the own layer, as every ordinary decoder."""

    kind = "standard"
    equation = "(s, l), s <= t"
    source = "Vaswani et al. (arXiv:1706.03762)"

    def terms(self, layers):
        return (OWN_ROW,)


@dataclasses.dataclass(frozen=True)
class Map(Geometry):
    """Each layer reads the row of one target layer; a row above the own one is read of earlier tokens only.

    targets: f(1) .. f(L), from 1.
    """

    targets: tuple[int, ...]

    kind = "map"
    equation = "(s, f(l)), s <= t if f(l) <= l, s < t if f(l) > l"
    source = "LCKV (arXiv:2405.10637, 2410.14442); CLA, MLKV and YOCO are such maps"

    def terms(self, layers):
        if len(self.targets) != layers:
            raise ValueError(f"{self}: {len(self.targets)} target layers are given for {layers} layers")
        if not all(1 <= target <= layers for target in self.targets):
            raise ValueError(f"{self}: target layers must be in 1 .. {layers}")
        down = tuple(f if f <= l else 0 for l, f in enumerate(self.targets, 1))
        up = tuple(f if f > l else 0 for l, f in enumerate(self.targets, 1))
        return tuple(
            Term(low=Layer(base), high=Layer(base), near=near) for base, near in ((down, 0), (up, 1)) if any(base)
        )


@dataclasses.dataclass(frozen=True)
class Block(Geometry):
    """The own layer and the w - 1 below it, of all tokens so far."""

    layers_wide: int

    kind = "block"
    equation = "(s, m), s <= t, l - w < m <= l"

    def terms(self, layers):
        if self.layers_wide < 1:
            raise ValueError(f"{self}: a block is at least 1 layer wide")
        return (Term(low=Layer("reader", 1 - self.layers_wide)),)


@dataclasses.dataclass(frozen=True)
class Moda(Geometry):
    """The own row, and the own column below."""

    kind = "moda"
    equation = "(s, l), s <= t; (t, m), m < l"
    source = "MoDA (arXiv:2603.15619), without its slots for the MLPs"

    def terms(self, layers):
        return (OWN_ROW, Term(low=BOTTOM, far=0))


@dataclasses.dataclass(frozen=True)
class Rectangle(Geometry):
    """The own row, and all layers below of the chunk of C tokens up to the own one."""

    chunk: int

    kind = "rectangle"
    equation = "(s, l), s <= t; (s, m), m < l, c(s) = c(t), s <= t"
    source = "the chunk-visible kernel in MoDA's repository"

    def terms(self, layers):
        return (OWN_ROW, Term(low=BOTTOM, chunks=Chunks("same", self.chunk)))


@dataclasses.dataclass(frozen=True)
class Diagonal(Geometry):
    """One source per token: farther tokens are read at shallower (sigma < 0) or deeper (sigma > 0) layers.

    border: "clip" stays at the first or last layer, "drop" lets the cell go.
    """

    sigma: Fraction
    border: Literal["clip", "drop"] = "clip"

    kind = "diagonal"
    equation = "(s, l + floor(sigma (t - s))), rounded towards l"

    def terms(self, layers):
        slanted = Layer("reader", slope=Fraction(self.sigma))
        return (Term(low=slanted, high=slanted, border=self.border),)


@dataclasses.dataclass(frozen=True)
class Cone(Geometry):
    """The light cone: all that a wavefront of slope lambda has computed in time. output: with an output cell."""

    slope: Fraction
    output: bool = False

    kind = "cone"
    equation = "(t, l); (s, m), s < t, m <= l + lambda (t - s)"

    def source_layers(self, layers):
        return layers + self.output

    def terms(self, layers):
        if self.slope < 0:
            raise ValueError(f"{self}: the slope of a cone must not be negative")
        return (SELF, Term(low=BOTTOM, high=Layer("reader", slope=Fraction(self.slope)), near=1))


@dataclasses.dataclass(frozen=True)
class Recurrent(Geometry):
    """Each layer reads its own output of earlier tokens, through its own projections."""

    kind = "recurrent"
    equation = "(t, l); (s, l + 1), s < t, through layer l's own projections"
    source = "Recurrent Transformer (arXiv:2604.21215)"
    projection = "consumer"

    def source_layers(self, layers):
        return layers + 1

    def terms(self, layers):
        above = Layer("reader", 1)
        return (SELF, Term(low=above, high=above, near=1))


@dataclasses.dataclass(frozen=True)
class Top(Geometry):
    """The past is read at the top layer only. output: at the output cell instead."""

    output: bool = False

    kind = "top"
    equation = "(t, l); (s, M), s < t"
    source = "LCKV (arXiv:2405.10637) without its ordinary layers"

    def source_layers(self, layers):
        return layers + self.output

    def terms(self, layers):
        return (SELF, Term(low=TOP, high=TOP, near=1))


@dataclasses.dataclass(frozen=True)
class Deep(Geometry):
    """All layers of all earlier tokens. output: and their output cells."""

    output: bool = False

    kind = "deep"
    equation = "(t, l); (s, m), all m, s < t"

    def source_layers(self, layers):
        return layers + self.output

    def terms(self, layers):
        return (SELF, Term(low=BOTTOM, high=TOP, near=1))


@dataclasses.dataclass(frozen=True)
class Lag(Geometry):
    """The own row for the last D tokens, all layers of those before."""

    distance: int

    kind = "lag"
    equation = "(s, l), t - s < D; (s, m), all m, t - s >= D"

    def terms(self, layers):
        if self.distance < 1:
            raise ValueError(f"{self}: the lag is at least 1 token")
        return (Term(far=self.distance - 1), Term(low=BOTTOM, high=TOP, near=self.distance))


@dataclasses.dataclass(frozen=True)
class Chunk(Geometry):
    """The own row within the chunk of C tokens, all layers of the chunks before."""

    size: int

    kind = "chunk"
    equation = "(s, l), c(s) = c(t), s <= t; (s, m), all m, c(s) < c(t)"
    source = "own; the chunked deep read of a public nanochat study reads the top only"

    def terms(self, layers):
        return (
            Term(chunks=Chunks("same", self.size)),
            Term(low=BOTTOM, high=TOP, near=1, chunks=Chunks("earlier", self.size)),
        )


@dataclasses.dataclass(frozen=True)
class Feedback(Geometry):
    """One mixture of all layers, the output included, per earlier token; it is ready when the output is."""

    kind = "feedback"
    equation = "one mixed memory per s < t over m = 0 .. L"
    source = "Feedback Transformer (arXiv:2002.09402)"
    projection = "consumer"

    def source_layers(self, layers):
        return layers + 1

    def terms(self, layers):
        return (Term(low=TOP, high=TOP, near=1),)


@dataclasses.dataclass(frozen=True)
class Pool(Geometry):
    """Reader l reads channel l mod k of k mixtures of all layers per earlier token; all are ready with layer L."""

    channels: int

    kind = "pool"
    equation = "one of k mixtures of all m = 1 .. L per s < t"
    source = "WhiteMatter (arXiv:2608.18486)"
    projection = "channels"

    def terms(self, layers):
        if not 1 <= self.channels <= layers:
            raise ValueError(f"{self}: the channels must be in 1 .. {layers}, the number of layers")
        return (Term(low=TOP, high=TOP, near=1),)


@dataclasses.dataclass(frozen=True)
class PerHead(Geometry):
    """The heads are shared out evenly, and each share reads by a geometry of its own: ``standard + cone(1)``.

    parts: all with the same number of source layers, whose layers project for all readers.
    """

    parts: tuple[Geometry, ...]

    kind = "per head"
    equation = "that of the head's own part"

    def source_layers(self, layers):
        if any(part.projection != "producer" for part in self.parts):
            raise ValueError(f"{self}: only geometries that read the layers' own keys can share the heads")
        found = [part.source_layers(layers) for part in self.parts]
        if len(set(found)) > 1:
            raise ValueError(
                f"{self.name}: the parts have {', '.join(map(str, found))} source layers; with an output cell in one "
                "part, every part needs one"
            )
        return found[0]

    def terms(self, layers):
        return tuple(term for part in self.parts for term in part.terms(layers))

    def __str__(self):
        return " + ".join(map(str, self.parts))

    @property
    def name(self):
        return " + ".join(part.name for part in self.parts)


GEOMETRIES: dict[str, type[Geometry]] = {
    g.kind: g
    for g in (Standard, Map, Block, Moda, Rectangle, Diagonal, Cone, Recurrent, Top, Deep, Lag, Chunk, Feedback, Pool)
}  # fmt: skip


def parse(text: str) -> Geometry:
    """The geometry of a short notation: ``standard``, ``block(2)``, ``diagonal(-1/2)``, ``map(1,1,3,3)``, ``top``; with
    ``+`` between several, each is read by its share of the heads.

    Raises ValueError that says what would be right.
    """
    parts = re.split(r"\+(?![^()]*\))", text)
    return _parse_one(text) if len(parts) == 1 else PerHead(tuple(map(_parse_one, parts)))


def _parse_one(text: str) -> Geometry:
    found = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", text)
    if not found or found[1] not in GEOMETRIES:
        raise ValueError(f"{text!r} is no geometry; write one of {', '.join(GEOMETRIES)}, such as diagonal(-1/2)")
    cls = GEOMETRIES[found[1]]
    given = [part.strip() for part in found[2].split(",")] if found[2] else []
    wanted = [f for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    if cls is Map:
        return Map(tuple(_number(text, part, int) for part in given))
    if len(given) != len(wanted):
        raise ValueError(f"{text!r}: {cls.kind} takes {', '.join(f.name for f in wanted) or 'nothing'} in brackets")
    return cls(*(_number(text, part, f.type) for part, f in zip(given, wanted)))


def _number(text: str, part: str, kind: Any) -> Any:
    try:
        return kind(part)
    except (ValueError, ZeroDivisionError):
        what = "a whole number" if kind is int else "a number such as -1/2"
        raise ValueError(f"{text!r}: {part!r} is not {what}") from None
