"""Checkpoints that are damaged, unfinished, of another shape, on other devices, or in the way."""

import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_helpers import META, filled, make_state, same, shapes_of
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from lmres.flow import FlowConfig
from lmres.train import digest
from lmres.train.checkpoint import Checkpoints, FolderInUse
from lmres.train.digest import digests
from lmres.train.fingerprint import (
    CheckpointError,
    CheckpointMismatch,
    architecture,
    check_architecture,
    differences,
    stored_architecture,
)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("saved") / "run")


@pytest.fixture
def folder(three, tmp_path):
    """A fresh copy of a folder with complete checkpoints of steps 1, 2 and 3."""
    return Path(shutil.copytree(three, tmp_path / "run"))


def data_files(step_folder):
    files = [f for f in step_folder.rglob("*") if f.is_file() and f.parent.name == "d"]
    assert files
    return sorted(files, key=lambda f: f.stat().st_size)


def truncate(step):
    for file in data_files(step):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def remove_data(step):
    for file in data_files(step):
        file.unlink()


def only_a_folder(step):
    shutil.rmtree(step)
    step.mkdir()


DAMAGE = {
    "truncated data": truncate,
    "missing data": remove_data,
    "missing manifest": lambda step: (step / "state" / "manifest.ocdbt").unlink(),
    "empty manifest": lambda step: (step / "state" / "manifest.ocdbt").write_bytes(b""),
    "missing tree": lambda step: (step / "state" / "_METADATA").unlink(),
    "missing state": lambda step: shutil.rmtree(step / "state"),
    "missing meta": lambda step: shutil.rmtree(step / "meta"),
    "truncated meta": lambda step: (step / "meta" / "metadata").write_text('{"step": 3, "arr'),
    "empty folder": only_a_folder,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_newest_is_skipped_reported_and_out_of_the_way(folder, damage, monkeypatch):
    noise = []
    monkeypatch.setattr(sys, "unraisablehook", noise.append)
    damage(folder / "3")
    said = []
    with Checkpoints(folder, keep=3, mode="resume", report=said.append) as checkpoints:
        restored = checkpoints.restore(shapes_of(make_state()))
        assert restored.step == 2 and restored.meta["data"] == {"next": 7}
        same(restored.state, make_state(2))
        assert [s.step for s in restored.skipped] == [3]
        assert checkpoints.steps() == [1, 2]
        checkpoints.save(3, make_state(30), META)
        checkpoints.wait()
        same(checkpoints.restore(shapes_of(make_state())).state, make_state(30))
    assert any("step 3: " in line for line in said) and all(
        "\n" not in line and len(line) < 400 for line in said
    )
    assert noise == []


def flip_a_bit(step):
    file = data_files(step)[-1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4  # in the middle of the largest file, so in the numbers
    file.write_bytes(bytes(data))


def test_changed_bytes_are_found(tmp_path):
    """Numbers that do not compress, so that a flip lands in them and orbax reads them without a word."""
    noise = {"params": {"w": jax.random.bits(jax.random.key(0), (64, 1024), jnp.uint32)}}
    for checked in (True, False):
        run = tmp_path / str(checked)
        with Checkpoints(run, digest=checked) as checkpoints:
            checkpoints.save(1, noise, META)
            checkpoints.save(2, noise, META)
        flip_a_bit(run / "2")
        with Checkpoints(run, mode="read") as checkpoints:
            restored = checkpoints.restore(shapes_of(noise))
            if checked:
                assert restored.step == 1 and "params/w differs from its digest" in restored.skipped[0].reason
                assert checkpoints.steps() == [1, 2], "reading must not delete"
                problems = [row["problem"] for row in checkpoints.inspect()]
                assert problems[0] is None and "digest" in problems[1]
            else:  # shows that the damage is one which only the digest finds
                assert restored.step == 2 and (restored.state["params"]["w"] != noise["params"]["w"]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "float16"])
def test_digest_sees_every_entry_and_place(dtype):
    x = np.arange(24).reshape(4, 6) % 2
    base = digests({"x": jnp.asarray(x, dtype)})["x"]
    seen = {base}
    for i in np.ndindex(x.shape):
        other = x.copy()
        other[i] = 1 - other[i]
        seen.add(digests({"x": jnp.asarray(other, dtype)})["x"])
    assert len(seen) == 25
    assert digests({"x": jnp.asarray(x[:, ::-1], dtype)})["x"] not in seen


def mix(v):
    """MurmurHash3's finaliser in Python's integers."""
    v = (v ^ (v >> 16)) * 0x85EBCA6B % 2**32
    v = (v ^ (v >> 13)) * 0xC2B2AE35 % 2**32
    return v ^ (v >> 16)


def test_digest_is_the_same_everywhere(monkeypatch):
    """Host, device and any sharding agree with a sum in Python's integers."""
    monkeypatch.setattr(digest, "CHUNK", 100)
    x = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32)
    want = sum(mix(int(b) ^ mix(i + 1)) for i, b in enumerate(x.reshape(-1).view(np.uint32))) % 2**32
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    assert digests({"x": x}) == {"x": f"{want:08x}"}
    for spec in (P("a", "b"), P("b"), P(None, ("a", "b")), P()):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        assert digests({"x": placed}) == {"x": f"{want:08x}"}
        assert int(digest._on_device(placed)) == want


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "uint8", "int8", "bool", "float32"])
def test_digest_of_host_and_device_agree(dtype):
    for shape in ((), (7,), (3, 5, 2), (0, 4)):
        x = jnp.asarray(np.random.default_rng(1).integers(0, 2, shape), dtype)
        assert int(digest._on_device(x)) == digest._on_host(np.asarray(x))


