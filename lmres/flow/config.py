"""The flow of a model as a setting: which read set, how it is joined to the ordinary attention, and how it is run."""

import dataclasses
from typing import ClassVar, Literal

from lmres.flow.geometry import Diagonal, Feedback, Geometry, Pool, Recurrent, Standard, parse
from lmres.flow.readset import ReadSet

Schedule = Literal["auto", "parallel", "sequential", "wavefront", "chunked", "swept"]


@dataclasses.dataclass(frozen=True)
class FlowConfig:
    """Which cells of the token x layer grid a layer's attention reads.

    kind: the geometry in its short notation, such as "standard", "block(2)", "diagonal(-1/2)", "cone(1)", "deep".
    adopt: "optional" keeps the own layer's past readable, "mandatory" leaves the past readable only through what the
      geometry adds; None is what the geometry is by nature.
    border: of a diagonal: "clip" stays at the first or last layer, "drop" lets the cell go.
    bias: start of a learned logit bias per (reader layer, source layer), other than the own one, whose bias starts at
      0; None for no bias.
    schedule: how the cells are run. "auto": in the fewest steps that are exact. "swept": ``sweeps`` without gradient
      and ``gradient_sweeps`` with, each over ``groups`` groups of tokens in turn (1 is Jacobi); exact if enough.
    """

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}

    kind: str = "standard"
    adopt: Literal["optional", "mandatory"] | None = None
    border: Literal["clip", "drop"] = "clip"
    bias: float | None = None
    schedule: Schedule = "auto"
    sweeps: int = 1
    gradient_sweeps: int = 2
    groups: int = 1

    @property
    def geometry(self) -> Geometry:
        """The geometry. Raises ValueError naming the key where the settings do not fit each other."""
        try:
            geometry = parse(self.kind)
        except ValueError as error:
            raise ValueError(f"flow.kind={error}") from None
        if isinstance(geometry, (Recurrent, Feedback, Pool)):
            raise ValueError(f"flow.kind={self.kind} is described in lmres.flow; the model cannot run it yet")
        if isinstance(geometry, Diagonal):
            geometry = dataclasses.replace(geometry, border=self.border)
        elif self.border != "clip":
            raise ValueError(f"flow.border={self.border} has no meaning for flow.kind={self.kind}")
        return dataclasses.replace(geometry, adopt=self.adopt)

    @property
    def is_standard(self) -> bool:
        """Whether this is ordinary attention, run the ordinary way."""
        plain = isinstance(self.geometry, Standard) and self.adopt is None
        return plain and self.bias is None and self.schedule in ("auto", "parallel")

    def reads(self, layers: int) -> ReadSet:
        """The read set for ``layers`` layers. Raises ValueError naming the key where it does not fit them."""
        try:
            return self.geometry.reads(layers)
        except ValueError as error:
            raise ValueError(f"flow.kind={self.kind}: {error}") from None

    def check(self, layers: int, tokens: int) -> None:
        """Raises ValueError, naming keys and numbers, where the settings do not fit a model of so many layers."""
        for key, least in (("sweeps", 0), ("gradient_sweeps", 1), ("groups", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"flow.{key}={getattr(self, key)} must be at least {least}")
        if not self.is_standard:
            self.resolve(self.reads(layers), tokens)

    def resolve(self, reads: ReadSet, tokens: int) -> Schedule:
        """The schedule for ``tokens`` tokens, never "auto". Raises ValueError where the one asked for is not exact."""
        found = {"swept": "sequential"}.get(reads.schedule_class(tokens), reads.schedule_class(tokens))
        if self.schedule == "auto":
            return found
        slope, tile = reads.slope(tokens), reads.tile(tokens)
        if (self.schedule == "parallel" and slope > 0) or (self.schedule == "chunked" and tile < 2):
            raise ValueError(
                f"flow.schedule={self.schedule} cannot run flow.kind={self.kind} exactly over {tokens} tokens: its "
                f"slope is {slope}, its tile {tile} tokens; use {found}, or swept"
            )
        return self.schedule
