"""The equivalence kit: for each check a connection that is broken in just that way fails it, with a message that says
how."""

import dataclasses
import itertools
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import pytest

from lmres.residual import Connection, Cost, DenseFormer, HyperConnections, Plain
from lmres.residual.interface import Axes
from lmres.testing import CHECKS, ResidualCheckError, check_residual, running
from lmres.testing.counting import count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighted(Connection):
    """A sound connection, from which the broken ones are derived: every output has a learned weight."""

    kind: str = "weighted"

    def init(self, key, depth, width):
        return {"layers": {"weight": jnp.ones(depth)}, "shared": {}}

    def open(self, params, e, depth):
        return e

    def read(self, params_l, state, l, context=None):
        return state, params_l["weight"] if context is None else context

    def write(self, params_l, state, context, y, l):
        return (state + context * y).astype(state.dtype)

    def close(self, params, state, context=None):
        return state, ()

    def cost(self, depth, width):
        return Cost(params=depth, flops=2.0 * depth * width, moved=3.0 * depth, state=1.0)


# Shapes


class HalfPrecision(Weighted):
    def init(self, key, depth, width):
        return {"layers": {"weight": jnp.ones(depth, jnp.bfloat16)}, "shared": {}}


class OneTooMany(Weighted):
    def init(self, key, depth, width):
        return {"layers": {"weight": jnp.ones(depth + 1)}, "shared": {}}


class TwiceNamed(Weighted):
    def init(self, key, depth, width):
        return {"layers": {"weight": jnp.ones(depth)}, "shared": {"weight": jnp.ones(())}}


class NotCastBack(Weighted):
    def write(self, params_l, state, context, y, l):
        return state + context * y


class Growing(Weighted):
    def write(self, params_l, state, context, y, l):
        return (state, y)


class HalfContext(Weighted):
    def read(self, params_l, state, l, context=None):
        return state, params_l["weight"].astype(state.dtype) if context is None else context


class WideRead(Weighted):
    def read(self, params_l, state, l, context=None):
        x, context = super().read(params_l, state, l, context)
        return x * context, context


class ShortAxes(Weighted):
    def state_axes(self):
        return Axes("batch", "embed")


class SwappedAxes(Weighted):
    def state_axes(self):
        return Axes("sequence", "batch", "embed")


class Branching(Weighted):
    def write(self, params_l, state, context, y, l):
        return state if l == 2 else super().write(params_l, state, context, y, l)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unhashable(Weighted):
    sizes: list = dataclasses.field(default_factory=list)


# Start


class StartsElsewhere(Weighted):
    def init(self, key, depth, width):
        return {"layers": {"weight": jnp.full(depth, 1.1)}, "shared": {}}


class Modest(Weighted):
    start_tolerance: ClassVar[float | None] = None

    def as_plain(self, params, gains, final_gain):
        return None


class FalsePromise(StartsElsewhere):
    start_tolerance: ClassVar[float | None] = None

    def as_plain(self, params, gains, final_gain):
        return params


# Ways to run


class DropsWhenTraced(Weighted):
    def write(self, params_l, state, context, y, l):
        y = y if isinstance(l, int) else jnp.where(l == 3, 0, y)
        return super().write(params_l, state, context, y, l)


class WrongBackward(DenseFormer):
    def read_vjp(self, params_l, state, l, ways=1):
        x, back = super().read_vjp(params_l, state, l, ways)

        def wrong(g_x, g_slots):
            g_params, g_slots, g_carry = back(g_x, g_slots)
            return jax.tree.map(lambda g: 2.0 * g, g_params), g_slots, g_carry

        return x, wrong


class Counts(Weighted):
    calls: ClassVar = itertools.count(1)

    def write(self, params_l, state, context, y, l):
        return super().write(params_l, state, context, y * (1.0 + 0.1 * next(self.calls)), l)


class KnowsItsPlace(Weighted):
    def write(self, params_l, state, context, y, l):
        place = 1.0 + 0.1 * jnp.arange(y.shape[1], dtype=y.dtype)
        return super().write(params_l, state, context, y * place[:, None], l)


class Remembers(Weighted):
    """Keeps how long the last call was, as state carried from one decoding step to the next would."""

    seen: ClassVar[list[int]] = [0]

    def open(self, params, e, depth):
        before, self.seen[0] = self.seen[0], e.shape[1]
        return e * (1.0 + 0.01 * before)

    def write(self, params_l, state, context, y, l):
        return super().write(params_l, state, context, y, l) + 0.01 * self.seen[0]


class SplitTwice(Weighted):
    def state_axes(self):
        return Axes("batch", "batch", "embed")


# What is mixed


class Nonlinear(Weighted):
    def write(self, params_l, state, context, y, l):
        y = y + jnp.where(l == 2, 0.5, 0.0).astype(y.dtype) * y * y
        return super().write(params_l, state, context, y, l)


