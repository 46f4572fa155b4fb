"""Block Attention Residuals in two phases (arXiv:2603.15031, Algorithm 1): the same function, with fewer passes.

The readers of one depth block share the completed depth blocks as sources, and their queries are parameters. So

    phase 1, once per depth block, for its S readers together:
        o_s = sum_m softmax_m(z_sm) v_m,    c_s = log sum_m exp(z_sm)       over the completed depth blocks m
    phase 2, at each sub-layer s, with p the running sum of the block:
        x_s = (1 - b) o_s + b p,    b = sigmoid(w_s . RMSNorm(p) - c_s)     b = 0 at the block's first sub-layer

As a connection, ``PhaseOne`` has the depth block as its unit: its read is phase 1, its branch is the whole block
with phase 2 inside, and it writes once per depth block. So it runs under the append-only backward pass as it is, and
keeps one history of N + 1 entries. A depth block at the end that is short runs after the scan, by itself.

Only for depth blocks that hold whole copies of the branches; other sizes run as they are written.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmres.ops import stat_dtype
from lmres.residual.append import run_history
from lmres.residual.depth_attention import DepthAttention
from lmres.residual.interface import Axes, Cost, History, layer_params


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseOne(DepthAttention):
    """Phase 1 as a connection whose unit is a depth block of ``block`` sub-layers.

    slots: N + 1. per_copy: sub-layers per copy of the branches.
    """

    slots: int
    per_copy: int

    def init(self, key, depth, width):
        raise NotImplementedError("the parameters are those of AttentionResiduals")

    def slot_count(self, depth):
        return self.slots

    def cost(self, depth, width) -> Cost:
        raise NotImplementedError("the cost is that of AttentionResiduals")

    @property
    def rewrites(self):
        return False

    def emit(self, carry, y, l):
        return l + 1, y, ()

    @property
    def sees(self):
        return ("logits",)

    def reader(self, l):
        return l * self.block

    def rows(self, ways):
        return self.block

    def span(self, l):
        return super().span(l * self.block)

    def weigh(self, params_l, seen, l, ways, count):
        logits = seen["logits"] / self.temperature  # [M, S readers, (H,) B, S]
        valid = (jnp.arange(count) <= l).reshape(-1, *[1] * (logits.ndim - 1))
        logits = jnp.where(valid, logits, -jnp.inf)
        total = jax.nn.logsumexp(logits, axis=0)
        weights = jnp.moveaxis(jnp.exp(logits - total), 1, 0)
        if self.heads > 1:
            weights, total = jnp.moveaxis(weights, 2, -1), jnp.moveaxis(total, 1, -1)
        return [weights], total

    def finish(self, params_l, x, seen, extra):
        # In the shape that DepthBlock scans over: a reshaped copy would be one more history kept for the backward pass.
        by_copy = lambda a: a.reshape(-1, self.per_copy, *a.shape[1:])  # noqa: E731
        return {"partial": by_copy(x), "total": by_copy(extra)}, extra

    def close(self, params, state, context=None):
        raise NotImplementedError("AttentionResiduals closes")

    def state_axes(self):
        return History(self.slot_axes(), ())


def has_two_phases(connection: Any, per_copy: int, depth: int) -> bool:
    """Whether ``connection`` can run this way with ``per_copy`` sub-layers per copy."""
    block = getattr(connection, "block", 1)
    return connection.two_phase and block > 1 and block % per_copy == 0 and block <= depth


@dataclasses.dataclass(frozen=True)
class DepthBlock:
    """One depth block with phase 2 inside: the branch of ``PhaseOne``.

    stack: the whole stack, of which it runs ``copies`` copies. stride: copies in a whole depth block.
    """

    stack: Any
    copies: int
    stride: int

    def __call__(self, params_i, x, i, args, inputs_i):
        """params_i: {"branches": per branch [copies, ...], "queries": [S, D]}; i: number of the depth block.

        x: of phase 1, [copies, per copy, ...].
        """
        units = self.stack.units
        per_copy = len(units)
        queries = params_i["queries"].reshape(self.copies, per_copy, -1)

        def body(running, xs):
            branches, queries, partial, total, c = xs
            for s, unit in enumerate(units):
                x = self._merge(queries[s], partial[s], total[s], running, (c == 0) & (s == 0))
                y, _ = unit(branches[s], x, i * self.stride + c, args, ())
                running = self.stack.constrain(running + y, Axes("batch", "sequence", "embed"))
            return running, ()

        xs = (params_i["branches"], queries, x["partial"], x["total"])
        start = jnp.zeros_like(x["partial"][0, 0])
        running, _ = jax.lax.scan(self.stack.checkpointed(body), start, (*xs, jnp.arange(self.copies)))
        return running, ()

    def _merge(self, query, partial, total, running, first):
        """What a sub-layer reads, [B, S, D]."""
        connection, wide = self.stack.connection, stat_dtype(running)
        logit = connection.project(query[None], running)[0] / connection.temperature
        logit = jnp.moveaxis(logit, 0, -1) if connection.heads > 1 else logit[..., None]
        total = total if connection.heads > 1 else total[..., None]
        own = jnp.where(first, 0, jax.nn.sigmoid(logit - total))
        own = jnp.repeat(own, running.shape[-1] // own.shape[-1], axis=-1) if connection.heads > 1 else own
        return (partial.astype(wide) + own * (running.astype(wide) - partial.astype(wide))).astype(running.dtype)


def run_two_phases(stack, connection_params, branch_params, e: Array, args: Any) -> Array:
    """``stack`` on the embedding ``e`` [B, S, D]; returns h [B, S, D]. For ``has_two_phases`` connections."""
    connection, per_copy = stack.connection, len(stack.units)
    copies = connection.block // per_copy
    whole, rest = divmod(stack.repeats, copies)
    shared = connection_params["shared"]
    queries = connection.queries(shared)
    options = {f.name: getattr(connection, f.name) for f in dataclasses.fields(DepthAttention)}
    phase_one = PhaseOne(**options, slots=connection.slot_count(stack.depth), per_copy=per_copy)

    scanned = whole * copies
    group = lambda a: a[:scanned].reshape(whole, copies, *a.shape[1:])  # noqa: E731
    params = {
        "branches": jax.tree.map(group, branch_params),
        "queries": queries[: whole * connection.block].reshape(whole, connection.block, -1),
    }
    # Each copy inside a depth block is rematerialised as the stack says. What phase 1 gives would be one more history.
    remat = "none" if stack.remat == "none" else "inputs"
    grouped = dataclasses.replace(
        stack, connection=phase_one, branches=(DepthBlock(stack, copies, copies),), repeats=whole, remat=remat
    )
    # The logits of readers beyond the last whole depth block are padded, so that every read takes the same number.
    short = whole * connection.block + connection.block - len(queries)
    padded = {"layers": {}, "shared": _padded(shared, max(short, 0))}
    final = run_history(grouped, padded, (params,), e, args)
    running = ()
    if rest:
        x, _ = phase_one.read(layer_params(padded, 0), final, whole)
        tail = {
            "branches": jax.tree.map(lambda a: a[scanned:], branch_params),
            "queries": queries[whole * connection.block : -1],
        }
        x = jax.tree.map(lambda a: a[:rest], x)
        running, _ = DepthBlock(stack, rest, copies)(tail, x, whole, args, ())
        final = phase_one.write(padded["shared"], final, (), running, whole)
    # The readout's logits are the row after the last sub-layer's.
    slots = {**final.slots, "logits": final.slots["logits"][:, : len(queries)]}
    return connection.close(connection_params, History(slots, running))[0]


def _padded(shared, rows: int):
    return jax.tree.map(lambda a: jnp.pad(a, ((0, rows), (0, 0))), shared) if rows else shared
