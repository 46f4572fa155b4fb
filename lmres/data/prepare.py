"""Sources to a token store: read, encode, set a validation split aside, write."""

from __future__ import annotations

import array
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from .config import DataConfig
from .errors import DataError, shown
from .files import as_path
from .readers import Document, Reader
from .sources import Input, is_store, resolve
from .store import VERSION, SplitInfo, SplitWriter, StoreInfo, open_store, write_meta
from .tokenizers import Encoded, Tokenizer, get_tokenizer

# Documents are encoded in groups of about this many characters: enough for a tokenizer to use its threads.
_GROUP_SIZE, _GROUP_DOCUMENTS = 1 << 20, 2048


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a preparation is. source_total counts bytes on disk; 0 when it is not known."""

    split: str
    documents: int
    tokens: int
    source_bytes: int
    source_total: int


@dataclasses.dataclass(frozen=True)
class _Plan:
    config: DataConfig
    inputs: dict[str, tuple[Input, ...]]
    tokenizer: Tokenizer | None
    limit: int | None
    made_from: dict[str, object]

    @property
    def fingerprint(self) -> str:
        return _digest(self.made_from)


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def plan(config: DataConfig, vocab_size: int | None = None) -> _Plan:
    """Finds the inputs and the fingerprint of their preparation, without reading the text. Arguments as
    `prepare`."""
    inputs = {"train": resolve(config, "train")}
    if config.valid is not None:
        inputs["valid"] = resolve(config, "valid")
        same = {os.path.realpath(i.name) for i in inputs["train"]} & {
            os.path.realpath(i.name) for i in inputs["valid"]
        }
        if same:
            raise DataError(
                f"data.valid: {shown(sorted(same), 3)} is in data.train too; validation must be text unseen"
            )
    kinds = {k: v[0].ids for k, v in inputs.items()}
    if len(set(kinds.values())) > 1:
        raise DataError(
            "data.train and data.valid: one holds ready-made ids and the other text; both must be the same"
        )
    ids = kinds["train"]
    tokenizer = None if ids else get_tokenizer(config.tokenizer, config.eos_token)
    limit = (config.vocab_size or vocab_size) if ids else tokenizer.vocab_size
    made_from = {
        "version": VERSION,
        "train": _digest([i.stamp() for i in inputs["train"]]),
        "valid": _digest([i.stamp() for i in inputs["valid"]]) if "valid" in inputs else None,
        "tokenizer": None if ids else tokenizer.fingerprint,
        "vocab_size": limit,
        "valid_fraction": None if "valid" in inputs else config.valid_fraction,
        "split_seed": None if "valid" in inputs else config.split_seed,
        "key": config.ids_key if ids else config.text_key,
        "text_unit": config.text_unit,
        "errors": config.errors,
        "on_bad_record": config.on_bad_record,
    }
    return _Plan(config, inputs, tokenizer, limit, made_from)


def prepare(
    config: DataConfig,
    out_dir: str | os.PathLike,
    *,
    progress: Callable[[Progress], None] | None = None,
    vocab_size: int | None = None,
    min_tokens: int = 2,
    overwrite: bool = False,
) -> StoreInfo:
    """Writes the token store of `config` to the folder `out_dir`, or finds it there already.

    Text is streamed: at most one document or about a million characters are in memory. Each text document is
    followed by one separator (the tokenizer's `eos_id`); ready-made ids are kept as they are, one record one
    document. The folder appears at its name only when complete. A store that is there already is reused when
    sources (names, sizes, times), tokenizer and settings are unchanged. Several processes may prepare into
    one folder at a
    time: all do the work, one result stays.

    Args:
      progress: called every few thousand documents.
      vocab_size: for ready-made ids, the number of ids allowed when `config.vocab_size` is None.
      min_tokens: fewest tokens of use to the caller (context + 1); fewer are an error.
      overwrite: replace a store of other sources or settings, or a damaged one. Other folders are never
        replaced.
    Raises:
      DataError: see `Reader`; also no documents, too few tokens or different documents, or `out_dir` holds
        something else.
    """
    todo = plan(config, vocab_size)
    out = as_path(out_dir, "a store while it is written", schemes=())
    ready = _existing(out, todo, overwrite)
    if ready is not None:
        return ready
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.parent / f".{out.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        work.mkdir()
        info = dataclasses.replace(_write(todo, work, progress, min_tokens), path=out)
        write_meta(info, work)
        return _publish(work, out, todo, overwrite) or info
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(work: Path, out: Path, todo: _Plan, overwrite: bool) -> StoreInfo | None:
    """Renames the finished folder to `out`. Returns the store found there if another process was first with
    one of the same fingerprint (its result is as good)."""
    old = work.with_suffix(".old")
    if overwrite and out.exists():
        os.rename(out, old)
    try:
        os.rename(work, out)
    except OSError:
        if old.exists() and not out.exists():
            os.rename(old, out)
            raise
        ready = _existing(out, todo, overwrite=False)
        if ready is None:
            raise
        return ready
    finally:
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
    return None


def _existing(out: Path, todo: _Plan, overwrite: bool) -> StoreInfo | None:
    """The store at `out` if it is the one wanted, None if one has to be written there."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not is_store(out):
        raise DataError(f"{out}: exists and is not a prepared store; choose another folder")
    try:
        info = open_store(out).info
    except DataError:
        if overwrite:
            return None
        raise
    if info.fingerprint == todo.fingerprint:
        return dataclasses.replace(info, reused=True)
    if overwrite:
        return None
    old, new = info.made_from, todo.made_from
    changed = [k for k in new if new[k] != old.get(k)]
    told = shown(
        f"{k}: the files" if k in ("train", "valid") else f"{k}: {old.get(k)} -> {new[k]}" for k in changed
    )
    raise DataError(
        f"{out}: holds a store made otherwise (changed: {told}); choose another folder, or ask to overwrite"
    )


def _write(todo: _Plan, work: Path, progress, min_tokens: int) -> StoreInfo:
    config = todo.config
    names = shown((i.name for i in todo.inputs["train"]), 3)
    splits, sources = {}, {}
    max_id, held_out = -1, set()
    if "valid" in todo.inputs:
        splits["valid"], max_id, hashes, sources["valid"] = _encode(
            todo, "valid", work / "valid", set(), progress
        )
        held_out = set(hashes.tolist())
    whole = work / ("train" if "valid" in todo.inputs else "all")
    train, top, hashes, sources["train"] = _encode(todo, "train", whole, held_out, progress)
    if train.tokens < min_tokens:
        raise DataError(
            f"{names}: {train.tokens} tokens found, one window of context {min_tokens - 1} needs "
            f"{min_tokens}; give more text, or a shorter context"
        )
    dtype = _dtype(todo.limit)
    if "valid" in todo.inputs:
        splits["train"] = train
    else:
        mask = _choose(hashes, config.valid_fraction, names, train)
        for name, keep in (("train", ~mask), ("valid", mask)):
            splits[name] = _cut(whole, work / name, dtype, keep)
        shutil.rmtree(whole)
    return StoreInfo(
        path=work,
        fingerprint=todo.fingerprint,
        tokenizer=todo.tokenizer and todo.tokenizer.fingerprint,
        vocab_size=todo.limit or max(max_id, top) + 1,
        eos_id=todo.tokenizer and todo.tokenizer.eos_id,
        dtype=dtype.name,
        splits={name: splits[name] for name in ("train", "valid")},
        sources=sources,
        made_from=todo.made_from,
    )


def _dtype(vocab_size: int | None) -> np.dtype:
    """16 bits hold ids up to 65535, that is a vocabulary of 65536. Without a limit any 32-bit id may yet
    come."""
    return np.dtype(np.uint16 if vocab_size is not None and vocab_size <= 2**16 else np.uint32)


def _encode(todo: _Plan, split: str, folder: Path, leave_out: set[int], progress):
    """Writes the documents of one source to `folder`.

    Returns:
      The numbers, the largest id, a hash of each document's content (uint64 [D]), and the `sources` entry of
      meta.
    """
    inputs = todo.inputs[split]
    reader = Reader(todo.config, inputs, todo.limit)
    total = sum(i.stamp()[2] or 0 for i in inputs)
    writer = SplitWriter(folder, _dtype(todo.limit))
    hashes = array.array("Q")
    skipped = 0
    try:
        for group in _groups(reader):
            kept = []
            for document in group:
                code = _hash(document.value, todo.config.split_seed)
                if code in leave_out:
                    skipped += 1
                else:
                    kept.append((code, document.value))
            hashes.extend(_add(writer, todo.tokenizer, kept, reader))
            if progress is not None:
                progress(Progress(split, writer.documents, writer.tokens, reader.counts.source_bytes, total))
        if not writer.documents:
            raise _nothing(split, inputs, reader, skipped, total)
        info = writer.close()
    finally:
        writer.abandon()
    counts = {**dataclasses.asdict(reader.counts), "in_valid": skipped}
    del counts["source_bytes"]
    source = {"files": [[i.name, i.stamp()[2]] for i in inputs], "counts": counts}
    return info, writer.max_id, np.frombuffer(hashes, np.uint64), source


def _nothing(split, inputs, reader, skipped, total) -> DataError:
    c = reader.counts
    return DataError(
        f"data.{split}: no documents in {shown((i.name for i in inputs), 3)} ({len(inputs)} files, {total} "
        f"bytes): {c.records} records read, {c.blank} blank, {c.bad} bad, {c.undecodable} files not UTF-8, "
        f"{skipped} also in the validation set; give a file with text"
    )


def _groups(documents) -> Iterator[list[Document]]:
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document.value)
        if size >= _GROUP_SIZE or len(group) >= _GROUP_DOCUMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _hash(value: str | np.ndarray, seed: int) -> int:
    content = value.encode("utf-8") if isinstance(value, str) else value.astype("<i8").tobytes()
    return int.from_bytes(
        hashlib.blake2b(content, digest_size=8, salt=seed.to_bytes(8, "little")).digest(), "little"
    )


