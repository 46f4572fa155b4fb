"""Runs whose folder is on gs://, with data from a store on s3://; both served by stand-ins on this machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import object_stores
import pytest

from lmres.data.files import as_path
from lmres.train.metrics import read_metrics

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gs(monkeypatch, tmp_path, request):
    """Address of a folder of this test's own."""
    for variables in (object_stores.gs(), object_stores.s3()):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return f"gs://{object_stores.BUCKET}/{tmp_path.name}-{request.node.name}"


def test_run_on_an_object_store(lmres, tiny, gs, tmp_path):
    prepared = tmp_path / "store"
    assert lmres("data", "prepare", tiny, "--output", prepared).code == 0
    address = gs.replace("gs://", "s3://")
    for file in prepared.rglob("*.*"):
        (as_path(address, "stores") / str(file.relative_to(prepared))).write_bytes(file.read_bytes())
    data = (f"data.train={address}", "data.valid=null")
    said = lmres("data", "show", address, "--verify")
    assert said.code == 0 and f"store {address}" in said.out, said.err

    train = lmres("train", tiny, *data, "--folder", gs, "log.tensorboard=true")
    assert train.code == 0, train.err
    folder = as_path(gs, "runs")
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["2", "4"]
    assert address in (folder / "config.yaml").read_text()
    assert [line["step"] for line in read_metrics(gs) if "loss" in line] == [1, 2, 3, 4]
    assert any(p.name.startswith("events.") for p in (folder / "tensorboard").iterdir())

    more = lmres("train", gs, "--resume", "train.steps=6")
    assert more.code == 0 and "resumed from step 4" in more.err, more.err
    assert [line["step"] for line in read_metrics(gs) if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert lmres("eval", gs, "--json").json["step"] == 6
    assert lmres("inspect", gs).code == 0
    again = lmres("train", tiny, *data, "--folder", gs)
    assert again.code == 1 and gs in again.err and "--resume" in again.err
    assert sorted(p.name for p in tmp_path.iterdir() if ":" in p.name) == []  # no folder of that name here


def test_places_that_will_not_do_are_refused(lmres, tiny, gs, finished, tmp_path):
    cases = [
        (("train", tiny, "--folder", "s3://bucket/run"), "runs cannot be on s3://; supported are a folder"),
        (("train", tiny, "--folder", "ftp://host/run"), "runs cannot be on ftp://"),
        (("train", tiny, "--folder", gs, "train.profile_steps=[2,3]"), "train.profile_steps: the profiler cannot"),
        (("train", tiny, f"data.train={gs}/a.jsonl"), "is no prepared store; text is read from this machine"),
        (("train", tiny, f"data.cache_dir={gs}"), "data.cache_dir cannot be on gs://"),
        (("data", "prepare", tiny, "--output", gs), "a store while it is written cannot be on gs://"),
        (("compare", ROOT / "configs/quickstart.yaml", "--folder", gs), "comparisons cannot be on gs://"),
        (("convert", finished, "residual.kind=hc", "--out", gs), "converted runs cannot be on gs://"),
        (("eval", gs), "is not the folder of a run"),
        (("data", "show", gs), "no such folder"),
    ]
    for words, told in cases:
        answer = lmres(*words)
        assert answer.code == 1 and told in answer.err, (words, answer.err)
    assert sorted(p.name for p in tmp_path.iterdir() if ":" in p.name) == []


@pytest.mark.slow
def test_two_processes_save_to_an_object_store_and_one_goes_on(lmres, gs, tmp_path):
    config = tmp_path / "tiny.yaml"
    config.write_text(
        "task: {kind: word, group: Z2, length: 8}\nmodel: {width: 16, blocks: 1, heads: 2, context: 8}\n"
        "train: {steps: 1000000, batch_size: 16, eval_every: 0, save_every: 20}\nlog: {tensorboard: false}\n"
        "schedule: {kind: constant, warmup: 0}\n"
    )
    command = ["bash", f"{ROOT}/launch/local.sh", "--processes=2", f"--program={sys.executable} -m lmres"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, config, "--folder", gs], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 120
        folder = as_path(gs, "runs")
        while not (folder / "checkpoints" / "20" / "commit_success.txt").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.5)
        process.terminate()
        _, err = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 143, err
    step = max(int(p.name) for p in (folder / "checkpoints").iterdir())
    answer = lmres("train", gs, "--resume", f"train.steps={step + 2}")
    assert answer.code == 0 and f"resumed from step {step}" in answer.err, answer.err
    steps = [line["step"] for line in read_metrics(gs) if "loss" in line]
    assert steps == list(range(1, step + 3)), json.dumps(steps)
