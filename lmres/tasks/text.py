"""No task."""

import dataclasses
from typing import ClassVar, Literal


@dataclasses.dataclass(frozen=True)
class Text:
    """The text of the ``data`` section. kind: "text"."""

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}

    kind: Literal["text"] = "text"

    def check(self) -> None:
        """Nothing can be wrong with it."""


TEXT = Text()
