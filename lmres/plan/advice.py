"""What would fit, where a plan does not: other settings by estimate, corrected by what the compiler found."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from lmres.plan.estimate import Estimate, estimate, state_shapes
from lmres.plan.lowering import Setting
from lmres.plan.machines import HEADROOM
from lmres.plan.planning import Plan
from lmres.plan.topology import Topology
from lmres.sharding import AXES, mesh_sizes

_POLICIES = ("none", "dots", "offload", "full")  # what is kept on the device less and less


@dataclasses.dataclass(frozen=True)
class Advice:
    """A setting that should fit. changes: the keys to change and their values. peak: estimated bytes per device.
    seconds: estimated bound of a step. note: what it changes beyond memory and speed, "" for nothing."""

    changes: dict[str, Any]
    peak: float
    seconds: float
    setting: Setting
    note: str = ""

    @property
    def words(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.changes.items())


def changed(setting: Setting, changes: dict[str, Any]) -> Setting:
    """A setting with ``section.key`` replaced."""
    for key, value in changes.items():
        section, name = key.split(".")
        setting = dataclasses.replace(
            setting, **{section: dataclasses.replace(getattr(setting, section), **{name: value})}
        )
    return setting


def candidates(setting: Setting, devices: int) -> Iterator[dict[str, Any]]:
    """Changes to a setting that keep what it computes: every mesh of so many devices (parts of a sequence as they are
    where attention reads other cells than its row's), every rematerialisation on the device, every accumulation by a
    power of two. Not model.remat=offload: its time is that of the way to the host, for which no figure is at hand."""
    meshes = [
        dict(zip(AXES, (devices // fsdp // sequence // tensor, fsdp, sequence, tensor), strict=True))
        for tensor in _divisors(devices)
        for sequence in _divisors(devices // tensor)
        for fsdp in _divisors(devices // tensor // sequence)
        if setting.flow.is_standard or sequence == setting.mesh.sequence
    ]
    accumulations = [2**k for k in range(setting.train.batch_size.bit_length()) if setting.train.batch_size % 2**k == 0]
    for mesh, remat, accumulate in itertools.product(meshes, _POLICIES, accumulations):
        if remat != "offload":
            changes = {f"mesh.{axis}": size for axis, size in mesh.items()}
            yield changes | {"model.remat": remat, "train.accumulate": accumulate}


def ranked(setting: Setting, topology: Topology, shapes: dict[str, Any]) -> list[tuple[dict[str, Any], Estimate]]:
    """Candidates whose sizes divide, with their estimates, by ``Estimate.order`` and then by memory."""
    found = []
    for changes in candidates(setting, topology.size):
        try:
            found.append((changes, estimate(changed(setting, changes), topology, shapes)))
        except ValueError:  # sizes that do not divide: no candidate
            continue
    return sorted(found, key=lambda pair: (pair[1].order, pair[1].peak))


def scale_of(plan: Plan, guess: Estimate) -> float:
    """By how much the compiler's peak exceeds the estimate; at least 1, so that advice errs on the safe side."""
    return max(plan.memory.peak / guess.peak, 1.0)


def advise(plan: Plan, limit: int = 5) -> list[Advice]:
    """What would fit instead of a train step that does not: single changes first, by estimate.

    Where none is enough alone, the fastest combination; an empty list when no combination is estimated to fit.
    """
    setting, topology = plan.setting, plan.topology
    shapes = state_shapes(setting)
    scale = scale_of(plan, estimate(setting, topology, shapes))
    room = min(topology.machine.memory * (1 - HEADROOM), plan.memory.limit)
    advice = []
    for options in _single(setting, topology):
        for changes in options:
            found = _tried(setting, topology, shapes, changes, scale)
            if found is not None and found.peak <= room:
                advice.append(found)
                break
    if not advice:
        for changes, guess in ranked(setting, topology, shapes):
            if guess.peak * scale <= room:
                advice.append(_named(setting, changes, guess, scale))
                break
    return advice[:limit]


def _single(setting: Setting, topology: Topology) -> Iterator[list[dict[str, Any]]]:
    """Lists of changes of one kind, the mildest first."""
    sizes = mesh_sizes(setting.mesh, topology.size)
    yield [{"model.remat": p} for p in _POLICIES[_POLICIES.index(setting.model.remat) + 1 :]]
    train = setting.train
    powers = [2**k for k in range(1, 8)]
    yield [{"train.accumulate": train.accumulate * p} for p in powers if train.batch_size % (train.accumulate * p) == 0]
    yield [{"mesh.data": sizes["data"] // p, "mesh.fsdp": sizes["fsdp"] * p} for p in powers if sizes["data"] % p == 0]
    yield [
        {f"mesh.{axis}": sizes[axis] // p, "mesh.tensor": sizes["tensor"] * p}
        for p in powers
        for axis in ("fsdp", "data")
        if sizes[axis] % p == 0
    ]
    yield [{"train.batch_size": train.batch_size // p} for p in powers if train.batch_size % p == 0]


def _tried(setting, topology, shapes, changes, scale) -> Advice | None:
    try:
        guess = estimate(changed(setting, changes), topology, shapes)
    except ValueError:  # sizes that do not divide
        return None
    return _named(setting, changes, guess, scale)


def _named(setting: Setting, changes: dict[str, Any], guess: Estimate, scale: float) -> Advice:
    note = "trains differently: fewer tokens per update" if "train.batch_size" in changes else ""
    if changes.get("model.remat") == "offload":
        note = "moves activations to the host, which the bound leaves out"
    return Advice(changes, guess.peak * scale, guess.seconds, changed(setting, changes), note)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
