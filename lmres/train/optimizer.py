"""The update rule: AdamW, or Muon for the matrices of the branches and AdamW for the rest.

What happens to a parameter is decided by its *role*, and the role by its path (``ROLES``), never by its
number of axes: layers are stacked along a leading axis, so a stacked gain [Bk, D] looks like a matrix.

    role         weight decay                    Muon
    matrix       yes                             yes, but for the output head
    embedding    yes                             no
    gain         no                              no
    flow         no                              no
    connection   as ``connection.no_decay`` says no; learning rate times ``connection.lr_multipliers[name]``

One update, for gradient g, peak rate lr, schedule s(step):

    g  <- g min(1, clip / |g|)                           global norm over all parameters
    u  =  Adam(g)                                        arXiv:1412.6980, bias-corrected
       or 0.2 sqrt(max(fan_in, fan_out)) Orth(momentum)  Muon, Newton-Schulz on each layer's own matrix
    p  <- p - lr m s(step) (u + weight_decay p)          arXiv:1711.05101; m is the parameter's multiplier

The factor 0.2 sqrt(max(..)) (arXiv:2502.16982) gives Muon's updates the root mean square that Adam's have, so
that one learning rate and one weight decay serve both parts.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from lmres.residual.interface import Connection
from lmres.train.config import OptimizerConfig
from lmres.train.schedule import Schedule

Role = Literal["embedding", "matrix", "gain", "flow", "connection"]

MUON_RMS = 0.2


class Kind(NamedTuple):
    """What a parameter is.

    inputs, outputs: axes of the matrix that Muon orthogonalises, counted from the back since a stacked layer
      has a leading axis more; None where Muon is not used.
    """

    role: Role
    inputs: tuple[int, ...] | None = None
    outputs: tuple[int, ...] | None = None


# The last two components of a parameter's path; "*" stands for any. The first match counts.
ROLES: dict[str, Kind] = {
    "embed/table": Kind("embedding"),
    "head/kernel": Kind("matrix"),  # an embedding of the output, in effect: Muon is for hidden matrices
    "attention/query": Kind("matrix", (-3,), (-2, -1)),
    "attention/key": Kind("matrix", (-3,), (-2, -1)),
    "attention/value": Kind("matrix", (-3,), (-2, -1)),
    "attention/out": Kind("matrix", (-3, -2), (-1,)),
    "output/key": Kind("matrix", (-3,), (-2, -1)),  # of a flow: of the output cell, and of pooled channels
    "output/value": Kind("matrix", (-3,), (-2, -1)),
    "key/projection": Kind("matrix", (-3,), (-2, -1)),
    "value/projection": Kind("matrix", (-3,), (-2, -1)),
    "mlp/gate": Kind("matrix", (-2,), (-1,)),
    "mlp/up": Kind("matrix", (-2,), (-1,)),
    "mlp/down": Kind("matrix", (-2,), (-1,)),
    "*/gain": Kind("gain"),
}


def path_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Components of a tree path of nested dicts."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def connection_name(names: tuple[str, ...]) -> str | None:
    """The connection's own name of the parameter at path ``names``; None for parameters of other roles."""
    if "connection" not in names:
        return None
    return names[names.index("connection") + 2]  # .../connection/{layers,shared}/NAME/...


def kind_of(path: tuple[Any, ...]) -> Kind:
    """Role of the parameter at a tree path. Raises ValueError for a path that ``ROLES`` does not know."""
    names = path_names(path)
    if connection_name(names) is not None:
        return Kind("connection")
    for key in ("/".join(names[-2:]), f"*/{names[-1]}"):
        if key in ROLES:
            return ROLES[key]
    if "cells" in names:  # the flow's own: biases, gates, weights of sources
        return Kind("flow")
    where = "/".join(names)
    raise ValueError(f"parameter {where} has no role: add its path to ROLES in lmres/train/optimizer.py")


def is_decayed(path: tuple[Any, ...], no_decay: tuple[str, ...]) -> bool:
    """Whether weight decay applies to the parameter at ``path``; ``no_decay`` is the connection's."""
    role = kind_of(path).role
    if role == "connection":
        return "*" not in no_decay and connection_name(path_names(path)) not in no_decay
    return role not in ("gain", "flow")


def _map(f: Callable[[tuple[Any, ...]], Any], params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: f(path), params)


