"""Prepared stores on gs:// and s3://, served by stand-ins on this machine."""

import json
from pathlib import Path

import numpy as np
import object_stores
import pytest

from lmres.data import DataConfig, DataError, open_store, prepare
from lmres.data.files import as_path


@pytest.fixture(params=object_stores.STORES)
def remote(request, monkeypatch, tmp_path):
    """Address of an empty folder, a new one for each test."""
    for name, value in object_stores.STORES[request.param]().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"{request.param}://{object_stores.BUCKET}/{tmp_path.name}-{request.node.name.split('[')[0]}"


@pytest.fixture
def local(tmp_path):
    """A store on this machine."""
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": f"document {i} " + "word " * i}) + "\n" for i in range(40)))
    prepare(DataConfig(train=str(source)), tmp_path / "store")
    return tmp_path / "store"


def upload(folder, address):
    for file in folder.rglob("*"):
        if file.is_file():
            (as_path(address, "stores") / str(file.relative_to(folder))).write_bytes(file.read_bytes())


def test_store_is_copied_once_and_read_as_it_was_written(local, remote, tmp_path):
    upload(local, remote)
    there, here = open_store(remote), open_store(local)
    assert str(there.info.path) == remote and there.info.splits == here.info.splits
    for name in here.splits:
        np.testing.assert_array_equal(there.splits[name].tokens, here.splits[name].tokens)
        np.testing.assert_array_equal(there.splits[name].offsets, here.splits[name].offsets)
    [copy] = (tmp_path / "cache" / "lmres" / "data").iterdir()
    before = copy.stat().st_mtime_ns
    (as_path(remote, "stores") / "train" / "tokens.bin").unlink()  # not read again
    open_store(remote)
    assert [copy] == list(copy.parent.iterdir()) and copy.stat().st_mtime_ns == before
    assert open_store(local, cache=tmp_path / "other").info.path == local


def test_damage_is_told_and_leaves_nothing(local, remote, tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        open_store(remote)
    upload(local, remote)
    file = as_path(remote, "stores") / "train" / "tokens.bin"
    good = file.read_bytes()
    file.write_bytes(good[:-2])
    with pytest.raises(DataError, match=f"{remote}.*tokens.bin has {len(good) - 2} bytes, {len(good)} expected"):
        open_store(remote)
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))  # a copy of it may be damaged too
    with pytest.raises(DataError, match=f"{remote}.*differ from those written"):
        open_store(remote)
    file.unlink()
    with pytest.raises(DataError, match=remote):
        open_store(remote)
    assert list((tmp_path / "cache").rglob("*.bin")) == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("hdfs://host/x", r"hdfs://host/x: stores cannot be on hdfs://; supported are .* gs://BUCKET/..., s3://BUCKET"),
        (Path("gs://bucket/x"), "gs:/bucket/x: gs://bucket/x cannot be given as a path of pathlib"),
        ("gs://", "names no bucket; stores are to be at gs://BUCKET/FOLDER"),
    ],
)
def test_other_places_are_refused(name, told):
    with pytest.raises(DataError, match=told):
        as_path(name, "stores")


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"s3:// needs the package s3fs: pip install 'lmres\[s3\]'"):
        as_path("s3://bucket/x", "stores")
