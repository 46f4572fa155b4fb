"""Every input case that concerns the data, from the file to the batches."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lmres.data import Batches, DataConfig, DataError, load_splits, open_store, prepare


@pytest.fixture
def build(tmp_path, case):
    """Prepares a store with case `name` as data.valid, so that small cases need no split; returns the
    split of the case and the store's info."""

    def run(name, vocab_size=None, **settings):
        other = tmp_path / "other.jsonl"
        record = (
            {"input_ids": [1, 2, 3]} if "ids" in name or "sequences" in name else {"text": "Another text."}
        )
        other.write_text(json.dumps(record) + "\n")
        config = DataConfig(train=str(other), valid=case(name), **settings)
        info = prepare(config, tmp_path / f"store{len(list(tmp_path.iterdir()))}", vocab_size=vocab_size)
        return open_store(info.path).splits["valid"], info

    return run


def documents(split):
    return [split.document(i) for i in range(split.info.documents)]


def text(ids):
    return bytes(ids[ids != 256].astype(np.uint8)).decode()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("invalid_utf8.txt", ["invalid_utf8.txt:3:", "0xe9", "offset 100", "replace"]),
        ("utf16le.txt", ["utf16le.txt", "UTF-16", "UTF-8"]),
        ("missing_text.jsonl", ["missing_text.jsonl:3:", "'text'", "txt, id"]),
        ("wrong_type_text.jsonl", ["wrong_type_text.jsonl:2:", "'text'", "null"]),
        ("bad_json_line.jsonl", ["bad_json_line.jsonl:2:", "JSON", "column"]),
        ("truncated.jsonl.gz", ["truncated.jsonl.gz", "cut off", "2817 bytes"]),
        ("empty_file.jsonl", ["empty_file.jsonl", "no documents", "0 bytes", "0 records"]),
    ],
)
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(build, tmp_path, name, parts):
    with pytest.raises(DataError) as error:
        build(name)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    assert not list(tmp_path.glob("*store*")), "a failed preparation left a folder behind"


def test_invalid_utf8_replaced_uses_every_line_and_counts(build):
    split, info = build("invalid_utf8.txt", errors="replace")
    assert info.sources["valid"]["counts"]["replacements"] == 3
    assert info.sources["valid"]["counts"]["records"] == 6
    whole = text(documents(split)[0])
    assert whole.count("\n") == 6
    assert whole.count("\ufffd") == 3


def test_mark_and_crlf_do_not_change_the_tokens(build):
    plain, _ = build("plain_lf.txt")
    marked, _ = build("bom_crlf.txt")
    assert plain.tokens.tolist() == marked.tokens.tolist()
    assert len(plain.tokens) == 219 + 1
    for unit in ("line", "paragraph"):
        a, _ = build("plain_lf.txt", text_unit=unit)
        b, _ = build("bom_crlf.txt", text_unit=unit, on_bad_record="skip")
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.info.documents == {"line": 5, "paragraph": 1}[unit]


def test_empty_documents_are_skipped_and_counted(build):
    split, info = build("empty_docs.jsonl")
    assert split.info.documents == 4
    counts = info.sources["valid"]["counts"]
    assert (counts["records"], counts["blank"]) == (8, 4)
    assert all(len(d) > 2 for d in documents(split))


@pytest.mark.parametrize(
    ("name", "used", "bad"),
    [("missing_text.jsonl", 3, 1), ("wrong_type_text.jsonl", 2, 3), ("bad_json_line.jsonl", 2, 1)],
)
def test_bad_records_can_be_skipped_and_are_counted(build, name, used, bad):
    split, info = build(name, on_bad_record="skip")
    assert split.info.documents == used
    assert info.sources["valid"]["counts"]["bad"] == bad


def test_truncated_gz_is_an_error_even_when_records_may_be_skipped(build):
    with pytest.raises(DataError, match="cut off"):
        build("truncated.jsonl.gz", on_bad_record="skip", errors="replace")


def test_complete_gz(build):
    assert build("complete.jsonl.gz")[0].info.documents == 60


