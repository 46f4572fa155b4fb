"""A mesh and a policy that fit and are cheapest by the bound.

All candidates are estimated, which is cheap; the most promising few are compiled, one after the other. Each compiled
one corrects the memory estimate of the rest, so a guess that was too low is made once, and the bound of those that
split tokens and heads in the same way under the same policy, so that no more of them are compiled for a guess that was
too fast.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from lmres.plan.advice import changed, ranked, scale_of
from lmres.plan.estimate import Estimate, state_shapes
from lmres.plan.lowering import Setting
from lmres.plan.machines import HEADROOM
from lmres.plan.planning import Plan, make_plan
from lmres.plan.topology import Topology

MARGIN = 1.2  # the compilers' peaks were 0.5 to 1.2 times the estimates of the shipped configs (configs/README.md)


@dataclasses.dataclass(frozen=True)
class Found:
    """tried: the plans that were compiled, with the keys that were changed, in that order. best: the fitting one with
    the lowest bound; None if there is none. candidates: how many there were. stopped: why no more were compiled."""

    tried: list[tuple[dict[str, Any], Plan]]
    best: tuple[dict[str, Any], Plan] | None
    candidates: int
    stopped: str


def search(
    setting: Setting,
    topology: Topology,
    devices: list[Any],
    *,
    compiles: int = 3,
    seconds: float = 900.0,
    tell: Callable[[str], None] = lambda text: None,
) -> Found:
    """Searches over meshes, rematerialisation and accumulation; batch and model stay as they are.

    compiles: programs to compile at most. seconds: after which no further one is begun. tell: gets a line of progress.

    Raises ValueError when no candidate's sizes divide.
    """
    setting.check()
    started = time.perf_counter()
    waiting = ranked(setting, topology, state_shapes(setting))
    if not waiting:
        raise ValueError(
            f"no mesh of {topology.size} devices divides train.batch_size={setting.train.batch_size}, model.heads, "
            "model.kv_heads, model.width and model.vocab_size; change one of them"
        )
    total, scale, tried, slower = len(waiting), MARGIN, [], {}

    def told(pair: tuple[dict[str, Any], Estimate], seconds: float) -> float:
        """Seconds of a candidate, corrected."""
        return seconds * slower.get(_family(pair[0]), 1.0)

    limit = topology.machine.memory * (1 - HEADROOM)
    stopped = "every candidate that is estimated to fit was compiled"
    while waiting:
        fitting = [pair for pair in waiting if pair[1].peak * scale <= limit]
        if not fitting:
            break
        best = _best(tried)
        changes, guess = min(fitting, key=lambda pair: told(pair, pair[1].order))
        waiting.remove((changes, guess))
        if best is not None and told((changes, guess), guess.seconds) >= best[1].bound.seconds:
            stopped = "no other candidate is estimated to be faster"
            break
        if len(tried) >= compiles:
            stopped = f"{compiles} programs were compiled (--compiles)"
            break
        if time.perf_counter() - started > seconds:
            stopped = f"{seconds / 60:g} minutes are over (--minutes)"
            break
        words = " ".join(f"{key}={value}" for key, value in changes.items())
        tell(
            f"compiling {len(tried) + 1} of at most {compiles}: {words}, estimated {guess.peak * scale / 2**30:.1f} GiB"
        )
        plan = make_plan(changed(setting, changes), topology, devices)
        tried.append((changes, plan))
        limit = plan.memory.limit
        if not plan.fits:  # of one that fits nothing needs to be learnt, and another policy may be estimated better
            scale = max(scale, scale_of(plan, guess))
        if plan.bound is not None:
            slower[_family(changes)] = plan.bound.seconds / guess.seconds
        tell(f"  {plan.memory.peak / 2**30:.1f} GiB, {'fits' if plan.fits else 'does not fit'}")
    return Found(tried, _best(tried), total, stopped)


def _family(changes: dict[str, Any]) -> tuple[Any, ...]:
    """What estimates of time are alike wrong for."""
    return tuple(changes[key] for key in ("mesh.sequence", "mesh.tensor", "model.remat"))


def _best(tried: list[tuple[dict[str, Any], Plan]]) -> tuple[dict[str, Any], Plan] | None:
    fitting = [pair for pair in tried if pair[1].fits]
    return min(fitting, key=lambda pair: pair[1].bound.seconds) if fitting else None
