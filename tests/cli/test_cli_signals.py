"""A process that is told to stop, as a scheduler does it."""

import os
import signal
import subprocess
import sys
import time

from lmres.train.metrics import read_metrics


def test_sigterm_saves_and_a_resume_goes_on(lmres, tiny, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "lmres", "train", tiny, "--folder", folder]
    command += ["train.steps=1000000", "train.save_every=0", "train.eval_every=0"]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        deadline = time.monotonic() + 90
        while len(read_metrics(folder)) < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143, err
    assert "SIGTERM: stopping" in err and "Traceback" not in err
    assert f"go on with: lmres train {folder} --resume" in err
    [step] = [int(p.name) for p in (folder / "checkpoints").iterdir()]
    assert step >= 3 and f"step {step} of 1000000" in out
    assert [line["step"] for line in read_metrics(folder)] == list(range(1, step + 1))

    # Here there are eight devices, not one.
    answer = lmres("train", folder, "--resume", f"train.steps={step + 2}")
    assert answer.code == 0
    assert f"resumed from step {step}" in answer.err and f"step {step + 2} of {step + 2}" in answer.out
