"""Configs of the training room: optimiser, schedule, loop. Each part owns its own."""

import dataclasses
from typing import ClassVar, Literal

_FORBID = {"extra": "forbid"}  # read by pydantic when a config is validated


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The update rule.

    kind: "adamw", or "muon": Muon for the weight matrices of the branches, AdamW for all the rest.
    learning_rate: at the peak of the schedule.
    muon_learning_rate: of the Muon part at the peak; None for ``learning_rate``.
    weight_decay: decoupled; chosen by parameter role (matrices and embeddings are decayed, norms' gains and what a
      connection lists as exempt are not).
    beta1, beta2, eps: of AdamW. muon_momentum: of Muon.
    clip: largest global gradient norm; None for no clipping.
    """

    __pydantic_config__: ClassVar[dict] = _FORBID

    kind: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-3
    muon_learning_rate: float | None = None
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    muon_momentum: float = 0.95
    clip: float | None = 1.0


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over optimiser updates, as a fraction of the peak.

    kind: after a linear warm-up: "cosine", "linear", "constant", or "wsd" (constant, then a linear decay over the last
      ``decay_fraction`` of the run).
    warmup: updates of the warm-up; a float below 1 is a fraction of the run.
    final: fraction of the peak at the end.
    decay_fraction: of "wsd".
    """

    __pydantic_config__: ClassVar[dict] = _FORBID

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup: float = 0.05
    final: float = 0.1
    decay_fraction: float = 0.2

    def warmup_updates(self, steps: int) -> int:
        """Updates of the warm-up in a run of ``steps``, for a valid ``warmup``."""
        return round(self.warmup * steps) if self.warmup < 1 else round(self.warmup)

    def decay_updates(self, steps: int) -> int:
        """Updates of the last decay of "wsd" in a run of ``steps``, for a valid ``decay_fraction``."""
        return round(self.decay_fraction * steps)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop.

    steps: optimiser updates.
    batch_size: sequences per update, over all devices and accumulation steps.
    accumulate: micro-batches per update; must divide ``batch_size``.
    z_loss: weight of the squared log-partition penalty; 0 is off.
    seed: of the parameters and of dropout.
    eval_every: updates between evaluations; 0 for the end only. eval_batches: None for the whole validation split,
      else how many batches of ``batch_size`` sequences of it.
    eval_batch_size: None for ``batch_size / accumulate``.
    save_every: updates between checkpoints; 0 for the end only. The end, and a SIGTERM, always save.
    keep: checkpoints kept.
    log_every: updates between lines of metrics.
    compilation_cache: folder of the persistent compilation cache; None for off, "auto" for the user's cache folder.
    profile_steps: None, or (first, last) update of a profiler window.
    """

    __pydantic_config__: ClassVar[dict] = _FORBID

    steps: int = 1000
    batch_size: int = 32
    accumulate: int = 1
    z_loss: float = 0.0
    seed: int = 0
    eval_every: int = 250
    eval_batches: int | None = None
    eval_batch_size: int | None = None
    save_every: int = 500
    keep: int = 2
    log_every: int = 10
    compilation_cache: str | None = "auto"
    profile_steps: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """Where metrics go besides ``metrics.jsonl`` in the run's folder.

    tensorboard: write event files.
    wandb: project name for Weights & Biases (extra ``lmres[wandb]``); None is off.
    """

    __pydantic_config__: ClassVar[dict] = _FORBID

    tensorboard: bool = True
    wandb: str | None = None
