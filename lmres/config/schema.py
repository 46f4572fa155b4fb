"""What a run is made of: the rooms' own configs side by side.

Each room owns a frozen dataclass; nothing here repeats a field or a default. A section whose type is a union
of dataclasses is tagged by its ``kind``.
"""

import contextlib
import dataclasses
import functools
import types
import typing
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import pydantic

from lmres.data.config import DataConfig
from lmres.flow.config import FlowConfig
from lmres.model.config import ModelConfig
from lmres.residual import Plain, Residual
from lmres.sharding import MeshConfig
from lmres.tasks import Task, Text
from lmres.train.config import LogConfig, OptimizerConfig, ScheduleConfig, TrainConfig

_FORBID = {"extra": "forbid"}
Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One training run.

    name: of the run, for its folder and in reports; None takes the config file's name.
    """

    __pydantic_config__: ClassVar[dict] = _FORBID

    name: str | None = None
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    residual: Annotated[Residual, pydantic.Field(discriminator="kind")] = dataclasses.field(
        default_factory=Plain
    )
    flow: FlowConfig = dataclasses.field(default_factory=FlowConfig)
    task: Annotated[Task, pydantic.Field(discriminator="kind")] = dataclasses.field(default_factory=Text)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)

    def __post_init__(self):
        """What a residual must know of the model is filled in; where the two disagree ``check_config`` says so."""
        if self.model.heads >= 1:
            with contextlib.suppress(ValueError):
                fitted = self.residual.fit(self.model.kv, self.model.head_size)
                object.__setattr__(self, "residual", fitted)


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """What a comparison adds to a run: the ``compare`` section of its file.

    variants: names of the compared runs. In the file: a mapping from name to the settings in which a variant
      differs from the rest of the file, or a list of such settings, named after their residual and flow.
    seeds: every variant is trained once with each, as its train.seed.
    baseline: the variant that the others are compared with; None is the first.
    """

    __pydantic_config__: ClassVar[dict] = _FORBID

    variants: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    baseline: str | None = None


class Section(NamedTuple):
    """A section's classes by kind (one class under "" if it has no kinds), and its default."""

    classes: dict[str, type]
    default: Any

    @property
    def tagged(self) -> bool:
        return "" not in self.classes


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """Types of a dataclass's fields, by name."""
    resolved = typing.get_type_hints(cls)
    return {field.name: resolved[field.name] for field in dataclasses.fields(cls)}


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    # ``Literal[...] | None`` is a typing.Union, unlike ``int | None``.
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if union else (annotation,)


@functools.cache
def sections(cls: type = RunConfig) -> dict[str, Section]:
    """The sections of ``cls`` by name: its fields whose types are dataclasses."""
    found = {}
    for field in dataclasses.fields(cls):
        classes = members(hints(cls)[field.name])
        if dataclasses.is_dataclass(classes[0]):
            tagged = len(classes) > 1
            found[field.name] = Section(
                {c.kind if tagged else "": c for c in classes}, field.default_factory()
            )
    return found


def describe(annotation: Any) -> str:
    """A type in words: "integer or null"."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if len(members(annotation)) > 1:
        return " or ".join(describe(a) for a in members(annotation))
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in args)
    if origin is tuple:
        many = "list of" if args[-1] is Ellipsis else f"list of {len(args)}"
        return f"{many} {describe(args[0])}{'' if args[0] is str else 's'}"
    names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}
    return names[annotation]
