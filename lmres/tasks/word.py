"""The word problem of a finite group: what do the letters read so far multiply to?

    y_t = x_1 x_2 ... x_t = y_(t-1) x_t        t = 1 .. length

Letters x_t are drawn independently and uniformly; the new letter stands on the right, in the convention of
``groups``. Every position has a label, and the difficulty of a position is t: it can be solved by a chain of t - 1
products, one per token, in order. Z2 is parity. S3 and S4 have a sign, which parity alone gives: 1/3 of the labels of
S3 can be guessed right by it, and 1/12 of those of S4.
"""

import dataclasses
from typing import ClassVar, Literal

import numpy as np

from lmres.tasks.groups import GROUPS, Name, group

_BLOCK = 64  # sequences that are drawn together: one generator for each is most of the time for short ones
_STREAMS = {"train": 0, "valid": 1}
_SEEDS = 2**32


@dataclasses.dataclass(frozen=True)
class WordProblem:
    """Running products in a finite group.

    kind: "word".
    group: Z2 (parity), Z6, S3, A4, S4 or A5, whose words are made of all elements; swap-S4 or swap-S5, of the identity
      and the transpositions.
    length: letters, and labels, of a sequence.
    train_seed: of the training sequences, 0 .. 2**32 - 1; they never end.
    valid_seed: of the validation sequences, which are drawn apart from those of any train_seed.
    valid_sequences: how many there are.
    """

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}

    kind: Literal["word"] = "word"
    group: Name = "S3"
    length: int = 24
    train_seed: int = 0
    valid_seed: int = 0
    valid_sequences: int = 1024

    def check(self) -> None:
        """Raises ValueError naming each setting that is out of range, its key and what it may be."""
        wrong = []
        if self.group not in GROUPS:
            wrong.append(f"task.group={self.group} must be one of {', '.join(GROUPS)}")
        for key in ("length", "valid_sequences"):
            if getattr(self, key) < 1:
                wrong.append(f"task.{key}={getattr(self, key)} must be at least 1")
        for key in ("train_seed", "valid_seed"):
            if not 0 <= getattr(self, key) < _SEEDS:
                wrong.append(f"task.{key}={getattr(self, key)} must be in 0 .. 2**32 - 1")
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def vocab_size(self) -> int:
        """Ids are the numbers of the group's elements, of letters and labels alike."""
        return group(self.group).order

    @property
    def vocabulary(self) -> str:
        """What the ids mean; equal for two tasks only if ids mean the same."""
        return f"elements of {self.group.removeprefix('swap-')}"

    def describe(self) -> str:
        """The task in a few words."""
        return f"word problem of {self.group}, {len(group(self.group).letters)} letters, {self.vocab_size} elements"

    def rows(self, split: Literal["train", "valid"], index: np.ndarray) -> dict[str, np.ndarray]:
        """The sequences numbered ``index``, int [B], each from 0.

        Returns: inputs (letters), targets (products): int32 [B, length]. weights: float32 [B, length], 1 at each label.
        """
        the_group = group(self.group)
        blocks, block_of = np.unique(index // _BLOCK, return_inverse=True)
        drawn = [self._block(split, int(block), len(the_group.letters)) for block in blocks]
        drawn = np.array(drawn, int).reshape(-1, _BLOCK, self.length)
        letters = the_group.letters[drawn[block_of, index % _BLOCK]]
        products = np.empty_like(letters)
        so_far = np.zeros(len(letters), np.int32)  # the identity
        for t in range(self.length):
            so_far = products[:, t] = the_group.table[so_far, letters[:, t]]
        return {"inputs": letters, "targets": products, "weights": np.ones(letters.shape, np.float32)}

    def _block(self, split: str, number: int, letters: int) -> np.ndarray:
        """int64 [_BLOCK, length] in 0 .. letters - 1.

        Philox gives different output for different (key, counter) by construction. The key is (seed, split); the
        number of the block stands above the 128 bits of the counter that drawing moves, so no two blocks meet.
        """
        seed = self.train_seed if split == "train" else self.valid_seed
        key = np.array([seed, _STREAMS[split]], np.uint64)
        counter = np.array([0, 0, number, 0], np.uint64)
        draw = np.random.Generator(np.random.Philox(counter=counter, key=key))
        return draw.integers(letters, size=(_BLOCK, self.length))
