"""Readers, sources and configuration: formats that the cases do not cover."""

import ast
import gzip
import json
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
import pytest
import zstandard

import lmres.data
from lmres.data import DataConfig, DataError
from lmres.data.readers import Reader
from lmres.data.sources import resolve, stdlib_files


def read(path, vocab_size=None, **settings):
    """(documents, counts) of data.train = path."""
    config = DataConfig(train=path if isinstance(path, tuple) else str(path), **settings)
    reader = Reader(config, resolve(config, "train"), vocab_size)
    documents = [d.value if isinstance(d.value, str) else d.value.tolist() for d in reader]
    return documents, reader.counts


def lines(*records):
    return "".join(json.dumps(r) + "\n" for r in records)


TEXTS = [f"document {i} über {'x' * (i * 37 % 50)}" for i in range(200)]
JSONL = lines(*({"text": t, "id": i} for i, t in enumerate(TEXTS))).encode()


def test_zstandard_of_one_and_of_several_frames(tmp_path):
    half = JSONL.index(b"\n", len(JSONL) // 2) + 1
    frames = [zstandard.compress(JSONL[:half]), zstandard.compress(JSONL[half:])]
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(JSONL))
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(frames))
    assert read(tmp_path / "a.jsonl.zst")[0] == TEXTS
    assert read(tmp_path / "b.jsonl.zst")[0] == TEXTS


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_files_cut_anywhere_or_damaged_are_refused(tmp_path, suffix):
    whole = (
        gzip.compress(JSONL)
        if suffix == "gz"
        else zstandard.ZstdCompressor(write_checksum=True).compress(JSONL)
    )
    path = tmp_path / f"a.jsonl.{suffix}"
    for size in (3, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(
            DataError, match=rf"a\.jsonl\.{suffix}: the compressed data is cut off after {size} bytes"
        ):
            read(path)
    broken = bytearray(whole)
    broken[len(whole) // 2] ^= 0xFF
    path.write_bytes(broken)
    with pytest.raises(DataError, match=rf"a\.jsonl\.{suffix}: the compressed data is (damaged|cut off)"):
        read(path, format="jsonl", on_bad_record="skip", errors="replace")


def test_compressed_text_with_mark(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbfone\r\n two \r\n\r\nthree"))
    assert read(path)[0] == ["one\n two \n\nthree"]
    assert read(path, text_unit="paragraph")[0] == ["one\n two ", "three"]
    documents, counts = read(path, text_unit="line")
    assert documents == ["one", " two ", "three"]
    assert (counts.records, counts.blank) == (4, 1)


def test_offsets_count_the_mark_and_every_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo \xff\n")
    for unit in ("file", "line"):
        with pytest.raises(
            DataError, match=r"a\.txt:2: not UTF-8: byte 0xff at offset 12 \(byte 5 of the line\)"
        ):
            read(path, text_unit=unit)


@pytest.mark.parametrize(
    ("encoding", "name"), [("utf-16-le", "UTF-16"), ("utf-16-be", "UTF-16"), ("utf-32", "UTF-32")]
)
def test_wide_encodings_are_named_with_and_without_mark(tmp_path, encoding, name):
    for suffix, wrap in (("txt", str), ("jsonl", lambda t: lines({"text": t}))):
        path = tmp_path / f"a.{suffix}"
        path.write_bytes(wrap("plain words in lines\n").encode(encoding))
        for unit in ("file", "line"):
            with pytest.raises(DataError, match=name):
                read(path, errors="replace", text_unit=unit, format="text")


def test_lone_surrogates(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine \\ud83d\\ude42"}\n{"text": "bad \\ud800 end"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*U\+D800 at character 4"):
        read(path)
    documents, counts = read(path, errors="replace")
    assert documents == ["fine \U0001f642", "bad \ufffd end"]
    assert counts.replacements == 1


def test_replacement_characters_of_the_source_are_not_counted(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("a \ufffd b ".encode() + b"\xc3\n")
    documents, counts = read(path, errors="replace")
    assert documents == ["a \ufffd b \ufffd\n"]
    assert counts.replacements == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, 2]", "a JSON list, not an object"),
        ('"text"', "a JSON str, not an object"),
        ("[" * 100000, "a.jsonl:1: not "),
        ('{"text": %s}' % ("9" * 5000), "a.jsonl:1: not usable JSON"),
        ('{"input_ids": [1], "x": 2}', "no key 'text'; keys found: input_ids, x; for ready-made ids"),
    ],
)
def test_odd_records(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n" + lines({"text": "good"}))
    with pytest.raises(DataError, match=message):
        read(path, format="jsonl")
    documents, counts = read(path, format="jsonl", on_bad_record="skip")
    assert documents == ["good"]
    assert counts.bad == 1


@pytest.mark.parametrize(
    "value", [None, "1 2", [1.5, 2], [True, False], [[1, 2]], [1, [2]], ["a"], {"a": 1}, [2**70]]
)
def test_ids_that_are_none(tmp_path, value):
    path = tmp_path / "a.jsonl"
    path.write_text(lines({"input_ids": [5, 6]}, {"input_ids": value}, {"input_ids": []}))
    with pytest.raises(DataError, match=r"a\.jsonl:2: 'input_ids' is "):
        read(path)
    documents, counts = read(path, on_bad_record="skip")
    assert documents == [[5, 6]]
    assert (counts.bad, counts.blank) == (1, 1)


def test_ids_that_no_store_can_hold(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines({"input_ids": [2**32 - 1]}, {"input_ids": [2**32]}))
    with pytest.raises(DataError, match=r"record 2 holds id 4294967296 at position 0"):
        read(path)


def test_parquet_text_and_ids(tmp_path):
    table = pa.table({"text": [*TEXTS, None, " "], "body": [*TEXTS, "a", "b"]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=64)
    with pytest.raises(DataError, match=r"a\.parquet:201: 'text' is null"):
        read(tmp_path / "a.parquet")
    documents, counts = read(tmp_path / "a.parquet", on_bad_record="skip")
    assert documents == TEXTS
    assert (counts.records, counts.bad, counts.blank) == (202, 1, 1)
    assert read(tmp_path / "a.parquet", text_key="body")[0] == [*TEXTS, "a", "b"]
    with pytest.raises(DataError, match="no column 'words'; columns found: text, body"):
        read(tmp_path / "a.parquet", text_key="words")
    for kind in (pa.list_(pa.int64()), pa.large_list(pa.uint32()), pa.list_(pa.int16())):
        ids = pa.table({"input_ids": pa.array([[1, 2, 300], [], [7], [8, 9]], kind)})
        pq.write_table(ids, tmp_path / "ids.parquet")
        assert read(tmp_path / "ids.parquet")[0] == [[1, 2, 300], [7], [8, 9]]
        with pytest.raises(DataError, match=r"record 1 holds id 300 at position 2"):
            read(tmp_path / "ids.parquet", vocab_size=300)
    holes = pa.table({"input_ids": pa.array([[1, None], [3]], pa.list_(pa.int64()))})
    pq.write_table(holes, tmp_path / "holes.parquet")
    with pytest.raises(DataError, match=r"holes\.parquet:1: 'input_ids' is not a flat list"):
        read(tmp_path / "holes.parquet")


def test_damaged_parquet(tmp_path):
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for size in (0, 10, len(whole) // 2):
        (tmp_path / "a.parquet").write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"a\.parquet: not a readable Parquet file"):
            read(tmp_path / "a.parquet")


def test_folders_globs_and_lists_are_read_in_a_fixed_order(tmp_path):
    for name in (
        "b/2.txt",
        "a.txt",
        "b/1.txt.gz",
        "c.md",
        ".hidden.txt",
        ".cache/d.txt",
        "notes.bin",
        "b/3.jsonl",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        content = (lines({"text": name}) if name.endswith("jsonl") else name).encode()
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert read(tmp_path)[0] == ["a.txt", "c.md", "b/1.txt.gz", "b/2.txt", "b/3.jsonl"]
    assert read(tmp_path, format="jsonl")[0] == ["b/3.jsonl"]
    assert read(tmp_path / "**" / "*.txt")[0] == ["a.txt", "b/2.txt"]
    assert read((str(tmp_path / "c.md"), str(tmp_path / "a.txt")))[0] == ["c.md", "a.txt"]
    assert read(tmp_path / "notes.bin", format="text")[0] == ["notes.bin"]


@pytest.mark.parametrize(
    ("train", "settings", "message"),
    [
        ("nothing.txt", {}, "no such file or folder"),
        ("*.nothing", {}, "no such file or folder"),
        ("empty", {}, r"empty holds no file of a known name \(\.txt"),
        ("a.bin", {}, "the name does not tell the format"),
        (("a.txt", "a.txt"), {}, "named twice"),
        (("a.txt", "*.txt"), {}, "named twice"),
        (("a.txt", "ids.jsonl"), {}, "mixes ready-made ids"),
        ("a.txt", {"format": "stdlib"}, "reads no other files"),
        (None, {"format": "jsonl"}, "names no file"),
        (None, {"format": "datasets"}, r"NAME\[:CONFIG\]"),
    ],
)
def test_sources_that_cannot_be_resolved(tmp_path, monkeypatch, train, settings, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.bin").write_bytes(b"x")
    (tmp_path / "a.txt").write_bytes(b"x")
    (tmp_path / "ids.jsonl").write_text(lines({"input_ids": [1]}))
    with pytest.raises(DataError, match=message):
        resolve(DataConfig(train=train, **settings), "train")


def test_the_standard_library_is_the_default():
    files = stdlib_files()
    names = {p.name for p in files}
    assert {"argparse.py", "textwrap.py"} <= names
    assert files == stdlib_files()
    assert not any(part in ("site-packages", "test", "tests") for p in files for part in p.parts[-3:-1])
    assert resolve(DataConfig(), "train") == resolve(DataConfig(train="stdlib"), "train")


def test_standard_library_files_that_do_not_decode_are_counted(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_bytes(b"x = 1\r\n")
    (tmp_path / "b.py").write_bytes(b"# latin-1: \xe9\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "c.py").write_bytes(b"y = 2\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    documents, counts = read("stdlib")
    assert documents == ["x = 1\n"]
    assert counts.undecodable == 1


def test_hugging_face_datasets(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        if name == "missing":
            raise FileNotFoundError("no such data set\nlong story")
        return [{"text": "one"}, {"text": None}, {"text": ""}]

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset
    fake.load_from_disk = lambda path: {"train": [{"text": path}], "test": []}
    monkeypatch.setitem(sys.modules, "datasets", fake)
    documents, counts = read("org/name:sub", format="datasets", on_bad_record="skip")
    assert documents == ["one"]
    assert (counts.records, counts.bad, counts.blank) == (3, 1, 1)
    resolved = resolve(DataConfig(valid="org/name", format="datasets"), "valid")
    assert [i.name for i in resolved] == ["org/name@validation"]
    assert asked == [("org/name", "sub", "train")]
    with pytest.raises(DataError, match=r"org/name@test:2: 'text' is null"):
        read("org/name@test", format="datasets")
    with pytest.raises(DataError, match=r"missing@train: the data set cannot be loaded: no such data set$"):
        read("missing", format="datasets")
    (tmp_path / "state.json").write_text("{}")
    (local,) = resolve(DataConfig(train=str(tmp_path), format="datasets"), "train")
    before = local.stamp()
    (tmp_path / "data.arrow").write_text("rows")
    assert local.stamp() != before
    assert read(tmp_path, format="datasets")[0] == [str(tmp_path)]
    with pytest.raises(DataError, match="no split 'dev'; splits found: train, test"):
        read(f"{tmp_path}@dev", format="datasets")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'lmres\[datasets\]'"):
        read("org/name", format="datasets")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"valid_fraction": 0.0}, "valid_fraction is 0.0"),
        ({"valid_fraction": 1.0}, "valid_fraction is 1.0"),
        ({"train": ()}, "data.train is an empty list"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"seed": -1}, "data.seed is -1"),
        ({"split_seed": -1}, "data.split_seed is -1"),
        ({"format": "csv"}, "data.format is 'csv'; choose one of auto, text"),
        ({"packing": "best"}, "data.packing is 'best'"),
    ],
)
def test_config_values_out_of_range(settings, message):
    with pytest.raises(DataError, match=message):
        DataConfig(**settings)


def test_config_nests_in_a_validated_one():
    class Whole(pydantic.BaseModel):
        data: DataConfig = DataConfig()

    assert Whole(data={"train": ["a", "b"]}).data == DataConfig(train=("a", "b"))
    assert DataConfig(train=["a"]) == DataConfig(train=("a",))
    hash(DataConfig(train=["a"]))
    for data, place in (
        ({"trian": "a"}, "trian"),
        ({"valid_fraction": "much"}, "valid_fraction"),
        ({"packing": 3}, "packing"),
    ):
        with pytest.raises(pydantic.ValidationError) as error:
            Whole(data=data)
        assert place in str(error.value)
    with pytest.raises(pydantic.ValidationError, match=r"data\.valid_fraction is 2"):
        Whole(data={"valid_fraction": 2})


def test_the_room_imports_no_other_room_and_no_jax():
    folder = Path(lmres.data.__file__).parent
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level < 2, f"{file.name} reaches out of lmres.data"
                modules = [node.module or ""] if node.level == 0 else []
            assert not {m.split(".")[0] for m in modules} & {"jax", "flax", "optax", "lmres"}, file.name


def test_ids_keep_their_dtype_free_values(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines({"input_ids": [0, 65535, 65536, 2**31]}))
    config = DataConfig(train=str(path))
    (document,) = Reader(config, resolve(config, "train"))
    assert document.value.dtype == np.int64
    assert document.value.tolist() == [0, 65535, 65536, 2**31]
