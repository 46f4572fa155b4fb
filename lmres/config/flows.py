"""What a flow makes of a model's size, as numbers and in words."""

import dataclasses
from fractions import Fraction

from lmres.flow import FlowConfig, ReadSet
from lmres.flow.geometry import PerHead
from lmres.train.flops import keys_read


@dataclasses.dataclass(frozen=True)
class FlowFacts:
    """Of a flow over L layers and T tokens.

    geometry: its short notation. reads: the cells that cell (t, l) reads. slope: layers climbed per token, at most.
    schedule_class: how the read set is best run exactly. schedule: how the cells are run, never "auto".
    steps: one after the other in a forward pass, each a layer of some tokens; ordinary attention has L.
    keys_per_query: mean over all cells and heads. cached: source layers whose keys and values later tokens read.
    slots: keys and values per token that are made to be read.
    """

    geometry: str
    reads: str
    slope: Fraction
    schedule_class: str
    schedule: str
    steps: int
    keys_per_query: float
    cached: tuple[int, ...]
    slots: int


def flow_facts(flow: FlowConfig, layers: int, tokens: int) -> FlowFacts:
    """What ``flow`` makes of L = ``layers`` layers and T = ``tokens`` tokens.

    Raises ValueError naming the key where they do not fit.
    """
    reads, geometry = flow.reads(layers), flow.geometry
    parts = geometry.parts if isinstance(geometry, PerHead) else (geometry,)
    also = [f"adoption {flow.adopt}"] if flow.adopt else []
    also += ["with the output cell"] * flow.output + ["in a gated branch"] * (flow.combine == "gated")
    also += ["keys and values by reader"] * (flow.projection == "consumer")
    schedule = flow.resolve(reads, tokens)
    return FlowFacts(
        geometry=", ".join([str(geometry), *also]),
        reads=" | ".join(part.equation for part in parts),
        slope=reads.slope(tokens),
        schedule_class=reads.schedule_class(tokens),
        schedule=schedule,
        steps=_steps(flow, reads, schedule, tokens),
        keys_per_query=keys_read(flow, layers, tokens),
        cached=reads.cached(tokens),
        slots=len(flow.store(layers).slots),
    )


def _steps(flow: FlowConfig, reads: ReadSet, schedule: str, tokens: int) -> int:
    if schedule == "wavefront":
        return reads.wavefront_steps(tokens)
    _, tiles, _ = flow.tiling(reads.layers, tokens)
    if schedule == "swept":
        return reads.layers * ((flow.start == "plain") + tiles * (flow.sweeps + flow.gradient_sweeps))
    return reads.layers * tiles
