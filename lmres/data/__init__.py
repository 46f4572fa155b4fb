"""Text, JSONL, Parquet, ready-made ids -> tokens -> batches that are a pure function of the step.

The room knows nothing of models and training: it imports numpy, grain and the standard library, no jax and no
other room of lmres. The way through it, in the order of the imports:

    errors, config       DataError, DataConfig
    files, sources       bytes from disk; which files, in which order
    readers, tokenizers  documents; their ids
    store, prepare       the token store on disk; writing one
    indexed              what all batches have in common
    batches, generated   batches of a store's windows; of sequences made on demand by something from outside
    loading              the calls for a trainer

    splits = load_splits(DataConfig(), context=256, batch_size=16)
    splits.train.batch(0)["inputs"].shape    # (16, 256)
"""

from .batches import Batches
from .config import DataConfig
from .errors import DataError
from .generated import GeneratedBatches, GeneratedInfo, Sequences
from .indexed import IndexedBatches
from .loading import Splits, generated_splits, load_splits
from .prepare import Progress, prepare
from .store import Store, StoreInfo, TokenSplit, open_store
from .tokenizers import ByteTokenizer, Tokenizer, get_tokenizer

__all__ = [
    "Batches",
    "ByteTokenizer",
    "DataConfig",
    "DataError",
    "GeneratedBatches",
    "GeneratedInfo",
    "IndexedBatches",
    "Progress",
    "Sequences",
    "Splits",
    "Store",
    "StoreInfo",
    "TokenSplit",
    "Tokenizer",
    "generated_splits",
    "get_tokenizer",
    "load_splits",
    "open_store",
    "prepare",
]
