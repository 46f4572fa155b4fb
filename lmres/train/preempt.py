"""Being told to stop: SIGTERM from a scheduler, Ctrl-C from a person.

With one process, a handler sets a flag that the loop looks at between steps. After
``jax.distributed.initialize`` jax's preemption service owns SIGTERM instead: it passes the news to all
processes and names one step at which all of them stop, so that they save the same state. It also keeps
SIGTERM from ending the process, so the loop must ask.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils


def _to_stderr(line: str) -> None:
    # Not print: the handler may have interrupted a print, and buffered files cannot be re-entered.
    os.write(2, f"{line}\n".encode())


class StopSignals:
    """A context manager in which SIGTERM and the first Ctrl-C ask for a stop, and a second Ctrl-C interrupts.

    report: gets one line when a signal arrives; called inside the handler.

    May be entered before or after ``jax.distributed.initialize``. Signal handlers can be set by the main
    thread only; in another thread signals act as they did before.
    """

    def __init__(self, report: Callable[[str], None] = _to_stderr):
        self._report = report
        self._reason: str | None = None
        self._passed_on = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._set(signal.SIGINT, self._on_interrupt)
            # Once initialised, this would take SIGTERM away from jax's service.
            if not jax.distributed.is_initialized():
                self._set(signal.SIGTERM, self._on_terminate)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # Initialised in between: SIGTERM is the service's now, and is not given back.
            if not (number == signal.SIGTERM and jax.distributed.is_initialized()):
                signal.signal(number, handler)
        self._before.clear()

    def _set(self, number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> None:
        before = signal.signal(number, handler)
        # None: set by code that is not Python, and cannot be set back; the default is the best there is.
        self._before[number] = signal.SIG_DFL if before is None else before

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        self._reason = "SIGTERM"
        self._report("SIGTERM: stopping after this step")

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._reason is not None:
            raise KeyboardInterrupt
        self._reason = "Ctrl-C"
        self._report("Ctrl-C: stopping after this step and saving; press again to stop at once")

    def requested(self, step: int) -> str | None:
        """Why the run should stop after ``step`` ("SIGTERM", "Ctrl-C"), or None. Call it once per step.

        With several processes all of them must ask, with the same step, and all get an answer at the same
        step.
        """
        if jax.distributed.is_initialized():
            if multihost_utils.reached_preemption_sync_point(step):
                return self._reason or "SIGTERM"
            # Ctrl-C, and a SIGTERM from before initialisation, are known to this process alone. The others
            # must stop at the same step: tell jax's service, which tells them.
            if self._reason is not None and not self._passed_on:
                self._passed_on = True
                os.kill(os.getpid(), signal.SIGTERM)
            return None
        return self._reason
