"""The store on disk: exact ids, reuse, damage, concurrent and interrupted preparation."""

import json
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from data_helpers import split_of
from hypothesis import given, settings
from hypothesis import strategies as st

from lmres.data import DataConfig, DataError, load_splits, open_store, prepare


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i} " + "word " * i}) + "\n" for i in range(40)))
    return DataConfig(train=str(path))


def snapshot(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 256, 257, 65535, 65536, 65537, 70000, 2**32]))
def test_ids_of_any_vocabulary_read_back_unchanged(data, vocab_size):
    some = st.lists(
        st.one_of(st.integers(0, vocab_size - 1), st.just(vocab_size - 1)), min_size=1, max_size=6
    )
    documents = data.draw(st.lists(some, min_size=2, max_size=6, unique_by=tuple))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ids.jsonl"
        path.write_text("".join(json.dumps({"input_ids": d}) + "\n" for d in documents))
        for limit in (vocab_size, None):
            info = prepare(DataConfig(train=str(path), vocab_size=limit), Path(folder) / f"store{limit}")
            splits = open_store(info.path).splits.values()
            found = [s.document(i).tolist() for s in splits for i in range(s.info.documents)]
            assert sorted(found) == sorted(documents)
            assert info.vocab_size == (limit or max(map(max, documents)) + 1)
            assert info.dtype == ("uint16" if limit is not None and limit <= 65536 else "uint32")


def test_the_writer_never_wraps_an_id(tmp_path):
    with pytest.raises(DataError, match="65536"):
        split_of([[1, 65536]], tmp_path, np.uint16)


def test_a_preparation_is_reused_until_something_changes(config, tmp_path):
    calls = []
    first = prepare(config, tmp_path / "store", progress=calls.append)
    before = snapshot(first.path)
    assert calls
    assert not first.reused
    seen = len(calls)
    again = prepare(config, tmp_path / "store", progress=calls.append)
    assert again.reused
    assert len(calls) == seen
    assert (again.splits, again.sources) == (first.splits, first.sources)

    def changed(key, **settings):
        with pytest.raises(DataError, match=f"made otherwise.*{key}.*overwrite"):
            prepare(DataConfig(**{**vars(config), **settings}), tmp_path / "store")
        assert snapshot(first.path) == before

    changed("valid_fraction: 0.05 -> 0.2", valid_fraction=0.2)
    changed("split_seed: 0 -> 1", split_seed=1)
    changed("errors", errors="replace")
    for free in ({"seed": 5}, {"packing": "none"}, {"repeat": "small"}):
        assert prepare(DataConfig(**{**vars(config), **free}), tmp_path / "store").reused
    path = Path(config.train)
    path.write_text(path.read_text().replace("document 3 ", "document X "))
    state = path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))
    changed("train: the files")
    new = prepare(config, tmp_path / "store", overwrite=True)
    assert not new.reused
    assert new.splits["train"].content != first.splits["train"].content
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_the_content_digest_depends_on_nothing_but_the_content(config, tmp_path):
    first = prepare(config, tmp_path / "one")
    copy = tmp_path / "copy.jsonl"
    copy.write_text(Path(config.train).read_text())
    second = prepare(DataConfig(train=str(copy)), tmp_path / "two")
    assert first.fingerprint != second.fingerprint
    assert first.splits == second.splits


def test_the_cache_keeps_one_store_per_setting(config, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one = load_splits(config, 16, 2)
    assert one.info.path.parent == tmp_path / "cache" / "lmres" / "data"
    assert load_splits(config, 32, 1).info.path == one.info.path
    other = load_splits(DataConfig(**{**vars(config), "split_seed": 1}), 16, 2)
    assert other.info.path != one.info.path
    assert open_store(one.info.path).info.splits == one.info.splits


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda p: (p / "meta.json").unlink(), "no meta.json"),
        (lambda p: (p / "meta.json").write_text('{"format": "lmres-'), "not valid JSON"),
        (lambda p: (p / "train" / "tokens.bin").unlink(), "no tokens.bin"),
        (lambda p: os.truncate(p / "train" / "tokens.bin", 100), "tokens.bin has 100 bytes, [0-9]+ expected"),
        (lambda p: (p / "valid" / "offsets.npy").unlink(), "no offsets.npy"),
        (lambda p: os.truncate(p / "valid" / "offsets.npy", 130), "offsets.npy"),
        (lambda p: np.save(p / "train" / "offsets.npy", np.arange(3)), "does not describe"),
        (lambda p: edit(p, version=99), "format version 99"),
        (lambda p: edit(p, vocabulary=1), "wrong keys"),
        (lambda p: edit(p, format="other"), "not that of an lmres token store"),
    ],
)
def test_damaged_stores_are_refused_and_left_alone(config, tmp_path, harm, message):
    path = prepare(config, tmp_path / "store").path
    harm(path)
    before = snapshot(path)
    for use in (
        lambda: open_store(path),
        lambda: load_splits(DataConfig(train=str(path), format="store"), 8, 1),
    ):
        with pytest.raises(DataError, match=message):
            use()
    with pytest.raises(DataError):
        prepare(config, path)
    assert snapshot(path) == before
    assert not prepare(config, path, overwrite=True).reused
    open_store(path).splits["train"].verify()


