"""Groups and their words against permutations as dicts and plain loops."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmres.data import DataError, generated_splits
from lmres.tasks import GROUPS, WordProblem, group

ORDERS = {"Z2": 2, "Z6": 6, "S3": 6, "A4": 12, "S4": 24, "A5": 60, "swap-S4": 24, "swap-S5": 120}
LETTERS = ORDERS | {"swap-S4": 7, "swap-S5": 11}


@pytest.mark.parametrize("name", GROUPS)
def test_the_tables_are_groups(name):
    the_group = group(name)
    table, n = the_group.table, the_group.order
    every = np.arange(n)
    assert n == ORDERS[name] and table.shape == (n, n)
    assert np.array_equal(table[0], every) and np.array_equal(table[:, 0], every), "0 is the identity"
    assert np.array_equal(np.sort(table, 0), np.broadcast_to(every[:, None], (n, n))), "closed, with inverses"
    assert np.array_equal(np.sort(table, 1), np.broadcast_to(every, (n, n)))
    for a in range(n):
        assert np.array_equal(table[table[a]], table[a][table]), "(a b) c = a (b c)"


@pytest.mark.parametrize("name", [name for name in GROUPS if name[0] != "Z"])
def test_elements_stand_in_the_documented_order(name):
    n, alternating = int(name[-1]), name.startswith("A")
    images = [p for p in itertools.permutations(range(n)) if not alternating or sign(p) == 1]
    assert [tuple(row) for row in group(name).permutations.tolist()] == images


def sign(p):
    """By the number of cycles."""
    seen, cycles = set(), 0
    for start in range(len(p)):
        cycles += start not in seen
        while start not in seen:
            seen.add(start)
            start = p[start]
    return (-1) ** (len(p) - cycles)


@pytest.mark.parametrize("name", GROUPS)
def test_letters_make_up_the_whole_group(name):
    the_group = group(name)
    letters = the_group.letters.tolist()
    assert len(letters) == LETTERS[name] == len(set(letters)) and 0 in letters
    found = {0}
    while len(new := found | {int(the_group.table[a, b]) for a in found for b in letters}) > len(found):
        found = new
    assert len(found) == the_group.order
    if name.startswith("swap-"):
        moved = [sum(i != image for i, image in enumerate(the_group.permutations[k])) for k in letters]
        assert sorted(moved) == [0] + [2] * math.comb(int(name[-1]), 2)


def test_an_unknown_group_is_refused():
    with pytest.raises(ValueError, match="no group 'S9' \\(groups: Z2, Z6"):
        group("S9")


@given(st.sampled_from(GROUPS), st.integers(1, 12), st.integers(0, 2**32 - 1), st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_labels_are_the_products_of_the_letters(name, length, seed, first):
    made = WordProblem(group=name, length=length, train_seed=seed).rows("train", first + np.arange(3))
    assert made["inputs"].shape == made["targets"].shape == (3, length) and (made["weights"] == 1).all()
    images = group(name).permutations
    for word, labels in zip(made["inputs"].tolist(), made["targets"].tolist()):
        for t, label in enumerate(labels, start=1):
            if images is None:
                assert label == sum(word[:t]) % ORDERS[name]
                continue
            for start in range(images.shape[1]):
                image = start
                for letter in reversed(word[:t]):  # the letter on the right acts first
                    image = images[letter][image]
                assert image == images[label][start]


def test_letters_are_uniform_and_independent_of_place():
    letters = WordProblem(group="swap-S4", length=10).rows("train", np.arange(4000))["inputs"]
    expected = 4000 / 7
    for t in range(10):
        counts = np.unique(letters[:, t], return_counts=True)[1]
        assert len(counts) == 7
        assert ((counts - expected) ** 2 / expected).sum() < 30  # chi-squared of 6: above with probability 4e-5


def test_sequences_do_not_repeat_within_or_between_streams():
    task = WordProblem(group="A5", length=16, valid_sequences=2000)
    streams = [
        (task, "train"), (task, "valid"), (WordProblem(group="A5", length=16, train_seed=1), "train"),
        (WordProblem(group="A5", length=16, valid_seed=1), "valid"),
    ]  # fmt: skip
    rows = [tuple(row) for one, split in streams for row in one.rows(split, np.arange(2000))["inputs"].tolist()]
    assert len(set(rows)) == len(rows) == 8000
    again = WordProblem(group="A5", length=16, train_seed=7).rows("valid", np.arange(5))["inputs"]
    assert np.array_equal(again, task.rows("valid", np.arange(5))["inputs"]), "validation is the same for all seeds"


@given(st.lists(st.integers(0, 1000), max_size=20))
@settings(max_examples=30, deadline=None)
def test_a_sequence_depends_on_its_number_alone(numbers):
    task = WordProblem(length=6)
    every = task.rows("train", np.arange(1001))
    some = task.rows("train", np.array(numbers, int))
    for name, values in some.items():
        assert np.array_equal(values, every[name][numbers])


def splits(batch_size=6, context=9, **settings_):
    return generated_splits(WordProblem(length=7, valid_sequences=10, **settings_), context, batch_size)


def test_a_host_gets_its_rows_of_the_global_batch():
    train = splits().train
    whole = train.batch(5)
    for rows in (slice(2, 4), np.array([5, 0]), np.array([3])):
        for name, values in train.batch(5, rows).items():
            assert np.array_equal(values, whole[name][rows])
    with pytest.raises(DataError, match="step -1 asked of the train split"):
        train.batch(-1)


def test_batches_are_the_same_after_a_restart():
    first = splits().train.iterate()
    ahead = [next(first) for _ in range(6)]
    first.close()
    second = splits().train.iterate(3, slice(0, 6, 2))
    for old in ahead[3:]:
        new = next(second)
        assert all(np.array_equal(values, old[name][::2]) for name, values in new.items())
    second.close()
    assert not np.array_equal(ahead[0]["inputs"], ahead[1]["inputs"])


def test_rows_are_padded_to_the_context():
    batch = splits().train.batch(0)
    assert {name: (values.shape, values.dtype.name) for name, values in batch.items()} == {
        "inputs": ((6, 9), "int32"),
        "targets": ((6, 9), "int32"),
        "segment_ids": ((6, 9), "int32"),
        "positions": ((6, 9), "int32"),
        "weights": ((6, 9), "float32"),
    }
    assert batch["weights"].tolist() == [[1] * 7 + [0] * 2] * 6 == batch["segment_ids"].tolist()
    assert batch["positions"].tolist() == [[*range(7), 0, 0]] * 6
    assert not any(values[:, 7:].any() for values in batch.values())


@pytest.mark.parametrize("size", [1, 3, 10, 16])
def test_validation_is_every_sequence_once(size):
    valid = splits().valid
    batches = list(valid.eval_batches(size))
    assert len(batches) == valid.num_eval_batches(size) == -(-10 // size)
    rows = np.concatenate([b["inputs"] for b in batches])[:10, :7]
    assert np.array_equal(rows, valid.sequences.rows("valid", np.arange(10))["inputs"])
    assert sum(b["weights"].sum() for b in batches) == 70
    assert len(list(valid.eval_batches(size, 1))) == 1


def test_what_does_not_fit_is_refused_with_keys_and_numbers():
    with pytest.raises(DataError, match=r"model\.context=6 is less than task\.length=7"):
        splits(context=6)
    with pytest.raises(DataError, match=r"model\.vocab_size=5 is less than the 6 ids of the task"):
        generated_splits(WordProblem(), 24, 4, vocab_size=5)
    with pytest.raises(ValueError, match=r"task\.group=S9 must be one of .*; task\.length=0 must be at least 1; "):
        WordProblem(group="S9", length=0, train_seed=-1).check()


def test_batches_describe_themselves():
    made = splits()
    assert made.train.describe() == (
        "train: sequences of 7 (2 of 9 places of a row are padding), without end; 6 rows per step"
    )
    assert made.valid.describe().endswith("10 in all; 6 rows per step")
    assert made.info.lines() == ["word problem of S3, 6 letters, 6 elements; vocabulary 6"]
    assert made.train.num_steps is None and made.valid.bytes_per_target is None and made.scored
