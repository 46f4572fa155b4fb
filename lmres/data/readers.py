"""Documents from inputs: plain text, JSONL, Parquet, ready-made ids, Hugging Face data sets."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .config import DataConfig
from .errors import DataError, shown
from .files import decode, open_bytes, scrub, strip_mark
from .sources import Input


@dataclasses.dataclass
class Counts:
    """What a reader has met so far.

    records: lines of text, lines of JSONL, rows. blank: documents or lines without any text. bad: records
    skipped because of `on_bad_record`. undecodable: standard-library files skipped. replacements: U+FFFD put
    in.
    source_bytes: bytes on disk read so far.
    """

    records: int = 0
    blank: int = 0
    bad: int = 0
    undecodable: int = 0
    replacements: int = 0
    source_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Document:
    """`value` is the text (never blank), or the ids (int64 [n], n > 0); `where` is its place for messages."""

    where: str
    value: str | np.ndarray


class Reader:
    """Iterates over the documents of `inputs` in order, once; `counts` grows meanwhile.

    Raises (while iterating):
      DataError: a file that cannot be read in full, text that is not UTF-8, a record without usable text, or
        an id outside 0 .. vocab_size - 1 (never skipped, whatever `on_bad_record` says: the vocabulary is
        wrong then).
    """

    def __init__(self, config: DataConfig, inputs: tuple[Input, ...], vocab_size: int | None = None):
        self.config, self.inputs, self.vocab_size = config, inputs, vocab_size
        self.counts = Counts()

    def __iter__(self) -> Iterator[Document]:
        readers = {
            "text": self._text,
            "stdlib": self._stdlib,
            "jsonl": self._jsonl,
            "parquet": self._parquet,
            "datasets": self._datasets,
        }
        for item in self.inputs:
            before = self.counts.source_bytes
            yield from readers[item.kind](item)
            if item.path.is_file():
                self.counts.source_bytes = before + item.path.stat().st_size

    def _text(self, item: Input) -> Iterator[Document]:
        unit = self.config.text_unit
        if unit == "file":
            with self._open(item.path) as (stream, _, start):
                raw = stream.read()
            self.counts.records += raw.count(b"\n") + (not raw.endswith(b"\n") and bool(raw))
            yield from self._checked(self._decoded(raw, item.path, 1, start), item.name)
            return
        paragraph: list[str] = []
        first = 1
        for number, line in self._lines(item.path):
            self.counts.records += 1
            if unit == "line":
                yield from self._checked(line, f"{item.name}:{number}")
            elif line.strip():
                first = first if paragraph else number
                paragraph.append(line)
            elif paragraph:
                yield Document(f"{item.name}:{first}", "\n".join(paragraph))
                paragraph = []
        if paragraph:
            yield Document(f"{item.name}:{first}", "\n".join(paragraph))

    def _stdlib(self, item: Input) -> Iterator[Document]:
        raw = item.path.read_bytes()
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            # A few sources declare another encoding; the default set is those that are UTF-8.
            self.counts.undecodable += 1
            return
        self.counts.records += raw.count(b"\n")
        yield from self._checked(text.replace("\r\n", "\n"), item.name)

    def _decoded(self, raw: bytes, path: Path, line: int, offset: int) -> str:
        text, replaced = decode(raw, path, self.config.errors, line, offset)
        self.counts.replacements += replaced
        return text.replace("\r\n", "\n")

    @contextlib.contextmanager
    def _open(self, path: Path) -> Iterator[tuple[BinaryIO, BinaryIO, int]]:
        """The stream after a byte-order mark, the raw file, and how many bytes the mark took."""
        with open_bytes(path) as (stream, raw):
            head = stream.peek(1024)[:1024]
            mark = len(head) - len(strip_mark(head, path))
            stream.read(mark)
            yield stream, raw, mark

    def _lines(self, path: Path) -> Iterator[tuple[int, str]]:
        """(number from 1, line without its end)."""
        before = self.counts.source_bytes
        with self._open(path) as (stream, raw, offset):
            for number, line in enumerate(stream, start=1):
                yield number, self._decoded(line, path, number, offset).removesuffix("\n")
                offset += len(line)
                self.counts.source_bytes = before + raw.tell()

    def _jsonl(self, item: Input) -> Iterator[Document]:
        for number, line in self._lines(item.path):
            where = f"{item.name}:{number}"
            if not line.strip():
                continue
            self.counts.records += 1
            try:
                record = json.loads(line)
            except json.JSONDecodeError as e:
                self._bad(where, f"not valid JSON: {e.msg} at column {e.colno} of {len(line)}")
            except (ValueError, RecursionError) as e:
                self._bad(where, f"not usable JSON: {e}")
            else:
                if isinstance(record, dict):
                    yield from self._record(record, item, where)
                else:
                    self._bad(where, f"a JSON {type(record).__name__}, not an object with keys")

    def _record(self, record: dict, item: Input, where: str) -> Iterator[Document]:
        key = self.config.ids_key if item.ids else self.config.text_key
        if key not in record:
            hint = ""
            if not item.ids and self.config.ids_key in record:
                hint = "; for ready-made ids set data.format to 'ids'"
            self._bad(where, f"no key {key!r}; keys found: {shown(record)}{hint}")
        else:
            yield from (self._ids if item.ids else self._value)(record[key], key, where)

    def _value(self, value: Any, key: str, where: str) -> Iterator[Document]:
        if isinstance(value, str):
            yield from self._checked(value, where)
        else:
            self._bad(where, f"{key!r} is {_kind_of(value)}, not a string")

    def _checked(self, text: str, where: str) -> Iterator[Document]:
        """The document, unless it is blank."""
        text, replaced = scrub(text, where, self.config.errors)
        self.counts.replacements += replaced
        if text.strip():
            yield Document(where, text)
        else:
            self.counts.blank += 1

    def _ids(self, value: Any, key: str, where: str) -> Iterator[Document]:
        """The record's ids; its number is the line or row, counted from 1."""
        if not isinstance(value, (list, np.ndarray)):
            return self._bad(where, f"{key!r} is {_kind_of(value)}, not a list of ids")
        try:
            ids = np.asarray(value) if len(value) else np.zeros(0, np.int64)
        except ValueError:  # lists of unequal length inside the list
            ids = np.zeros(0)
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            return self._bad(where, f"{key!r} is not a flat list of whole numbers")
        # 32 bits is what a store can hold.
        limit = 2**32 if self.vocab_size is None else self.vocab_size
        wrong = np.flatnonzero((ids < 0) | (ids >= limit))
        if wrong.size:
            raise DataError(
                f"{where}: record {where.rpartition(':')[2]} holds id {ids[wrong[0]]} at position "
                f"{wrong[0]}, outside the vocabulary of {limit} ids (0 .. {limit - 1}); mend the "
                "record, or raise the vocabulary"
            )
        if ids.size:
            yield Document(where, ids.astype(np.int64))
        else:
            self.counts.blank += 1

    def _bad(self, where: str, what: str) -> None:
        if self.config.on_bad_record == "error":
            raise DataError(f"{where}: {what}; mend the record, or set data.on_bad_record to 'skip'")
        self.counts.bad += 1

    def _parquet(self, item: Input) -> Iterator[Document]:
        key = self.config.ids_key if item.ids else self.config.text_key
        before, number = self.counts.source_bytes, 0
        with open_parquet(item.path) as file:
            names = file.schema_arrow.names
            if key not in names:
                raise DataError(f"{item.path}: no column {key!r}; columns found: {shown(names)}")
            total, size = max(1, file.metadata.num_rows), item.path.stat().st_size
            for batch in file.iter_batches(batch_size=1024, columns=[key]):
                for value in batch.column(0):
                    number += 1
                    self.counts.records += 1
                    where = f"{item.name}:{number}"
                    if item.ids:
                        yield from self._ids(_list_cell(value), key, where)
                    else:
                        yield from self._value(value.as_py(), key, where)
                self.counts.source_bytes = before + size * number // total

    def _datasets(self, item: Input) -> Iterator[Document]:
        for number, record in enumerate(_load_dataset(item.name), start=1):
            self.counts.records += 1
            yield from self._record(record, item, f"{item.name}:{number}")


