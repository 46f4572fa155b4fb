"""What one optimiser update is made of, from the sections of a config: training, comparisons, benchmarks and plans all
compile the same step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from lmres.model import Transformer
from lmres.sharding import batch_sharding
from lmres.train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from lmres.train.optimizer import make_optimizer
from lmres.train.schedule import Schedule, make_schedule
from lmres.train.state import TrainState, abstract_params, abstract_state
from lmres.train.step import Batch, Metrics, jit_train_step, train_step_function

Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True)
class Update:
    """model: with shardings of ``mesh`` pinned. state_like: shapes and shardings of the training state."""

    model: Transformer
    optimizer: optax.GradientTransformation
    schedule: Schedule
    mesh: Mesh
    train: TrainConfig
    state_like: TrainState

    @property
    def batch_like(self) -> Batch:
        """Shapes and shardings of a global batch."""
        shape, sharding = (self.train.batch_size, self.model.config.context), batch_sharding(self.mesh)
        ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
        weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        return {"inputs": ids, "targets": ids, "segment_ids": ids, "positions": ids, "weights": weights}

    def function(self) -> Step:
        """``(state, batch) -> (state, metrics)``, not jitted."""
        train = self.train
        return train_step_function(
            self.model, self.optimizer, self.schedule,
            accumulate=train.accumulate, z_loss=train.z_loss, seed=train.seed,
        )  # fmt: skip

    def jitted(self, function: Step | None = None) -> Any:
        """The step jitted with its shardings. function: what stands for ``function()``, such as one that counts."""
        return jit_train_step(function or self.function(), self.state_like, self.mesh)


def build_update(
    model: Transformer, optimizer: OptimizerConfig, schedule: ScheduleConfig, train: TrainConfig, mesh: Mesh
) -> Update:
    """The parts of an update; nothing is allocated.

    Raises ValueError, naming the config key, when a size cannot be split as the mesh asks.
    """
    rates = make_schedule(schedule, train.steps)
    made = make_optimizer(optimizer, rates, model.connection, abstract_params(model))
    return Update(model, made, rates, mesh, train, abstract_state(model, made, mesh))
