"""The table of machines is complete, machines are read by name, and what is wrong with a name is said."""

import math

import pytest

from lmres.plan.machines import HEADROOM, MACHINES
from lmres.plan.topology import PlanExtraMissing, TopologyError, parse_topology, topology_devices
from lmres.train.flops import peak_flops


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_machine_has_its_published_figures(machine):
    assert machine.peak == peak_flops(machine.kind) and machine.peak > 1e14
    assert 16e9 <= machine.memory <= 200e9
    assert 5e11 < machine.hbm < 1e13 and 1e11 < machine.link < machine.hbm
    assert (machine.network is None) == (machine.platform == "tpu")
    assert len(machine.source) > 20 and "http" not in machine.source


def test_the_issue_s_machines_are_known():
    assert set(MACHINES) == {"v4", "v5e", "v5p", "v6e", "tpu7x", "h100", "h200"}
    assert 0 < HEADROOM < 0.2


@pytest.mark.parametrize(
    ("text", "slices", "size", "name"),
    [
        ("v5p:8x8x16", 1, 1024, "v5p:8x8x16"),
        ("v5p:8x8x16", 2, 2048, "v5p:8x8x16"),
        ("TPU7x:2x2x1", 1, 8, "tpu7x:2x2x1"),  # two devices per chip
        ("v5e:16x16", 2, 512, "v5e:16x16"),
        ("V6E:4x4", 1, 16, "v6e:4x4"),
        ("h200:2x8", 1, 16, "h200:2x8"),
        ("h100:1x8", 1, 8, "h100:1x8"),
    ],
)
def test_machines_are_read_by_name(text, slices, size, name):
    topology = parse_topology(text, slices)
    assert topology.size == size and topology.name == name
    assert size == math.prod(topology.shape) * slices * topology.machine.cores


@pytest.mark.parametrize(
    ("text", "slices", "parts"),
    [
        ("v7:2x2", 1, ["'v7'", "v5p", "h200"]),
        ("v5p:8x8", 1, ["3 sizes", "v5p:AxBxC"]),
        ("v5e:4x4x4", 1, ["2 sizes", "v5e:AxB"]),
        ("h200:8", 1, ["2 sizes", "hosts x GPUs per host"]),
        ("v5p", 1, ["3 sizes"]),
        ("v5p:8x0x4", 1, ["3 sizes"]),
        ("v5p:ax8x4", 1, ["3 sizes"]),
        ("v5p:8x8x4", 0, ["--slices 0", "at least 1"]),
        ("h100:2x8", 2, ["--slices 2", "hosts"]),
    ],
)
def test_a_wrong_name_is_told_with_what_is_right(text, slices, parts):
    with pytest.raises(TopologyError) as error:
        parse_topology(text, slices)
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize("text", ["v5e:2x2", "h200:1x8"])
def test_a_missing_compiler_is_told_with_the_extra(text, monkeypatch):
    monkeypatch.setattr("lmres.plan.topology.importlib.util.find_spec", lambda name: None)
    with pytest.raises(PlanExtraMissing, match=r"pip install 'lmres\[plan\]'"):
        topology_devices(parse_topology(text))
