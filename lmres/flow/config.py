"""The flow of a model as a setting: which read set, how it is joined to the ordinary attention, and how it is run."""

import dataclasses
import math
from typing import ClassVar, Literal

from lmres.flow.geometry import (
    OWN_ROW,
    Cone,
    Deep,
    Diagonal,
    Feedback,
    Geometry,
    PerHead,
    Pool,
    Recurrent,
    Standard,
    Top,
    parse,
)
from lmres.flow.reader import Reader
from lmres.flow.readset import ReadSet
from lmres.flow.store import Store

Schedule = Literal["auto", "parallel", "sequential", "wavefront", "chunked", "swept"]


@dataclasses.dataclass(frozen=True)
class FlowConfig:
    """Which cells of the token x layer grid a layer's attention reads.

    kind: the geometry in its short notation, such as "standard", "block(2)", "diagonal(-1/2)", "cone(1)", "deep"; with
      "+" between several, each is read by its share of the heads.
    adopt: "optional" keeps the own layer's past readable, "mandatory" leaves the past readable only through what the
      geometry adds; None is what the geometry is by nature.
    border: of a diagonal: "clip" stays at the first or last layer, "drop" lets the cell go.
    output: of a top, a deep read and a cone: with the output cell, keys and values of the column's output.
    combine: "joint": one softmax over all that is read. "gated": ordinary attention, plus tanh(g) times attention over
      what the geometry adds to it, with g one number per layer and head that starts at 0.
    projection: "producer": a layer's keys and values are its own, whoever reads them. "consumer": each reader makes
      its own of every source, which stores one key and value per (reader, source).
    bias: start of a learned logit bias per (reader layer, source layer), other than the own one, whose bias starts at
      0; None for no bias. bias_upward: start for the sources above the reader; None for ``bias``.
    schedule: how the cells are run. "auto": in the fewest steps that are exact. "swept": ``sweeps`` without gradient
      and ``gradient_sweeps`` with, each over ``groups`` groups of tokens in turn (1 is Jacobi); exact if enough.
    start: what the first sweep reads where nothing is computed yet: "zeros"; "embedding", what every layer makes of
      the embeddings; "plain", what one pass of ordinary attention leaves.
    """

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}

    kind: str = "standard"
    adopt: Literal["optional", "mandatory"] | None = None
    border: Literal["clip", "drop"] = "clip"
    output: bool = False
    combine: Literal["joint", "gated"] = "joint"
    projection: Literal["producer", "consumer"] = "producer"
    bias: float | None = None
    bias_upward: float | None = None
    schedule: Schedule = "auto"
    sweeps: int = 1
    gradient_sweeps: int = 2
    groups: int = 1
    start: Literal["zeros", "embedding", "plain"] = "zeros"

    @property
    def geometry(self) -> Geometry:
        """The geometry. Raises ValueError naming the key where the settings do not fit each other."""
        try:
            geometry = parse(self.kind)
        except ValueError as error:
            raise ValueError(f"flow.kind={error}") from None
        parts = geometry.parts if isinstance(geometry, PerHead) else (geometry,)
        for key, means, value in (("border", (Diagonal,), "drop"), ("output", (Top, Deep, Cone), True)):
            if getattr(self, key) == value:
                if not all(isinstance(part, (Standard, *means)) for part in parts) or geometry == Standard():
                    raise ValueError(f"flow.{key}={value} has no meaning for flow.kind={self.kind}")
                parts = tuple(dataclasses.replace(p, **{key: value}) if isinstance(p, means) else p for p in parts)
        geometry = PerHead(parts) if isinstance(geometry, PerHead) else parts[0]
        if self.adopt is not None and (isinstance(geometry, (PerHead, Pool)) or self.combine == "gated"):
            raise ValueError(
                f"flow.adopt={self.adopt} has no meaning for heads that are shared out, for flow.combine=gated, nor "
                f"for a pool: flow.kind={self.kind}"
            )
        if self.combine == "gated" and isinstance(geometry, (PerHead, Recurrent, Feedback, Pool)):
            raise ValueError(f"flow.combine=gated needs a geometry that reads the layers' own keys, not {self.kind}")
        if self.projection == "consumer" and isinstance(geometry, (PerHead, Pool)):
            raise ValueError(f"flow.projection=consumer cannot be had with flow.kind={self.kind}")
        if self.start == "plain" and isinstance(geometry, Pool):
            raise ValueError(f"flow.start=plain needs layers with keys of their own; flow.kind={self.kind} has none")
        return dataclasses.replace(geometry, adopt=self.adopt)

    @property
    def is_standard(self) -> bool:
        """Whether this is ordinary attention, run the ordinary way."""
        plain = isinstance(self.geometry, Standard) and self.adopt is None and self.combine == "joint"
        return plain and not self.has_bias and self.schedule in ("auto", "parallel")

    @property
    def has_bias(self) -> bool:
        """Whether there is a learned logit bias."""
        return self.bias is not None or self.bias_upward is not None

    def reads(self, layers: int) -> ReadSet:
        """The read set for ``layers`` layers. Raises ValueError naming the key where it does not fit them."""
        try:
            reads = self.geometry.reads(layers)
        except ValueError as error:
            raise ValueError(f"flow.kind={self.kind}: {error} (model.blocks={layers})") from None
        return dataclasses.replace(reads, terms=(*reads.terms, OWN_ROW)) if self.combine == "gated" else reads

    def parts(self, layers: int) -> tuple[ReadSet, ...]:
        """The read set of each share of the heads; with "gated", of what is added, own row included."""
        geometry = self.geometry
        return tuple(p.reads(layers) for p in (geometry.parts if isinstance(geometry, PerHead) else (geometry,)))

    def store(self, layers: int) -> Store:
        """Where the keys and values that are read lie."""
        geometry = self.geometry
        consumer = self.projection == "consumer" or geometry.projection == "consumer"
        channels = geometry.channels if isinstance(geometry, Pool) else 0
        return Store(self.reads(layers), "consumer" if consumer else geometry.projection, channels)

    def reader(self, layers: int, tokens: int, one_tile: bool) -> Reader:
        """The reader over a grid of ``tokens`` tokens. one_tile: whether all of them are run layer by layer."""
        return Reader(self.reads(layers), tokens, one_tile, self.store(layers), row=self.combine == "gated")

    def tiling(self, layers: int, tokens: int) -> tuple[Schedule, int, int]:
        """(schedule, number of tiles, tokens of a tile); tokens beyond ``tokens`` fill the last tile."""
        reads = self.reads(layers)
        schedule = self.resolve(reads, tokens)
        if schedule == "chunked":  # a tile is never shorter than the read set's, so that it ends where a chunk does
            each = reads.tile(tokens)
            return schedule, math.ceil(tokens / each), each
        tiles = {"parallel": 1, "swept": min(self.groups, tokens)}.get(schedule, tokens)
        return schedule, tiles, math.ceil(tokens / tiles)

    def check(self, layers: int, tokens: int, groups: int = 1, heads_from: str = "projections") -> None:
        """Raises ValueError, naming keys and numbers, where the settings do not fit a model of so many layers.

        groups: of key/value heads. heads_from: as in the model's config.
        """
        for key, least in (("sweeps", 0), ("gradient_sweeps", 1), ("groups", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"flow.{key}={getattr(self, key)} must be at least {least}")
        if self.is_standard:
            return
        self.resolve(self.reads(layers), tokens)
        shares = len(self.parts(layers))
        if groups % shares:
            raise ValueError(f"flow.kind={self.kind} shares {groups} key/value heads among {shares}; they must divide")
        store = self.store(layers)
        if not store.slots:
            raise ValueError(
                f"flow.kind={self.kind} with flow.adopt={self.adopt} leaves no token anything of another to read over "
                f"model.blocks={layers}"
            )
        if heads_from != "projections" and (store.projection != "producer" or store.last()):
            raise ValueError(
                f"flow.kind={self.kind} needs keys that are projected, and model.heads_from={heads_from} has none; set "
                "model.heads_from=projections"
            )

    def resolve(self, reads: ReadSet, tokens: int) -> Schedule:
        """The schedule for ``tokens`` tokens, never "auto". Raises ValueError where the one asked for is not exact."""
        found = {"swept": "sequential"}.get(reads.schedule_class(tokens), reads.schedule_class(tokens))
        pooled = isinstance(self.geometry, Pool)
        found = "sequential" if pooled else found  # its channels are ready when the column is done
        if self.schedule == "auto":
            return found
        slope, tile = reads.slope(tokens), reads.tile(tokens)
        wrong = (self.schedule == "parallel" and slope > 0) or (self.schedule == "chunked" and tile < 2)
        if wrong or (pooled and self.schedule in ("parallel", "wavefront")):
            raise ValueError(
                f"flow.schedule={self.schedule} cannot run flow.kind={self.kind} exactly over {tokens} tokens: its "
                f"slope is {slope}, its tile {tile} tokens; use {found}, or swept"
            )
        return self.schedule

    def unaligned(self, layers: int, tokens: int) -> "FlowConfig":
        """The same flow, run exactly whatever place in its row a document begins at: tiles that are a flow's chunks
        would have to begin with it."""
        exact = dataclasses.replace(self, schedule="auto")
        reads = self.reads(layers)
        chunked = exact.resolve(reads, tokens) == "chunked" and any(term.chunks for term in reads.terms)
        return dataclasses.replace(exact, schedule="sequential") if chunked else exact
