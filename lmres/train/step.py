"""The train step and the evaluation step, jitted with pinned shardings.

One update, whatever the accumulation: the gradient of ``sum of nats over all real tokens of the global batch / number
of those tokens``. Micro-batches therefore add up unnormalised gradients, and the division comes last; dividing each
micro-batch by its own count would favour the tokens of short ones.

A loss or gradient that is not finite leaves the state as it was (only ``step`` is not advanced either), so what the
host learns one step later, it learns before anything is lost; the loop then stops.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from lmres.model import Transformer
from lmres.sharding import batch_sharding
from lmres.train.loss import LossSums, ScoredSums, loss_sums
from lmres.train.schedule import Schedule
from lmres.train.state import TrainState, replicated

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Measure = Callable[[jax.Array, jax.Array, jax.Array], LossSums | ScoredSums]  # of logits, targets, weights


def micro_batches(batch: Batch, accumulate: int) -> Batch:
    """[B, ...] to [accumulate, B / accumulate, ...]; row r goes to micro-batch r mod accumulate, so that a batch split
    over devices in contiguous runs of rows stays where it is."""

    def split(x):
        return x.reshape(x.shape[0] // accumulate, accumulate, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, batch)


def batch_sums(model: Transformer, params: Any, batch: Batch, dropout_key=None, measure: Measure = loss_sums):
    """What ``measure`` sums up of the model on a batch."""
    logits = model.apply(
        {"params": params}, batch["inputs"], batch["segment_ids"], batch["positions"], dropout_key=dropout_key
    )
    return measure(logits, batch["targets"], batch["weights"])


def gradients(
    model: Transformer, params: Any, batch: Batch, accumulate: int, z_loss: float, dropout_key=None
) -> tuple[Any, LossSums]:
    """Gradient of (nats + z_loss * z) / tokens over the whole batch, and the sums."""

    def objective(params, micro, key):
        sums = batch_sums(model, params, micro, key)
        return sums.nats + z_loss * sums.z, sums

    differentiate = jax.grad(objective, has_aux=True)
    if accumulate == 1:
        total, sums = differentiate(params, batch, dropout_key)
    else:

        def add(carry, xs):
            micro, index = xs
            key = None if dropout_key is None else _fold(dropout_key, index)
            return jax.tree.map(jnp.add, carry, differentiate(params, micro, key)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        zero = jnp.zeros((), jnp.promote_types(jnp.float32, jax.tree.leaves(params)[0].dtype))
        xs = (micro_batches(batch, accumulate), jnp.arange(accumulate))
        (total, sums), _ = jax.lax.scan(add, (zeros, LossSums(zero, zero, zero)), xs)
    # A batch without a single real token has gradient zero, not 0/0.
    return jax.tree.map(lambda g: g / jnp.maximum(sums.tokens, 1.0).astype(g.dtype), total), sums


def _fold(key_data, value):
    return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key_data), value))


def train_step_function(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    *,
    accumulate: int = 1,
    z_loss: float = 0.0,
    seed: int = 0,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """``(state, batch) -> (state, metrics)``, not jitted; shared by training, benchmarks and memory tests."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        params, count = state["params"], state["step"]
        # Dropout is a function of (seed, update), so a resumed run draws the same.
        dropout_key = _fold(jax.random.key_data(jax.random.key(seed)), count) if model.config.dropout else None
        grads, sums = gradients(model, params, batch, accumulate, z_loss, dropout_key)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(sums.nats) & jnp.isfinite(norm)
        updates, opt_state = optimizer.update(grads, state["opt_state"], params)
        new = TrainState(params=optax.apply_updates(params, updates), opt_state=opt_state, step=count + 1)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, dict(state))
        tokens = jnp.maximum(sums.tokens, 1.0)
        metrics = {
            "loss": sums.nats / tokens,
            "grad_norm": norm,
            "lr_fraction": schedule(count),
            "tokens": sums.tokens,
            "finite": finite,
        }
        if z_loss:
            metrics["z"] = sums.z / tokens
        return new, metrics

    return step


def jit_train_step(step: Callable, state_like: TrainState, mesh: Mesh) -> Callable:
    """Jits a train step: state donated and pinned to its shardings on both sides, batch over data and fsdp.

    Without pinned outputs the compiler may choose other shardings for the new state (an FSDP axis was seen to drop
    out), and the second step would compile again.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state_like)
    return jax.jit(
        step,
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )


def jit_eval_step(model: Transformer, mesh: Mesh, params_like: Any, measure: Measure) -> Callable[[Any, Batch], Any]:
    """``(params, batch) -> sums``, those that ``measure`` gives, jitted."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params_like)
    return jax.jit(
        lambda params, batch: batch_sums(model, params, batch, measure=measure),
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=replicated(mesh),
    )
