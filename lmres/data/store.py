"""The token store: a folder of flat token files that are read through memory maps.

meta.json              StoreInfo as JSON; written last
train/tokens.bin       all tokens of all documents one after the other, uint16 or uint32, little-endian
train/offsets.npy      int64 [D + 1], where each document begins; the last entry is the number of tokens
train/bytes.npy        int64 [D, 2], UTF-8 bytes of each document, and of these the bytes after its first
                       token (absent for ready-made ids)
valid/                 the same
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path

import numpy as np

from .errors import DataError
from .files import as_path, is_remote
from .sources import STORE_FORMAT, STORE_META

VERSION = 1


@dataclasses.dataclass(frozen=True)
class SplitInfo:
    """Numbers of one split.

    documents, tokens: counts, separators included in the tokens. targets: tokens that are predicted, all but
    the first of each document. text_bytes: UTF-8 bytes of the text. target_bytes: of these, what the targets
    stand for (a separator stands for none). Both are None for ready-made ids. content: digest of tokens and
    offsets.
    """

    documents: int
    tokens: int
    targets: int
    text_bytes: int | None
    target_bytes: int | None
    content: str


@dataclasses.dataclass(frozen=True)
class StoreInfo:
    """What a prepared store holds and what it was made from; the content of its `meta.json`.

    tokenizer: fingerprint of the tokenizer, None for ready-made ids. vocab_size: every id is below it.
    eos_id: the separator after each document, None for ready-made ids. sources: per source ("train", and
    "valid" when it has files of its own): the files with their sizes, and the counts of `readers.Counts` plus
    `in_valid`, the training documents left out because they are in the validation set. made_from: the
    settings and digests whose change makes the store stale, and `fingerprint` their digest. reused: True when
    `prepare` found it ready.
    """

    path: Path
    fingerprint: str
    tokenizer: str | None
    vocab_size: int
    eos_id: int | None
    dtype: str
    splits: dict[str, SplitInfo]
    sources: dict[str, dict]
    made_from: dict[str, object]
    reused: bool = False

    def facts(self) -> dict[str, str]:
        """What there is, by name, for a report."""
        told = {"tokenizer": self.tokenizer or "ready-made ids", "vocabulary": f"{self.vocab_size}"}
        for name, split in self.splits.items():
            size = "" if split.text_bytes is None else f", {split.text_bytes:,} bytes"
            told[name] = f"{split.documents:,} documents, {split.tokens:,} tokens{size}"
        return told

    def lines(self) -> list[str]:
        """A summary for people, a few short lines."""
        out = [
            f"store {self.path} ({'reused' if self.reused else 'new'}), vocabulary {self.vocab_size}, "
            f"{self.dtype}"
        ]
        for name, s in self.splits.items():
            size = "" if s.text_bytes is None else f", {s.text_bytes} bytes of text"
            out.append(f"{name}: {s.documents} documents, {s.tokens} tokens{size}")
        for name, source in self.sources.items():
            seen = ", ".join(f"{v} {k}" for k, v in source["counts"].items() if v or k == "records")
            out.append(f"read for {name}: {len(source['files'])} files, {seen}")
        return out


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """One split, memory-mapped. tokens: uint16 or uint32 [T]. offsets: int64 [D + 1]. info: its numbers."""

    name: str
    path: Path
    tokens: np.ndarray
    offsets: np.ndarray
    info: SplitInfo

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document with its separator, int64 [n]."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].astype(np.int64)

    def verify(self) -> None:
        """Reads everything and compares it with the digest written at preparation.

        Raises:
          DataError: the content has changed since.
        """
        digest = hashlib.blake2b(digest_size=16)
        for start in range(0, len(self.tokens), 1 << 22):
            digest.update(self.tokens[start : start + (1 << 22)].tobytes())
        digest.update(self.offsets.tobytes())
        if digest.hexdigest() != self.info.content:
            raise DataError(
                f"{self.path}: the tokens differ from those written (bad disk or copy?); prepare it again"
            )


@dataclasses.dataclass(frozen=True)
class Store:
    """A prepared store: `info`, and `splits` by name ("train", "valid")."""

    info: StoreInfo
    splits: dict[str, TokenSplit]


class SplitWriter:
    """Writes one split into `folder`, block by block. Nothing is kept in memory but 8 to 24 bytes per
    document."""

    def __init__(self, folder: Path, dtype: np.dtype):
        folder.mkdir(parents=True)
        self.folder, self.dtype = folder, np.dtype(dtype).newbyteorder("<")
        self._file = open(folder / "tokens.bin", "wb")  # noqa: SIM115 (open from block to block; see close)
        self._digest = hashlib.blake2b(digest_size=16)
        self._lengths: list[np.ndarray] = []
        self._bytes: list[np.ndarray] = []
        self.tokens, self.documents, self.max_id = 0, 0, -1

    def extend(self, tokens: np.ndarray, lengths: np.ndarray, sizes: np.ndarray | None) -> None:
        """Appends documents: tokens [T] of all of them, lengths [D], sizes [D, 2] as in bytes.npy or None."""
        if not len(tokens):
            return
        self.max_id = max(self.max_id, int(tokens.max()))
        # numpy's astype would wrap 65536 to 0 without a word.
        if self.max_id > np.iinfo(self.dtype).max or int(tokens.min()) < 0:
            raise DataError(f"id {self.max_id} or {tokens.min()} does not fit a store of {self.dtype}")
        raw = tokens.astype(self.dtype).tobytes()
        self._file.write(raw)
        self._digest.update(raw)
        self._lengths.append(np.asarray(lengths, np.int64))
        if sizes is not None:
            self._bytes.append(np.asarray(sizes, np.int64))
        self.tokens += len(tokens)
        self.documents += len(lengths)

    def close(self) -> SplitInfo:
        """Writes what is left to disk and returns the numbers."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        offsets = np.zeros(self.documents + 1, np.int64)
        np.cumsum(np.concatenate([np.zeros(0, np.int64), *self._lengths]), out=offsets[1:])
        np.save(self.folder / "offsets.npy", offsets)
        self._digest.update(offsets.tobytes())
        text = target = None
        if self._bytes:
            sizes = np.concatenate(self._bytes)
            np.save(self.folder / "bytes.npy", sizes)
            text, target = (int(n) for n in sizes.sum(0))
        return SplitInfo(
            self.documents, self.tokens, self.tokens - self.documents, text, target, self._digest.hexdigest()
        )

    def abandon(self) -> None:
        """Closes the file of a split that will not be finished."""
        self._file.close()


