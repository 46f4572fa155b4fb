"""What commands print: tables, JSON, progress."""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def print_json(value: Any) -> None:
    """One JSON document on stdout; NaN and infinity, which JSON has not, are null."""
    print(json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False))


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(value: Any, path: Path) -> None:
    """One JSON document in a file, in one move."""
    write_text(json.dumps(plain(value), indent=1, allow_nan=False) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """A file, in one move; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Aligned columns on stdout, the first ``left`` of them to the left."""
    widths = [max(map(len, column)) for column in zip(columns, *rows)]
    for row in (columns, *rows):
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())
