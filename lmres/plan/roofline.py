"""The least time a step can take: by arithmetic, by memory, by network, at the published peak figures.

    compute  = FLOPs / peak FLOP/s        memory = bytes moved / memory bandwidth
    network  = max(bytes sent / link bandwidth, bytes that leave the host or slice / network bandwidth)
    bound    = max of the three           (the roofline of Williams, Waterman and Patterson 2009, with a third roof)

All per device. It supposes that arithmetic, memory and network overlap entirely and that each runs at its peak, so
real steps take longer.
"""

import dataclasses

from lmres.plan.machines import Machine

ROOFS = ("compute", "memory", "network")


@dataclasses.dataclass(frozen=True)
class Bound:
    """Seconds per step. network: None where the figure that decides is not published. by: which roof is the bound.
    incomplete: why the bound leaves something out, "" where it does not."""

    compute: float
    memory: float
    network: float | None
    seconds: float
    by: str
    incomplete: str = ""


def bound(machine: Machine, flops: float, moved: float, sent: float, far: float = 0.0) -> Bound:
    """flops: of one device, as are moved, sent and far in bytes; far: of ``sent``, what leaves the host or slice."""
    compute, memory = flops / machine.peak, moved / machine.hbm
    roofs = {"compute": compute, "memory": memory}
    network: float | None = sent / machine.link
    incomplete = ""
    if far:
        if machine.network is None:
            incomplete = f"no bandwidth between slices is published per device of {machine.kind}"
            roofs["network"], network = network, None
        else:
            network = max(network, far / machine.network)
    if network is not None:
        roofs["network"] = network
    by = max(roofs, key=lambda name: roofs[name])
    return Bound(compute, memory, network, roofs[by], by, incomplete)
