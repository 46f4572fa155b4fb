"""The settings of the data: where text comes from, how it becomes tokens, how tokens become rows."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from .errors import DataError, shown

Format = Literal["auto", "text", "jsonl", "parquet", "ids", "store", "stdlib", "datasets"]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to train on, and what to validate on.

    Attributes:
      train: a file, a glob (`data/*.jsonl.gz`), a folder (searched recursively for files of known names), or
        several of these. None or "stdlib": the `.py` files of the running Python's standard library, one
        document each, so that a first run needs no download. With `format="datasets"`:
        `NAME[:CONFIG][@SPLIT]` on the Hugging Face Hub, or a folder written by `save_to_disk`.
      valid: the same for the validation set. None: `valid_fraction` of the training documents are set aside.
        A training document that also occurs in a separate validation set is left out of training and counted.
      valid_fraction: share of the documents set aside when `valid` is None, strictly between 0 and 1; at
        least one document goes to each side. The choice is by a hash of the document's content and
        `split_seed`: it depends neither on the order or number of files nor on the number of processes, and
        copies of one document all fall on the same side.
      split_seed: changes which documents are set aside; apart from `seed`, so that runs with another order of
        data are still validated on the same text.
      format: what the files hold. "auto" goes by the file name, and tells text from ready-made ids by the
        keys of the first record. "ids" is ready-made token ids in JSONL or Parquet; "store" a folder written
        by `prepare`.
      text_unit: what one document of a plain text file is: the whole "file", a "paragraph" (blank lines
        between), or a "line". A document is held in memory while it is encoded; use paragraphs or lines for
        one very big file, and for a single file whose validation set is to be split off.
      text_key: key or column of the text in JSONL, Parquet and `datasets` records.
      ids_key: key or column of ready-made token ids.
      tokenizer: "bytes" (256 bytes and one separator), or the path of a Hugging Face `tokenizer.json` or of a
        sentencepiece `.model`. Not used for ready-made ids.
      eos_token: the token that is put after each document; None: the usual names are tried.
      vocab_size: for ready-made ids, the number of ids allowed; an id outside 0 .. vocab_size - 1 is an
        error. None: the caller's limit (the model's vocabulary) if it gives one, else the largest id found
        plus one.
      errors: text that is not UTF-8: "strict" refuses it, "replace" puts U+FFFD in its place and counts.
        UTF-16 is refused either way. (Standard-library files that do not decode are always skipped and
        counted.)
      on_bad_record: a record without usable text: "error", or "skip" and count it.
      packing: "concat": documents one after the other, each followed by one separator, cut in windows.
        "none": one document per row, padded; long ones in consecutive windows. The prepared store is the same
        for both.
      seed: order of the training windows; each epoch gets another order.
      repeat: "epochs": start over when all windows have been seen; the training set must fill one batch.
        "small": the same, and a set with fewer windows than a batch recurs inside the batch (a set shorter
        than one window is padded). "never": asking for a step past the first epoch is an error, the last
        batch is padded.
      cache_dir: where `load_splits` keeps prepared stores, one folder per combination of source, tokenizer
        and settings. None: `$XDG_CACHE_HOME/lmres/data`, or `~/.cache/lmres/data`.

    Raises:
      DataError: a value is outside the range given above.
    """

    train: str | tuple[str, ...] | None = None
    valid: str | tuple[str, ...] | None = None
    valid_fraction: float = 0.05
    split_seed: int = 0
    format: Format = "auto"
    text_unit: Literal["file", "paragraph", "line"] = "file"
    text_key: str = "text"
    ids_key: str = "input_ids"
    tokenizer: str = "bytes"
    eos_token: str | None = None
    vocab_size: int | None = None
    errors: Literal["strict", "replace"] = "strict"
    on_bad_record: Literal["error", "skip"] = "error"
    packing: Literal["concat", "none"] = "concat"
    seed: int = 0
    repeat: Literal["epochs", "small", "never"] = "epochs"
    cache_dir: str | None = None

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}

    def __post_init__(self):
        for key in ("train", "valid"):
            value = getattr(self, key)
            if isinstance(value, (list, tuple)):
                if not value:
                    raise DataError(f"data.{key} is an empty list; name at least one file, or leave it out")
                object.__setattr__(self, key, tuple(value))
        if not 0 < self.valid_fraction < 1:
            raise DataError(
                f"data.valid_fraction is {self.valid_fraction}; it must lie between 0 and 1, both excluded"
            )
        if self.vocab_size is not None and self.vocab_size < 1:
            raise DataError(f"data.vocab_size is {self.vocab_size}; it must be at least 1")
        if not 0 <= self.split_seed < 2**63:
            raise DataError(f"data.split_seed is {self.split_seed}; it must lie in 0 .. 2**63 - 1")
        if not 0 <= self.seed < 2**32:
            raise DataError(f"data.seed is {self.seed}; it must lie in 0 .. 2**32 - 1")
        for key, allowed in _CHOICES.items():
            if getattr(self, key) not in allowed:
                raise DataError(f"data.{key} is {getattr(self, key)!r}; choose one of {shown(allowed, 20)}")


# A config built by hand meets no validator, and a misspelt choice must not fall through to some default
# branch.
_CHOICES = {
    field: args
    for field, args in (
        ("format", Format.__args__),
        ("text_unit", ("file", "paragraph", "line")),
        ("errors", ("strict", "replace")),
        ("on_bad_record", ("error", "skip")),
        ("packing", ("concat", "none")),
        ("repeat", ("epochs", "small", "never")),
    )
}