def test_another_mesh_and_device_count(tmp_path):
    def sharded(devices, shape, spec):
        mesh = jax.make_mesh(shape, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=devices)
        return lambda x: NamedSharding(mesh, spec if x.ndim == 2 else P())

    def place(sharding):
        return lambda tree: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)), tree
        )

    eight = sharded(jax.devices(), (4, 2), P("a", "b"))
    state = make_state(5)
    state = jax.device_put(state, jax.tree.map(eight, state))
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(5, state, META)
        checkpoints.wait()
        one = SingleDeviceSharding(jax.devices()[3])
        for target in (eight, sharded(jax.devices()[:4], (2, 2), P("b", "a")), lambda x: one):
            restored = checkpoints.restore(place(target)(state))
            same(restored.state, make_state(5))
            table = restored.state["params"]["embed"]["table"]
            assert table.sharding.is_equivalent_to(target(table), 2)


def test_parameters_alone(three):
    with Checkpoints(three, mode="read") as checkpoints:
        restored = checkpoints.restore_params()
        same(restored.state, make_state(3)["params"])
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), make_state()["params"])
        restored = checkpoints.restore_params(target, step=1)
        assert restored.step == 1
        same(restored.state, jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_state(1)["params"]))
        row = checkpoints.inspect()[-1]
        assert row["step"] == 3 and row["problem"] is None and row["parameters"] == 16 * 8 + 8


def test_other_architecture_is_refused_with_the_differences(three):
    with Checkpoints(three, mode="read") as checkpoints:
        with pytest.raises(CheckpointMismatch) as error:
            other = stored_architecture(META) | {"model": {"width": 16, "heads": 2}}
            checkpoints.restore(shapes_of(make_state()), architecture=other)
        assert error.value.differences == ["model.width: 8 -> 16", "model.heads: (absent) -> 2"]
        with pytest.raises(CheckpointMismatch) as error:
            checkpoints.restore_params(shapes_of(make_state(width=4)["params"]))
        assert error.value.differences == [
            "params/embed/table: 'float32[16, 8]' -> 'float32[16, 4]'",
            "params/gain: 'float32[8]' -> 'float32[4]'",
        ]
        smaller = make_state()
        smaller["opt_state"] = optax.sgd(0.1, momentum=0.9).init(smaller["params"])
        with pytest.raises(CheckpointMismatch, match=r"opt_state/1/0/mu/gain: 'float32\[8\]' -> \(absent\)"):
            checkpoints.restore(shapes_of(smaller))
        bf16 = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, make_state())
        with pytest.raises(CheckpointMismatch, match=r"float32.* -> .*bfloat16"):  # orbax would cast
            checkpoints.restore(shapes_of(bf16))


def test_architecture_ignores_how_it_is_computed():
    params = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    a = architecture({"width": 2, "remat": "none"}, {"kind": "plain"}, params, FlowConfig())
    b = architecture({"width": 2, "remat": "full"}, {"kind": "plain"}, params, FlowConfig(schedule="parallel"))
    assert differences(a, b) == []
    wider = {"w": jax.ShapeDtypeStruct((2, 4), jnp.float32)}
    c = architecture({"width": 2}, {"kind": "hc", "streams": 4}, wider, FlowConfig("deep"))
    assert differences(a, c) == [
        "residual.kind: 'plain' -> 'hc'",
        "residual.streams: (absent) -> 4",
        "flow.kind: 'standard' -> 'deep'",
        "params.w: [2, 3] -> [2, 4]",
    ]


