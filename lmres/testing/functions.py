"""Checks of the four functions: what they take and give, where they start, what they mix."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct
from jax.sharding import PartitionSpec

from lmres.residual import Plain, depth_mixing, layer_params, recompose
from lmres.residual.interface import Exchange, read_unit
from lmres.testing.report import Skipped, Wrong, where
from lmres.testing.setting import BATCH, DTYPES, SEQUENCE, Setting, compiled

NOT_STARTING_PLAIN = 1e-3  # a connection that differs from plain by less than this at the start should say so
AS_PLAIN = 1e-4
DEAD = 1e-7  # of a parameter's largest gradient: below is rounding
ALIVE = 1e-3  # of the same: above is certainly none


def shapes(s: Setting) -> dict[str, Any]:
    """Parameters, states, inputs and outputs have the shapes and dtypes of the interface; nothing is computed."""
    c = s.connection
    if hash(c) != hash(dataclasses.replace(c)) or c != dataclasses.replace(c):
        raise Wrong("equal specs must be equal and hash equally; make it @dataclass(frozen=True)")
    _parameters(s)
    for dtype in DTYPES:
        _column(s, dtype)
    arrays = jax.tree.leaves(s.start)
    return {"parameters": sum(p.size for p in arrays), "arrays": len(arrays)}


def _parameters(s: Setting) -> None:
    c, start = s.connection, s.start
    if not isinstance(start, dict) or set(start) != {"layers", "shared"}:
        raise Wrong(f'init must return {{"layers": ..., "shared": ...}}, got {jax.tree.structure(start)}')
    for path, p in jax.tree_util.tree_leaves_with_path(start):
        if not isinstance(p, jax.Array) or p.dtype != jnp.float32:
            dtype = p.dtype if hasattr(p, "dtype") else type(p).__name__
            raise Wrong(f"parameter {where(path)} is {dtype}; parameters are float32 arrays of jax, cast where used")
        if not p.size:
            raise Wrong(f"parameter {where(path)} has shape {p.shape}; leave it out, a checkpoint holds no empty one")
        if not np.isfinite(p).all():
            raise Wrong(f"parameter {where(path)} is not finite at the start")
    for path, p in jax.tree_util.tree_leaves_with_path(start["layers"]):
        if p.ndim == 0 or p.shape[0] != s.unit_count:
            raise Wrong(
                f"parameter layers/{where(path)} has shape {p.shape}; its leading axis must be the depth, "
                f'{s.unit_count} units here. What is not per unit belongs into "shared"'
            )
    if both := set(start["layers"]) & set(start["shared"]):
        raise Wrong(f"{sorted(both)} are in layers and in shared; a unit gets both in one dict, so names must differ")
    for group, axes in c.param_axes().items():
        for name, spec in axes.items():
            if name not in start.get(group, {}):
                continue  # of another configuration
            rank = start[group][name].ndim - (group == "layers")
            if len(spec) != rank:
                raise Wrong(f"param_axes gives {spec} for {group}/{name}, which has {rank} axes (layer axis left out)")


def _column(s: Setting, dtype) -> None:
    """One abstract run up the column."""
    c, name = s.connection, jnp.dtype(dtype).name
    e = ShapeDtypeStruct((BATCH, SEQUENCE, s.width), dtype)
    state = jax.eval_shape(lambda p, e: c.open(p, e, s.unit_count), s.start, e)
    _axes_fit(c.state_axes(), state)
    units = s.stack().units
    weights = jax.tree.map(lambda p: np.asarray(p)[0], (s.weights["first"], s.weights["second"]))
    per_unit = weights if c.unit == "sublayer" else (weights,)
    for l in range(s.unit_count):
        k = l % len(units)

        def read(p, state, l, k=k):
            return read_unit(c, layer_params(p, l), state, l, k)

        def write(p, state, context, y, l):
            return c.write(layer_params(p, l), state, context, y, l)

        index = ShapeDtypeStruct((), jnp.int32)
        x, context = jax.eval_shape(read, s.start, state, index)
        inputs = (x.x,) if isinstance(x, Exchange) else x if type(x) is tuple else (x,)
        ways = c.ways[k % len(c.ways)]
        if len(inputs) != ways:
            raise Wrong(f"read of unit {l} gives {len(inputs)} inputs; ways={c.ways} says {ways}")
        for one in inputs:
            _is_stream(one, e, f"read of unit {l}, for an embedding in {name},")
        for path, leaf in jax.tree_util.tree_leaves_with_path(context):
            if leaf.dtype != jnp.float32:
                raise Wrong(
                    f"the context of unit {l}{where(path)} is {leaf.dtype} for an embedding in {name}; mixing weights "
                    "are float32 (lmres.ops.stat_dtype)"
                )
        y, _ = jax.eval_shape(lambda p, x, unit=units[k]: unit(p, x, 0, (), ()), per_unit[k], x)
        after = jax.eval_shape(write, s.start, state, context, y, index)
        if jax.tree.structure(after) != jax.tree.structure(state):
            raise Wrong(
                f"write of unit {l} changes the state's structure from {jax.tree.structure(state)} to "
                f"{jax.tree.structure(after)}; a state must keep it, or depth cannot be scanned"
            )
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(state)):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                raise Wrong(
                    f"write of unit {l} changes the state{where(path)} from {b.dtype}{list(b.shape)} to "
                    f"{a.dtype}{list(a.shape)} for an embedding in {name}; cast back with .astype(state.dtype)"
                )
    h, _ = jax.eval_shape(c.close, s.start, state)
    _is_stream(h, e, f"close, for an embedding in {name},")


def _is_stream(x, e, what: str) -> None:
    if (x.shape, x.dtype) != (e.shape, e.dtype):
        raise Wrong(f"{what} gives {x.dtype}{list(x.shape)}; it must give {e.dtype}{list(e.shape)}")


def _axes_fit(axes: Any, state: Any) -> None:
    specs, tree = jax.tree.flatten(axes, is_leaf=lambda a: isinstance(a, PartitionSpec))
    if tree != jax.tree.structure(state):
        raise Wrong(f"state_axes is {tree}; it must be a tree like the state, {jax.tree.structure(state)}")
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(state), specs):
        if len(spec) != leaf.ndim:
            raise Wrong(f"state_axes gives {spec} for the state{where(path)}, which has shape {leaf.shape}")
        for axis, size in (("batch", BATCH), ("sequence", SEQUENCE)):
            if list(spec).count(axis) != 1 or leaf.shape[list(spec).index(axis)] != size:
                raise Wrong(
                    f"state_axes gives {spec} for the state{where(path)} of shape {leaf.shape}; {axis!r} must stand "
                    f"once, at the axis of size {size}"
                )


def start(s: Setting) -> dict[str, Any]:
    """Outputs beside those of the plain residual with the same branches, norms and readout."""
    c = s.connection
    out, _ = s.run(params=s.start)
    difference = _largest(out, s.plain)
    figures: dict[str, Any] = {"difference to plain": difference}
    if c.start_tolerance is not None:
        figures["tolerance"] = c.start_tolerance
        if not difference <= c.start_tolerance:
            raise Wrong(
                f"outputs at the start differ from the plain residual's by {difference:.2e}, and start_tolerance "
                f"states {c.start_tolerance:.0e}. Change what init returns, or state start_tolerance=None"
            )
    plain_again = c.as_plain(s.start, *_gains(s))
    if plain_again is not None:
        figures["as_plain"] = _as_plain(s, plain_again)
    elif c.start_tolerance is None and not difference > NOT_STARTING_PLAIN:
        raise Wrong(
            "start_tolerance is None, which says that this is not the plain residual at the start, but outputs differ "
            f"by {difference:.2e} only. State the tolerance"
        )
    return figures


def _gains(s: Setting):
    """Gains of a trained plain model: of the input norms in order [2 blocks, D], and of the final norm [D]."""
    rng = np.random.default_rng(s.seed + 2)
    draw = lambda *shape: jnp.asarray(np.float32(rng.uniform(0.5, 1.5, shape)))  # noqa: E731
    return draw(2 * s.blocks, s.width), draw(s.width)


def _largest(a, b) -> float:
    """Difference of two arrays. Here and below numpy computes what is done once: jax would compile it first."""
    return float(np.max(np.abs(np.asarray(a) - np.asarray(b))))


def _as_plain(s: Setting, params) -> float:
    gains, final = _gains(s)
    first, second = (jnp.asarray(np.asarray(gains)[k::2]) for k in (0, 1))
    trained = s.weights | {
        "first": s.weights["first"] | {"gain": first},
        "second": s.weights["second"] | {"gain": second},
        "final": final,
    }
    expected = Setting(Plain(), s.width, s.blocks, s.seed).run(weights=trained)[0]
    difference = _largest(s.run(params=params, weights=trained)[0], expected)
    tolerance = max(AS_PLAIN, s.connection.start_tolerance or 0.0)
    if not difference <= tolerance:
        raise Wrong(
            f"with the parameters from as_plain, outputs differ by {difference:.2e} from those of the plain model "
            f"whose gains it was given; at most {tolerance:.0e}. Return None if no parameters give the plain residual"
        )
    return difference


def matrix(s: Setting) -> dict[str, Any]:
    """Every read, and the readout, as the matrix times the embedding and the outputs so far."""
    c = s.connection
    if not c.has_matrix:
        raise Skipped("has_matrix is False: it mixes channels, so no matrix over depth can exist")
    inner = 2 if c.unit == "block" else 1
    h, record = s.recorded

    def recomposed(record, e, way):
        return recompose(depth_mixing(c, record.contexts, e, inner, way), e, record.outputs)

    recomposed = compiled(recomposed, static_argnums=2)
    largest = 0.0
    for way in range(max(1, *(min(w, 3) for w in c.ways))):
        found = recomposed(record, s.e, way)
        expected = [np.asarray(_pick(x, way)) for x in record.reads] + [np.asarray(h)]
        scale = max(float(np.max(np.abs(x))) for x in expected)
        for l, (a, b) in enumerate(zip(found, expected, strict=True)):
            error = np.max(np.abs(np.asarray(a) - b), axis=-1)
            at = np.unravel_index(np.argmax(error), error.shape)
            largest = max(largest, float(error[at]) / scale)
            if not largest <= 2e-5:
                reader = f"sub-layer {l}" if l < len(expected) - 1 else "the readout"
                raise Wrong(
                    f"what {reader} reads is not the matrix times the outputs below it: off by {float(error[at]):.2e} "
                    f"of {scale:.2e} at [batch, position] {[int(i) for i in at]}. Given the context, read, write and "
                    "close must be linear in the state and in y; what depends on them otherwise goes into the context"
                )
    return {"error": largest, "readers": len(record.reads) + 1}


def _pick(x: Any, way: int):
    x = x.x if isinstance(x, Exchange) else x
    return x[way if way < len(x) else 0] if type(x) is tuple else x


def causal(s: Setting) -> dict[str, Any]:
    """The gradient of each position's output with respect to the embedding, at every other position and row."""
    for t in range(SEQUENCE):
        b = t % BATCH
        alone = np.zeros(s.g.shape, np.float32)
        alone[b, t] = s.g[b, t]
        _, grads = s.run(g=jnp.asarray(alone))
        reached = np.abs(np.asarray(grads["embedding"])).max(-1)
        if not reached[b, t] > 0:
            raise Wrong(f"the output at position {t} does not depend on its own embedding (gradient {reached[b, t]})")
        own = reached[b, t]
        reached[b, t] = 0.0
        at = np.unravel_index(np.argmax(np.where(np.isnan(reached), np.inf, reached)), reached.shape)
        if reached[at] != 0:
            row, other = (int(i) for i in at)
            size = f"gradient {reached[at]:.2e} beside {own:.2e} of its own"
            if row != b:
                what = f"the output in row {b} of the batch depends on row {row} ({size})"
            elif other > t:
                what = f"the output at position {t} depends on the later position {other} ({size})"
            else:
                what = f"the output at position {t} depends on position {other} ({size})"
            raise Wrong(f"{what}. A connection runs up one token's column: branches mix tokens, and nothing mixes rows")
    return {"positions": SEQUENCE}


