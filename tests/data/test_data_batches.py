"""Batches against a slow reference that knows nothing of the code: plain loops over lists."""

import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from data_helpers import split_of
from hypothesis import given, settings
from hypothesis import strategies as st

from lmres.data import Batches, DataError

KEYS = ("inputs", "targets", "segment_ids", "positions", "weights")


def reference(documents, context, packing):
    """Every window as a dict of lists, in order."""
    runs = [[(d, t) for d, ids in enumerate(documents) for t in ids]]
    if packing == "none":
        runs = [[(d, t) for t in ids] for d, ids in enumerate(documents)]
    rows = []
    for run in runs:
        for start in range(0, len(run) - 1, context):
            row = {k: [0] * context for k in KEYS}
            segment, position = 1, 0
            for i in range(min(context, len(run) - 1 - start)):
                document, token = run[start + i]
                if i and document != run[start + i - 1][0]:
                    segment, position = segment + 1, 0
                follower, target = run[start + i + 1]
                row["inputs"][i], row["targets"][i] = token, target
                row["segment_ids"][i], row["positions"][i] = segment, position
                row["weights"][i] = int(follower == document)
                position += 1
            rows.append(row)
    return rows


@st.composite
def cases(draw):
    """Documents whose ids are all different, so that an id says which token of which document it is."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8).filter(lambda n: sum(n) > len(n)))
    ids = iter(range(1, sum(lengths) + 1))
    documents = [[next(ids) for _ in range(n)] for n in lengths]
    return documents, draw(st.integers(1, 10)), draw(st.sampled_from(["concat", "none"]))


def batches(documents, context, batch_size, **options):
    with tempfile.TemporaryDirectory() as folder:
        return Batches(
            split_of(documents, Path(folder)), context, batch_size, **{"repeat": "small", **options}
        )


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 5))
def test_every_window_equals_the_reference_and_every_token_is_predicted_once(drawn, eval_batch):
    documents, context, packing = drawn
    b = batches(documents, context, 2, packing=packing)
    expected = reference(documents, context, packing)
    assert b.num_windows == len(expected)
    found = list(b.eval_batches(eval_batch))
    rows = {k: np.concatenate([part[k] for part in found]) for k in KEYS}
    for key in KEYS:
        assert rows[key][: len(expected)].tolist() == [r[key] for r in expected], key
        assert not rows[key][len(expected) :].any(), "rows that fill up the last batch are all zero"
        assert rows[key].dtype == (np.float32 if key == "weights" else np.int32)
    predicted = rows["targets"][rows["weights"] == 1].tolist()
    assert sorted(predicted) == sorted(t for ids in documents for t in ids[1:])
    assert b.target_tokens == len(predicted)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_an_epoch_of_training_predicts_every_token_once(drawn, batch_size, seed):
    documents, context, packing = drawn
    b = batches(documents, context, batch_size, packing=packing, seed=seed)
    epochs = 3
    steps = -(-epochs * b.num_windows // batch_size)
    parts = [b.batch(s) for s in range(steps)]
    for epoch in range(epochs):
        span = slice(epoch * b.num_windows, (epoch + 1) * b.num_windows)
        targets, weights = (np.concatenate([p[k] for p in parts])[span] for k in ("targets", "weights"))
        assert sorted(targets[weights == 1].tolist()) == sorted(t for ids in documents for t in ids[1:])


LONG = [list(range(1 + 50 * d, 51 + 50 * d)) for d in range(20)]


def test_epochs_are_shuffled_each_in_its_own_way():
    b = batches(LONG, 10, 5)
    per_epoch = b.num_windows // 5
    orders = [
        [int(r) for s in range(e * per_epoch, (e + 1) * per_epoch) for r in b.batch(s)["inputs"][:, 0]]
        for e in (0, 1)
    ]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])
    assert (batches(LONG, 10, 5, seed=1).batch(0)["inputs"] != b.batch(0)["inputs"]).any()
    plain = batches(LONG, 10, 5, shuffle=False)
    assert plain.batch(0)["inputs"][:, 0].tolist() == [1, 11, 21, 31, 41]
    assert plain.batch(per_epoch)["inputs"][:, 0].tolist() == [1, 11, 21, 31, 41]


@pytest.mark.parametrize("packing", ["concat", "none"])
def test_hosts_hold_the_rows_of_one_global_batch(packing):
    b = batches(LONG, 16, 8, packing=packing)
    for step in (0, 7, 1000):
        whole = b.batch(step)
        for hosts in (1, 2, 4):
            share = 8 // hosts
            parts = [b.batch(step, slice(h * share, (h + 1) * share)) for h in range(hosts)]
            for key in KEYS:
                assert (np.concatenate([p[key] for p in parts]) == whole[key]).all()
        some = b.batch(step, np.array([6, 1]))
        assert (some["inputs"] == whole["inputs"][[6, 1]]).all()
    with pytest.raises(IndexError):
        b.batch(0, np.array([8]))


def test_iteration_from_any_step_equals_random_access():
    b = batches(LONG, 16, 8)
    for start in (0, 3, 10**6):
        iterator = b.iterate(start, rows=slice(2, 5))
        for step in range(start, start + 12):
            got, wanted = next(iterator), b.batch(step, slice(2, 5))
            for key in KEYS:
                assert (got[key] == wanted[key]).all()
        iterator.close()


def test_closing_the_iterator_ends_its_threads():
    before = threading.active_count()
    iterator = batches(LONG, 16, 8).iterate()
    next(iterator)
    iterator.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_repeat_never_ends_with_a_padded_batch():
    b = batches(LONG, 30, 8, repeat="never")
    assert (b.num_windows, b.num_steps) == (34, 5)
    parts = list(b.iterate())
    assert len(parts) == 5
    assert {p["inputs"].shape for p in parts} == {(8, 30)}
    assert sum(p["weights"].sum() for p in parts) == b.target_tokens
    assert not parts[-1]["segment_ids"][2:].any()
    assert len(list(b.iterate(4))) == 1
    assert list(b.iterate(5)) == list(b.iterate(9)) == []
    with pytest.raises(DataError, match=r"step 5 .* 5 steps"):
        b.batch(5)


def test_max_batches_and_rows_of_the_evaluation():
    b = batches(LONG, 30, 8)
    assert b.num_eval_batches(8) == 5
    assert len(list(b.eval_batches(8, max_batches=2))) == b.num_eval_batches(8, 2) == 2
    assert len(list(b.eval_batches(8, max_batches=99))) == 5
    for whole, part in zip(b.eval_batches(8), b.eval_batches(8, rows=slice(4, 8)), strict=True):
        assert (whole["targets"][4:8] == part["targets"]).all()


def test_description_gives_the_remainder():
    text = batches(LONG, 30, 8).describe()
    assert "34 windows of 30 (21 of 1020 places are padding)" in text
    assert "4.25 steps of 8 rows" in text
    assert "(0 of 999" in batches(LONG, 1, 8).describe()


@pytest.mark.parametrize(
    ("documents", "context", "batch_size", "options", "message"),
    [
        (LONG[:1], 50, 1, {}, "50 tokens, one window of context 50 needs 51"),
        (LONG[:1], 10, 6, {}, "5 windows of context 10, one batch needs 6"),
        (LONG[:1], 60, 2, {"packing": "none"}, "1 windows of context 60, one batch needs 2"),
        ([[1], [2]], 4, 1, {"packing": "none"}, "none to predict"),
        (LONG[:1], 0, 1, {}, "context is 0"),
        (LONG[:1], 1, 0, {}, "batch size 0"),
    ],
)
def test_too_little_data_names_found_and_needed(documents, context, batch_size, options, message):
    with pytest.raises(DataError, match=message):
        batches(documents, context, batch_size, **{"repeat": "epochs", **options})


def test_negative_steps_are_refused():
    b = batches(LONG, 10, 5)
    with pytest.raises(DataError, match="step -1"):
        b.batch(-1)
    with pytest.raises(DataError, match="start_step is -1"):
        next(b.iterate(-1))
