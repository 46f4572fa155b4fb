"""From the names in a `DataConfig` to the list of inputs to read, in an order that is always the same."""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from .config import DataConfig
from .errors import DataError, shown
from .files import COMPRESSED, as_path, is_remote, open_bytes

_KINDS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
# Not library code, or present on one machine and not on the next.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload"}
STORE_META = "meta.json"
STORE_FORMAT = "lmres-tokens"


@dataclasses.dataclass(frozen=True)
class Input:
    """One thing to read: `kind` is text, stdlib, jsonl, parquet or datasets; `ids` is True for ready-made
    token ids; `name` is the path, or the specification of a Hugging Face data set, and is what messages
    show."""

    kind: str
    name: str
    ids: bool = False

    @property
    def path(self) -> Path:
        return Path(self.name.rpartition("@")[0] if self.kind == "datasets" else self.name)

    def stamp(self) -> list:
        """[kind, name, bytes, modification time in ns]: changes when the file does, or a file in the folder.
        A data set on the Hub has no size and no time here, so a change of it there goes unnoticed."""
        if self.path.is_dir():
            states = [p.stat() for p in _walk(self.path)]
            return [
                self.kind,
                self.name,
                sum(s.st_size for s in states),
                max((s.st_mtime_ns for s in states), default=0),
            ]
        if self.kind == "datasets":
            return [self.kind, self.name, None, None]
        state = self.path.stat()
        return [self.kind, self.name, state.st_size, state.st_mtime_ns]


def is_store(name) -> bool:
    """Whether `name` is a folder that `prepare` wrote, complete or damaged."""
    folder = as_path(name, "prepared stores")
    if (folder / "train" / "tokens.bin").exists():
        return True
    try:
        meta = json.loads((folder / STORE_META).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no such file, or some other program's file of that name
        return False
    return isinstance(meta, dict) and meta.get("format") == STORE_FORMAT


def resolve(config: DataConfig, key: str) -> tuple[Input, ...]:
    """The inputs that `config.train` or `config.valid` (`key`) names, sorted within each entry.

    Raises:
      DataError: nothing found, a format that cannot be told, one file named twice, or text and ids mixed.
    """
    value = getattr(config, key)
    inputs = []
    for entry in (value,) if value is None or isinstance(value, str) else value:
        inputs += _entry(config, key, entry)
    seen = set()
    for item in inputs:
        real = os.path.realpath(item.name)
        if real in seen:
            raise DataError(f"data.{key}: {item.name} is named twice; its documents would count double")
        seen.add(real)
    if len({i.ids for i in inputs}) > 1:
        one, other = (next(i.name for i in inputs if i.ids is want) for want in (True, False))
        raise DataError(f"data.{key} mixes ready-made ids ({one}) and text ({other}); prepare them apart")
    return tuple(inputs)


def _entry(config: DataConfig, key: str, entry: str | None) -> list[Input]:
    if config.format == "datasets":
        if entry is None:
            raise DataError(
                f"data.{key} is empty; with data.format=datasets it must be NAME[:CONFIG][@SPLIT]"
            )
        if "@" not in entry:
            entry += "@train" if key == "train" else "@validation"
        return [Input("datasets", entry)]
    if entry is None or entry == "stdlib":
        if config.format not in ("auto", "stdlib"):
            raise DataError(
                f"data.{key} names no file, but data.format is {config.format!r}; name a file or folder"
            )
        return [Input("stdlib", str(p)) for p in stdlib_files()]
    if config.format == "stdlib":
        raise DataError(f"data.{key} is {entry!r}, but data.format is 'stdlib', which reads no other files")
    path = as_path(entry, "prepared stores").expanduser()
    if config.format == "store" or is_store(path):
        raise DataError(
            f"data.{key}: {entry} is to be a prepared store; name it alone in data.train, without data.valid"
        )
    if is_remote(entry):
        raise DataError(
            f"data.{key}: {entry} is no prepared store; text is read from this machine: `lmres data prepare` it, "
            "and copy the store there"
        )
    if path.is_dir():
        files = [p for p in _walk(path) if _wanted(config, p)]
        if not files:
            known = shown(_KINDS, 20)
            raise DataError(
                f"data.{key}: the folder {entry} holds no file of a known name ({known}, also .gz, .zst)"
            )
    elif path.exists():
        files = [path]
    else:
        files = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if os.path.isfile(p))
        if not files:
            raise DataError(
                f"data.{key}: {entry}: no such file or folder, and no file matches it as a pattern"
            )
    return [_input(config, key, p) for p in files]


def _walk(folder: Path) -> Iterator[Path]:
    """Files below `folder` in a fixed order, hidden ones left out."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(d for d in folders if not d.startswith("."))
        yield from (Path(root) / f for f in sorted(files) if not f.startswith("."))


def _kind(path: Path) -> str | None:
    plain = path.with_suffix("") if path.suffix in COMPRESSED else path
    return _KINDS.get(plain.suffix.lower())


def _wanted(config: DataConfig, path: Path) -> bool:
    kind = _kind(path)
    if config.format == "ids":
        return kind in ("jsonl", "parquet")
    return kind is not None if config.format == "auto" else kind == config.format


def _input(config: DataConfig, key: str, path: Path) -> Input:
    kind = _kind(path)
    if config.format == "ids":
        return Input("parquet" if kind == "parquet" else "jsonl", str(path), ids=True)
    if config.format != "auto":
        return Input(config.format, str(path))
    if kind is None:
        raise DataError(
            f"data.{key}: {path}: the name does not tell the format; set data.format to text, jsonl, "
            "parquet or ids"
        )
    keys = _first_keys(kind, path)
    return Input(kind, str(path), ids=config.ids_key in keys and config.text_key not in keys)


def _first_keys(kind: str, path: Path) -> set[str]:
    """Keys of the first record, to tell text from ids. Whatever is wrong with that record is left for the
    reader to report, which knows line and wanted key."""
    if kind == "parquet":
        from .readers import open_parquet

        with open_parquet(path) as file:
            return set(file.schema_arrow.names)
    if kind == "jsonl":
        with open_bytes(path) as (stream, _):
            for line in stream:
                if line.strip():
                    try:
                        record = json.loads(line.decode("utf-8-sig"))
                    except (ValueError, RecursionError):
                        return set()
                    return set(record) if isinstance(record, dict) else set()
    return set()


def stdlib_files() -> list[Path]:
    """The `.py` files of the running Python's standard library without its tests, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            d for d in folders if d not in _NOT_LIBRARY and not d.startswith(("config-", "."))
        )
        files += [Path(folder) / n for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata")]
    if not files:
        raise DataError(
            f"the standard library at {root} holds no .py files (a zipped Python?); name files in data.train"
        )
    return sorted(files, key=lambda p: p.relative_to(root).as_posix())
