"""Step time, memory and compile time of connections, each beside the plain residual.

Times are taken in rounds: in each round every variant makes one step, in an order that is rotated from round to round, and the
ratio to plain is taken within the round. The reported figures are medians over rounds, so a machine whose speed drifts moves
all of them together. Memory and FLOPs are the compiler's own (``memory_analysis``, ``cost_analysis``).
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lmres.model import ModelConfig, Transformer
from lmres.residual import Connection, Plain
from lmres.sharding import MeshConfig, constrainer, make_mesh
from lmres.train.config import OptimizerConfig, ScheduleConfig
from lmres.train.optimizer import make_optimizer
from lmres.train.schedule import make_schedule
from lmres.train.state import abstract_params, abstract_state, count, init_state
from lmres.train.step import jit_train_step, train_step_function


@dataclasses.dataclass(frozen=True)
class BenchRow:
    """One variant.

    step_seconds: median of one train step. ratio: median over rounds of this step's time to plain's in the same round.
    compile_seconds, lower_seconds: of the step. temp_bytes: the compiler's temporaries per device. peak_bytes: arguments,
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
class _Candidate:
    name: str
    step: Any
    state: Any
    lower_seconds: float
    compile_seconds: float
    memory: Any
    flops: float | None
    seconds: list[float] = dataclasses.field(default_factory=list)


def compile_step(model_config: ModelConfig, connection: Connection, batch_size: int, mesh=None):
    """The compiled train step of a model (AdamW), nothing allocated.

    Returns (compiled, abstract state, model, optimizer, lower seconds, compile seconds).
    """
    mesh = make_mesh(MeshConfig(), jax.devices()[:1]) if mesh is None else mesh
    model = Transformer(model_config, connection, constrainer(mesh))
    schedule = make_schedule(ScheduleConfig(), 1000)
    optimizer = make_optimizer(OptimizerConfig(), schedule, connection, abstract_params(model))
    target = abstract_state(model, optimizer, mesh)
    step = jit_train_step(train_step_function(model, optimizer, schedule), target, mesh)
    start = time.perf_counter()
    lowered = step.lower(target, _batch_like(batch_size, model_config.context))
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    return compiled, target, (model, optimizer, mesh), lowered_at - start, time.perf_counter() - lowered_at


def _batch_like(batch_size: int, context: int) -> dict[str, jax.ShapeDtypeStruct]:
    ids = jax.ShapeDtypeStruct((batch_size, context), jnp.int32)
    weights = jax.ShapeDtypeStruct((batch_size, context), jnp.float32)
    return {"inputs": ids, "targets": ids, "segment_ids": ids, "positions": ids, "weights": weights}


def _random_batch(batch_size: int, context: int, vocab_size: int, seed: int) -> dict[str, np.ndarray]:
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
) -> list[BenchRow]:
    """Times one train step of each variant against the plain residual, on one device.

    Args:
      variants: connections; plain (pre-norm) is added in front if it is not among them.
      model_config: sizes, with ``vocab_size`` set.
      batch_size: sequences per step.
      rounds: timed steps per variant, after one that is not counted.
      progress: called with (what, fraction done).

    Raises: ValueError for fewer than one round.
    """
    if rounds < 1:
        raise ValueError(f"bench needs at least one round, got {rounds}")
    variants = [Plain(), *[v for v in variants if v != Plain()]]
    tell = progress or (lambda what, done: None)
    total, done = len(variants) * (rounds + 2), 0
    candidates = []
    for connection in variants:
        tell(f"compiling {connection.name}", done / total)
        compiled, _, (model, optimizer, mesh), lower, compile_ = compile_step(model_config, connection, batch_size)
        costs = compiled.cost_analysis() or {}
        candidates.append(
            _Candidate(
                connection.name, compiled, init_state(model, optimizer, mesh, 0), lower, compile_,
                compiled.memory_analysis(), costs.get("flops"),
            )
        )
        done += 1
    for round_ in range(-1, rounds):
        batch = _random_batch(batch_size, model_config.context, model_config.vocab_size, round_ + 1)
        for k in range(len(candidates)):
            candidate = candidates[(k + round_) % len(candidates)]
            tell(f"timing {candidate.name}", done / total)
            start = time.perf_counter()
            candidate.state, metrics = candidate.step(candidate.state, batch)
            jax.block_until_ready((candidate.state, metrics))
            if round_ >= 0:
                candidate.seconds.append(time.perf_counter() - start)
            done += 1
    return [_row(c, candidates[0], batch_size * model_config.context) for c in candidates]


def _row(candidate: _Candidate, plain: _Candidate, tokens: int) -> BenchRow:
    memory, base = candidate.memory, plain.memory
    seconds = statistics.median(candidate.seconds)
    params = candidate.state["params"]
    return BenchRow(
        name=candidate.name,
        parameters=count(params),
        connection_parameters=count(params["stack"]["connection"]),
        step_seconds=seconds,
        ratio=statistics.median(a / b for a, b in zip(candidate.seconds, plain.seconds, strict=True)),
        tokens_per_second=tokens / seconds,
        compile_seconds=candidate.compile_seconds,
        lower_seconds=candidate.lower_seconds,
        temp_bytes=memory.temp_size_in_bytes,
        temp_ratio=memory.temp_size_in_bytes / base.temp_size_in_bytes,
        peak_bytes=_peak(memory),
        peak_ratio=_peak(memory) / _peak(base),
        flops=candidate.flops,
    )


def _peak(memory: Any) -> int:
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