def gradients(s: Setting) -> dict[str, Any]:
    """Two steps of a rule that moves every parameter that has a gradient, as Adam does."""
    c = s.connection
    out, first = s.run(params=s.start)
    _finite(out, first, "at the start")

    def step(p, g):
        p, g = np.asarray(p), np.asarray(g)
        return jnp.asarray(p - np.float32(0.05) * g / np.maximum(np.max(np.abs(g), initial=0.0), np.float32(1e-30)))

    params = jax.tree.map(step, s.start, first["connection"])
    weights = jax.tree.map(step, s.weights, first["branches"])
    out, second = s.run(params=params, weights=weights)
    _finite(out, second, "at step 2")
    largest = max((float(np.max(np.abs(g))) for g in jax.tree.leaves(second["connection"])), default=0.0)
    rows, smallest = 0, np.inf
    for path, g in jax.tree_util.tree_leaves_with_path(second["connection"]):
        name = where(path).split("/")[1]
        sizes = np.abs(np.asarray(g)).reshape(g.shape[0] if g.ndim else 1, -1).max(-1, initial=0.0)
        allowed = {row % len(sizes) for row in c.no_gradient.get(name, ())}
        rows += len(sizes)
        for row, size in enumerate(sizes):
            dead = not size > DEAD * max(sizes.max(), DEAD * largest)
            if dead and row not in allowed:
                raise Wrong(
                    f"row {row} of parameter {where(path)} gets no gradient at step 2 ({size:.1e}, others up to "
                    f"{largest:.1e}): it cannot learn. Start it elsewhere, or declare it: "
                    f'no_gradient = {{"{name}": ({row},)}}'
                )
            if row in allowed and size > ALIVE * sizes.max():
                raise Wrong(f'no_gradient says that row {row} of "{name}" gets none, but it gets {size:.1e}')
            if row not in allowed:
                smallest = min(smallest, float(size))
    return {"rows": rows, "smallest": smallest if rows else 0.0}


def _finite(out, grads, when: str) -> None:
    if not np.isfinite(out).all():
        raise Wrong(f"outputs are not finite {when}")
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        bad = np.argwhere(~np.isfinite(np.asarray(g)))
        if len(bad):
            at = [int(i) for i in bad[0]]
            raise Wrong(
                f"the gradient of {where(path)} is not finite {when}, first at {at} ({len(bad)} of {g.size} entries); "
                "look for a square root, logarithm or quotient at zero"
            )
