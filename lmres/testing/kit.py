"""``check_residual`` and the list of its checks."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from lmres.residual import Connection
from lmres.testing import declared, functions, running
from lmres.testing.report import Report, ResidualCheckError, Skipped, Wrong
from lmres.testing.setting import HEADS, Setting


@dataclasses.dataclass(frozen=True)
class Check:
    """One check.

    description: one line, what it establishes.
    run: ``run(setting) -> figures``; raises ``Wrong`` or ``Skipped``.
    """

    description: str
    run: Callable[[Setting], dict[str, Any]]


CHECKS: dict[str, Check] = {
    "shapes": Check("shapes and dtypes are those of the interface, in float32 and bfloat16", functions.shapes),
    "start": Check("equal to the plain residual at the start, to the stated tolerance", functions.start),
    "scan": Check("scanned equals looped: outputs and all gradients", running.scan),
    "remat": Check("rematerialised equals not: outputs and all gradients", running.remat),
    "matrix": Check("the depth-mixing matrix recomposes what every unit reads", functions.matrix),
    "causal": Check("the connection mixes neither tokens nor rows of the batch", functions.causal),
    "decode": Check("cached decoding gives the logits of the full forward pass", running.decode),
    "sharded": Check("sharded over all devices equals one device: loss and all gradients", running.sharded),
    "gradients": Check("finite gradients reach every row of every parameter by step 2", functions.gradients),
    "decay": Check("labels for weight decay and learning rates name parameters that exist", declared.decay),
    "cost": Check("stated parameters are exact and stated FLOPs within 10 % of XLA's count", declared.cost),
}


def check_residual(
    connection: Connection,
    *,
    only: str | Iterable[str] | None = None,
    width: int = 16,
    blocks: int = 3,
    seed: int = 0,
) -> Report:
    """Checks everything that a connection promises, on small shapes.

    Args:
      connection: any ``lmres.residual.Connection``: four pure functions, ``init`` and ``cost``.
      only: names of the checks to run, of ``CHECKS``; all by default.
      width: size D of a stream, a multiple of 4, and of 8 for the check that runs a transformer.
      blocks: copies of two sub-layers, at least 2; the connection has 2 x blocks units, or ``blocks`` if its unit is
        the block.
      seed: of parameters and inputs.

    Returns: what was run, with figures, and what could not be run here, with the reason.

    Raises:
      ResidualCheckError: at the first check that fails; an AssertionError.
      ValueError: for an unknown check, or sizes that the connection refuses.
      TypeError: if ``connection`` is not a ``Connection``.
    """
    if not isinstance(connection, Connection):
        raise TypeError(
            f"check_residual takes an instance of lmres.residual.Connection, got {connection!r}; "
            "give the class its hyper-parameters, and derive it from Connection"
        )
    names = list(CHECKS) if only is None else [only] if isinstance(only, str) else list(only)
    for name in names:
        if name not in CHECKS:
            raise ValueError(f"there is no check {name!r}; there are {', '.join(CHECKS)}")
    if blocks < 2:
        raise ValueError(f"blocks={blocks} must be at least 2")
    if width % HEADS:
        raise ValueError(f"width={width} must be a multiple of {HEADS}, the heads of the branches")
    setting = Setting(connection, width, blocks, seed)
    setting.connection.check(setting.unit_count, width)
    passed, skipped = {}, {}
    for name in names:
        try:
            passed[name] = CHECKS[name].run(setting)
        except Skipped as reason:
            skipped[name] = str(reason)
        except Wrong as wrong:
            raise ResidualCheckError(name, connection, str(wrong)) from None
        except Exception as error:  # the connection's own; the traceback follows
            message = f"raised {type(error).__name__}: {error}"
            raise ResidualCheckError(name, connection, message) from error
    return Report(connection, passed, skipped)
