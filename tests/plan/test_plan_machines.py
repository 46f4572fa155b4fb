"""The table of machines is complete, machines are read by name, and what is wrong with a name is said."""

import math

import jax
import jax.numpy as jnp
import pytest

from lmres.plan.machines import HEADROOM, MACHINES
from lmres.plan.planning import told_memory
from lmres.plan.topology import PlanExtraMissing, TopologyError, parse_topology, topology_devices, topology_of
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


@pytest.mark.parametrize(
    ("name", "chips", "shape"),
    [
        ("v5p", 1, (1, 1, 1)),
        ("V5P", 256, (4, 8, 8)),
        ("v5p", 4096, (16, 16, 16)),
        ("v5e", 16, (4, 4)),
        ("h200", 4, (1, 4)),
        ("h100", 64, (8, 8)),
    ],
)
def test_a_number_of_chips_is_a_published_shape(name, chips, shape):
    topology = topology_of(name, chips)
    assert topology.shape == shape and topology.size == chips
    assert parse_topology(topology.name) == topology


@pytest.mark.parametrize(
    ("name", "chips", "parts"),
    [
        ("v5p", 3, ["--chips 3", "v5p has 1, 4, 8, 16"]),
        ("v5e", 512, ["--chips 512", "128, 256"]),
        ("h200", 12, ["--chips 12", "hosts of 8"]),
        ("h200", 0, ["--chips 0"]),
        ("v9", 1, ["--machine v9", "v5p"]),
    ],
)
def test_a_number_of_chips_that_no_slice_has_is_told(name, chips, parts):
    with pytest.raises(TopologyError) as error:
        topology_of(name, chips)
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize("name", ["v5p", "v5e"])
def test_one_chip_is_a_machine(needs_tpu, name):
    (device,) = topology_devices(topology_of(name, 1))
    assert device.device_kind == topology_of(name, 1).machine.kind


def test_a_refusal_counts_the_arguments(needs_tpu):
    gib = 2**30
    (device,) = topology_devices(topology_of("v5e", 1))
    rows = [
        jax.ShapeDtypeStruct(
            (size * gib // 2**14, 2**12), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device)
        )
        for size in (8, 9)
    ]
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as refused:
        jax.jit(lambda x, y: x.sum(0) + y.sum(0)).lower(*rows).compile()  # holds nothing else
    needed, available = told_memory(str(refused.value), 17 * gib, 16 * gib)
    assert needed == pytest.approx(17 * gib, rel=0.01) and available == pytest.approx(16 * gib, rel=0.05)
