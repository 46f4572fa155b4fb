"""The metric files after resuming, killing and non-finite numbers; and that reading them does not block."""

import json
import struct
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmres.train.config import LogConfig
from lmres.train.metrics import FILE, Deferred, MetricWriter, read_metrics

QUIET = LogConfig(tensorboard=False)


def write(folder, steps, resume=0, scale=1.0, log=QUIET):
    with MetricWriter(folder, log, resume=resume) as writer:
        for step in steps:
            writer.write(step, {"loss": scale * step, "eval/loss": 2.0 * step})


def test_one_object_a_line(tmp_path):
    write(tmp_path / "new" / "run", [1, 2])
    text = (tmp_path / "new" / "run" / FILE).read_text()
    assert text == '{"step": 1, "loss": 1.0, "eval/loss": 2.0}\n{"step": 2, "loss": 2.0, "eval/loss": 4.0}\n'


def test_resuming_leaves_one_sequence(tmp_path):
    write(tmp_path, [1, 2, 3, 4, 5])
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 6, "lo')  # killed in the middle of a line
    write(tmp_path, [4, 5], resume=3, scale=10.0)
    assert [(m["step"], m["loss"]) for m in read_metrics(tmp_path)] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 40),
        (5, 50),
    ]
    write(tmp_path, [1])
    assert len(read_metrics(tmp_path)) == 1, "a new run begins an empty file"
    assert read_metrics(tmp_path / "nowhere") == []


def test_lines_are_there_before_closing(tmp_path):
    writer = MetricWriter(tmp_path, QUIET)
    writer.write(1, {"loss": 1.0})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1.0}]
    writer.close()


def test_non_finite_numbers_stay_json(tmp_path):
    with MetricWriter(tmp_path, QUIET) as writer:
        writer.write(1, {"a": float("nan"), "b": float("inf"), "c": float("-inf")})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    line = json.loads((tmp_path / FILE).read_text(), parse_constant=refuse)
    assert line == {"step": 1, "a": "nan", "b": "inf", "c": "-inf"}


def test_a_line_that_is_not_ours_is_named(tmp_path):
    (tmp_path / FILE).write_text('{"step": 1}\noops\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2.*oops"):
        write(tmp_path, [2], resume=1)


def events(folder):
    """Scalars of the event files, oldest first: records are length (8), check (4), data, check (4)."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(folder.iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack("<Q", data[at : at + 8])
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def test_tensorboard_gets_the_same(tmp_path):
    write(tmp_path, [1, 2], log=LogConfig(tensorboard=True))
    assert events(tmp_path / "tensorboard") == [
        (1, "loss", 1.0),
        (1, "eval/loss", 2.0),
        (2, "loss", 2.0),
        (2, "eval/loss", 4.0),
    ]


class FakeWandb(types.ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.inits, self.lines, self.ends, self.id = [], [], [], "abc123"

    def init(self, **options):
        self.inits.append(options)
        return self

    def log(self, values, step):
        self.lines.append((step, values))

    def finish(self, exit_code):
        self.ends.append(exit_code)


def test_wandb_keeps_its_run_on_resume(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = LogConfig(tensorboard=False, wandb="study")
    with MetricWriter(tmp_path / "run7", log, config={"a": 1}) as writer:
        writer.write(1, {"loss": 2.0})
    with (
        pytest.raises(RuntimeError),
        MetricWriter(tmp_path / "run7", log, resume=1) as writer,
    ):
        raise RuntimeError("stop")
    first, second = fake.inits
    assert first["project"] == "study" and first["name"] == "run7" and first["config"] == {"a": 1}
    assert "id" not in first and second["id"] == "abc123" and second["resume"] == "must"
    assert fake.lines == [(1, {"loss": 2.0})] and fake.ends == [0, 1]


def test_missing_wandb_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes the import fail
    with pytest.raises(ImportError, match=r"lmres\[wandb\]"):
        MetricWriter(tmp_path, LogConfig(tensorboard=False, wandb="study"))


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    write(tmp_path / "run", [1], log=LogConfig(tensorboard=True, wandb="study"))
    assert not (tmp_path / "run").exists()


def test_deferred_is_one_step_late():
    deferred = Deferred()
    assert deferred.flush() is None
    assert deferred.push(1, {"loss": jnp.float32(1.5)}) is None
    assert deferred.push(2, {"loss": jnp.float32(2.5), "n": 3}) == (1, {"loss": 1.5})
    assert deferred.flush() == (2, {"loss": 2.5, "n": 3.0})
    assert deferred.flush() is None


def test_deferred_does_not_read_the_step_just_pushed():
    reads = []

    class Running:
        """Stands for a device array: reading it would wait for the step."""

        def __init__(self, step):
            self.step = step

        def __array__(self, dtype=None, copy=None):
            reads.append(self.step)
            return np.asarray(10.0 * self.step, dtype)

    deferred = Deferred()
    deferred.push(1, {"loss": Running(1)})
    assert reads == []
    assert deferred.push(2, {"loss": Running(2)}) == (1, {"loss": 10.0})
    assert reads == [1]
    assert deferred.flush() == (2, {"loss": 20.0})
