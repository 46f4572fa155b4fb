"""Runs with another flow than the ordinary one: over devices, and from a run that had none."""

import jax
import numpy as np
import pytest
import test_run
from test_convert import convert
from test_run import run, sections
from variants import draw

from lmres.flow import FlowConfig
from lmres.residual import Plain
from lmres.residual.stack import no_constraint
from lmres.sharding import MeshConfig
from lmres.train.checkpoint import Checkpoints
from lmres.train.convert import ConversionError
from lmres.train.feed import Feed
from lmres.train.fingerprint import CheckpointMismatch
from lmres.train.session import build_session
from lmres.train.step import gradients

text = test_run.text
SMALL = {"model__context": 8, "train__steps": 3, "train__log_every": 1}
OFF = -40.0  # a bias with which what a flow adds weighs nothing


def params_of(folder):
    with Checkpoints(folder / "checkpoints", mode="read") as checkpoints:
        return checkpoints.restore_params().state


def gradients_over(parts, devices):
    """(gradients, loss sums) of the first batch on a mesh of the section ``mesh``."""
    wanted = ("model", "residual", "flow", "data", "optimizer", "schedule", "train", "mesh")
    session = build_session(**{key: parts[key] for key in wanted}, devices=jax.devices()[:devices])
    like = session.state_like["params"]
    drawn = draw(session.model.clone(constrain=no_constraint))  # of one token, too little to be split
    params = jax.device_put(drawn, jax.tree.map(lambda leaf: leaf.sharding, like))
    batch = next(Feed(session.splits.train, session.mesh, 8).train(0))
    return jax.jit(lambda params, batch: gradients(session.model, params, batch, 1, 0.0))(params, batch)


SWEPT = pytest.param(FlowConfig("top", schedule="swept", groups=4), marks=pytest.mark.slow)


@pytest.mark.parametrize("flow", [FlowConfig("cone(1)", bias=-1.0), SWEPT], ids=lambda f: f.kind)
def test_gradients_do_not_depend_on_devices(text, flow):
    parts = sections(text, **SMALL, flow=flow)
    one, many = gradients_over(parts, 1), gradients_over(parts | {"mesh": MeshConfig(data=4, fsdp=2)}, 8)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), one, many)


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
