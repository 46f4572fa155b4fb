"""Splits written without the readers."""

from pathlib import Path

import numpy as np

from lmres.data.store import SplitWriter, TokenSplit


def split_of(documents, folder: Path, dtype=np.uint32) -> TokenSplit:
    """A split of exactly these documents (lists of ids), with its tokens in memory."""
    writer = SplitWriter(folder / "train", np.dtype(dtype))
    for ids in documents:
        writer.extend(np.array(ids, np.int64), np.array([len(ids)]), None)
    info = writer.close()
    tokens = np.fromfile(folder / "train" / "tokens.bin", np.dtype(dtype))
    return TokenSplit("train", folder / "train", tokens, np.load(folder / "train" / "offsets.npy"), info)