class ForgetsContext(Weighted):
    def write(self, params_l, state, context, y, l):
        scale = 1.0 if params_l is None else params_l["weight"]
        return super().write(params_l, state, context * scale, y, l)


class Peeks(Weighted):
    def read(self, params_l, state, l, context=None):
        return state + 0.1 * jnp.roll(state, -1, axis=1), super().read(params_l, state, l, context)[1]


class LooksBack(Weighted):
    def read(self, params_l, state, l, context=None):
        before = jnp.pad(state, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return state + 0.1 * before, super().read(params_l, state, l, context)[1]


class MixesRows(Weighted):
    def read(self, params_l, state, l, context=None):
        return state + 0.1 * jnp.mean(state, 0), super().read(params_l, state, l, context)[1]


class Constant(Weighted):
    def close(self, params, state, context=None):
        return jnp.ones_like(state), ()


# Gradients


class DeadRow(Weighted):
    def read(self, params_l, state, l, context=None):
        x, context = super().read(params_l, state, l, context)
        return x, jnp.where(l == 4, jax.lax.stop_gradient(context), context)


class Unused(Weighted):
    def init(self, key, depth, width):
        return super().init(key, depth, width) | {"shared": {"spare": jnp.zeros(3)}}


class RootAtZero(Weighted):
    def init(self, key, depth, width):
        return {"layers": {"weight": jnp.ones(depth), "size": jnp.zeros(depth)}, "shared": {}}

    def read(self, params_l, state, l, context=None):
        x, weight = super().read(params_l, state, l, context)
        return x, weight + jnp.sqrt(params_l["size"]) if context is None else context


class NotSoDead(Weighted):
    no_gradient: ClassVar = {"weight": (-1,)}


# What is declared


class NoSuchName(Weighted):
    no_decay: ClassVar = ("weight", "gate")


class ForgottenComma(Weighted):
    no_decay: ClassVar = "weight"


class Backwards(Weighted):
    lr_multipliers: ClassVar = {"weight": -1.0}


class NoSuchGradient(Weighted):
    no_gradient: ClassVar = {"query": (0,)}


class CountsOneLess(Weighted):
    def cost(self, depth, width):
        return dataclasses.replace(super().cost(depth, width), params=depth - 1)


class CountsHalf(Weighted):
    def cost(self, depth, width):
        return dataclasses.replace(super().cost(depth, width), flops=1.0 * depth * width)


@pytest.mark.parametrize(
    "broken, check, message",
    [
        (HalfPrecision(), "shapes", "parameter layers/weight is bfloat16; parameters are float32"),
        (OneTooMany(), "shapes", r"layers/weight has shape \(7,\); its leading axis must be the depth, 6 units"),
        (TwiceNamed(), "shapes", r"\['weight'\] are in layers and in shared"),
        (NotCastBack(), "shapes", r"write of unit 0 changes the state from bfloat16\[2, 8, 16\] to float32.*cast back"),
        (Growing(), "shapes", "write of unit 0 changes the state's structure"),
        (HalfContext(), "shapes", "context of unit 0 is bfloat16 .*; mixing weights are float32"),
        (WideRead(), "shapes", r"read of unit 0.* gives float32\[2, 8, 16\]; it must give bfloat16\[2, 8, 16\]"),
        (ShortAxes(), "shapes", r"state_axes gives .*batch.* for the state, which has shape \(2, 8, 16\)"),
        (SwappedAxes(), "shapes", "'batch' must stand once, at the axis of size 2"),
        (Branching(), "shapes", "raised TracerBoolConversionError"),
        (Unhashable(), "shapes", "raised TypeError: unhashable type: 'list'"),
        (StartsElsewhere(), "start", r"differ from the plain residual's by .*start_tolerance states 1e-04"),
        (Modest(), "start", "start_tolerance is None, .* outputs differ by 0.00e\\+00 only. State the tolerance"),
        (FalsePromise(), "start", "with the parameters from as_plain, outputs differ by .* at most 1e-04"),
        (DropsWhenTraced(), "scan", "scanned and looped differ at .*A unit's number l is traced in a scan"),
        (WrongBackward(), "scan", "scanned and looped differ at 1/connection/shared/alpha"),
        (Counts(), "remat", "remat='full' and remat='none' differ at .*no side effects"),
        (KnowsItsPlace(), "decode", r"cached and full differ at logits\[\d, \d, \d+\].*where a token stands"),
        (Remembers(), "decode", r"cached and full differ at logits.*or on earlier calls"),
        (SplitTwice(), "sharded", "raised ValueError: .*'batch' and 'batch' are both split"),
        (Nonlinear(), "matrix", "what sub-layer 3 reads is not the matrix times the outputs below it: off by"),
        (ForgetsContext(), "matrix", "must be linear in the state and in y"),
        (Peeks(), "causal", "the output at position 0 depends on the later position 1"),
        (LooksBack(), "causal", "the output at position 1 depends on position 0"),
        (MixesRows(), "causal", "the output in row 0 of the batch depends on row 1"),
        (Constant(), "causal", "the output at position 0 does not depend on its own embedding"),
        (DeadRow(), "gradients", r"row 4 of parameter layers/weight gets no gradient at step 2 .*\"weight\": \(4,\)"),
        (Unused(), "gradients", "row 0 of parameter shared/spare gets no gradient at step 2"),
        (RootAtZero(), "gradients", "gradient of connection/layers/size is not finite at the start.*a square root"),
        (NotSoDead(), "gradients", 'no_gradient says that row 5 of "weight" gets none, but it gets'),
        (NoSuchName(), "decay", r"no_decay names \['gate'\], and no configuration has such.* there are \['weight'\]"),
        (ForgottenComma(), "decay", "no_decay is the string 'weight'; it must be a tuple"),
        (Backwards(), "decay", r"lr_multipliers\['weight'\]=-1.0 must be positive"),
        (NoSuchGradient(), "decay", r"no_gradient names \['query'\]"),
        (CountsOneLess(), "cost", r"cost\(6, 16\).params is 5, and init makes 6 parameters: layers/weight 6"),
        (CountsHalf(), "cost", r"cost\(6, 64\).flops is 384 per token, and XLA counts 768, .* within 10%"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Connection) else value if value in CHECKS else "",
)
def test_what_is_broken_is_found_and_named(broken, check, message):
    with pytest.raises(ResidualCheckError, match=f"(?s)^{check}: {type(broken).__name__}: .*{message}") as caught:
        check_residual(broken, only=check)
    assert caught.value.check == check and isinstance(caught.value, AssertionError)


def test_the_sound_one_passes_and_the_report_says_what_was_run(monkeypatch):
    report = check_residual(Weighted(), blocks=2)
    assert list(report.passed) == list(CHECKS) and report.skipped == {}
    assert report.passed["cost"]["FLOPs stated"] == report.passed["cost"]["counted"] == 2 * 6 * 64
    text = str(report)
    assert "11 checks passed, 0 skipped" in text and "passed   matrix    error" in text
    assert all(check.description and "\n" not in check.description for check in CHECKS.values())

    monkeypatch.setattr(running.jax, "devices", lambda: [None])
    report = check_residual(Weighted(), only="sharded")
    assert report.passed == {} and "needs at least 2 devices" in report.skipped["sharded"]
    assert "0 checks passed, 1 skipped" in str(report)


def test_misuse_is_explained():
    with pytest.raises(TypeError, match="takes an instance of lmres"):
        check_residual(Weighted)
    with pytest.raises(ValueError, match="there is no check 'speed'; there are shapes, start"):
        check_residual(Weighted(), only=["shapes", "speed"])
    with pytest.raises(ValueError, match=r"residual\.streams=0"):
        check_residual(HyperConnections(streams=0))
    with pytest.raises(ValueError, match="blocks=1 must be at least 2"):
        check_residual(Plain(), blocks=1)


def test_names_of_other_configurations_are_known():
    """A label may name a parameter that only another option has."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Optional(Weighted):
        gate: Literal["none", "learned"] = "none"
        no_decay: ClassVar = ("weight", "gate")

        def init(self, key, depth, width):
            gate = {"gate": jnp.zeros(depth)} if self.gate == "learned" else {}
            return {"layers": {"weight": jnp.ones(depth), **gate}, "shared": {}}

    assert check_residual(Optional(), only="decay").passed["decay"]["names"] == 2


def test_operations_are_counted_as_often_as_they_run():
    x = jnp.ones((4, 8))

    def looped(x):
        x = jax.lax.fori_loop(0, jnp.int32(5), lambda i, x: x * 2.0, x)  # 5 x 32, and 2 scalars per turn
        x, _ = jax.lax.scan(lambda x, w: (x + w, None), x, jnp.ones((3, 4, 8)))  # 3 x 32
        return jax.lax.cond(True, lambda x: jnp.exp(x) @ x.T, lambda x: x[:, :4], x)  # 2 x 4 x 4 x 8

    found = count(looped, x)
    assert found.transcendentals == 32
    assert 0 <= found.flops - (5 * 32 + 3 * 32 + 256) < 20

    # Without loops it is XLA's count of the whole program.
    straight = lambda x: jnp.sum(jax.nn.softmax(x @ x.T) - x[:, :4] * 3.0, axis=0)  # noqa: E731
    whole = jax.jit(straight).lower(x).cost_analysis()
    assert count(straight, x) == (whole["flops"], whole["transcendentals"])
