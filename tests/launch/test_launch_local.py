"""launch/local.sh: with stand-ins for `lmres` that are told what to do, and for real."""

import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from launch_helpers import LAUNCH, LMRES, ROOT, environment

from lmres.cli import main
from lmres.train.checkpoint import Checkpoints
from lmres.train.metrics import read_metrics

# Process 0 gets the signal when all are up; the others' programs come from the test.
STAND_IN = """
import os, signal, sys, time
from pathlib import Path
me, folder = int(os.environ["JAX_PROCESS_ID"]), Path(sys.argv[0]).parent
def stop(number, frame):
    Path(folder, f"told-{me}-{number}").touch()
    if STUBBORN: return
    time.sleep(0.2 * me)  # they end one after the other, and all must
    Path(folder, f"saved-{me}").touch()
    sys.exit(128 + number)
STUBBORN = "stubborn" in sys.argv
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
Path(folder, f"up-{me}").touch()
if "fail" in sys.argv and me == 1:
    time.sleep(0.3)
    sys.exit(7)
if "done" in sys.argv:
    sys.exit(0)
time.sleep(30)
"""


def start(*words, **variables):
    command = ["bash", LAUNCH / "local.sh", *map(str, words)]
    return subprocess.Popen(
        command, env=environment(**variables), cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def ended(process, timeout=90):
    """(exit code, stdout, stderr); nothing is left running, whatever the test finds."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err


def wait_for(condition, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition(), ended(process, 1)


@pytest.fixture
def stand_in(tmp_path):
    file = tmp_path / "stand_in.py"
    file.write_text(STAND_IN)
    return lambda *how: start("--processes=3", "--grace=1", f"--program={sys.executable} {file}", "x.yaml", *how)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_every_process_and_all_may_save(stand_in, tmp_path, number):
    process = stand_in()
    wait_for(lambda: len(list(tmp_path.glob("up-*"))) == 3, process)
    process.send_signal(number)
    code, _, err = ended(process)
    assert code == 128 + number, err
    assert sorted(p.name for p in tmp_path.glob("saved-*")) == ["saved-0", "saved-1", "saved-2"]
    assert {p.name for p in tmp_path.glob("told-*")} == {f"told-{i}-{int(number)}" for i in range(3)}


def test_first_that_fails_ends_the_others(stand_in, tmp_path):
    began = time.monotonic()
    code, _, err = ended(stand_in("fail"))
    assert code == 7 and "process 1 of 3 ended with exit code 7" in err
    assert sorted(p.name for p in tmp_path.glob("saved-*")) == ["saved-0", "saved-2"]
    assert time.monotonic() - began < 20


def test_what_does_not_end_is_killed(stand_in, tmp_path):
    began = time.monotonic()
    code, _, err = ended(stand_in("fail", "stubborn"))
    assert code == 7 and time.monotonic() - began < 20, err
    assert len(list(tmp_path.glob("told-*"))) == 2


def test_all_done_is_0(stand_in):
    assert ended(stand_in("done"))[0] == 0


TINY = """
task: {kind: word, group: Z2, length: 8}
model: {width: 16, blocks: 1, heads: 2, context: 8}
optimizer: {learning_rate: 1e-3}
schedule: {kind: constant, warmup: 0}
train: {steps: 1000000, batch_size: 16, eval_every: 0, save_every: 0, log_every: 1}
log: {tensorboard: false}
"""


def params(folder, step):
    with Checkpoints(folder / "checkpoints", mode="read") as checkpoints:
        restored = checkpoints.restore_params()
    assert restored.step == step
    return {"/".join(map(str, k)): v for k, v in leaves(restored.state)}


def leaves(tree, path=()):
    if not isinstance(tree, dict):
        yield path, np.asarray(tree)
        return
    for key, value in tree.items():
        yield from leaves(value, (*path, key))


@pytest.mark.slow
def test_stopped_and_gone_on_with_other_numbers_of_processes(tmp_path):
    """Two processes, told to stop; then one, then four: the parameters are those of an unbroken run."""
    config, folder = tmp_path / "tiny.yaml", tmp_path / "run"
    config.write_text(TINY)

    def command(processes, *words):
        return start(f"--processes={processes}", f"--program={LMRES}", config, "--folder", folder, *words)

    process = command(2)
    wait_for(lambda: len(read_metrics(folder)) >= 3, process, seconds=120)
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert code == 143, err
    assert f"go on with: lmres train {folder} --resume" in err and "2 processes" in err
    [step] = [int(p.name) for p in (folder / "checkpoints").iterdir()]
    assert f"step {step} of 1000000" in out

    for processes, more in ((1, 4), (4, 8)):
        code, out, err = ended(command(processes, f"train.steps={step + more}"))
        assert code == 0, err
        assert re.search(rf"resumed from step {step + more - 4}\b", err) and f"step {step + more} of" in out
    metrics = [line["step"] for line in read_metrics(folder) if "loss" in line]
    assert metrics == list(range(1, step + 9))

    unbroken = tmp_path / "unbroken"
    assert main(["train", str(config), "--folder", str(unbroken), f"train.steps={step + 8}", "--json"]) == 0
    found, wanted = params(folder, step + 8), params(unbroken, step + 8)
    assert found.keys() == wanted.keys()
    for name in wanted:  # sums over rows are made in another order on another number of devices
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-3, atol=1e-5, err_msg=name)
