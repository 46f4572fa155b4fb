"""What a trainer calls: settings in, batches of both splits out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from .batches import Batches
from .config import DataConfig
from .errors import DataError
from .files import as_path
from .generated import GeneratedBatches, GeneratedInfo, Sequences
from .prepare import Progress, plan, prepare
from .sources import is_store
from .store import Store, StoreInfo, open_store, store_cache
from .tokenizers import Tokenizer, get_tokenizer


@dataclasses.dataclass(frozen=True)
class Splits:
    """train, valid: batches of the two splits. info: what is behind them. tokenizer: None where ids stand for
    no text. scored: whether a target is the answer at its position in the row, right or wrong, so that
    accuracy by position says something."""

    train: Batches | GeneratedBatches
    valid: Batches | GeneratedBatches
    info: StoreInfo | GeneratedInfo
    tokenizer: Tokenizer | None
    scored: bool = False


def load_splits(
    config: DataConfig,
    context: int,
    batch_size: int,
    *,
    vocab_size: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Splits:
    """Prepares the store of `config` in its cache if need be, opens it, and makes the batches.

    The validation split is padded where it is short, never refused, and reads best through `eval_batches`.

    Args:
      context: inputs per row.
      batch_size: rows of the global training batch, all hosts together.
      vocab_size: the model's vocabulary, if known; ids and tokenizers that do not fit are an error.
      progress: as in `prepare`.
    Raises:
      DataError: see `prepare`, `open_store` and `Batches`; and a vocabulary larger than the model's.
    """
    store, tokenizer = _store(config, context, vocab_size, progress)
    found = store.info.vocab_size
    # For text the limit is the tokenizer's; for ready-made ids the reader has already named the record at
    # fault.
    if vocab_size is not None and found > vocab_size:
        what = "ready-made ids" if tokenizer is None else f"tokenizer {config.tokenizer}"
        raise DataError(
            f"{store.info.path}: the {what} use a vocabulary of {found} ids, the model has {vocab_size}; "
            f"set the model's vocabulary to at least {found}"
        )
    train, valid = (
        Batches(split, context, batch_size, config.seed, packing=config.packing, repeat=repeat)
        for split, repeat in ((store.splits["train"], config.repeat), (store.splits["valid"], "small"))
    )
    return Splits(train, valid, store.info, tokenizer)


def generated_splits(
    sequences: Sequences, context: int, batch_size: int, *, vocab_size: int | None = None
) -> Splits:
    """Batches of sequences that are made as they are asked for; arguments as in `load_splits`.

    Raises:
      DataError: a context shorter than the sequences; a vocabulary larger than the model's.
    """
    needed = sequences.vocab_size
    if vocab_size is not None and needed > vocab_size:
        raise DataError(
            f"model.vocab_size={vocab_size} is less than the {needed} ids of the task ({sequences.vocabulary})"
        )
    train, valid = (
        GeneratedBatches(sequences, split, context, batch_size) for split in ("train", "valid")
    )
    info = GeneratedInfo(sequences.vocabulary, needed, sequences.describe())
    return Splits(train, valid, info, tokenizer=None, scored=True)


def _store(
    config: DataConfig, context: int, vocab_size: int | None, progress
) -> tuple[Store, Tokenizer | None]:
    alone = isinstance(config.train, str)
    path = as_path(config.train, "prepared stores").expanduser() if alone and config.format != "datasets" else None
    if config.format == "store" or (config.format == "auto" and alone and is_store(path)):
        if not alone or config.valid is not None:
            raise DataError(
                "data.train must name one prepared store, and data.valid nothing: the store holds both splits"
            )
        store = open_store(path, _cache(config))
        store = dataclasses.replace(store, info=dataclasses.replace(store.info, reused=True))
        if store.info.tokenizer is None:
            return store, None
        tokenizer = get_tokenizer(config.tokenizer, config.eos_token)
        if tokenizer.fingerprint != store.info.tokenizer:
            raise DataError(
                f"{store.info.path}: was made with tokenizer {store.info.tokenizer}, data.tokenizer "
                f"{config.tokenizer!r} is {tokenizer.fingerprint}; name the tokenizer the store was made with"
            )
        return store, tokenizer
    todo = plan(config, vocab_size)
    folder = _cache(config) / todo.fingerprint
    small = config.repeat == "small" or config.packing == "none"
    info = prepare(config, folder, progress=progress, vocab_size=vocab_size, min_tokens=2 if small else context + 1)
    return dataclasses.replace(open_store(folder), info=info), todo.tokenizer


def _cache(config: DataConfig) -> Path:
    if config.cache_dir is not None:
        return as_path(config.cache_dir, "data.cache_dir", schemes=()).expanduser()
    return store_cache()
