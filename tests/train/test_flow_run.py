"""Runs with another flow than the ordinary one: over devices, and from a run that had none."""

import jax
import numpy as np
import pytest
import test_run
from test_convert import convert
from test_run import run, sections

from lmres.flow import FlowConfig
from lmres.residual import Plain
from lmres.sharding import MeshConfig
from lmres.train.checkpoint import Checkpoints
from lmres.train.convert import ConversionError
from lmres.train.fingerprint import CheckpointMismatch
from lmres.train.metrics import read_metrics

text = test_run.text
SMALL = {"model__context": 8, "train__steps": 3, "train__log_every": 1}
OFF = -40.0  # a bias with which what a flow adds weighs nothing


def params_of(folder):
    with Checkpoints(folder / "checkpoints", mode="read") as checkpoints:
        return checkpoints.restore_params().state


SWEPT = pytest.param(FlowConfig("top", schedule="swept", groups=4), marks=pytest.mark.slow)


@pytest.mark.parametrize("flow", [FlowConfig("cone(1)", bias=-1.0), SWEPT], ids=lambda f: f.kind)
def test_eight_devices_train_as_one(text, tmp_path, flow):
    parts = sections(text, **SMALL) | {"flow": flow}
    _, one = run(tmp_path / "one", parts)
    _, many = run(tmp_path / "many", parts | {"mesh": MeshConfig(data=4, fsdp=2)}, devices=8)
    assert one.train_traces == many.train_traces == 1
    losses = [[row["loss"] for row in read_metrics(tmp_path / name) if "loss" in row] for name in ("one", "many")]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), one.state["params"], many.state["params"]
    )


@pytest.fixture(scope="module")
def plain(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "plain"
    run(folder, sections(text, **SMALL))
    return folder


def test_an_ordinary_run_is_converted_to_a_flow_that_starts_as_it(text, plain, tmp_path):
    flow = FlowConfig("block(2)", bias=OFF)
    options = {"connection": Plain(), "splits": False, "model__context": 8}
    done, _ = convert(text, plain, tmp_path / "new", **options, flow=flow)
    assert done.difference <= 1e-4 < done.logit
    before, after = params_of(plain), params_of(tmp_path / "new")
    own = after.pop("cells")
    np.testing.assert_array_equal(own["bias"], [[0, OFF], [OFF, 0]])
    jax.tree.map(np.testing.assert_array_equal, before, after)
    convert(text, tmp_path / "new", tmp_path / "again", **options, flow=flow)
    np.testing.assert_array_equal(params_of(tmp_path / "again")["cells"]["bias"], own["bias"])
    with pytest.raises(CheckpointMismatch, match=r"flow\.kind: 'block\(2\)' -> 'standard'"):
        convert(text, tmp_path / "new", tmp_path / "back", **options)


def test_a_flow_that_changes_the_function_is_not_converted_to(text, plain, tmp_path):
    with pytest.raises(ConversionError, match=r"differ by at most.*flow\.kind=block\(2\) reads other cells"):
        convert(text, plain, tmp_path / "new", Plain(), splits=False, model__context=8, flow=FlowConfig("block(2)"))
    assert not (tmp_path / "new").exists()


def test_an_ordinary_run_does_not_go_on_with_another_flow(text, plain):
    parts = sections(text, **SMALL | {"train__steps": 5})
    with pytest.raises(CheckpointMismatch, match=r"flow\.kind: 'standard' -> 'deep'"):
        run(plain, parts | {"flow": FlowConfig("deep")}, mode="resume")
