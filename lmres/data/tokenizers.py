"""Text to token ids and back: bytes, Hugging Face `tokenizer.json`, sentencepiece.

Bits per byte need to know how many bytes of text the predicted tokens stand for. The first token of a
document is never predicted (nothing stands before it), so each encoding also says how many bytes that token
covers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from .errors import DataError, shown

_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "[SEP]")
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Encoded(NamedTuple):
    """ids: int64 or narrower [n], without separator. first_bytes: UTF-8 bytes of the text that ids[0] stands
    for."""

    ids: np.ndarray
    first_bytes: int


@runtime_checkable
class Tokenizer(Protocol):
    """vocab_size: every id is below it. eos_id: the separator put after each document; text never encodes to
      it.
    fingerprint: changes when the tokens of some text would; stored with the data."""

    vocab_size: int
    eos_id: int
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Ids [n] of one text, no separator added."""

    def encode_documents(self, texts: Sequence[str]) -> list[Encoded]:
        """`encode` of many texts, with the bytes of each first token."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ids [n]; the separator gives no text, bytes that are not UTF-8 (a cut character) give
        U+FFFD.

        Raises:
          DataError: an id outside the vocabulary.
        """


def get_tokenizer(name: str = "bytes", eos_token: str | None = None) -> Tokenizer:
    """The tokenizer that `DataConfig.tokenizer` and `DataConfig.eos_token` name.

    Raises:
      DataError: no such file, a damaged file, no end token in it, or the package to read it is missing.
    """
    if name == "bytes":
        if eos_token is not None:
            raise DataError(
                f"data.eos_token is {eos_token!r}, but the byte tokenizer has no named tokens; leave it out"
            )
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise DataError(
            f"data.tokenizer: {path}: no such file; use 'bytes', a tokenizer.json or a sentencepiece .model"
        )
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path, eos_token)
    if path.suffix == ".model":
        return SentencePieceTokenizer(path, eos_token)
    raise DataError(
        f"data.tokenizer: {path}: unknown kind; use 'bytes', a tokenizer.json or a sentencepiece .model"
    )


def _checked_ids(ids, vocab_size: int) -> np.ndarray:
    ids = np.asarray(ids, np.int64).reshape(-1)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise DataError(
            f"cannot decode id {wrong[0]}: the tokenizer has {vocab_size} ids (0 .. {vocab_size - 1})"
        )
    return ids


