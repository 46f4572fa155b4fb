"""Step time, memory and compile time of connections and flows, each beside the plain residual with ordinary attention.

Times are taken in rounds: in each round every variant makes one step, in an order that is rotated from round to round,
and the ratio to plain is taken within the round. The reported figures are medians over rounds, so a machine whose
speed drifts moves all of them together. Memory and FLOPs are the compiler's own (``memory_analysis``,
``cost_analysis``).
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lmres.flow.config import FlowConfig
from lmres.model import ModelConfig, Transformer
from lmres.residual import Connection, Plain
from lmres.sharding import MeshConfig, constrainer, make_mesh
from lmres.train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from lmres.train.state import count, init_state
from lmres.train.update import Update, build_update


@dataclasses.dataclass(frozen=True)
class BenchRow:
    """One variant.

    step_seconds: median of one train step. ratio: median over rounds of this step's time to plain's in the same round.
    compile_seconds, lower_seconds: of the step. temp_bytes: the compiler's temporaries per device. peak_bytes:
    arguments,
    outputs and temporaries, less what is donated. flops: of one step, by the compiler, or None where it does not say.
    """

    name: str
    parameters: int
    connection_parameters: int
    step_seconds: float
    ratio: float
    tokens_per_second: float
    compile_seconds: float
    lower_seconds: float
    temp_bytes: int
    temp_ratio: float
    peak_bytes: int
    peak_ratio: float
    flops: float | None


@dataclasses.dataclass
class Timed:
    """A compiled train step with a state of its own, and the seconds of each of its timed steps."""

    name: str
    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    batch: Callable[[int], Any]  # of a round
    seconds: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Candidate:
    timed: Timed
    lower_seconds: float
    compile_seconds: float
    memory: Any
    flops: float | None


def time_in_turns(candidates: Sequence[Timed], rounds: int, tell: Callable[[str, float], None]) -> None:
    """Fills ``seconds``: in each round every candidate makes one step, the order rotated; one round before is not
    counted.

    tell: called with (what, fraction done).
    """
    total, done = len(candidates) * (rounds + 1), 0
    for round_ in range(-1, rounds):
        for k in range(len(candidates)):
            one = candidates[(k + round_) % len(candidates)]
            tell(f"timing {one.name}", done / total)
            batch = one.batch(round_ + 1)
            start = time.perf_counter()
            one.state, metrics = one.step(one.state, batch)
            jax.block_until_ready((one.state, metrics))
            if round_ >= 0:
                one.seconds.append(time.perf_counter() - start)
            done += 1


def label(connection: Connection, flow: FlowConfig) -> str:
    """What is told apart in a comparison: the connection, and the flow where that is not the ordinary one."""
    return connection.name if flow.is_standard else f"{connection.name}, {flow.kind}"


def compile_step(
    model_config: ModelConfig,
    connection: Connection,
    batch_size: int,
    flow: FlowConfig = FlowConfig(),  # noqa: B008 - frozen
    compiler_options: dict[str, bool | int | str] | None = None,
) -> tuple[Any, Update, float, float]:
    """The train step of a model (AdamW) on one device, compiled; nothing is allocated.

    compiler_options: as of ``jax.stages.Lowered.compile``.

    Returns (compiled, its parts, seconds of lowering, seconds of compiling).
    """
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model = Transformer(model_config, connection, constrainer(mesh), flow)
    update = build_update(model, OptimizerConfig(), ScheduleConfig(), TrainConfig(batch_size=batch_size), mesh)
    step = update.jitted()
    start = time.perf_counter()
    lowered = step.lower(update.state_like, update.batch_like)
    lowered_at = time.perf_counter()
    compiled = lowered.compile(compiler_options)
    return compiled, update, lowered_at - start, time.perf_counter() - lowered_at


def random_batch(batch_size: int, context: int, vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """A batch of random tokens, one document per row."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, (batch_size, context + 1), dtype=np.int32)
    shape = (batch_size, context)
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(context, dtype=np.int32), shape).copy(),
        "weights": np.ones(shape, np.float32),
    }


def bench(
    variants: Sequence[Connection],
    model_config: ModelConfig,
    batch_size: int,
    rounds: int = 7,
    progress: Callable[[str, float], None] | None = None,
    flows: Sequence[FlowConfig] = (FlowConfig(),),
) -> list[BenchRow]:
    """Times one train step of each variant with each flow against the plain residual with the ordinary flow, on one
    device.

    Args:
      variants: connections; plain (pre-norm) is added in front if it is not among them.
      model_config: sizes, with ``vocab_size`` set.
      batch_size: sequences per step.
      rounds: timed steps per variant, after one that is not counted.
      progress: called with (what, fraction done).
      flows: of the variants, each of which is timed with all of them.

    Raises: ValueError for fewer than one round.
    """
    if rounds < 1:
        raise ValueError(f"bench needs at least one round, got {rounds}")
    first = (Plain(), FlowConfig())
    variants = [Plain(), *[v for v in variants if v != Plain()]]
    pairs = [first, *[pair for pair in itertools.product(variants, flows) if pair != first]]
    tell = progress or (lambda what, done: None)
    candidates = []
    for number, (connection, flow) in enumerate(pairs):
        # Compiling and timing take about the same time each.
        tell(f"compiling {label(connection, flow)}", 0.5 * number / len(pairs))
        compiled, update, lower, compile_ = compile_step(model_config, connection, batch_size, flow)
        timed = Timed(
            label(connection, flow),
            compiled,
            init_state(update.model, update.optimizer, update.mesh, 0),
            lambda seed: random_batch(batch_size, model_config.context, model_config.vocab_size, seed),
        )
        flops = (compiled.cost_analysis() or {}).get("flops")
        candidates.append(_Candidate(timed, lower, compile_, compiled.memory_analysis(), flops))
    time_in_turns([c.timed for c in candidates], rounds, lambda what, done: tell(what, 0.5 + 0.5 * done))
    return [_row(c, candidates[0], batch_size * model_config.context) for c in candidates]


def _row(candidate: _Candidate, plain: _Candidate, tokens: int) -> BenchRow:
    memory, base = candidate.memory, plain.memory
    seconds = statistics.median(candidate.timed.seconds)
    params = candidate.timed.state["params"]
    return BenchRow(
        name=candidate.timed.name,
        parameters=count(params),
        connection_parameters=count(params["stack"]["connection"]),
        step_seconds=seconds,
        ratio=statistics.median(a / b for a, b in zip(candidate.timed.seconds, plain.timed.seconds, strict=True)),
        tokens_per_second=tokens / seconds,
        compile_seconds=candidate.compile_seconds,
        lower_seconds=candidate.lower_seconds,
        temp_bytes=memory.temp_size_in_bytes,
        temp_ratio=memory.temp_size_in_bytes / base.temp_size_in_bytes,
        peak_bytes=peak_bytes(memory),
        peak_ratio=peak_bytes(memory) / peak_bytes(base),
        flops=candidate.flops,
    )


def peak_bytes(memory: Any) -> int:
    """Bytes of one device by a ``memory_analysis``: arguments, outputs and temporaries, less what is donated."""
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
