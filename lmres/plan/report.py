"""A plan as a table of sections and as JSON; the keys of the JSON are kept."""

import dataclasses
from typing import Any, NamedTuple

from lmres.plan.advice import Advice
from lmres.plan.machines import HEADROOM
from lmres.plan.planning import Plan
from lmres.plan.search import Found

FORMAT = 1  # raised when a key of the JSON changes its meaning or goes


class Section(NamedTuple):
    """A table: title, columns, rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def size(value: float | None) -> str:
    """Bytes in words; "n/a" for None."""
    if value is None:
        return "n/a"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:,.2f} {unit}"
    return f"{value:,.0f} B"


def number(value: float | None, unit: str = "") -> str:
    """A large number in words; "n/a" for None."""
    if value is None:
        return "n/a"
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:,.3g} {prefix}{unit}"
    return (f"{value:,.0f} {unit}" if value >= 1e3 else f"{value:,.3g} {unit}").rstrip()


def duration(value: float | None) -> str:
    """Seconds in words; "n/a" for None."""
    if value is None:
        return "n/a"
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} us"


def verdict(plan: Plan) -> str:
    """One line: whether it fits."""
    memory = plan.memory
    share = memory.peak / memory.available
    limit = f"{size(memory.limit)} may be used ({HEADROOM:.0%} of {size(plan.topology.machine.memory)} is headroom)"
    if plan.refused:
        return f"does not fit: the compiler needs {size(memory.peak)} of {size(memory.available)}"
    if plan.fits:
        return f"fits: {size(memory.peak)} of {size(memory.available)} ({share:.0%}); {limit}"
    return f"does not fit: {size(memory.peak)} of {size(memory.available)} ({share:.0%}); {limit}"


def head(plan: Plan) -> list[str]:
    """Lines that say what was planned."""
    topology, setting = plan.topology, plan.setting
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    slices = f", {topology.slices} slices" if topology.slices > 1 else ""
    if setting.what == "train":
        work = f"one update of {setting.train.batch_size} rows of {setting.model.context} tokens"
        work += f" in {setting.train.accumulate} micro-batches" if setting.train.accumulate > 1 else ""
        work += f", model.remat={setting.model.remat}"
    elif setting.what == "decode":
        work = f"one token for each of {setting.batch} rows, {setting.tokens} tokens in the cache"
    else:
        work = f"{setting.batch} prompts of {setting.tokens} tokens"
    return [
        f"{setting.what} of {setting.residual.name} on {topology.name}: "
        f"{topology.size} {topology.machine.kind}{slices}",
        f"mesh: {mesh}",
        f"{work}; compiled in {plan.compile_seconds:.0f} s",
    ]


def sections(plan: Plan, advice: list[Advice] = ()) -> list[Section]:
    """The tables of a plan."""
    found = [_memory(plan)]
    if plan.compute is not None and plan.bound is not None:
        found += [_work(plan), _time(plan)]
        sent = [
            (row.kind, f"{row.count:,.0f}", size(row.bytes), size(row.sent)) for row in plan.traffic
        ]  # fmt: skip
        found.append(Section("collectives per step and device", ("kind", "count", "of arrays", "sent at least"), sent))
        rows = [(size(b.bytes), f"{b.count}", b.shape, b.source or "-", b.op_name or "-") for b in plan.buffers]
        found.append(
            Section("largest buffers that are not arguments", ("size", "places", "shape", "line", "name"), rows)
        )
    if advice:
        rows = [(a.words, size(a.peak), duration(a.seconds), a.note) for a in advice]
        found.append(
            Section("what would fit, by estimate (compile it to be sure)", ("change", "peak", "bound", ""), rows)
        )
    return found


def _memory(plan: Plan) -> Section:
    memory = plan.memory
    rows = [(name, size(value)) for name, value in memory.held.items()]
    if plan.setting.what == "train":
        rows.append(("activations kept for backward", size(memory.activations)))
    rows += [
        ("other temporaries", size(memory.temporaries)),
        ("program", size(memory.program)),
        ("peak", size(memory.peak)),
        ("memory", size(memory.available)),
    ]
    if memory.host:
        rows.append(("in the host's memory, for this device", size(memory.host)))
    return Section("memory per device", ("", "bytes"), rows)


def _work(plan: Plan) -> Section:
    compute = plan.compute
    rows = [
        ("FLOPs of the model, by formula", number(compute.model_flops, "FLOP")),
        ("FLOPs that rematerialisation adds, by formula", number(compute.recomputed_flops, "FLOP")),
        ("FLOPs the compiler counts, loops once", number(compute.compiler_flops, "FLOP")),
        ("bytes moved, loops as often as they run", size(compute.moved)),
        ("bytes the compiler counts, loops once", size(compute.compiler_bytes)),
    ]
    if plan.unknown_loops:
        rows.append(("loops of unknown length, counted once", str(plan.unknown_loops)))
    return Section("work per step and device", ("", ""), rows)


def _time(plan: Plan) -> Section:
    bound, machine = plan.bound, plan.topology.machine
    rows = [
        ("compute", duration(bound.compute), f"{machine.peak / 1e12:,.4g} TFLOP/s"),
        ("memory", duration(bound.memory), f"{machine.hbm / 1e9:,.4g} GB/s"),
        ("network", duration(bound.network), f"{machine.link / 1e9:,.4g} GB/s" + _far(machine)),
        (f"bound, by {bound.by}", duration(bound.seconds), f"{number(plan.tokens / bound.seconds)} tokens/s at most"),
        ("the compiler's estimate, loops once", duration(plan.compute.compiler_seconds), ""),
    ]
    return Section("time of a step", ("", "at least", "at"), rows)


def _far(machine) -> str:
    between = "hosts" if machine.platform == "cuda" else "slices"
    return f", between {between} {'n/a' if machine.network is None else f'{machine.network / 1e9:,.4g} GB/s'}"


def plan_json(plan: Plan, advice: list[Advice] = ()) -> dict[str, Any]:
    """A plan as plain values. Sizes in bytes, times in seconds, per device where not said otherwise."""
    topology, machine, setting = plan.topology, plan.topology.machine, plan.setting
    return {
        "format": FORMAT,
        "what": setting.what,
        "residual": setting.residual.name,
        "topology": {
            "name": topology.name, "slices": topology.slices, "devices": topology.size, "kind": machine.kind,
            "memory": machine.memory, "peak_flops": machine.peak, "hbm_bandwidth": machine.hbm,
            "link_bandwidth": machine.link, "network_bandwidth": machine.network, "source": machine.source,
        },
        "mesh": plan.mesh,
        "settings": {
            "model.remat": setting.model.remat, "train.batch_size": setting.train.batch_size,
            "train.accumulate": setting.train.accumulate, "batch": setting.batch, "context": setting.tokens,
        },
        "tokens": plan.tokens,
        "fits": plan.fits,
        "refused": plan.refused,
        "headroom": HEADROOM,
        "memory": dataclasses.asdict(plan.memory),
        "work": None if plan.compute is None else dataclasses.asdict(plan.compute),
        "collectives": [dataclasses.asdict(row) for row in plan.traffic],
        "bound": None if plan.bound is None else dataclasses.asdict(plan.bound),
        "buffers": [dataclasses.asdict(row) for row in plan.buffers],
        "unknown_loops": plan.unknown_loops,
        "lower_seconds": plan.lower_seconds,
        "compile_seconds": plan.compile_seconds,
        "notes": list(plan.notes),
        "advice": [
            {"changes": a.changes, "peak": a.peak, "seconds": a.seconds, "note": a.note} for a in advice
        ],
    }  # fmt: skip


def search_json(found: Found) -> dict[str, Any]:
    """A search as plain values: ``tried`` and ``best`` hold the changed keys and the plan."""
    pairs = [{"changes": changes, "plan": plan_json(plan)} for changes, plan in found.tried]
    best = None if found.best is None else {"changes": found.best[0], "plan": plan_json(found.best[1])}
    return {"format": FORMAT, "candidates": found.candidates, "stopped": found.stopped, "tried": pairs, "best": best}


def search_section(found: Found) -> Section:
    """The compiled candidates as a table."""
    rows = [
        (
            " ".join(f"{key}={value}" for key, value in changes.items()),
            size(plan.memory.peak),
            "fits" if plan.fits else "does not fit",
            "n/a" if plan.bound is None else f"{duration(plan.bound.seconds)} ({plan.bound.by})",
        )
        for changes, plan in found.tried
    ]
    title = f"{len(found.tried)} of {found.candidates} candidates compiled; {found.stopped}"
    return Section(title, ("settings", "peak", "", "bound"), rows)