def write_meta(info: StoreInfo, folder: Path) -> None:
    """Writes `meta.json` into `folder`; the store is complete after that."""
    content = dataclasses.asdict(info)
    del content["path"], content["reused"]
    with open(folder / STORE_META, "w", encoding="utf-8") as file:
        json.dump({"format": STORE_FORMAT, "version": VERSION, **content}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def open_store(path: str | os.PathLike, cache: Path | None = None) -> Store:
    """Opens a folder that `prepare` wrote; the tokens stay on disk.

    Args:
      path: the folder; or gs://BUCKET/FOLDER, s3://BUCKET/FOLDER, where one was copied to. From there it is copied
        to `cache` once and checked, since a memory map needs a file of this machine.
      cache: None for `store_cache()`.
    Raises:
      DataError: not a store, not complete, damaged (sizes that do not fit), or written by a newer lmres; an object
        store that cannot be read. A flipped bit is found only by `TokenSplit.verify`, which reads everything.
    """
    folder = source = as_path(path, "prepared stores")
    if is_remote(path):
        folder = _fetched(source, store_cache() if cache is None else cache)
    meta = dataclasses.replace(_read_meta(folder), path=source)
    splits = {name: _open_split(folder / name, info, meta.dtype) for name, info in meta.splits.items()}
    return Store(meta, splits)


def store_cache() -> Path:
    """Where stores are kept unless `data.cache_dir` says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmres" / "data"


def _fetched(source: Path, cache: Path) -> Path:
    """The copy in `cache` of a store on an object store. It is at its name only when complete; of several processes
    that copy it at a time, one's copy stays."""
    try:
        info = _read_meta(source)
        meta = (source / STORE_META).read_bytes()
        folder = cache / f"copy-{hashlib.sha256(f'{source}'.encode() + meta).hexdigest()[:32]}"
        if folder.exists():
            return folder
        work = cache / f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        try:
            for name in info.splits:
                (work / name).mkdir(parents=True)
                for file in ("tokens.bin", "offsets.npy", "bytes.npy"):
                    if file == "bytes.npy" and not (source / name / file).exists():
                        continue  # ready-made ids
                    with (source / name / file).open("rb") as there, open(work / name / file, "wb") as here:
                        shutil.copyfileobj(there, here, 1 << 24)
            (work / STORE_META).write_bytes(meta)
            for name, split in info.splits.items():
                _open_split(work / name, split, info.dtype).verify()
            try:
                os.rename(work, folder)
            except OSError:
                if not folder.exists():
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return folder
    except DataError as e:
        raise DataError(f"{source}: {e}") from e
    except Exception as e:  # each object store's package has errors of its own
        told = " ".join(str(e).split())[:200]
        raise DataError(f"{source}: cannot be copied to {cache} ({type(e).__name__}: {told})") from e


def _broken(path: Path, what: str) -> DataError:
    return DataError(
        f"{path}: the prepared store is damaged or incomplete ({what}); delete the folder and prepare it "
        "again"
    )


def _read_meta(path: Path) -> StoreInfo:
    file = path / STORE_META
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; a prepared store is written by `lmres data prepare`")
    if not file.is_file():
        raise _broken(path, f"no {STORE_META}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise _broken(path, f"{STORE_META} is not valid JSON: {e}") from e
    if not isinstance(content, dict) or content.pop("format", None) != STORE_FORMAT:
        raise DataError(f"{path}: {STORE_META} is not that of an lmres token store")
    version = content.pop("version", None)
    if version != VERSION:
        raise DataError(
            f"{path}: the store has format version {version}, this lmres reads {VERSION}; prepare it again"
        )
    try:
        content["splits"] = {k: SplitInfo(**v) for k, v in content["splits"].items()}
        return StoreInfo(path=path, **content)
    except (KeyError, TypeError, AttributeError) as e:
        raise _broken(path, f"{STORE_META} has the wrong keys: {e}") from e


def _open_split(folder: Path, info: SplitInfo, dtype: str) -> TokenSplit:
    tokens, offsets = folder / "tokens.bin", folder / "offsets.npy"
    for file in (tokens, offsets):
        if not file.is_file():
            raise _broken(folder, f"no {file.name}")
    kind = np.dtype(dtype).newbyteorder("<")
    found, wanted = tokens.stat().st_size, info.tokens * kind.itemsize
    if found != wanted:
        raise _broken(folder, f"tokens.bin has {found} bytes, {wanted} expected")
    try:
        starts = np.load(offsets)
    except (ValueError, OSError, EOFError) as e:
        raise _broken(folder, f"offsets.npy: {e}") from e
    good = starts.dtype == np.int64 and starts.shape == (info.documents + 1,)
    if not good or starts[0] != 0 or starts[-1] != info.tokens or (np.diff(starts) < 1).any():
        raise _broken(
            folder, f"offsets.npy does not describe {info.documents} documents of {info.tokens} tokens"
        )
    # The plain view of the map: indexing it skips the subclass's Python-side bookkeeping.
    flat = np.asarray(np.memmap(tokens, kind, mode="r"))
    return TokenSplit(folder.name, folder, flat, starts, info)