def test_an_architecture_stored_before_there_were_flows_is_of_the_ordinary_one():
    now = architecture({"width": 2}, {"kind": "plain"}, {}, FlowConfig())
    before = {key: value for key, value in now.items() if key != "flow"}
    check_architecture({"step": 3, "architecture": before}, now)
    deep = architecture({"width": 2}, {"kind": "plain"}, {}, FlowConfig("deep"))
    with pytest.raises(CheckpointMismatch, match=r"flow\.kind: 'standard' -> 'deep'"):
        check_architecture({"step": 3, "architecture": before}, deep)


def test_a_new_run_refuses_the_folder_of_another(folder):
    with pytest.raises(FolderInUse, match="step 3"):
        Checkpoints(folder)
    with Checkpoints(folder, mode="read") as checkpoints:
        assert checkpoints.steps() == [1, 2, 3]
    with Checkpoints(folder, mode="overwrite") as checkpoints:
        assert checkpoints.steps() == [] and checkpoints.latest_step() is None
        checkpoints.save(1, make_state(1), META)


def test_latest_step_counts_complete_ones_only(folder):
    DAMAGE["missing meta"](folder / "3")
    (folder / "9").mkdir()
    with Checkpoints(folder, mode="read") as checkpoints:
        assert checkpoints.latest_step() == 2
        assert checkpoints.meta()["step"] == 2
        assert [row["problem"] is None for row in checkpoints.inspect()] == [True, True, False, False]


def test_nothing_left_to_read(folder, monkeypatch):
    noise = []
    monkeypatch.setattr(sys, "unraisablehook", noise.append)
    for step in (1, 2, 3):
        remove_data(folder / str(step))
    with Checkpoints(folder, mode="resume") as checkpoints:
        with pytest.raises(CheckpointError, match=r"step 3: .*step 2: .*step 1: "):
            checkpoints.restore(shapes_of(make_state()))
        assert checkpoints.steps() == [1, 2, 3], "with nothing better, damaged ones are kept"
    assert noise == []


def test_declined_saves_are_errors(folder):
    with Checkpoints(folder, mode="resume", keep=3) as checkpoints:
        assert checkpoints.restore(shapes_of(make_state()), step=1).step == 1
        with pytest.raises(CheckpointError, match=r"step 2 was not saved.*at step 3"):
            checkpoints.save(2, make_state(2), META)
        checkpoints.discard_after(1)
        checkpoints.save(2, make_state(20), META)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]
    with (
        Checkpoints(folder, mode="read") as checkpoints,
        pytest.raises(CheckpointError, match="reading only"),
    ):
        checkpoints.save(7, make_state(7), META)
    with (
        Checkpoints(folder, mode="read") as checkpoints,
        pytest.raises(CheckpointError, match="reading only"),
    ):
        checkpoints.discard_after(1)


def test_keeps_the_newest(tmp_path):
    filled(tmp_path / "a", steps=(1, 2))
    with Checkpoints(tmp_path / "a", mode="resume", keep=2) as checkpoints:
        checkpoints.save(3, make_state(3), META)
        checkpoints.save(4, make_state(4), META)
    with Checkpoints(tmp_path / "a", mode="read") as checkpoints:
        assert checkpoints.steps() == [3, 4]


def test_leaving_by_an_exception_still_finishes_the_save(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, make_state(1), META)
        raise RuntimeError("stop")
    with Checkpoints(tmp_path / "run", mode="read") as checkpoints:
        same(checkpoints.restore(shapes_of(make_state())).state, make_state(1))


def test_state_may_be_donated_after_save(tmp_path):
    change = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    state = {"params": {"w": jnp.arange(1 << 20, dtype=jnp.float32)}}
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state, META)
        target = shapes_of(state)
        jax.block_until_ready(change(state))
        checkpoints.wait()
        restored = checkpoints.restore(target)
    assert restored.skipped == ()
    np.testing.assert_array_equal(restored.state["params"]["w"], np.arange(1 << 20))


def test_a_failed_background_save_is_an_error(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, make_state(1), META)
    checkpoints.wait()
    large = {"params": {"w": jax.random.normal(jax.random.key(0), (1 << 24,))}}
    checkpoints.save(2, large, META)
    (tmp_path / "run" / "2" / "in the way").mkdir(parents=True)  # the finished save cannot take its name
    with pytest.raises(CheckpointError, match="background"):
        checkpoints.close()
    with Checkpoints(tmp_path / "run", mode="read") as checkpoints:
        assert checkpoints.latest_step() == 1
