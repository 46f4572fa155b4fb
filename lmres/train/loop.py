"""The training loop: dispatch a step, read the metrics of the one before, evaluate, save, stop when asked.

The host never waits for the device between steps: it learns the results of step t when step t + 1 is under way. A loss
that is not finite leaves the state untouched (see ``step``), stops the run one step later, and is never followed by a
save, so the last good checkpoint stays the last.
"""

import contextlib
import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax

from lmres.train.checkpoint import Checkpoints
from lmres.train.evaluate import Evaluator, in_words, measure_of
from lmres.train.feed import Feed, eval_batch_size
from lmres.train.flops import Throughput, flops_per_token, utilisation
from lmres.train.metrics import Deferred, MetricWriter
from lmres.train.preempt import StopSignals
from lmres.train.progress import Reporter
from lmres.train.session import Session
from lmres.train.state import TrainState
from lmres.train.step import jit_eval_step


class TrainingDiverged(RuntimeError):
    """The loss, the gradient or the validation loss is not finite."""


@dataclasses.dataclass
class TrainResult:
    """How a run ended.

    step: updates made. stopped: None at the planned end, or what stopped it ("SIGTERM", "Ctrl-C").
    evaluation: the last one. tokens_per_second: median over the run's log intervals, compile and pauses excluded.
    train_traces: how often the step was compiled; 1.
    """

    state: TrainState
    step: int
    stopped: str | None
    evaluation: dict[str, float]
    tokens_per_second: float | None
    seconds: float
    train_traces: int
    history: list[dict[str, float]]


class Loop:
    """One run over a session.

    folder: of the run; metrics and profiles go there. checkpoints: None to save nothing. meta: what is stored with
    each checkpoint beside the data position. base_rate: peak learning rate, for the log.
    """

    def __init__(
        self,
        session: Session,
        writer: MetricWriter,
        checkpoints: Checkpoints | None,
        meta: dict[str, Any],
        reporter: Reporter,
        folder: Path,
        base_rate: float,
    ):
        self._s, self._writer, self._checkpoints, self._meta = session, writer, checkpoints, meta
        self._reporter, self._folder, self._base_rate = reporter, folder, base_rate
        train, mesh = session.train, session.mesh
        self._traces = 0
        step = session.function()

        def counted(state, batch):
            self._traces += 1
            return step(state, batch)

        self._step = session.jitted(counted)
        size = eval_batch_size(train.eval_batch_size, train.batch_size // train.accumulate, mesh)
        eval_step = jit_eval_step(session.model, mesh, session.state_like["params"], measure_of(session.splits))
        valid = session.splits.valid
        # Counted in training batches, so that what is evaluated does not depend on how they are accumulated.
        limit = None if train.eval_batches is None else -(-train.eval_batches * train.batch_size // size)
        self.evaluate = Evaluator(eval_step, Feed(valid, mesh, size), valid, limit)
        self._flops = flops_per_token(session.model.config, session.connection, flow=session.model.flow)["total"]
        self._saved: int | None = None
        self._shown_rate: float | None = None
        self._shown_use: float | None = None

    def run(self, state: TrainState, start: int, signals: StopSignals) -> TrainResult:
        """From ``start`` updates to the end of the run, or to what ``signals`` was told.

        Raises TrainingDiverged for a loss or gradient that is not finite; CheckpointError when a save fails.
        """
        train, began = self._s.train, time.perf_counter()
        self._meter, self._deferred = Throughput(train.steps), Deferred()
        self._rates: list[float] = []
        self._history: list[dict[str, float]] = []
        self._saved = start if start else None
        evaluation: dict[str, float] = {}
        stopped, step = None, start
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._reporter.start(start, train.steps))
            batches = stack.enter_context(
                contextlib.closing(Feed(self._s.splits.train, self._s.mesh, train.batch_size).train(start))
            )
            profiling = stack.enter_context(contextlib.ExitStack())
            while step < train.steps:
                self._profile(step, profiling)
                state, metrics = self._step(state, next(batches))
                step += 1
                self._log(self._deferred.push(step, metrics))
                stopped = signals.requested(step)
                last = step == train.steps or stopped is not None
                if last or _due(train.eval_every, step):
                    self._log(self._deferred.flush())
                    if stopped is None:
                        evaluation = self._evaluated(state, step)
                if last or _due(train.save_every, step):
                    self._log(self._deferred.flush())
                    self._save(state, step)
                if stopped is not None:
                    break
        rates = sorted(self._rates)
        return TrainResult(
            state=state, step=step, stopped=stopped, evaluation=evaluation,
            tokens_per_second=rates[len(rates) // 2] if rates else None,
            seconds=time.perf_counter() - began, train_traces=self._traces, history=self._history,
        )  # fmt: skip

    def _log(self, ready: tuple[int, dict[str, float]] | None) -> None:
        """Takes a finished step's metrics: stops on what is not finite, writes and shows the rest."""
        if ready is None:
            return
        step, values = ready
        if not values.pop("finite"):
            raise self._diverged(
                f"step {step}: loss {values['loss']:.4g}, gradient norm {values['grad_norm']:.4g}: not finite"
            )
        self._meter.update(step, values["tokens"])
        values["learning_rate"] = self._base_rate * values.pop("lr_fraction")
        if step % self._s.train.log_every == 0 or step == self._s.train.steps:
            rate = self._meter.rate()
            if rate is not None:
                self._rates.append(rate)
                values["tokens_per_second"] = rate
                used = utilisation(rate, self._flops, jax.devices()[0].device_kind, self._s.mesh.size)
                if used is not None:
                    values["mfu"] = used
            self._shown_rate = rate
            self._shown_use = values.get("mfu")
        self._writer.write(step, values)
        self._history.append({"step": step, **values})
        shown = {"loss": values["loss"]}
        self._reporter.step(step, shown, self._shown_rate, self._meter.remaining(), self._shown_use)

    def _evaluated(self, state: TrainState, step: int) -> dict[str, float]:
        with self._meter.pause():
            result = self.evaluate(state["params"])
        if not math.isfinite(result["valid_loss"]):
            raise self._diverged(f"step {step}: validation loss {result['valid_loss']}: not finite")
        self._writer.write(step, result)
        self._history.append({"step": step, **result})
        self._reporter.line(f"step {step}: validation {in_words(result)}")
        return result

    def _save(self, state: TrainState, step: int) -> None:
        if self._checkpoints is None or self._saved == step:
            return
        with self._meter.pause():
            # A step's own loss was that of the parameters before its update; these have not been used yet.
            if not self.evaluate.is_finite(state["params"]):
                raise self._diverged(f"step {step}: the loss of the updated parameters is not finite")
            self._writer.sync()  # a run that is resumed from here has all that was written before
            self._checkpoints.save(step, state, {**self._meta, "data_position": step})
        self._saved = step

    def _diverged(self, what: str) -> TrainingDiverged:
        kept = f"the last good checkpoint is step {self._saved}" if self._saved else "no checkpoint was saved"
        return TrainingDiverged(
            f"{what}. Stopped; {kept}. Try a lower optimizer.learning_rate (now {self._base_rate:g}) or a longer "
            "schedule.warmup"
        )

    def _profile(self, step: int, window: contextlib.ExitStack) -> None:
        """Opens and closes the profiler's window; steps count from 1."""
        steps = self._s.train.profile_steps
        if steps is None:
            return
        if step + 1 == steps[0]:
            window.enter_context(jax.profiler.trace(str(self._folder / "profile")))
        elif step == steps[1]:
            window.close()


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
