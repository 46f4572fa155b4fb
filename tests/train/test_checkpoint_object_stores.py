"""Checkpoints on gs://, served by a stand-in on this machine; what orbax has no support for is refused."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import object_stores
import pytest
from checkpoint_helpers import shapes_of

from lmres.data.files import as_path
from lmres.train.checkpoint import Checkpoints, FolderInUse
from lmres.train.fingerprint import CheckpointError


@pytest.fixture
def folder(monkeypatch, tmp_path, request):
    for name, value in object_stores.gs().items():
        monkeypatch.setenv(name, value)
    return f"gs://{object_stores.BUCKET}/{tmp_path.name}-{request.node.name}/checkpoints"


def state(value):
    return {"params": {"w": jnp.full((64, 8), value, jnp.float32), "b": jnp.ones(3, jnp.bfloat16) * value}}


def test_saved_listed_pruned_and_restored(folder):
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.folder == folder and checkpoints.steps() == []
        for step in (1, 2, 3):
            checkpoints.save(step, state(float(step)), {"config": {"a": 1}})
    assert sorted(p.name for p in as_path(folder, "checkpoints").iterdir()) == ["2", "3"]
    with Checkpoints(folder, mode="read") as checkpoints:
        assert checkpoints.steps() == [2, 3] and checkpoints.meta()["config"] == {"a": 1}
        assert [row["problem"] for row in checkpoints.inspect()] == [None, None]
        restored = checkpoints.restore(shapes_of(state(0.0)))
    assert restored.step == 3
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), restored.state, state(3.0)))
    with pytest.raises(FolderInUse, match=folder):
        Checkpoints(folder, mode="new")
    with Checkpoints(folder, mode="overwrite") as checkpoints:
        assert checkpoints.steps() == []


READER = """
import sys
import jax, jax.numpy as jnp
from lmres.train.checkpoint import Checkpoints
like = {"params": {"w": jax.ShapeDtypeStruct((64, 8), jnp.float32), "b": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}}
with Checkpoints(sys.argv[1], mode="resume", report=print) as checkpoints:
    assert checkpoints.restore(like).step == 1
    checkpoints.save(2, jax.tree.map(lambda x: jnp.full(x.shape, 5, x.dtype), like), {})
"""


def test_damaged_and_unfinished_steps_are_walked_over(folder):
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(float(step)), {})
    root = as_path(folder, "checkpoints")
    for data in ("d", "ocdbt.process_0/d"):
        for file in (root / "2" / "state" / data).iterdir():
            file.write_bytes(file.read_bytes()[:10])
    (root / "3" / "meta" / "metadata").write_text("{}")  # nothing says that it was finished: cut off while saving
    # In another process: this one remembers what it read.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", READER, folder], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 2" in done.stdout and "using step 1" in done.stdout and "Traceback" not in done.stderr
    with Checkpoints(folder, mode="read") as checkpoints:
        assert float(checkpoints.restore(shapes_of(state(0.0))).state["params"]["w"].min()) == 5.0


def test_what_another_process_saved_is_seen(folder):
    with Checkpoints(folder, mode="read") as reader:
        assert reader.steps() == []
        with Checkpoints(folder) as writer:
            writer.save(4, state(1.0), {})
        assert reader.steps() == [4] and reader.latest_step() == 4


@pytest.mark.parametrize("name", ["s3://bucket/run/checkpoints", "az://bucket/run/checkpoints"])
def test_stores_that_orbax_does_not_write_to_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be on (s3|az)://; supported are .*gs://BUCKET/"):
        Checkpoints(name)
    assert list(tmp_path.iterdir()) == []
