"""A machine by name, and its devices as the compilers of TPUs and GPUs describe them.

``v5p:8x8x16`` is a cube of TPU v5p chips, ``v5e:16x16`` a square of v5e chips, ``h200:2x8`` two hosts with eight GPUs.
The devices have no memory and run nothing: they are there to be compiled for.
"""

import dataclasses
import importlib.util
import math
import os
import re
from typing import Any

from jax.errors import JaxRuntimeError
from jax.experimental import topologies

from lmres.plan.machines import MACHINES, Machine

# What libtpu and the CUDA plugin look for when they are loaded. Without these libtpu asks the network which TPU it is
# on, and the plugin prints a traceback about CUDA libraries that compiling does not need.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is opened, so several plans may be made at once
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
_PLUGINS = {"tpu": ("libtpu",), "cuda": ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")}
_EXAMPLES = "v5p:8x8x16, v5e:16x16, h200:2x8 (hosts x GPUs per host)"
# Shapes of one slice, from Cloud TPU's lists of v5e, v6e, v4 and v5p; one chip stands for one of a host's.
_SLICES = {
    2: ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    3: (
        (1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16),
        (8, 16, 16), (16, 16, 16), (16, 16, 24),
    ),
}  # fmt: skip


class TopologyError(ValueError):
    """A machine that is not known or cannot be built; the message says what would be right."""


class PlanExtraMissing(ImportError):
    """The compiler of a machine is not installed."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine: chips along each dimension (for GPUs hosts and GPUs per host), and how many slices of that."""

    machine: Machine
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def size(self) -> int:
        """Number of JAX devices."""
        return math.prod(self.shape) * self.machine.cores * self.slices

    @property
    def name(self) -> str:
        """As it is written."""
        return f"{self.machine.name}:{'x'.join(map(str, self.shape))}"


def parse_topology(text: str, slices: int = 1) -> Topology:
    """The machine of a name such as ``v5p:8x8x16``. slices: of TPUs, joined by a data-centre network.

    Raises TopologyError.
    """
    name, colon, sizes = text.strip().partition(":")
    machine = MACHINES.get(name.lower())
    if machine is None:
        raise TopologyError(f"--topology {text}: unknown device {name!r} (known: {', '.join(MACHINES)}); {_EXAMPLES}")
    words = "hosts x GPUs per host" if machine.platform == "cuda" else "chips along each axis"
    right = "x".join("ABC"[: machine.dimensions])
    if not colon or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) or sizes.count("x") != machine.dimensions - 1:
        raise TopologyError(
            f"--topology {text}: {machine.name} wants {machine.dimensions} sizes, {machine.name}:{right} ({words}); "
            f"as in {_EXAMPLES}"
        )
    if slices < 1:
        raise TopologyError(f"--slices {slices} must be at least 1")
    if slices > 1 and machine.platform == "cuda":
        raise TopologyError(f"--slices {slices}: slices are TPUs'; of GPUs give the hosts, {machine.name}:HOSTSxGPUS")
    return Topology(machine, tuple(map(int, sizes.split("x"))), slices)


def topology_of(name: str, chips: int) -> Topology:
    """A machine of so many chips (or GPUs, eight to a host) in a published shape.

    Raises TopologyError, with the numbers of chips that there are.
    """
    machine = MACHINES.get(name.lower())
    if machine is None:
        raise TopologyError(f"--machine {name}: unknown device (known: {', '.join(MACHINES)})")
    if machine.platform == "cuda":
        if chips < 1 or (chips > 8 and chips % 8):
            raise TopologyError(f"--chips {chips}: of {machine.name}, up to 8 on one host, or hosts of 8")
        return Topology(machine, (1, chips) if chips <= 8 else (chips // 8, 8))
    shapes = {math.prod(shape): shape for shape in _SLICES[machine.dimensions]}
    if chips not in shapes:
        raise TopologyError(f"--chips {chips}: a slice of {machine.name} has {', '.join(map(str, shapes))}")
    return Topology(machine, shapes[chips])


def topology_devices(topology: Topology) -> list[Any]:
    """The devices of a machine, for a mesh. Sets what the compilers read from the environment where it is not set.

    Raises PlanExtraMissing when the compiler is not installed, TopologyError when it knows no such machine.
    """
    machine = topology.machine
    if not any(_found(name) for name in _PLUGINS[machine.platform]):
        missing = "libtpu" if machine.platform == "tpu" else "the CUDA plugin of jax"
        raise PlanExtraMissing(f"{topology.name} needs {missing}: pip install 'lmres[plan]'")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if machine.platform == "cuda":
        hosts, gpus = topology.shape
        options = {"topology": f"1x{hosts}x{gpus}", "target_config": gpu_target(machine)}
    else:
        name = "TPU7x" if machine.name == "tpu7x" else machine.name
        options = {"topology_name": f"{name}:{'x'.join(map(str, topology.shape))}", "num_slices": topology.slices}
        if machine.name == "v4":  # otherwise each of a chip's two cores is a device, which no one runs
            options["chip_config_name"] = "megacore"
        if math.prod(topology.shape) == 1:  # less than the host that is otherwise taken for the smallest part
            options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        devices = topologies.get_topology_desc(platform=machine.platform, **options).devices
    except JaxRuntimeError as error:
        told = str(error).splitlines()[0]
        raise TopologyError(f"--topology {topology.name}: the compiler knows no such machine ({told})") from error
    if len(devices) != topology.size:
        raise TopologyError(f"--topology {topology.name}: expected {topology.size} devices, got {len(devices)}")
    return list(devices)


def _found(module: str) -> bool:
    """Whether a module is installed, without loading more than its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def gpu_target(machine: Machine) -> str:
    """The description of a Hopper GPU that XLA wants, a protobuf text. The figures are those of NVIDIA's H100 tensor
    core GPU architecture paper and of compute capability 9.0 in the CUDA programming guide."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {round(machine.hbm)} l2_cache_size: 52428800 device_memory_size: {machine.memory}
  cuda_compute_capability {{ major: 9 }} registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{machine.kind}"
"""
