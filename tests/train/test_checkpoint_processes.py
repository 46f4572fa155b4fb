"""Checkpoints of processes that are killed while they save, or of which one sees damage."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from checkpoint_helpers import shapes_of

from lmres.train.checkpoint import Checkpoints

KILLED = """
import os, signal, sys
import jax, jax.numpy as jnp
from lmres.train import digest
from lmres.train.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
make = lambda v: {"params": {"w": jnp.full((1 << 22,), v, jnp.float32)}}
checkpoints.save(1, make(1.0), {})
checkpoints.wait()
noise = {"params": {"w": jax.random.normal(jax.random.key(0), (1 << 25,))}}
jax.block_until_ready(noise)
checkpoints.save(2, noise, {})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_while_saving(tmp_path):
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path / "run"], env=env, capture_output=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    assert not (tmp_path / "run" / "2").exists(), "the save finished before the kill"
    small = {"params": {"w": jnp.full((1 << 22,), 2.0, jnp.float32)}}
    with Checkpoints(tmp_path / "run", mode="resume") as checkpoints:
        assert checkpoints.latest_step() == 1
        restored = checkpoints.restore(shapes_of(small))
        assert restored.step == 1 and float(restored.state["params"]["w"].min()) == 1.0
        checkpoints.save(2, small, {})
    with Checkpoints(tmp_path / "run", mode="read") as checkpoints:
        assert float(checkpoints.restore(shapes_of(small)).state["params"]["w"].max()) == 2.0
    assert sorted(name for name in os.listdir(tmp_path / "run") if "tmp" in name) == []


TWO_PROCESSES = """
import sys
from pathlib import Path
number, port, run = int(sys.argv[1]), *sys.argv[2:]
import jax
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number, initialization_timeout=60)
import jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from lmres.train import digest
from lmres.train.checkpoint import Checkpoints

mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
where = NamedSharding(mesh, PartitionSpec("a"))

def state(seed):
    w = np.random.default_rng(seed).standard_normal((64, 256)).astype(np.float32)
    return {"params": {"w": jax.make_array_from_callback(w.shape, where, lambda index: w[index])}}

with Checkpoints(run) as checkpoints:
    for step in (1, 2):
        checkpoints.save(step, state(step), {})
multihost_utils.sync_global_devices("saved")
if number == 0:  # what process 1 will read
    for file in Path(run, "2", "state", "ocdbt.process_1", "d").iterdir():
        file.write_bytes(file.read_bytes()[:10])
multihost_utils.sync_global_devices("damaged")
target = {"params": {"w": jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=where)}}
with Checkpoints(run, mode="resume", report=lambda line: None) as checkpoints:
    restored = checkpoints.restore(target)
    assert restored.step == 1 and len(restored.skipped) == 1, restored.skipped
    assert ("process 1" in restored.skipped[0].reason) == (number == 0), restored.skipped
    same = jax.jit(lambda a, b: (a == b).all())(restored.state["params"]["w"], state(1)["params"]["w"])
    assert bool(same)
    checkpoints.save(2, state(2), {})
"""


@pytest.mark.slow
def test_damage_that_one_of_two_processes_sees(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "JAX_NUM_CPU_DEVICES": "2"}
    logs = [(tmp_path / f"log{i}").open("w+") for i in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(i), str(port), str(tmp_path / "run")],
            env=env,
            stdout=logs[i],
            stderr=subprocess.STDOUT,
        )
        for i in range(2)
    ]
    try:
        codes = [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    said = "\n".join((tmp_path / f"log{i}").read_text()[-1500:] for i in range(2))
    assert codes == [0, 0], said
    target = {"params": {"w": jax.ShapeDtypeStruct((64, 256), jnp.float32)}}
    with Checkpoints(tmp_path / "run", mode="read") as checkpoints:
        assert checkpoints.restore(target).step == 2
    for log in logs:
        log.close()