class ByteTokenizer:
    """One id per UTF-8 byte (0 .. 255) and the separator 256."""

    vocab_size = 257
    eos_id = 256
    fingerprint = "bytes-257"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_documents(self, texts: Sequence[str]) -> list[Encoded]:
        return [Encoded(ids, min(1, len(ids))) for ids in map(self.encode, texts)]

    def decode(self, ids) -> str:
        ids = _checked_ids(ids, self.vocab_size)
        return ids[ids != self.eos_id].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` read by the `tokenizers` package.

    Truncation, padding and post-processing templates in the file are not applied: a data set must not be cut
    at somebody's 512 tokens, and exactly one separator stands between documents. Text that happens to spell a
    special token is encoded as ordinary text.
    """

    def __init__(self, path: Path, eos_token: str | None = None):
        try:
            import tokenizers
        except ImportError as e:
            raise DataError(f"data.tokenizer: {path} needs the package: pip install 'lmres[text]'") from e
        content = path.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as e:  # the package raises bare Exception
            raise DataError(f"data.tokenizer: {path}: not a readable tokenizer.json ({e})") from e
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have gaps, so the number of tokens is not the bound.
        self.vocab_size = max(vocab.values()) + 1
        self.eos_id = _end_id(path, eos_token, vocab.get)
        self.fingerprint = f"tokenizers-{hashlib.sha256(content).hexdigest()[:16]}-eos{self.eos_id}"
        self._added = set(self._tokenizer.get_added_tokens_decoder())
        byte_level = '"ByteLevel"' in json.dumps(json.loads(content).get("decoder"))
        self._pieces = _Pieces(
            lambda text: self._tokenizer.encode(text, add_special_tokens=False).tokens, byte_level
        )

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def encode_documents(self, texts: Sequence[str]) -> list[Encoded]:
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            Encoded(np.asarray(e.ids, np.int64), self._first_bytes(t, e))
            for t, e in zip(texts, found, strict=True)
        ]

    def _first_bytes(self, text: str, encoding) -> int:
        """From the offsets, unless the token is only a part of a character (offsets are in whole
        characters)."""
        if not encoding.ids:
            return 0
        covered = len(text[: encoding.offsets[0][1]].encode("utf-8"))
        if encoding.ids[0] in self._added:
            return covered
        return min(covered, self._pieces.bytes_of_first(text, encoding.tokens[0]))

    def decode(self, ids) -> str:
        ids = _checked_ids(ids, self.vocab_size)
        return self._tokenizer.decode(ids[ids != self.eos_id].tolist(), skip_special_tokens=False)


class SentencePieceTokenizer:
    """A sentencepiece `.model`."""

    def __init__(self, path: Path, eos_token: str | None = None):
        try:
            import sentencepiece
        except ImportError as e:
            raise DataError(f"data.tokenizer: {path} needs the package: pip install 'lmres[text]'") from e
        content = path.read_bytes()
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as e:
            raise DataError(f"data.tokenizer: {path}: not a readable sentencepiece model ({e})") from e
        self.vocab_size = self._model.get_piece_size()
        self.eos_id = self._model.eos_id() if eos_token is None else -1
        if self.eos_id < 0:
            vocab = {self._model.id_to_piece(i): i for i in range(self.vocab_size)}
            self.eos_id = _end_id(path, eos_token, vocab.get)
        self._pieces = _Pieces(lambda text: self._model.encode(text, out_type=str), byte_level=False)
        self.fingerprint = f"sentencepiece-{hashlib.sha256(content).hexdigest()[:16]}-eos{self.eos_id}"

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._model.encode(text), np.int64)

    def encode_documents(self, texts: Sequence[str]) -> list[Encoded]:
        ids = [np.asarray(i, np.int64) for i in self._model.encode(list(texts))]
        return [Encoded(i, self._first_bytes(t, i)) for t, i in zip(texts, ids, strict=True)]

    def _first_bytes(self, text: str, ids: np.ndarray) -> int:
        """From the piece. An unknown one (a model without byte fallback) counts as the first character: what
        it replaced is lost."""
        if not len(ids):
            return 0
        if self._model.is_unknown(int(ids[0])):
            return len(text[0].encode("utf-8"))
        piece = self._model.id_to_piece(int(ids[0]))
        return min(len(text.encode("utf-8")), self._pieces.bytes_of_first(text, piece))

    def decode(self, ids) -> str:
        ids = _checked_ids(ids, self.vocab_size)
        return self._model.decode(ids[ids != self.eos_id].tolist())


class _Pieces:
    """How the pieces of a vocabulary spell bytes, and whether the encoder puts a space of its own before the
    text.

    A byte-level piece has one character per byte. Elsewhere `<0xE3>` is one byte and U+2581 a space. Some
    encoders put a space before any text, some before text that does not begin with one, some never; no file
    format says so in one place, so it is found by trying.
    """

    def __init__(self, encode: Callable[[str], list[str]], byte_level: bool):
        self._byte_level = byte_level
        self._space = "\u0120" if byte_level else "\u2581"
        self._added_before_text = "".join(encode("a")).startswith(self._space)
        self._added_before_space = "".join(encode(" a")).startswith(self._space * 2)

    def bytes_of_first(self, text: str, piece: str) -> int:
        """UTF-8 bytes of `text` that `piece`, the first of its encoding, stands for."""
        if not self._byte_level and _BYTE_PIECE.fullmatch(piece):
            return 1
        added = self._added_before_space if text.startswith(" ") else self._added_before_text
        if added:
            piece = piece.removeprefix(self._space)
        return len(piece) if self._byte_level else len(piece.replace(self._space, " ").encode("utf-8"))


def _end_id(path: Path, wanted: str | None, find: Callable[[str], int | None]) -> int:
    """Id of the token that ends a document."""
    names = _END_NAMES if wanted is None else (wanted,)
    found = [i for i in map(find, names) if i is not None]
    if not found:
        raise DataError(
            f"data.tokenizer: {path}: no token to end a document with (looked for {shown(names, 20)}); name "
            "one of its tokens in data.eos_token"
        )
    return found[0]
