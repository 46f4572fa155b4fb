"""The devices that can be planned for, and what their makers publish about them.

Peak FLOP/s are those of ``lmres.train.flops``. Units: bytes, bytes per second. Interconnect bandwidths are per device
and in one direction.
"""

import dataclasses
from typing import Literal

from lmres.train.flops import peak_flops

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Machine:
    """One kind of device.

    name: as in ``--topology``. kind: how ``jax.Device.device_kind`` begins. platform: of the compiler. dimensions: of
    a topology (3: a cube of chips; for GPUs 2: hosts and GPUs per host). cores: JAX devices per chip.
    memory: bytes per device. hbm: bytes per second from and to that memory. link: bytes per second to devices of the
    same slice or host. network: the same to other slices or hosts; None where no figure per device is published.
    source: where the figures come from, in words.
    """

    name: str
    kind: str
    platform: Literal["tpu", "cuda"]
    dimensions: int
    memory: int
    hbm: float
    link: float
    network: float | None
    source: str
    cores: int = 1

    @property
    def peak(self) -> float:
        """Dense bfloat16 FLOP/s of one device."""
        return peak_flops(self.kind)


_TPU = "Google Cloud TPU documentation, system architecture of {}; inter-chip interconnect in one direction"
_GPU = (
    "NVIDIA {} datasheet, SXM form: NVLink in one direction; between hosts one 400 Gb/s port per GPU, as in NVIDIA DGX"
)

MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine("v4", "TPU v4", "tpu", 3, 32 * GIB, 1228e9, 300e9, None, _TPU.format("TPU v4")),
        Machine("v5e", "TPU v5 lite", "tpu", 2, 16 * GIB, 819e9, 200e9, None, _TPU.format("TPU v5e")),
        Machine("v5p", "TPU v5", "tpu", 3, 95 * GIB, 2765e9, 600e9, None, _TPU.format("TPU v5p")),
        Machine("v6e", "TPU v6 lite", "tpu", 2, 32 * GIB, 1640e9, 400e9, None, _TPU.format("TPU v6e")),
        Machine(
            "tpu7x", "TPU7x", "tpu", 3, 96 * GIB, 7380e9 / 2, 600e9 / 2, None,
            _TPU.format("TPU7x") + "; a chip is two JAX devices, and figures of a chip are halved", cores=2,
        ),
        Machine("h100", "NVIDIA H100", "cuda", 2, 80 * 10**9, 3.35e12, 450e9, 50e9, _GPU.format("H100")),
        Machine("h200", "NVIDIA H200", "cuda", 2, 141 * 10**9, 4.8e12, 450e9, 50e9, _GPU.format("H200")),
    )
}  # fmt: skip

HEADROOM = 0.05  # of the memory that a plan leaves free: the runtime, fragments, and what else a program puts there