def _kind_of(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _list_cell(cell) -> np.ndarray | Any:
    """A list cell as an array, without a Python object per id; anything else as Python shows it."""
    values = getattr(cell, "values", None)
    return values.to_numpy(zero_copy_only=False) if values is not None else cell.as_py()


@contextlib.contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`. Errors met while reading inside the `with` block become DataError."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install 'lmres[parquet]'") from e
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as e:
        raise DataError(f"{path}: not a readable Parquet file ({str(e).splitlines()[0]})") from e


def _load_dataset(spec: str):
    """Rows (dicts) of `NAME[:CONFIG][@SPLIT]`, or of a folder that `save_to_disk` wrote."""
    try:
        import datasets
    except ImportError as e:
        raise DataError(
            f"{spec}: data.format=datasets needs the package: pip install 'lmres[datasets]'"
        ) from e
    place, _, split = spec.rpartition("@")
    try:
        if not Path(place).is_dir():
            name, _, subset = place.partition(":")
            return datasets.load_dataset(name, subset or None, split=split)
        found = datasets.load_from_disk(place)
    except Exception as e:  # the package raises errors of many kinds, its own and those of the network
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise DataError(f"{spec}: the data set cannot be loaded: {reason}") from e
    if not isinstance(found, dict):
        return found
    if split not in found:
        raise DataError(f"{spec}: no split {split!r}; splits found: {shown(found)}")
    return found[split]