def edit(path, **changes):
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, **changes}))


def test_a_flipped_bit_is_found_by_verify(config, tmp_path):
    store = open_store(prepare(config, tmp_path / "store").path)
    for split in store.splits.values():
        split.verify()
    file = store.info.path / "train" / "tokens.bin"
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match="tokens differ"):
        open_store(store.info.path).splits["train"].verify()


def test_other_folders_and_missing_ones(config, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("keep me")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="is not a prepared store"):
            prepare(config, tmp_path / "mine", overwrite=overwrite)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "keep me"
    with pytest.raises(DataError, match="no such folder"):
        open_store(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert not prepare(config, tmp_path / "empty").reused


def test_an_interrupted_preparation_leaves_nothing_and_keeps_the_old_store(config, tmp_path):
    path = prepare(config, tmp_path / "store").path
    before = snapshot(path)

    def interrupt(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(DataConfig(train=config.train, split_seed=3), path, progress=interrupt, overwrite=True)
    assert snapshot(path) == before
    with pytest.raises(KeyboardInterrupt):
        prepare(config, tmp_path / "new", progress=interrupt)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "store"]


def test_a_failed_replacement_puts_the_old_store_back(config, tmp_path, monkeypatch):
    path = prepare(config, tmp_path / "store").path
    before = snapshot(path)
    rename = os.rename

    def fail(source, target):
        if str(source).endswith(".tmp"):
            raise OSError("disk says no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="disk says no"):
        prepare(DataConfig(train=config.train, split_seed=3), path, overwrite=True)
    assert snapshot(path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "store"]


def test_several_processes_may_prepare_the_same_folder(config, tmp_path):
    together = threading.Barrier(4)
    found, failed = [], []

    def work():
        try:
            # All have read everything before any of them renames its result.
            found.append(prepare(config, tmp_path / "store", progress=lambda p: together.wait(10)))
        except Exception as e:
            failed.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed
    assert sum(not i.reused for i in found) == 1
    open_store(tmp_path / "store").splits["train"].verify()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "store"]


def test_big_sources_stream_and_report(tmp_path):
    path = tmp_path / "big.txt"
    line = "word " * 200
    path.write_text("".join(f"{i} {line}\n" for i in range(5000)))
    config = DataConfig(train=str(path), text_unit="line")
    steps = []
    info = prepare(config, tmp_path / "store", progress=steps.append)
    assert len(steps) >= 4, "5 MB of text is more than one group"
    assert [s.documents for s in steps] == sorted({s.documents for s in steps})
    assert all(s.source_total == path.stat().st_size for s in steps)
    assert steps[0].source_bytes < 0.5 * path.stat().st_size, (
        "the first group was written before the rest was read"
    )
    assert steps[-1].source_bytes == path.stat().st_size
    assert info.splits["train"].documents + info.splits["valid"].documents == 5000
    assert info.splits["valid"].documents == 250
    assert steps[-1].tokens == sum(s.tokens for s in info.splits.values())


def test_summary_lines_give_the_counts(config, tmp_path):
    with open(config.train, "a") as file:
        file.write('{"text": ""}\n')
    text = "\n".join(prepare(config, tmp_path / "store").lines())
    for part in ("vocabulary 257", "train: 38 documents", "valid: 2 documents", "41 records", "1 blank"):
        assert part in text
