"""The section ``flow`` on the command line: train, stop, resume, evaluate, inspect, compare."""

import jax
import numpy as np
import pytest

from lmres.train.checkpoint import Checkpoints
from lmres.train.metrics import read_metrics

SIZES = ("model.blocks=2", "model.context=8", "train.eval_batches=2")
KINDS = ("block(2)", "cone(1)")


def params_of(folder):
    with Checkpoints(folder / "checkpoints", mode="read") as checkpoints:
        return checkpoints.restore_params().state


@pytest.fixture(scope="module")
def trained(tiny):
    """Folder of an unbroken run of four updates, by kind; made once."""
    from lmres.cli import main

    made = {}

    def folder(kind):
        if kind not in made:
            made[kind] = tiny.parent / f"flow{len(made)}"
            assert main(["train", str(tiny), "--folder", str(made[kind]), f"flow.kind={kind}", *SIZES]) == 0
        return made[kind]

    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_stopped_resumed_and_evaluated(lmres, tiny, trained, tmp_path, kind):
    whole, halves = trained(kind), tmp_path / "run"
    assert lmres("train", tiny, "--folder", halves, f"flow.kind={kind}", *SIZES, "train.steps=2").code == 0
    resumed = lmres("train", halves, "--resume", "train.steps=4")
    assert resumed.code == 0 and "resumed from step 2" in resumed.err
    assert f"attention reads {kind}, " in resumed.err
    jax.tree.map(np.testing.assert_array_equal, params_of(whole), params_of(halves))

    refused = lmres("train", whole, "--resume", "train.steps=6", "flow.kind=deep")
    assert refused.code == 1 and "Traceback" not in refused.err
    assert f"cannot resume {whole} with flow.kind: {kind} -> deep: what attention reads is part of" in refused.err

    evaluated = lmres("eval", whole, "--json", "--batches", 2)
    assert evaluated.code == 0
    assert evaluated.json["valid_loss"] == pytest.approx(read_metrics(whole)[-1]["valid_loss"], rel=1e-5)


def test_another_flow_is_another_function(lmres, trained):
    assert lmres("eval", trained("cone(1)"), "--batches", 1).code == 0
    refused = lmres("eval", trained("cone(1)"), "--batches", 1, "flow.kind=block(2)")
    assert refused.code == 1 and "flow.kind: 'cone(1)' -> 'block(2)'" in refused.err
    swept = ("flow.schedule=swept", "flow.sweeps=0", "flow.gradient_sweeps=9")
    exact, near = (lmres("eval", trained("cone(1)"), "--json", "--batches", 1, *words) for words in ((), swept))
    assert near.json["valid_loss"] == pytest.approx(exact.json["valid_loss"], rel=1e-5)  # as many sweeps as tokens


def test_inspect_shows_the_flow(lmres, trained):
    told = lmres("inspect", trained("cone(1)"), "--json").json["flow"]
    assert told == {
        "geometry": "cone(1)",
        "reads": "(t, l); (s, m), s < t, m <= l + lambda (t - s)",
        "slope": 1.0,
        "schedule_class": told["schedule_class"],
        "schedule": "sequential" if told["schedule_class"] == "swept" else told["schedule_class"],
        "steps": told["steps"],
        "keys_per_query": 1 + 2 * 3.5,  # the own cell, and both layers of what comes before
        "cached": [1, 2],
        "slots": 2,
    }
    shown = lmres("inspect", trained("cone(1)"), "--no-verify").out
    assert "geometry                  cone(1)" in shown and "source layers to cache    1, 2" in shown
    refused = lmres("inspect", trained("cone(1)"), "--measure")
    assert refused.code == 1 and "flow.kind=cone(1)" in refused.err


def test_a_mistake_in_a_file_is_told_with_its_place(lmres, tiny, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(f"include: {tiny}\nflow:\n  kind: map(1,1,1)\n")
    refused = lmres("train", path, "--folder", tmp_path / "run")
    assert refused.code == 1 and not (tmp_path / "run").exists()
    assert f"{path}:3:9: flow.kind=map(1,1,1): " in refused.err


@pytest.mark.slow
def test_flows_are_compared(lmres, tiny, tmp_path):
    path = tmp_path / "flows.yaml"
    path.write_text(f"include: {tiny}\ncompare:\n  variants: [residual.kind: plain, flow.kind: block(2)]\n")
    answer = lmres("compare", path, "--folder", tmp_path / "runs", "--json", *SIZES, "train.steps=2")
    assert answer.code == 0
    found = [(run["name"], run["connection"]) for run in answer.json["runs"]]
    assert found == [("plain", "plain"), ("plain-block(2)", "plain, block(2)")]


@pytest.mark.slow
def test_flows_are_timed(lmres, tmp_path):
    small = ("model.width=16", "model.blocks=2", "model.heads=2", "model.context=8", "--variants", "plain")
    timed = lmres("bench", *small, "--flow", "block(2)", "--rounds", 1, "--output", tmp_path / "b.json", "--json")
    assert timed.code == 0
    assert [row["name"] for row in timed.json["rows"]] == ["plain", "plain, block(2)"]
    refused = lmres("bench", *small, "--flow", "blok(2)")
    assert refused.code == 1 and "--flow: flow.kind='blok(2)' is no geometry" in refused.err
