"""One plan: a setting compiled for a machine, and what the result says."""

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from lmres.plan.buffers import Buffer, biggest_buffers, bytes_moved, kept_for_backward
from lmres.plan.collectives import Traffic, by_kind, collectives
from lmres.plan.hlo import Module
from lmres.plan.lowering import Setting, device_bytes, make_program, step_flops
from lmres.plan.machines import HEADROOM
from lmres.plan.roofline import Bound, bound
from lmres.plan.topology import Topology

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device.

    held: arguments by what they are, without padding. activations: what the forward pass keeps for the backward pass,
    part of what the compiler calls temporaries. temporaries: the rest of those. program: the code. host: what lies in
    the host's memory instead, for one device. peak: arguments, results that are not arguments updated in place,
    temporaries and code. available: the memory there is, as published or as the compiler says in a refusal. limit: of
    that, what may be used. Where the compiler refused, activations, temporaries, program and host are None.
    """

    held: dict[str, int]
    activations: int | None
    temporaries: int | None
    program: int | None
    host: int | None
    peak: int
    available: int
    limit: int

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit


@dataclasses.dataclass(frozen=True)
class Compute:
    """Of one step and one device.

    model_flops, recomputed_flops: by formula (``lmres.train.flops``; see ``step_flops``). compiler_flops,
    compiler_bytes: the compiler's count, which takes a loop's body once however often it runs. moved: bytes from and
    to memory with loops as often as they run (``bytes_moved``). compiler_seconds: the compiler's estimate of a step,
    with the same reservation; None where it gives none.
    """

    model_flops: float
    recomputed_flops: float
    compiler_flops: float | None
    compiler_bytes: float | None
    moved: float
    compiler_seconds: float | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a setting needs on a machine. refused: the compiler's words where it found that the memory does not
    suffice; there is then no compute, traffic or bound. unknown_loops: loops counted once because their length was not
    found. notes: what to know when reading it."""

    setting: Setting
    topology: Topology
    mesh: dict[str, int]
    memory: Memory
    compute: Compute | None
    traffic: list[Traffic]
    bound: Bound | None
    buffers: list[Buffer]
    unknown_loops: int
    tokens: int
    lower_seconds: float
    compile_seconds: float
    refused: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.refused is None and self.memory.fits


def make_plan(setting: Setting, topology: Topology, devices: list[Any], buffers: int = 12) -> Plan:
    """Compiles a setting for a machine and reads the result.

    devices: of ``topology_devices``. buffers: how many of the largest to list.

    Raises ValueError, naming the config key, for sizes that do not fit together. A compiler that runs out of the
    machine's memory makes a plan that does not fit; any other refusal of the compiler is raised.
    """
    started = time.perf_counter()
    program = make_program(setting, devices)
    lowered = program.lower()
    lowered_at = time.perf_counter()
    available = topology.machine.memory
    limit = round(available * (1 - HEADROOM))
    held = {name: device_bytes(tree) for name, tree in program.held.items()}
    common = {
        "setting": setting, "topology": topology, "mesh": dict(program.mesh.shape), "tokens": program.tokens,
        "lower_seconds": lowered_at - started, "notes": _notes(setting, topology),
    }  # fmt: skip
    try:
        with nothing_cached():
            compiled = lowered.compile()
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        peak, available = told_memory(str(error), sum(held.values()), available)
        memory = Memory(held, None, None, None, None, peak, available, min(limit, available))
        return Plan(
            **common, memory=memory, compute=None, traffic=[], bound=None, buffers=[], unknown_loops=0,
            compile_seconds=time.perf_counter() - lowered_at, refused=_first_lines(str(error)),
        )  # fmt: skip
    seconds = time.perf_counter() - lowered_at
    module = Module(compiled.as_text())
    stats = compiled.memory_analysis()
    kept = min(kept_for_backward(module), stats.temp_size_in_bytes)
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    memory = Memory(
        held=held,
        activations=kept,
        temporaries=stats.temp_size_in_bytes - kept,
        program=stats.generated_code_size_in_bytes,
        host=stats.host_argument_size_in_bytes + stats.host_output_size_in_bytes + stats.host_temp_size_in_bytes,
        peak=stats.argument_size_in_bytes + outputs + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes,
        available=available,
        limit=limit,
    )
    found = collectives(module, islands(program.mesh.devices.flat, topology))
    sent, far = (sum(c.times * getattr(c, part) for c in found) for part in ("near", "far"))
    cost = compiled.cost_analysis() or {}
    flops = {name: value / topology.size for name, value in step_flops(setting).items()}
    compute = Compute(
        flops["model"], flops["recomputed"], cost.get("flops"), cost.get("bytes accessed"), bytes_moved(module),
        cost["optimal_seconds"] if cost.get("optimal_seconds", -1) > 0 else None,
    )  # fmt: skip
    return Plan(
        **common, memory=memory, compute=compute, traffic=by_kind(found),
        bound=bound(topology.machine, flops["total"], compute.moved, sent, far),
        buffers=biggest_buffers(module, buffers), unknown_loops=module.unknown_loops, compile_seconds=seconds,
    )  # fmt: skip


def islands(devices, topology: Topology) -> list[int]:
    """Of each device: the number of its host (GPUs) or slice (TPUs)."""
    if topology.machine.platform == "cuda":
        return [device.process_index for device in devices]
    return [device.slice_index if topology.slices > 1 else 0 for device in devices]


def told_memory(text: str, held: int, available: int) -> tuple[int, int]:
    """(bytes needed, bytes there) from a compiler's refusal.

    Known: ``HLO temporaries (16.60G) exceeds available HBM (15.75G)``, which are the arguments too, whatever they are
    called; ``Used 20.1G of 15.75G hbm``; ``allocate 5.0GiB``. Without numbers: what is there and one byte more, or the
    arguments ``held``.
    """
    figure = r"([\d.]+)\s*([KMGT]?)(?:i?B)?"
    temporaries = re.search(rf"HLO temporaries \({figure}\) exceeds available HBM \({figure}\)", text)
    used = re.search(rf"Used {figure} of {figure} hbm", text)
    asked = re.search(rf"allocat(?:e|ing) {figure}", text)
    if temporaries:
        return _told(*temporaries.groups()[:2]), _told(*temporaries.groups()[2:])
    if used:
        return _told(*used.groups()[:2]), _told(*used.groups()[2:])
    return max(held, available + 1, _told(*asked.groups()) if asked else 0), available


def _told(value: str, unit: str) -> int:
    return round(float(value) * _UNITS[unit])


def _first_lines(text: str, count: int = 3) -> str:
    return " ".join(line.strip() for line in text.splitlines()[:count] if line.strip())[:400]


@contextlib.contextmanager
def nothing_cached() -> Iterator[None]:
    """jax's compilation cache cannot read back a program for a machine that is not here, and warns each time: keep
    such programs out of it."""
    key = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update(key, math.inf)
    try:
        yield
    finally:
        jax.config.update(key, before)


def _notes(setting: Setting, topology: Topology) -> tuple[str, ...]:
    notes = []
    if topology.machine.platform == "cuda" and setting.what == "train" and setting.model.attention == "auto":
        notes.append(
            "attention is planned as model.attention=xla; on the GPUs themselves cuDNN's is taken where it can run, "
            "which keeps no scores and needs less memory"
        )
    return tuple(notes)
