"""Bytes from disk: plain, gzip and zstandard files, UTF-8 with errors that say where, paths to object stores."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import importlib.util
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from .errors import DataError

COMPRESSED = (".gz", ".zst")
# Object stores by scheme: the package that etils' paths reach them through, and the extra that installs it.
_OBJECT_STORES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
# UTF-32 first: its little-endian mark begins with that of UTF-16.
_FOREIGN_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def is_remote(name: str | os.PathLike) -> bool:
    """Whether `name` has a scheme, as gs://bucket/run has: it is no path of this machine."""
    return "://" in os.fspath(name)


def as_path(name: str | os.PathLike, what: str, schemes: tuple[str, ...] = tuple(_OBJECT_STORES)) -> Path:
    """`name` as a path: of this machine, or of etils for one on an object store.

    Credentials and endpoint are those that the packages find by themselves.

    Args:
      what: is to be there, for messages: "checkpoints".
      schemes: the object stores that will do.
    Raises:
      DataError: a scheme that will not do, no bucket, or the package for it is missing; an address that went through
        `pathlib`, which turns it into a local folder of that name.
    """
    text = os.fspath(name)
    if not is_remote(name):
        head, slash, rest = text.partition(":/")
        if slash and head in _OBJECT_STORES:
            raise DataError(f"{text}: {head}://{rest} cannot be given as a path of pathlib, which drops a slash of it")
        return Path(name)
    scheme, _, rest = text.partition("://")
    if scheme not in schemes:
        places = ", ".join(["a folder (of a mounted disk or bucket too)", *(f"{s}://BUCKET/..." for s in schemes)])
        raise DataError(f"{text}: {what} cannot be on {scheme}://; supported are {places}")
    if not rest.strip("/"):
        raise DataError(f"{text}: names no bucket; {what} are to be at {scheme}://BUCKET/FOLDER")
    package, extra = _OBJECT_STORES[scheme]
    if importlib.util.find_spec(package) is None:
        raise DataError(f"{text}: {scheme}:// needs the package {package}: pip install 'lmres[{extra}]'")
    import fsspec
    from etils import epath

    # A listing that is kept hides what other processes write.
    for protocol in (scheme, "gcs") if scheme == "gs" else (scheme,):
        fsspec.config.conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
    return epath.Path(text)


class _ZstdFile(io.RawIOBase):
    """Decompressed bytes of a file of one or more zstandard frames.

    zstandard's own `stream_reader` ends quietly when the file is cut off in the middle of a frame; this one
    raises EOFError, as `gzip` does.
    """

    def __init__(self, raw: BinaryIO):
        self._raw, self._frame, self._ready = raw, None, b""

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self._ready:
            chunk = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            chunk = chunk or self._raw.read(1 << 17)
            if self._frame is None or self._frame.eof:
                if not chunk:
                    return 0
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            elif not chunk:
                raise EOFError("the last zstandard frame is not complete")
            self._ready = self._frame.decompress(chunk)
        n = min(len(buffer), len(self._ready))
        buffer[:n], self._ready = self._ready[:n], self._ready[n:]
        return n


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens `path` as (decompressed stream, raw file); `raw.tell()` says how far into the file on disk one
    is.

    Raises:
      DataError: the file is missing, unreadable, or its compressed data is cut off or damaged; errors met
        while the caller reads inside the `with` block are included.
    """
    try:
        with open(path, "rb") as raw:
            if path.suffix == ".gz":
                stream = io.BufferedReader(gzip.GzipFile(fileobj=raw))
            elif path.suffix == ".zst":
                stream = io.BufferedReader(_ZstdFile(raw), 1 << 17)
            else:
                stream = raw
            yield stream, raw
    except EOFError as e:
        size = path.stat().st_size
        raise DataError(
            f"{path}: the compressed data is cut off after {size} bytes on disk ({e}); fetch or write the "
            "file again"
        ) from e
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as e:
        raise DataError(f"{path}: the compressed data is damaged ({e}); fetch or write the file again") from e
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e.strerror or e})") from e


def strip_mark(head: bytes, path: Path) -> bytes:
    """Takes a UTF-8 byte-order mark off the first bytes of a file.

    Raises:
      DataError: the bytes are UTF-16 or UTF-32, by their mark or, lacking one, by a zero byte in every second
        place.
    """
    for mark, name in _FOREIGN_MARKS:
        if head.startswith(mark):
            raise DataError(f"{path}: the text is {name} (byte-order mark at byte 0); convert it to UTF-8")
    sample = head[:1024]
    for first, order in ((1, "little-endian"), (0, "big-endian")):
        places = sample[first::2]
        others = sample[1 - first :: 2]
        if len(places) >= 4 and places.count(0) * 2 > len(places) and others.count(0) * 8 < len(others):
            raise DataError(
                f"{path}: the text looks like UTF-16 ({order}, no byte-order mark); convert it to UTF-8"
            )
    return head.removeprefix(codecs.BOM_UTF8)


def decode(raw: bytes, path: Path, errors: str, line: int = 1, offset: int = 0) -> tuple[str, int]:
    """Decodes UTF-8 that begins on `line` at byte `offset` of the (decompressed) file.

    Returns:
      The text, and how many U+FFFD were put in place of bytes that are not UTF-8 (always 0 with
      errors="strict").
    Raises:
      DataError: errors="strict" and the bytes are not UTF-8; names line and byte.
    """
    try:
        return raw.decode("utf-8"), 0
    except UnicodeDecodeError as e:
        if errors == "replace":
            text = raw.decode("utf-8", errors="replace")
            return text, text.count("\ufffd") - raw.count("\ufffd".encode())
        before = raw[: e.start]
        at_line = line + before.count(b"\n")
        column = e.start - (before.rfind(b"\n") + 1) + 1
        raise DataError(
            f"{path}:{at_line}: not UTF-8: byte 0x{raw[e.start]:02x} at offset {offset + e.start} (byte "
            f"{column} of the line): {e.reason}; convert the file, or set data.errors to 'replace'"
        ) from e


def scrub(text: str, where: str, errors: str) -> tuple[str, int]:
    """Rids text of lone surrogates, which JSON can spell (`"\\ud800"`) but UTF-8 cannot hold.

    Returns and raises as `decode` does.
    """
    try:
        text.encode("utf-8")
        return text, 0
    except UnicodeEncodeError as e:
        if errors == "replace":
            clean = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
            return clean, clean.count("\ufffd") - text.count("\ufffd")
        raise DataError(
            f"{where}: the text holds a lone surrogate U+{ord(text[e.start]):04X} at character {e.start}, "
            "which is not Unicode text; set data.errors to 'replace' to use U+FFFD in its place"
        ) from e
