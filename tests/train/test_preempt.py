"""Signals: what they ask for, and that nothing of the handlers stays behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lmres.train.preempt import StopSignals


def send(number):
    signal.raise_signal(number)


def test_sigterm_sets_a_flag_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    said = []
    with StopSignals(said.append) as stop:
        assert stop.requested(1) is None
        send(signal.SIGTERM)
        assert stop.requested(1) == "SIGTERM" and stop.requested(2) == "SIGTERM"
    assert len(said) == 1
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_first_interrupt_asks_and_the_second_one_interrupts():
    said = []
    with pytest.raises(KeyboardInterrupt), StopSignals(said.append) as stop:
        send(signal.SIGINT)
        assert stop.requested(3) == "Ctrl-C" and "again" in said[0]
        send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_another_thread_is_left_alone():
    seen = []

    def work():
        with StopSignals() as stop:
            seen.append(stop.requested(1))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None] and signal.getsignal(signal.SIGTERM) is before


DISTRIBUTED = """
import os, signal, sys, time
import jax
from lmres.train.preempt import StopSignals
order, number, port = sys.argv[1:]
start = lambda: jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=1, process_id=0)
if order == "after":
    start()
with StopSignals(lambda line: None) as stop:
    if order == "before":
        start()
    elif order == "between":
        os.kill(os.getpid(), signal.SIGTERM)
        start()
    for step in range(100):
        if step == 3 and order != "between":
            os.kill(os.getpid(), int(number))
        reason = stop.requested(step)
        if reason:
            break
        time.sleep(0.1)
print("stopped:", reason, "in time:", step < 60)
"""


@pytest.mark.parametrize(
    ("order", "number"),
    [("before", signal.SIGTERM), ("after", signal.SIGINT), ("between", signal.SIGTERM)],
)
def test_with_jax_distributed(order, number):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(
        [sys.executable, "-c", DISTRIBUTED, order, str(int(number)), str(port)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    want = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"stopped: {want}" in done.stdout and "in time: True" in done.stdout
