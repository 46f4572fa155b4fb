"""Checks of what a connection states as data: labels for the optimiser, and its cost."""

import dataclasses
import itertools
import typing
from typing import Any

import jax
import jax.numpy as jnp

from lmres.residual import Stack
from lmres.residual.interface import Connection, Exchange, Lent
from lmres.testing.counting import count
from lmres.testing.report import Wrong, where
from lmres.testing.setting import GROUPS, HEADS, Setting, compiled, mixed
from lmres.train.optimizer import connection_name, is_decayed

COST_TOLERANCE = 0.1
COST_WIDTH, COST_BLOCKS = 64, 3


def decay(s: Setting) -> dict[str, Any]:
    """Names in ``no_decay``, ``lr_multipliers`` and ``no_gradient``, against the parameters of any configuration."""
    c = s.connection
    known = {name for spec in configurations(c) for name in names_of(spec, s)}
    for label, names in (
        ("no_decay", set(c.no_decay) - {"*"}),
        ("lr_multipliers", set(c.lr_multipliers)),
        ("no_gradient", set(c.no_gradient)),
    ):
        if isinstance(getattr(c, label), str):
            raise Wrong(f"{label} is the string {getattr(c, label)!r}; it must be a tuple of names")
        if missing := sorted(names - known):
            raise Wrong(f"{label} names {missing}, and no configuration has such parameters; there are {sorted(known)}")
    for name, factor in c.lr_multipliers.items():
        if not factor > 0:
            raise Wrong(f"lr_multipliers[{name!r}]={factor} must be positive")
    tree = {"stack": {"connection": s.start}}
    decayed = []
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        name = connection_name(tuple(where((key,)) for key in path))
        if is_decayed(path, c.no_decay) != ("*" not in c.no_decay and name not in c.no_decay):
            raise Wrong(f"the optimiser does not follow no_decay for {where(path)}")
        if is_decayed(path, c.no_decay):
            decayed.append(name)
    return {"decayed": ", ".join(decayed) or "none", "names": len(known)}


def configurations(connection: Connection) -> list[Connection]:
    """The spec and what flags and choices among given words (``bool``, ``Literal``) make of it."""
    hints = typing.get_type_hints(type(connection))
    choices = {}
    for field in dataclasses.fields(connection):
        hint = hints[field.name]
        if hint is bool:
            choices[field.name] = (False, True)
        elif typing.get_origin(hint) is typing.Literal:
            choices[field.name] = typing.get_args(hint)
    combinations = itertools.islice(itertools.product(*choices.values()), 256)
    return [connection, *(dataclasses.replace(connection, **dict(zip(choices, c))) for c in combinations)]


def names_of(connection: Connection, s: Setting) -> set[str]:
    """Parameter names; none for a configuration that refuses these sizes."""
    try:
        connection.check(s.unit_count, s.width)
    except ValueError:
        return set()
    params = jax.eval_shape(lambda key: connection.init(key, s.unit_count, s.width), jax.random.key(0))
    return set(params["layers"]) | set(params["shared"])


def cost(s: Setting) -> dict[str, Any]:
    """The stated cost, against the parameters there are and the operations of a run with branches that do nothing."""
    stated = s.connection.cost(s.unit_count, s.width).params
    actual = sum(p.size for p in jax.tree.leaves(s.start))
    if stated != actual:
        raise Wrong(
            f"cost({s.unit_count}, {s.width}).params is {stated}, and init makes {actual} parameters: "
            + ", ".join(f"{where(path)} {p.size}" for path, p in jax.tree_util.tree_leaves_with_path(s.start))
        )
    width = max(COST_WIDTH, s.width)
    units = COST_BLOCKS * (2 if s.connection.unit == "sublayer" else 1)
    flops, transcendentals = counted(s.given, COST_BLOCKS, width)
    stated = s.given.fit(GROUPS, width // HEADS).cost(units, width).flops
    figures = {"parameters": actual, "FLOPs stated": stated, "counted": flops, "transcendentals": transcendentals}
    if abs(stated - flops) > COST_TOLERANCE * flops:
        raise Wrong(
            f"cost({units}, {width}).flops is {stated:,.0f} per token, and XLA counts {flops:,.0f}, which is to be met "
            f"within {COST_TOLERANCE:.0%}. lmres.testing.counting says what counts"
        )
    return figures


def counted(connection: Connection, blocks: int, width: int) -> tuple[float, float]:
    """(FLOPs, transcendentals) of the connection alone, for one token over the whole depth."""
    connection = connection.fit(GROUPS, width // HEADS)
    branch = lambda params_i, x, i, args, inputs_i: (_nothing(x), ())  # noqa: E731
    stack = Stack(connection, (branch, branch), blocks, scan=False)
    params = compiled(lambda key: connection.init(key, stack.depth, width))(jax.random.key(0))

    def run(tokens):
        return count(lambda p, e: stack(p, ((), ()), e)[0], params, jnp.ones((1, tokens, width)))

    # What is done once per call, whatever the number of tokens, cancels in the difference of two lengths.
    few, many = run(2), run(6)
    return (many.flops - few.flops) / 4, (many.transcendentals - few.transcendentals) / 4


def _nothing(x: Any) -> Any:
    """An output without any arithmetic but the mixing of keys and values."""
    if isinstance(x, Exchange):
        own = x.x[..., : x.x.shape[-1] // HEADS * GROUPS].reshape(*x.x.shape[:2], GROUPS, -1)
        mixed(own, x.key), mixed(own, x.value)
        return Lent(x.x, own, own)
    return x[0] if type(x) is tuple else x
