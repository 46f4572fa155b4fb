"""What a checkpoint holds against what is wanted of it: architecture, and shapes and types of the arrays.

All of it is compared before anything is read: orbax loads 12 layers of 16 without a word.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from lmres.flow.config import FlowConfig
from lmres.train.digest import named

# Model settings that change how a model is computed or trained, but not which function its parameters make.
NOT_ARCHITECTURE = frozenset(
    {"dtype", "scan", "remat", "attention", "dropout", "embedding_std", "weight_std"}
)


# The same of a flow's settings: which schedule runs the cells.
HOW_A_FLOW_IS_RUN = frozenset({"schedule", "sweeps", "gradient_sweeps", "groups", "start"})


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or read."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint does not fit; ``differences`` are lines "key: stored -> current"."""

    def __init__(self, what: str, differences: list[str]):
        self.differences = differences
        shown = differences[:20] + ([f"and {len(differences) - 20} more"] if len(differences) > 20 else [])
        super().__init__("\n  ".join([f"{what} (stored -> current):", *shown]))


def architecture(
    model: dict[str, Any],
    residual: dict[str, Any],
    params: Any,
    flow: FlowConfig,
    ignore: Collection[str] = NOT_ARCHITECTURE,
) -> dict[str, Any]:
    """The JSON that says which function the parameters make: model, residual and flow config, and parameter shapes.

    model, residual: as plain dicts. params: arrays or ShapeDtypeStructs. ignore: keys of ``model`` to leave
      out.
    """
    shapes = {name: list(leaf.shape) for name, leaf in named(params)}
    return {
        "model": {k: v for k, v in model.items() if k not in ignore},
        "residual": residual,
        "flow": function_of(flow),
        "params": shapes,
    }


def stored_architecture(meta: dict[str, Any]) -> dict[str, Any]:
    """``meta["architecture"]`` of a checkpoint. A flow, or a setting of it, that was not there yet when it was saved is
    the ordinary one."""
    stored = meta.get("architecture", {})
    return {**stored, "flow": function_of(FlowConfig()) | stored.get("flow", {})} if stored else {}


def function_of(flow: FlowConfig) -> dict[str, Any]:
    """The settings of a flow that say which function it is."""
    return {key: value for key, value in dataclasses.asdict(flow).items() if key not in HOW_A_FLOW_IS_RUN}


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
    found = differences(stored_architecture(meta) or ABSENT, current)
    if found:
        raise CheckpointMismatch(f"checkpoint of step {meta['step']} has another architecture", found)


class _Absent:
    def __repr__(self):
        return "(absent)"


ABSENT = _Absent()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def as_stored(meta: dict[str, Any], target: Any, prefix: str, cast: bool) -> Any:
    """What to read: ``target`` (ShapeDtypeStructs) in the stored types, sharded, at its place in the state.

    meta: a checkpoint's. prefix: "" or "params/", the place. cast: whether another floating type is fine.

    Raises CheckpointMismatch when names, shapes or types differ.
    """
    stored = {name: array for name, array in meta["arrays"].items() if name.startswith(prefix)}
    wanted = {prefix + name: leaf for name, leaf in named(target)}

    def dtype(name, leaf):
        old = jnp.dtype(stored[name]["dtype"]) if name in stored and cast else leaf.dtype
        floats = all(jnp.issubdtype(d, jnp.floating) for d in (old, leaf.dtype))
        return old if floats else leaf.dtype

    def told(shape, dtype):
        return f"{dtype}{list(shape)}"

    found = differences(
        {name: told(array["shape"], array["dtype"]) for name, array in stored.items()},
        {name: told(leaf.shape, dtype(name, leaf)) for name, leaf in wanted.items()},
    )
    if found:
        raise CheckpointMismatch(f"checkpoint of step {meta['step']} holds other arrays", found)

    def one(path, leaf):
        name = prefix + jax.tree_util.keystr(path, simple=True, separator="/")
        return jax.ShapeDtypeStruct(leaf.shape, dtype(name, leaf), sharding=leaf.sharding or first_device())

    tree = jax.tree_util.tree_map_with_path(one, target)
    return {"params": tree} if prefix else tree


def first_device() -> SingleDeviceSharding:
    """Everything on this process's first device."""
    return SingleDeviceSharding(jax.local_devices()[0])


def on_one_device(meta: dict[str, Any], prefix: str) -> dict[str, Any]:
    """ShapeDtypeStructs on the first device for the stored arrays whose paths start with ``prefix``."""
    tree: dict[str, Any] = {}
    for name, array in meta["arrays"].items():
        if name.startswith(prefix):
            *parents, last = name.removeprefix(prefix).split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            shape, dtype = tuple(array["shape"]), jnp.dtype(array["dtype"])
            node[last] = jax.ShapeDtypeStruct(shape, dtype, sharding=first_device())
    return tree