def test_too_short_names_tokens_found_and_needed(case, tmp_path):
    config = DataConfig(train=case("too_short.txt"), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"40 tokens found.*context 256 needs 257"):
        load_splits(config, 256, 1)
    with_valid = DataConfig(
        train=case("too_short.txt"), valid=case("plain_lf.txt"), cache_dir=str(tmp_path / "cache")
    )
    with pytest.raises(DataError, match=r"40 tokens.*context 256 needs 257"):
        load_splits(with_valid, 256, 1)
    padded = DataConfig(**{**vars(with_valid), "repeat": "small"})
    batch = load_splits(padded, 256, 2).train.batch(0)
    assert batch["weights"].sum() == 2 * 39


def test_three_sequences_smaller_than_a_batch(case, tmp_path):
    settings = {"valid": case("wide_ids.jsonl"), "cache_dir": str(tmp_path / "cache")}
    config = DataConfig(train=case("three_sequences.jsonl"), **settings)
    with pytest.raises(DataError, match=r"4 windows of context 32, one batch needs 8.*data\.repeat"):
        load_splits(config, 32, 8)
    config = DataConfig(train=case("three_sequences.jsonl"), repeat="small", packing="none", **settings)
    train = load_splits(config, 32, 8).train
    assert train.num_windows == 3
    firsts = [int(row[0]) for step in range(3) for row in train.batch(step)["inputs"]]
    assert sorted(firsts) == sorted([1, 8, 15] * 8), "24 rows are 8 epochs of 3 windows"
    config = DataConfig(train=case("three_sequences.jsonl"), repeat="never", packing="none", **settings)
    train = load_splits(config, 32, 8).train
    assert train.num_steps == 1
    assert train.batch(0)["weights"].sum() == 3 * 32
    with pytest.raises(DataError, match=r"step 1 .* 1 steps of 8 rows"):
        train.batch(1)


def test_id_out_of_range_names_record_and_id(case, tmp_path):
    path = case("id_out_of_range.jsonl")
    other = case("three_sequences.jsonl")

    def load(**settings):
        config = DataConfig(train=path, valid=other, cache_dir=str(tmp_path / "cache"), **settings)
        return load_splits(config, 16, 1, vocab_size=256)

    with pytest.raises(
        DataError, match=r"id_out_of_range.jsonl:3: record 3 holds id 256 at position 2.*0 \.\. 255"
    ):
        load()
    with pytest.raises(DataError, match="record 3 holds id 256"):
        load(on_bad_record="skip")
    lines = Path(path).read_text().splitlines()
    Path(path).write_text("\n".join([lines[0], lines[1], lines[3]]))
    with pytest.raises(DataError, match="record 3 holds id -1"):
        load()
    Path(path).write_text("\n".join(lines[:2]))
    assert load().info.vocab_size == 256


def test_wide_ids_read_back_unchanged(build):
    split, info = build("wide_ids.jsonl", vocab_size=70000)
    assert (info.vocab_size, info.dtype) == (70000, "uint32")
    for ids in documents(split):
        assert ids.tolist() == [1, 65535, 65536, 65537, 69999, 2] * 6
    assert split.info.text_bytes is None


def test_a_vocabulary_larger_than_the_models_is_refused(case, tmp_path):
    config = DataConfig(train=case("single_shard"), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"tokenizer bytes.*257 ids, the model has 256"):
        load_splits(config, 16, 2, vocab_size=256)
    assert load_splits(config, 16, 2, vocab_size=257).tokenizer.vocab_size == 257


def test_packing_pairs_differ_only_in_the_first_document(build):
    rows = []
    for name in ("packing_pair_a.jsonl", "packing_pair_b.jsonl"):
        split, _ = build(name)
        assert [len(d) for d in documents(split)] == [132, 129]
        rows.append(Batches(split, 300, 1, repeat="small").batch(0))
    a, b = rows
    second = a["segment_ids"] == 2
    assert second.sum() == 129 - 1
    assert (a["inputs"] != b["inputs"]).any()
    for key in a:
        assert (a[key][second] == b[key][second]).all(), key
    assert (a["inputs"] == 256).sum() == 1, "exactly one separator stands between the documents"
    at = np.flatnonzero(a["inputs"][0] == 256)[0]
    assert a["weights"][0, at] == 0
    assert a["weights"][0, at - 1] == 1