def describe_roles(
    params: Any, connection: Connection, kind: Literal["adamw", "muon"] = "adamw"
) -> list[dict[str, Any]]:
    """How the parameters (arrays or ShapeDtypeStructs) are split, one row per group, for the log.

    Rows: {"role", "rule" ("adamw" or "muon"), "decayed", "multiplier" (of the learning rate), "arrays",
    "parameters", "names" (paths)}.
    """
    groups: dict[tuple, dict] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = path_names(path)
        what = kind_of(path)
        rule = "muon" if kind == "muon" and what.inputs is not None else "adamw"
        decayed = is_decayed(path, connection.no_decay)
        multiplier = connection.lr_multipliers.get(connection_name(names) or "", 1.0)
        row = groups.setdefault(
            (what.role, rule, decayed, multiplier),
            {
                "role": what.role,
                "rule": rule,
                "decayed": decayed,
                "multiplier": multiplier,
                "arrays": 0,
                "parameters": 0,
                "names": [],
            },
        )
        row["arrays"] += 1
        row["parameters"] += math.prod(leaf.shape)
        row["names"].append("/".join(names))
    return list(groups.values())


def _scale_each(factors: Any) -> optax.GradientTransformation:
    """Multiplies every update by its own constant; ``factors`` is a tree of floats like the parameters."""
    return optax.stateless(lambda updates, _: jax.tree.map(lambda u, f: u * f, updates, factors))


def _check(config: OptimizerConfig) -> None:
    for key in ("learning_rate", "muon_learning_rate", "eps", "clip"):
        value = getattr(config, key)
        if value is not None and not value > 0:
            hint = "; null turns clipping off" if key == "clip" else ""
            raise ValueError(f"optimizer.{key}={value} must be positive{hint}")
    for key in ("beta1", "beta2", "muon_momentum"):
        if not 0 <= getattr(config, key) < 1:
            raise ValueError(f"optimizer.{key}={getattr(config, key)} must be in [0, 1)")
    if config.weight_decay < 0:
        raise ValueError(f"optimizer.weight_decay={config.weight_decay} must not be negative")
    if config.kind == "adamw" and config.muon_learning_rate is not None:
        raise ValueError(
            "optimizer.muon_learning_rate needs optimizer.kind=muon, not adamw; change one of them"
        )


def make_optimizer(
    config: OptimizerConfig, schedule: Schedule, connection: Connection, params: Any
) -> optax.GradientTransformation:
    """The optimiser for parameters like ``params`` (arrays or ShapeDtypeStructs; only paths count).

    The state is a pytree of arrays; moments have their parameter's path as the end of theirs, so that
    ``lmres.sharding.param_shardings`` splits them like it.

    Raises ValueError for settings out of range (naming the key) and parameters without a role (naming the
    path).
    """
    _check(config)
    rates = (config.learning_rate, config.muon_learning_rate or config.learning_rate)

    def rule(path):
        return "muon" if config.kind == "muon" and kind_of(path).inputs is not None else "adamw"

    def multiplier(path):
        base = rates[1] / rates[0] if rule(path) == "muon" else 1.0
        return base * connection.lr_multipliers.get(connection_name(path_names(path)) or "", 1.0)

    def decayed(path):
        return is_decayed(path, connection.no_decay)

    moments = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)
    if config.kind == "muon":
        moments = optax.partition({"adamw": moments, "muon": _muon(config.muon_momentum)}, _map(rule, params))
    return optax.chain(
        *([optax.clip_by_global_norm(config.clip)] if config.clip is not None else []),
        moments,
        optax.add_decayed_weights(config.weight_decay, mask=_map(decayed, params)),
        _scale_each(_map(multiplier, params)),
        optax.scale_by_schedule(lambda step: -config.learning_rate * schedule(step)),
    )


def _muon(momentum: float) -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalised per layer, at Adam's usual size."""

    def numbers(path):
        kind = kind_of(path)
        return MuonDimensionNumbers(reduction_axis=kind.inputs, output_axis=kind.outputs)

    def resize(updates, _):
        def one(path, u):
            kind = kind_of(path)
            sizes = [math.prod(u.shape[axis] for axis in axes) for axes in (kind.inputs, kind.outputs)]
            return u * (MUON_RMS * math.sqrt(max(sizes)))

        return jax.tree_util.tree_map_with_path(one, updates)

    # The dimension numbers are made from the updates at hand: there, parameters of the other rule are masked
    # out.
    return optax.chain(
        scale_by_muon(beta=momentum, weight_dimension_numbers=lambda updates: _map(numbers, updates)),
        optax.stateless(resize),
    )
