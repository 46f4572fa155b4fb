"""How a train step grows: the same step for ever more chips or blocks, by formula and by the machine's compiler.

Rows per device are constant (weak scaling): the batch is rows x devices, taken at once, and all devices split the
parameters (mesh.fsdp=-1). What is found is plain values, so that it can be kept after every compile and gone on with.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from lmres.plan.estimate import estimate, state_shapes
from lmres.plan.lowering import Setting
from lmres.plan.machines import GIB
from lmres.plan.planning import make_plan
from lmres.plan.report import plan_json
from lmres.plan.roofline import ROOFS
from lmres.plan.topology import Topology, topology_devices, topology_of
from lmres.sharding import MeshConfig

FORMAT = 1  # raised when a key changes its meaning or goes
_KEPT = ("fits", "refused", "memory", "work", "collectives", "bound", "unknown_loops", "compile_seconds")


@dataclasses.dataclass(frozen=True)
class Point:
    """One step of one size. name: of the config. own_blocks: as many as the config has itself. rows: per device."""

    name: str
    setting: Setting
    topology: Topology
    own_blocks: int
    rows: int

    @property
    def chips(self) -> int:
        return self.topology.size // self.topology.machine.cores

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells it from other points of a document."""
        return self.name, self.chips, self.setting.model.blocks

    @property
    def digest(self) -> str:
        """Changes with anything that is compiled."""
        return hashlib.sha256(repr((self.setting, self.topology.name)).encode()).hexdigest()[:16]

    @property
    def words(self) -> str:
        return f"{self.name}, {self.setting.model.blocks} blocks, {self.topology.name}"


def key_of(found: dict[str, Any]) -> tuple[str, int, int]:
    """``Point.key`` of what was found for it."""
    return found["config"], found["chips"], found["blocks"]


def points(
    settings: dict[str, Setting], machine: str, chips: Iterable[int], blocks: Sequence[int] = (), rows: int = 1
) -> list[Point]:
    """Every config with every number of chips and of blocks. blocks: empty for each config's own number.

    Raises ValueError, naming the option or key, for a size that there is not.
    """
    found = []
    for name, setting in settings.items():
        for depth in blocks or (setting.model.blocks,):
            for count in chips:
                topology = topology_of(machine, count)
                changed = dataclasses.replace(
                    setting,
                    model=dataclasses.replace(setting.model, blocks=depth),
                    train=dataclasses.replace(setting.train, batch_size=rows * topology.size, accumulate=1),
                    mesh=MeshConfig(data=1, fsdp=-1),
                )
                changed.check()
                found.append(Point(name, changed, topology, setting.model.blocks, rows))
    return found


def on_paper(wanted: Sequence[Point]) -> list[dict[str, Any]]:
    """What is known of points without a compiler: what they are, and their estimates.

    Raises ValueError, naming the config key, for sizes that do not divide.
    """
    found, shapes = [], {}
    for point in wanted:
        setting, topology = point.setting, point.topology
        tpu = topology.machine.platform == "tpu"  # GPUs may be bound by the way between hosts: seconds, no bytes
        same = (point.name, setting.model.blocks)
        if same not in shapes:
            shapes = {same: state_shapes(setting)}
        guess = estimate(setting, topology, shapes[same])
        found.append({
            "config": point.name, "kind": setting.residual.kind, "residual": setting.residual.name,
            "topology": topology.name, "chips": point.chips, "blocks": setting.model.blocks,
            "own_blocks": point.own_blocks, "context": setting.model.context,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(shapes[same]["params"])),
            "digest": point.digest,
            "paper": {
                "state": guess.state, "activations": guess.activations, "transient": guess.transient,
                "peak": guess.peak, "sent": guess.roofs[2] * topology.machine.link if tpu else None,
                "seconds": guess.seconds, "by": ROOFS[guess.roofs.index(guess.seconds)],
            },
        })  # fmt: skip
    return found


def by_compile(point: Point) -> dict[str, Any]:
    """What the machine's compiler says of a point: parts of ``plan_json``. That it does not fit is an answer, too."""
    plan = make_plan(point.setting, point.topology, topology_devices(point.topology), buffers=0)
    whole = plan_json(plan)
    return {name: whole[name] for name in _KEPT}


def grow(
    wanted: Sequence[Point],
    document: dict[str, Any] | None,
    keep: Callable[[dict[str, Any]], None],
    *,
    compiles: int | None = None,
    compile_: Callable[[Point], dict[str, Any]] = by_compile,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """All points of a document and the wanted ones, which are compiled where they are not in it yet.

    Estimates are made anew, since that costs nothing; a point whose config has changed is compiled again.

    Args:
      document: what an earlier call kept, or None.
      keep: gets the document after every compile, and at the end.
      compiles: at most so many now; None for all.
      compile_: of a point; ``by_compile`` but in tests.
      tell: gets a line of progress.

    Raises ValueError for another machine or number of rows than the document's.
    """
    wanted = list({point.key: point for point in wanted}.values())
    head = {"format": FORMAT, "machine": wanted[0].topology.machine.name, "rows": wanted[0].rows}
    document = document or {**head, "points": []}
    for name in ("machine", "rows"):
        if document[name] != head[name]:
            raise ValueError(
                f"--{name} {head[name]}: the file was made with --{name} {document[name]}; give another --out"
            )
    known = {key_of(found): found for found in document["points"]}
    for found in on_paper(wanted):
        before = known.get(key_of(found), {})
        same = before.get("digest") == found["digest"]
        known[key_of(found)] = {**found, "compiled": before.get("compiled") if same else None}
    missing = [point for point in wanted if known[point.key]["compiled"] is None]
    now, spent = missing if compiles is None else missing[:compiles], 0.0
    so_far = lambda: {**head, "points": list(known.values())}  # noqa: E731
    for done, point in enumerate(now):
        left = f", about {spent / done * (len(now) - done) / 60:.0f} min left" if done else ""
        tell(f"compiling {done + 1} of {len(now)}: {point.words}{left}")
        started = time.perf_counter()
        compiled = compile_(point)
        spent += time.perf_counter() - started
        known[point.key] = {**known[point.key], "compiled": compiled}
        keep(so_far())
        peak = compiled["memory"]["peak"] / GIB
        tell(f"  {peak:.2f} GiB, {'fits' if compiled['fits'] else 'does not fit'}, {compiled['compile_seconds']:.0f} s")
    keep(so_far())
    if len(now) < len(missing):
        tell(f"{len(missing) - len(now)} of {len(wanted)} points are still to be compiled: run the same command again")
    return so_far()


def checked(document: Any) -> dict[str, Any]:
    """A document that was read. Raises ValueError if it is another file's."""
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT or not isinstance(document.get("points"), list):
        raise ValueError(f"not what lmres growth wrote in format {FORMAT}: its format is {found!r}")
    return document


def as_text(document: dict[str, Any]) -> str:
    """JSON with a line for each point, so that two of them can be compared line by line."""
    head = json.dumps({name: value for name, value in document.items() if name != "points"})
    points = ",\n".join(json.dumps(point, allow_nan=False) for point in document["points"])
    return f'{head[:-1]}, "points": [\n{points}\n]}}\n'