def _add(
    writer: SplitWriter, tokenizer: Tokenizer | None, documents: list[tuple], reader: Reader
) -> list[int]:
    """Encodes and writes a group; returns the hashes of the documents that gave at least one token."""
    values = [value for _, value in documents]
    encoded = [Encoded(v, 0) for v in values] if tokenizer is None else tokenizer.encode_documents(values)
    # Some tokenizers drop every character of a text that is not blank (zero-width ones, say).
    reader.counts.blank += sum(not len(e.ids) for e in encoded)
    full = [(code, value, e) for (code, value), e in zip(documents, encoded, strict=True) if len(e.ids)]
    if not full:
        return []
    end = np.zeros(0, np.int64) if tokenizer is None else np.array([tokenizer.eos_id])
    tokens = np.concatenate([part for _, _, e in full for part in (e.ids, end)])
    lengths = np.array([len(e.ids) + len(end) for _, _, e in full])
    sizes = None
    if tokenizer is not None:
        text = np.array([len(value.encode("utf-8")) for _, value, _ in full])
        sizes = np.stack([text, text - [e.first_bytes for _, _, e in full]], 1)
    writer.extend(tokens, lengths, sizes)
    return [code for code, _, _ in full]


def _choose(hashes: np.ndarray, fraction: float, names: str, info: SplitInfo) -> np.ndarray:
    """bool [D]: the documents of the validation set, those with the lowest hashes. Equal documents have equal
    hashes, so a cut between two different hashes never parts them."""
    values = np.unique(hashes)
    if len(values) < 2:
        raise DataError(
            f"{names}: no validation set can be set aside: {info.documents} documents ({info.tokens} "
            f"tokens) found, {len(values)} different, 2 needed; name one in data.valid, or for one text "
            "file set data.text_unit to 'paragraph' or 'line'"
        )
    want = min(max(1, round(fraction * len(hashes))), len(hashes) - 1)
    return hashes <= min(np.sort(hashes)[want - 1], values[-2])


def _cut(whole: Path, folder: Path, dtype: np.dtype, keep: np.ndarray) -> SplitInfo:
    """Copies the documents in the mask `keep` (bool [D]) to a split of their own, run by run."""
    tokens = np.memmap(whole / "tokens.bin", dtype.newbyteorder("<"), mode="r")
    offsets = np.load(whole / "offsets.npy")
    sizes = np.load(whole / "bytes.npy") if (whole / "bytes.npy").exists() else None
    writer = SplitWriter(folder, dtype)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], keep, [False]]).astype(np.int8)))
    for begin, end in edges.reshape(-1, 2):
        for a in range(begin, end, _GROUP_DOCUMENTS):
            b = min(a + _GROUP_DOCUMENTS, end)
            part = None if sizes is None else sizes[a:b]
            writer.extend(tokens[offsets[a] : offsets[b]], np.diff(offsets[a : b + 1]), part)
    return writer.close()