def test_unequal_lengths_have_the_same_targets_for_any_eval_batch(build):
    split, _ = build("unequal_lengths.jsonl")
    for packing in ("concat", "none"):
        batches = Batches(split, 64, 1, packing=packing)
        seen = []
        for size in (1, 3, 8):
            parts = list(batches.eval_batches(size))
            assert {p["inputs"].shape for p in parts} == {(size, 64)}
            rows = {k: np.concatenate([p[k] for p in parts])[: batches.num_windows] for k in parts[0]}
            assert sum(p["weights"].sum() for p in parts) == batches.target_tokens == len(split.tokens) - 8
            seen.append(rows)
        for rows in seen[1:]:
            for key, value in rows.items():
                assert (value == seen[0][key]).all()


def split_texts(config, folder):
    store = open_store(prepare(config, folder).path)
    return [[text(d) for d in documents(store.splits[k])] for k in ("train", "valid")]


def test_split_of_one_shard_is_disjoint_and_the_same_for_any_sharding(case, tmp_path):
    folder = case("single_shard")
    records = Path(folder, "part-00000.jsonl").read_text().splitlines()
    train, valid = split_texts(DataConfig(train=folder), tmp_path / "one")
    assert (len(train), len(valid)) == (19, 1)
    assert not set(train) & set(valid)
    assert sorted(train + valid) == sorted(json.loads(r)["text"] for r in records)
    shards = tmp_path / "shards"
    shards.mkdir()
    for i in range(4):
        (shards / f"{3 - i}.jsonl").write_text("\n".join(records[i::4]) + "\n")
    again = split_texts(DataConfig(train=str(shards)), tmp_path / "four")
    assert [sorted(part) for part in again] == [sorted(train), sorted(valid)]
    others = [
        split_texts(DataConfig(train=folder, split_seed=s), tmp_path / f"seed{s}")[1] for s in range(1, 6)
    ]
    assert any(o != valid for o in others)


def test_separate_validation_set_never_overlaps(case, tmp_path):
    train, valid = case("small_train.jsonl"), case("small_valid.jsonl")
    with open(train, "a") as file:
        file.write(Path(valid).read_text().splitlines()[4] + "\n")
    config = DataConfig(train=train, valid=valid)
    info = prepare(config, tmp_path / "store")
    assert (info.splits["train"].documents, info.splits["valid"].documents) == (120, 13)
    assert info.sources["train"]["counts"]["in_valid"] == 1
    with pytest.raises(DataError, match=re.escape(valid)):
        prepare(DataConfig(train=(train, valid), valid=valid), tmp_path / "same")
    copy = tmp_path / "copy.jsonl"
    copy.write_text(Path(valid).read_text())
    with pytest.raises(DataError, match="13 also in the validation set"):
        prepare(DataConfig(train=str(copy), valid=valid), tmp_path / "copied")


def test_one_document_cannot_be_split(case, tmp_path):
    path = case("plain_lf.txt")
    with pytest.raises(
        DataError, match=r"1 documents \(220 tokens\) found, 1 different, 2 needed.*text_unit"
    ):
        prepare(DataConfig(train=path), tmp_path / "store")
    info = prepare(DataConfig(train=path, text_unit="line"), tmp_path / "store")
    assert (info.splits["train"].documents, info.splits["valid"].documents) == (4, 1)


def test_copies_of_a_document_fall_on_one_side(tmp_path):
    path = tmp_path / "copies.txt"
    path.write_text("".join(f"line {i % 3}\n" for i in range(30)))
    train, valid = split_texts(DataConfig(train=str(path), text_unit="line"), tmp_path / "store")
    assert len(valid) == 10
    assert not set(train) & set(valid)
    most = DataConfig(train=str(path), text_unit="line", valid_fraction=0.99)
    assert len(split_texts(most, tmp_path / "most")[0]) == 10, "training is not empty either"
    path.write_text("same\n" * 30)
    with pytest.raises(DataError, match=r"30 documents .* 1 different, 2 needed"):
        prepare(DataConfig(train=str(path), text_unit="line"), tmp_path / "other")
