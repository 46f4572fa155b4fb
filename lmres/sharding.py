"""Where every array lives on a mesh: parameter path -> logical axes -> mesh axes.

The only file that knows mesh axis names. Two tables: ``LOGICAL`` (what the axes of a parameter mean, by the end of its
path) and ``MESH`` (which mesh axes a logical axis is split over). Both are checked against the real shapes and the
real mesh before anything is compiled, so a size that does not divide is reported with the config key to change.

May import: jax only. Used by train, generate and the command line; the model gets a ``constrain`` function handed in.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "sequence", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; one of them may be -1 for all remaining devices.

    data: copies of the model, each on its part of the batch.
    fsdp: parts of the batch that also share the parameters and the optimiser state.
    tensor: parts of heads, MLP hidden units and vocabulary.
    sequence: parts of each row of tokens (context parallelism): each device computes its own tokens only, and gathers
      the keys and values of all. They share the parameters and the optimiser state as fsdp's do.

    Over several slices (TPU pods joined by the data-centre network) ``data`` is split between the slices first.
    """

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1


# Logical axes of the parameters, by the last two components of their path. Stacked layers have one leading axis more,
# which is never split. What is not listed here (connection parameters, norms' gains) is replicated.
LOGICAL: dict[str, tuple[str | None, ...]] = {
    "embed/table": ("vocab", "embed"),
    "head/kernel": ("embed", "vocab"),
    "attention/query": ("embed", "heads", "head_dim"),
    "attention/key": ("embed", "kv_heads", "head_dim"),
    "attention/value": ("embed", "kv_heads", "head_dim"),
    "attention/out": ("heads", "head_dim", "embed"),
    "output/key": ("embed", "kv_heads", "head_dim"),  # of a flow: of the output cell, and of pooled channels
    "output/value": ("embed", "kv_heads", "head_dim"),
    "key/projection": ("embed", "kv_heads", "head_dim"),
    "value/projection": ("embed", "kv_heads", "head_dim"),
    "mlp/gate": ("embed", "mlp"),
    "mlp/up": ("embed", "mlp"),
    "mlp/down": ("mlp", "embed"),
}

# Mesh axes of the logical axes. Parameters are split over fsdp and sequence along "embed"; activations never are
# ("embed" of an activation is "features", so that the two cannot be confused).
MESH: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "embed": ("fsdp", "sequence"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "batch": ("data", "fsdp"),
    "sequence": ("sequence",),
}

# Config keys that set the size of a logical axis, for error messages.
KEYS = {
    "vocab": "model.vocab_size",
    "embed": "model.width",
    "heads": "model.heads",
    "kv_heads": "model.kv_heads",
    "mlp": "model.mlp_hidden",
    "batch": "train.batch_size / train.accumulate",
    "sequence": "model.context",
}


def mesh_sizes(config: MeshConfig, count: int, kind: str = "") -> dict[str, int]:
    """The sizes of the mesh axes over ``count`` devices, with -1 filled in. kind: of the devices, for the message.

    Raises ValueError for sizes that are none, or when they do not multiply to the number of devices.
    """
    sizes = {axis: getattr(config, axis) for axis in AXES}
    asked = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    if any(size < 1 and size != -1 for size in sizes.values()) or len(free) > 1:
        raise ValueError(f"{asked}: sizes must be positive, and at most one may be -1 (all remaining devices)")
    known = math.prod(size for size in sizes.values() if size != -1)
    if count % known or (not free and known != count):
        raise ValueError(
            f"{asked}: the product must be the number of devices, {count}{kind}; "
            "set one axis to -1 to take what remains"
        )
    return sizes | {axis: count // known for axis in free}


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh:
    """The mesh of ``config`` over ``devices`` (all by default).

    Raises ValueError when the sizes do not multiply to the number of devices, or ``data`` cannot be split between the
    slices that the devices are of.
    """
    devices = jax.devices() if devices is None else devices
    sizes = tuple(mesh_sizes(config, len(devices), f" ({devices[0].platform})").values())
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    # An axis may be part of a dimension of the torus: tensor=2 in a cube of 4 x 4 x 4.
    if slices == 1:
        arranged = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    else:  # the data axis alone crosses the slow network between slices
        data, *others = sizes
        if data % slices:
            raise ValueError(f"mesh.data={data} is not a multiple of the {slices} slices that the devices are of")
        within, between = (data // slices, *others), (slices,) + (1,) * len(others)
        arranged = mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)
    return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def logical_axes(path: tuple[Any, ...], ndim: int) -> tuple[str | None, ...]:
    """Logical axes of the parameter at a tree path; None for axes that are never split."""
    names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    axes = LOGICAL.get("/".join(names[-2:]), ())
    return (None,) * (ndim - len(axes)) + axes


def spec_for(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh, what: str) -> P:
    """Mesh axes for logical ``axes`` of an array of ``shape``.

    Raises ValueError when two axes of one array want the same mesh axis, or a size does not divide.
    """
    used: dict[str, str] = {}
    entries = []
    for axis, size in zip(axes, shape, strict=True):
        if axis is P.UNCONSTRAINED:
            entries.append(axis)
            continue
        over = tuple(m for m in MESH.get(axis or "", ()) if mesh.shape[m] > 1)
        for m in over:
            if m in used:
                raise ValueError(f"{what}: axes {used[m]!r} and {axis!r} are both split over mesh axis {m!r}; see MESH")
            used[m] = axis or ""
        parts = math.prod(mesh.shape[m] for m in over)
        if size % parts:
            split = " x ".join(f"mesh.{m}={mesh.shape[m]}" for m in over)
            raise ValueError(
                f"{what}: {KEYS.get(axis or '', axis)}={size} is not a multiple of {split}; change one of them"
            )
        entries.append(over if len(over) > 1 else over[0] if over else None)
    return P(*entries)


def param_shardings(tree: Any, mesh: Mesh) -> Any:
    """Shardings for a tree of arrays or ShapeDtypeStructs: parameters, and optimiser states shaped like them.

    Raises ValueError, naming the config key, when a size does not divide.
    """

    def one(path, leaf):
        what = f"parameter {jax.tree_util.keystr(path, simple=True, separator='/')}"
        axes = logical_axes(path, leaf.ndim)
        if len(axes) != leaf.ndim:  # a reduced statistic of an optimiser, not the parameter itself
            axes = (None,) * leaf.ndim
        return NamedSharding(mesh, spec_for(axes, leaf.shape, mesh, what))

    return jax.tree_util.tree_map_with_path(one, tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a batch [B, ...]: B over data and fsdp."""
    return NamedSharding(mesh, P(MESH["batch"]))


def constrainer(mesh: Mesh):
    """``f(array, PartitionSpec of logical names) -> array`` that pins an activation's sharding; hashable, by mesh."""
    return _Constrain(mesh)


@dataclasses.dataclass(frozen=True)
class _Constrain:
    mesh: Mesh

    def __call__(self, x: jax.Array, axes: P) -> jax.Array:
        # Activations keep their width whole ("embed" means the parameters' axis here).
        names = tuple(None if axis == "embed" else axis for axis in axes)
        spec = spec_for(names, x.shape, self.mesh, "activation")
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
