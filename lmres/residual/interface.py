"""The interface that every residual connection implements.

A connection is a frozen, hashable dataclass (its hyper-parameters) with pure functions on it. It never knows
what a branch is: a branch is an opaque callable ``y = branch(x)``.

    state          = open(params, e, depth)            what travels up the column, from the embedding
    x, context     = read(params_l, state, l)          what sub-layer l gets
    state          = write(params_l, state, context, y, l)
    h, context     = close(params, state)              before the final norm

``params`` is ``{"layers": {...}, "shared": {...}}``: the leaves of ``layers`` are stacked along a leading axis
of size ``depth``, so depth can be scanned; ``shared`` holds what is not per layer (readouts). ``params_l``, made
by ``layer_params``, is one flat dict of layer l's slices and the shared entries.

``l`` counts units from 0 and may be a traced integer. The unit is the sub-layer, or the whole block (attention
and MLP with a plain residual inside) for methods that are defined on blocks.

``context`` holds the mixing weights that were used, and it is the key to the depth-mixing matrix: given
``context``, ``read`` and ``write`` are *linear* in the state and in ``y``. So ``read(..., context=c)`` replays the
weights c on any other state instead of computing them, and replaying on one-hot states gives the matrix
(``lmres.residual.mixing``). Functions are called with ``params_l=None`` in a replay.

A unit may take several inputs (attention with separate query, key and value inputs): ``ways`` says how many the
successive units take, over and over. Such a connection's ``read`` takes ``ways=W``, the number for this unit, and gives
a tuple of W inputs where W is not 1; ``read_unit`` makes the right call. By convention 3 are query, key and value, and
4 are these and what the skip around attention starts from (in a unit that is a block). A unit may also lend its keys
and values to those above it: then ``read`` gives an ``Exchange`` and the unit returns a ``Lent``.

States come in two kinds. *Fixed*: any pytree of constant size (streams); an ordinary scan carry. *Growing*: a
``History`` that is only ever appended to; see ``AppendOnly`` below and ``lmres.residual.append`` for why it has its own
backward pass.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from lmres.ops import put

Params = dict[str, Any]
State = Any
Context = Any
Index = int | Array
ReadBack = Callable[[Any, Any], tuple[Params, Any, Any]]  # see ``AppendOnly.read_vjp``
Axes = PartitionSpec  # of *logical* axis names ("batch", "sequence", "embed", ...), not of mesh axes

_SPEC_CONFIG = {"extra": "forbid"}  # read by pydantic when a spec is a field of a config


class Mix(NamedTuple):
    """Keys or values from units below, of the same tokens: what is used is ``gathered`` + ``own`` @ (the unit's own).

    gathered: [B, S, G, K] for G key/value heads of size K. own: [G, G] over heads, or a scalar.
    """

    gathered: Array
    own: Array


class Exchange(NamedTuple):
    """The input of a unit that shares keys and values with others, before positions are applied to them.

    x: [B, S, D]. key, value: what to mix them with; None to use the unit's own.
    """

    x: Array
    key: Mix | None
    value: Mix | None


class Lent(NamedTuple):
    """The output of such a unit: y [B, S, D], and its own keys and values [B, S, G, K], not mixed with others'."""

    y: Array
    key: Array
    value: Array


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a connection costs beyond the branches, for one token and summed over the whole depth.

    params: number of parameters (not per token).
    flops: floating-point operations of the forward pass as XLA counts them: 2 per multiply-add of a product, 1 per
      entry of an elementwise operation or a reduction; exponentials, roots and moving data are not counted.
    moved: numbers read and written by the forward pass, in units of one d-vector.
    state: numbers alive between two sub-layers at the top of the stack, in units of one d-vector.
    """

    params: int
    flops: float
    moved: float
    state: float


@dataclasses.dataclass(frozen=True)
class Connection(abc.ABC):
    """Base of all connections. Subclasses are frozen dataclasses with a ``kind: Literal[...]`` field."""

    __pydantic_config__: ClassVar[dict] = _SPEC_CONFIG

    unit: ClassVar[Literal["sublayer", "block"]] = "sublayer"
    equation: ClassVar[str] = ""  # one line for `lmres variants`
    source: ClassVar[str] = ""  # paper
    no_decay: ClassVar[tuple[str, ...]] = ("*",)  # parameter names exempt from weight decay; "*" is all of them
    lr_multipliers: ClassVar[dict[str, float]] = {}  # parameter name -> learning-rate multiplier
    no_gradient: ClassVar[dict[str, tuple[int, ...]]] = {}  # parameter name -> rows that can never get a gradient
    start_tolerance: ClassVar[float | None] = 1e-4  # max |logit difference| to plain at start; None: not equal
    ways: ClassVar[tuple[int, ...]] = (1,)  # inputs that the successive units take, repeated over the depth
    final_norm: ClassVar[bool] = True  # False if ``close`` returns what is normalised already
    left_out: ClassVar[str] = ""  # what of the papers is not here since its formula could not be verified

    @property
    def name(self) -> str:
        """Short name with the options that matter, for tables."""
        return self.kind  # type: ignore[attr-defined]

    @property
    def branch_norms(self) -> tuple[Literal["input", "output"], ...]:
        """Which norms a branch carries of its own: pre-norm branches normalise their input."""
        return ("input",)

    @property
    def channelwise(self) -> bool:
        """True if weights differ from channel to channel, so that mixing weights have a trailing D axis."""
        return False

    @property
    def has_matrix(self) -> bool:
        """False where channels are mixed, so that no matrix over depth exists; then replays are never asked for."""
        return True

    def check(self, depth: int, width: int) -> None:  # noqa: B027 - most connections take any size
        """Raises ValueError when the spec cannot be used with this depth (in units) or width."""

    def fit(self, kv_heads: int, head_size: int) -> "Connection":
        """The spec with what it must know of the model's keys and values filled in; most need nothing.

        Raises ValueError where the spec says otherwise.
        """
        return self

    @abc.abstractmethod
    def init(self, key: Array, depth: int, width: int) -> Params:
        """Parameters at their start, float32: ``{"layers": {name: [depth, ...]}, "shared": {name: [...]}}``."""

    @abc.abstractmethod
    def open(self, params: Params, e: Array, depth: int) -> State:
        """The state from the embedding ``e`` [B, S, D]."""

    @abc.abstractmethod
    def read(self, params_l: Params | None, state: State, l: Index, context: Context = None) -> tuple[Array, Context]:
        """The input [B, S, D] of unit ``l``, and the weights that made it. Given ``context``: replay it."""

    @abc.abstractmethod
    def write(self, params_l: Params | None, state: State, context: Context, y: Array, l: Index) -> State:
        """The state after unit ``l`` returned ``y`` [B, S, D]. Linear in ``state`` and ``y`` given ``context``."""

    @abc.abstractmethod
    def close(self, params: Params | None, state: State, context: Context = None) -> tuple[Array, Context]:
        """The column's output [B, S, D], to go into the final norm, and the weights that made it."""

    @abc.abstractmethod
    def cost(self, depth: int, width: int) -> Cost:
        """Cost in closed form; ``depth`` counts units."""

    def as_plain(self, params: Params, gains: Array, final_gain: Array) -> Params | None:
        """Connection parameters with which a trained plain pre-norm model keeps its function.

        Args:
          params: from ``init``.
          gains: [depth, D], the input norms' gains of the plain model; final_gain: [D], of its final norm. Only
            connections that hold these norms themselves need them.

        Returns: parameters, or None where no choice of them gives the plain residual. The default is ``params`` for
        connections that start as the plain residual.
        """
        return params if self.start_tolerance is not None else None

    def param_axes(self) -> dict[str, dict[str, Axes]]:
        """Logical axis names of each parameter, without the leading layer axis. Default: all replicated."""
        return {}

    def state_axes(self) -> Any:
        """Logical axis names of the state's leaves, as a pytree like it. Default: one [B, S, D] tensor."""
        return Axes("batch", "sequence", "embed")


class History(NamedTuple):
    """A growing state.

    slots: pytree of buffers with a leading slot axis, e.g. [M, B, S, D]; slot 0 is the embedding's. A slot that is
      not yet written holds zeros, and readers mask it.
    carry: pytree of constant size that travels along (a running block sum), or ().
    """

    slots: Any
    carry: Any


class AppendOnly(Connection):
    """A growing connection: what it adds to the state is put into a slot, and nothing else of the state changes.

    Three functions define it, and ``write`` follows:

    - ``read`` uses only slots that are complete before unit l, so it may be handed *later* histories;
    - ``emit(carry, y, l)`` gives the slot number, its value and the next carry, linear in (carry, y);
    - ``keys(params, value)`` derives what else goes into the slot (logits of later readers).

    A slot may be written more than once (a running sum); the last write counts, and no reader sees it before. Then
    ``rewrites`` is True and ``is_last_write`` says which write that is.
    """

    two_phase: ClassVar[bool] = False  # True if ``lmres.residual.two_phase`` can run it
    reads_carry: ClassVar[bool] = True  # False if ``read`` uses the slots only; the carries are not kept then

    @property
    def rewrites(self) -> bool:
        """True if some slots are written more than once."""
        return False

    def completes(self, l: Index) -> bool | Array:
        """Whether unit ``l`` completes its slot. Keys are made then; of a slot that the end of the depth leaves
        incomplete they are zero."""
        return True

    @abc.abstractmethod
    def emit(self, carry: Any, y: Array, l: Index) -> tuple[Index, Array, Any]:
        """(slot, value [B, S, D], next carry) for the output ``y`` of unit ``l``."""

    def keys(self, params_l: Params, value: Array) -> Params:
        """What is stored beside ``value``: a dict of arrays; empty by default."""
        return {}

    def slot_count(self, depth: int) -> int:
        """Number of slots for ``depth`` units, the embedding's included."""
        return depth + 1

    def open(self, params: Params | None, e: Array, depth: int) -> History:
        first = self.slot_entry(params["shared"] if params is not None else None, e)
        count = self.slot_count(depth)
        slots = jax.tree.map(lambda v: jnp.zeros((count, *v.shape), v.dtype).at[0].set(v), first)
        return History(slots, self.first_carry(e))

    def first_carry(self, e: Array) -> Any:
        """The carry before unit 0; () by default."""
        return ()

    def slot_entry(self, params_l: Params | None, value: Array) -> Params:
        """One slot's content; in a replay (``params_l`` None) only the value, since keys are not linear."""
        return {"value": value, **(self.keys(params_l, value) if params_l is not None else {})}

    def _entry(self, params_l: Params | None, value: Any, l: Index) -> Params:
        """What unit ``l`` puts into its slot."""
        if params_l is None or not self.rewrites:
            return self.slot_entry(params_l, value)
        make = lambda: self.keys(params_l, value)  # noqa: E731
        none = lambda: jax.tree.map(lambda k: jnp.zeros(k.shape, k.dtype), jax.eval_shape(make))  # noqa: E731
        done = self.completes(l)
        keys = jax.lax.cond(done, make, none) if isinstance(done, Array) else make() if done else none()
        return {"value": value, **keys}

    def write(self, params_l: Params | None, state: History, context: Context, y: Array, l: Index) -> History:
        slot, value, carry = self.emit(state.carry, y, l)
        entry = self._entry(params_l, value, l)
        slots = jax.tree.map(lambda buffer, v: put(buffer, v.astype(buffer.dtype), slot, 0), state.slots, entry)
        return History(slots, carry)

    def output_like(self, slots: Any, carry: Any) -> Any:
        """Zeros like the output of a unit."""
        return jnp.zeros(slots["value"].shape[1:], slots["value"].dtype)

    def read_vjp(self, params_l: Params, state: History, l: Index, ways: int = 1) -> tuple[Any, ReadBack]:
        """``read`` in the backward pass: (what unit l reads, its pullback).

        The pullback takes (g_x, g_slots) and gives (cotangent of params_l, g_slots + cotangent of the slots, cotangent
        of the carry). The default differentiates ``read``. Override it when the cotangent can be added in place, and
        keep the default as the override's test.
        """
        options = {} if self.ways == (1,) else {"ways": ways}
        x, vjp = jax.vjp(lambda p, state: self.read(p, state, l, **options)[0], params_l, state)

        def back(g_x, g_slots):
            g_params, g_state = vjp(g_x)
            return g_params, jax.tree.map(jnp.add, g_slots, g_state.slots), g_state.carry

        return x, back


def without_empty(params: Params) -> Params:
    """``params`` without arrays of size zero, which nothing could learn and a checkpoint could not hold."""
    return {name: p for name, p in params.items() if p.size}


def ways_of(x: Any) -> int:
    """How many inputs ``x`` holds: arrays are one, tuples of them several."""
    return len(x) if type(x) is tuple else 1


def read_unit(
    connection: Connection, params_l: Params | None, state: State, l: Index, s: int, context: Context = None
) -> tuple[Any, Context]:
    """``connection.read`` for unit ``l`` that is number ``s`` (an int, modulo len(ways)) in its copy."""
    if connection.ways == (1,):
        return connection.read(params_l, state, l, context)
    return connection.read(params_l, state, l, context, ways=ways_at(connection, s))


def ways_at(connection: Connection, s: int) -> int:
    """How many inputs unit number ``s`` of a copy takes."""
    return connection.ways[s % len(connection.ways)]


def split_skip(x: Any) -> tuple[Any, Array]:
    """A block's input as (the first branch's input, where its skip starts)."""
    if type(x) is tuple:
        return (x[:-1] if len(x) > 2 else x[0]), x[-1]
    return x, (x.x if isinstance(x, Exchange) else x)


def check_not_negative(**values: float) -> None:
    """Raises ValueError naming the first of a spec's values that is below zero."""
    for key, value in values.items():
        if not value >= 0.0:
            raise ValueError(f"residual.{key}={value} must not be negative")


def layer_params(params: Params, l: Index) -> Params:
    """Unit ``l``'s flat parameter dict: its slices of ``params["layers"]`` and everything in ``params["shared"]``."""
    layers = jax.tree.map(lambda p: jax.lax.dynamic_index_in_dim(p, l, 0, keepdims=False), params["layers"])
    return {**layers, **params["shared"]}
