"""What a compiled step sends between devices: collectives by kind, how many, how large, and over which links.

What each of the g devices of a group must send, at least, whatever the algorithm, of an array of n bytes:

    all-gather, reduce-scatter   n (g - 1) / g         n: the whole, gathered or not yet scattered
    all-reduce                   2 n (g - 1) / g
    all-to-all                   n (g - 1) / g         n: what one device holds
    collective-permute           n

(Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH", sections 3 and 4:
the bandwidth terms of the ring algorithms, which are also lower bounds.)

What goes between TPU slices libtpu hands to the host's runtime, as a ``send`` that names the collective it is part of.
It is listed by that name with "between slices", and takes no time of the links within a slice.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from lmres.plan.hlo import Instruction, Module, Shape

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BETWEEN = " between slices"
_SHARE = {"all-gather": 1, "all-reduce": 2, "reduce-scatter": 1, "all-to-all": 1}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the module.

    times: it runs in a step. arrays: what is moved each time; several where collectives were joined. bytes: of them
    (n above). sent: bytes each device sends each time, at least. group: how many devices take part together. devices:
    those of the first group, as places in the mesh; none between slices. far: of ``sent``, what must leave the host
    (GPUs) or slice (TPUs).
    """

    kind: str
    times: float
    arrays: tuple[Shape, ...]
    sent: float
    group: int
    devices: tuple[int, ...]
    far: float
    op_name: str
    source: str

    @property
    def bytes(self) -> int:
        return sum(shape.bytes for shape in self.arrays)

    @property
    def near(self) -> float:
        """Bytes sent each time over the links of the slice or host."""
        return 0.0 if self.kind.endswith(BETWEEN) else self.sent


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All collectives of one kind in a step, per device. bytes, sent: of all of them."""

    kind: str
    count: float
    bytes: float
    sent: float


def collectives(module: Module, islands: Sequence[int]) -> list[Collective]:
    """The collectives of a module.

    islands: of each device, in the order of the mesh, the number of the host or slice it is in.
    """
    found, channels = [], set()
    for name, times in module.runs.items():
        for instruction in module.computations[name].instructions.values():
            handed = re.search(r'megascale_transfer_type="(\w+)"', instruction.rest)
            if handed and instruction.opcode == "send":
                found.append(_between(module, name, instruction, handed[1].lower().replace("_", "-"), times, islands))
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            channel = re.search(r"channel_id=(\d+)", instruction.rest)
            if name in module.inside and channel:  # a fused collective may be written once for each of its steps
                if channel[1] in channels:
                    continue
                channels.add(channel[1])
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"  # libtpu's form of it
            group = first_group(instruction, len(islands))
            found.append(_collective(module, name, instruction, kind, times, group, islands))
    return found


def _collective(module, name, instruction: Instruction, kind, times, group, islands) -> Collective:
    computation = module.computations[name]
    operands = tuple(
        shape
        for at in range(len(instruction.operands))
        if (operand := computation.operand(instruction, at))
        for shape in operand.shapes
    )
    results, given = instruction.shapes, len(operands)
    if instruction.opcode.endswith("-start") and len(results) >= 2 * given:
        results = results[given : 2 * given]  # of (operands, results, ...); else they are the results alone
    arrays = operands if kind in ("reduce-scatter", "all-to-all") else results
    size = sum(shape.bytes for shape in arrays)
    count = max(len(group), 1)
    share = (count - 1) / count * _SHARE[kind] if kind in _SHARE else float(count > 1)
    here = [islands[device] for device in group]
    spans = len(set(here))
    # Of the island's devices in the group, each can carry its part of what the island must send.
    far = 0.0
    if spans > 1 and kind in _SHARE:
        far = size * _SHARE[kind] * (spans - 1) / spans * (1 if kind == "all-to-all" else spans / count)
    elif spans > 1:
        far = float(size)
    source = module.source(instruction)
    return Collective(kind, times, arrays, size * share, count, tuple(group), far, instruction.op_name, source)


def _between(module, name, instruction: Instruction, kind, times, islands) -> Collective:
    """What a slice hands to the others; the device's part of it."""
    operand = module.computations[name].operand(instruction, 0)
    arrays = operand.shapes if operand else instruction.shapes[:1]
    slices = len(set(islands))
    far = sum(shape.bytes for shape in arrays) * _SHARE.get(kind, 1) * (slices - 1) / slices
    source = module.source(instruction)
    return Collective(kind + BETWEEN, times, arrays, far, slices, (), far, instruction.op_name, source)


def first_group(instruction: Instruction, devices: int) -> list[int]:
    """The devices of the first group, as places in the mesh; all where none is written.

    Knows ``{{0,1},{2,3}}``, ``[2,4]<=[8]`` with or without a transpose, ``mesh['a'=4,'b'=2] {'a'}``, and the pairs of a
    permute, of which it takes the one whose ends are furthest apart.
    """
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", instruction.rest)
    if pairs:
        ends = [tuple(map(int, pair)) for pair in re.findall(r"(\d+),(\d+)", pairs[1])]
        return list(max(ends, key=lambda ab: abs(ab[0] - ab[1]), default=(0, 0)))
    text = re.search(r"replica_groups=(.*)", instruction.rest)
    if not text:
        return list(range(devices))
    mesh = re.match(r"mesh\[(.*?)\]\s*(?:,?\s*device_ids=\(?\[?.*?\]?\)?)?\s*\{(.*?)\}", text[1])
    if mesh:
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        axes = [list(sizes).index(axis) for axis in re.findall(r"'([^']+)'", mesh[2]) if axis in sizes]
        grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        rest = [axis for axis in range(grid.ndim) if axis not in axes]
        return grid.transpose(rest + axes).reshape(-1, math.prod(grid.shape[a] for a in axes))[0].tolist()
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text[1])
    if iota:
        shape, dims = (tuple(map(int, part.split(","))) for part in iota.groups()[:2])
        grid = np.arange(math.prod(dims)).reshape(dims)
        if iota[3]:
            grid = grid.transpose(tuple(map(int, iota[3].split(","))))
        return grid.reshape(shape)[0].tolist()
    listed = re.match(r"\{\{([\d,]+)\}", text[1])
    return list(map(int, listed[1].split(","))) if listed else list(range(devices))


def by_kind(found: list[Collective]) -> list[Traffic]:
    """Summed up over a step, the largest first. Those within one device are left out."""
    rows = []
    for kind in sorted({c.kind for c in found}):
        of = [c for c in found if c.kind == kind and c.group > 1]
        if of:
            rows.append(
                Traffic(
                    kind, sum(c.times for c in of), sum(c.times * c.bytes for c in of),
                    sum(c.times * c.sent for c in of),
                )
            )  # fmt: skip
    return sorted(rows, key=lambda row: -row.sent)
