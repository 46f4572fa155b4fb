"""Learning-rate schedules: which fraction of the peak each optimiser update uses.

Schedules count optimiser updates, never micro-batches. For update number u = step + 1 (1 .. steps)
and W warm-up updates:

    u <= W               u / W, so the first update already moves and update W is at the peak
    after it             p = (u - W) / (steps - W), which is 1 at the last update
      "cosine"           final + (1 - final) (1 + cos(pi p)) / 2
      "linear"           1 - (1 - final) p
      "constant"         1 (``final`` is not used)
      "wsd"              1, and over the last D = decay_fraction x steps updates linearly down to ``final``
                         (warm-up, stable, decay: arXiv:2404.06395)
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lmres.train.config import ScheduleConfig

Schedule = Callable[[int | jax.Array], jax.Array]


def warmup_updates(config: ScheduleConfig, steps: int) -> int:
    """Number of warm-up updates of a run of ``steps`` updates.

    Raises ValueError, naming ``schedule.warmup``, if it is neither a fraction in [0, 1) nor a whole number <=
    steps.
    """
    if config.warmup < 0 or (config.warmup >= 1 and config.warmup != int(config.warmup)):
        raise ValueError(
            f"schedule.warmup={config.warmup} must be a fraction of the run in [0, 1), or a count of updates"
        )
    if config.warmup >= 1 and config.warmup > steps:
        raise ValueError(f"schedule.warmup={int(config.warmup)} updates is longer than train.steps={steps}")
    return config.warmup_updates(steps)


def make_schedule(config: ScheduleConfig, steps: int) -> Schedule:
    """``f(step) -> fraction of the peak``, float32; step = updates done before this one, 0 .. steps - 1.

    ``step`` may be a Python int or a traced integer. After the last update the value stays what it was there.

    Raises ValueError naming the config keys when they cannot be met by ``steps`` updates.
    """
    if steps < 1:
        raise ValueError(f"train.steps={steps} must be at least 1")
    if not 0.0 <= config.final <= 1.0:
        raise ValueError(f"schedule.final={config.final} must be in [0, 1]: it is a fraction of the peak")
    warmup = warmup_updates(config, steps)
    start = warmup  # last update at the peak
    if config.kind == "wsd":
        if not 0.0 <= config.decay_fraction <= 1.0:
            raise ValueError(f"schedule.decay_fraction={config.decay_fraction} must be in [0, 1]")
        start = steps - config.decay_updates(steps)
        if start < warmup:
            raise ValueError(
                f"schedule.warmup={config.warmup} ({warmup} updates) and schedule.decay_fraction="
                f"{config.decay_fraction} ({steps - start} updates) do not both fit into train.steps={steps}"
            )

    def schedule(step: int | jax.Array) -> jax.Array:
        update = jnp.minimum(jnp.asarray(step, jnp.float32) + 1.0, float(steps))
        rise = update / max(warmup, 1)
        p = jnp.clip((update - start) / max(steps - start, 1), 0.0, 1.0)
        if config.kind == "constant":
            after = jnp.ones_like(p)
        elif config.kind == "cosine":
            after = config.final + (1.0 - config.final) * 0.5 * (1.0 + jnp.cos(jnp.pi * p))
        else:
            after = 1.0 - (1.0 - config.final) * p
        return jnp.where(update < warmup, rise, after)

    return schedule
