"""Which function a set of parameters makes, as JSON, so that no checkpoint is loaded into another model."""

from collections.abc import Collection
from typing import Any

from lmres.train.digest import named

# Model settings that change how a model is computed or trained, but not which function its parameters make.
NOT_ARCHITECTURE = frozenset(
    {"dtype", "scan", "remat", "attention", "dropout", "embedding_std", "weight_std"}
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or read."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint does not fit; ``differences`` are lines "key: stored -> current"."""

    def __init__(self, what: str, differences: list[str]):
        self.differences = differences
        shown = differences[:20] + ([f"and {len(differences) - 20} more"] if len(differences) > 20 else [])
        super().__init__("\n  ".join([f"{what} (stored -> current):", *shown]))


def architecture(
    model: dict[str, Any], residual: dict[str, Any], params: Any, ignore: Collection[str] = NOT_ARCHITECTURE
) -> dict[str, Any]:
    """The JSON that says which function the parameters make: model and residual config, and parameter shapes.

    model, residual: as plain dicts. params: arrays or ShapeDtypeStructs. ignore: keys of ``model`` to leave
      out.
    """
    shapes = {name: list(leaf.shape) for name, leaf in named(params)}
    return {
        "model": {k: v for k, v in model.items() if k not in ignore},
        "residual": residual,
        "params": shapes,
    }


def differences(stored: Any, current: Any, key: str = "") -> list[str]:
    """Lines "key: stored -> current" for everything in which two nested dicts differ."""
    if not (isinstance(stored, dict) and isinstance(current, dict)):
        # A tuple comes back from JSON as a list, and equals it for this purpose.
        plain = [list(v) if isinstance(v, tuple) else v for v in (stored, current)]
        return [] if plain[0] == plain[1] else [f"{key}: {_short(stored)} -> {_short(current)}"]
    lines = []
    for name in dict.fromkeys([*stored, *current]):
        lines += differences(
            stored.get(name, ABSENT), current.get(name, ABSENT), f"{key}.{name}" if key else name
        )
    return lines


def check_architecture(meta: dict[str, Any], current: dict[str, Any]) -> None:
    """Raises CheckpointMismatch when ``meta["architecture"]`` of a checkpoint differs from ``current``."""
    found = differences(meta.get("architecture", ABSENT), current)
    if found:
        raise CheckpointMismatch(f"checkpoint of step {meta['step']} has another architecture", found)


class _Absent:
    def __repr__(self):
        return "(absent)"


ABSENT = _Absent()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
