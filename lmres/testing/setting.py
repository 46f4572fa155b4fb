"""What the checks share: a small stack, a small model, their parameters, and one compiled program per way to run them.
Numbers are drawn and compared with numpy, since each operation of jax outside a program is a program to compile.

The stack is ``blocks`` copies of two branches. A branch here is a function of one token, ``y = tanh(q Wq + [k Wk, v
Wv])``, so that whatever mixes tokens is the connection; q, k and v are its three inputs if the connection gives three,
else the same one, and keys and values are mixed with those of other units if the connection lends them. Norms stand
where ``branch_norms`` asks for them, with an eps of 1e-12.

Legend: B batch, S sequence, D width, V outputs, L units, G key/value heads, K head size.
"""

import dataclasses
import functools
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmres.model import ModelConfig, Transformer
from lmres.ops import rms_norm
from lmres.residual import Connection, Plain, Stack
from lmres.residual.interface import Exchange, Lent, Mix
from lmres.residual.stack import no_constraint
from lmres.testing.report import Skipped

EPS = 1e-12
BATCH, SEQUENCE, OUTPUTS, HEADS, GROUPS = 2, 8, 11, 4, 2
DTYPES = (jnp.float32, jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Branch:
    """A branch that sees one token at a time; see the head of this file. Parameters: gain [D], query [D, D], key and
    value [D, G K], with half as many key/value heads as heads: G K = D / 2."""

    norms: tuple[str, ...]

    def __call__(self, params_i, x, i, args, inputs_i):
        shared = x if isinstance(x, Exchange) else None
        inputs = x if type(x) is tuple else (x if shared is None else x.x,) * 3
        if "input" in self.norms:
            inputs = [rms_norm(one, params_i["gain"], EPS) for one in inputs]
        q, k, v = (one @ params_i[name].astype(one.dtype) for one, name in zip(inputs, ("query", "key", "value")))
        heads = lambda a: a.reshape(*a.shape[:2], GROUPS, -1)  # noqa: E731
        k, v = heads(k), heads(v)
        used_k, used_v = (k, v) if shared is None else (mixed(k, shared.key), mixed(v, shared.value))
        flat = lambda a: a.reshape(*a.shape[:2], -1)  # noqa: E731
        y = jnp.tanh(q + jnp.concatenate([flat(used_k), flat(used_v)], axis=-1))
        if "output" in self.norms:
            y = rms_norm(y, None, EPS)
        return (y if shared is None else Lent(y, k, v)), ()


def mixed(own: Array, mix: Mix | None) -> Array:
    """Keys or values [B, S, G, K] as a unit uses them."""
    if mix is None:
        return own
    if jnp.ndim(mix.own) == 0:
        return (mix.gathered + mix.own * own).astype(own.dtype)
    return (mix.gathered + jnp.einsum("...hg,bsgk->bshk", mix.own, own)).astype(own.dtype)


def compiled(f, **options):
    """``jax.jit``, for programs that are run once or twice: on a CPU little time is spent on making them fast."""
    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(f, compiler_options=quick, **options)


@functools.lru_cache(maxsize=16)
def program(stack: Stack):
    """Compiled: (params, weights, e, g) -> outputs [B, S, V], and the cotangents of (params, weights, e) for the
    outputs' cotangent g."""

    def outputs(params, weights, e):
        h, _ = stack(params, (weights["first"], weights["second"]), e)
        h = rms_norm(h, weights["final"], EPS) if stack.connection.final_norm else h
        return h @ weights["head"].astype(h.dtype)

    def run(params, weights, e, g):
        out, vjp = jax.vjp(outputs, params, weights, e)
        return out, vjp(g)

    return compiled(run)


@functools.lru_cache(maxsize=16)
def recorded(stack: Stack):
    """Compiled: (params, weights, e) -> (h, record), looped."""
    return compiled(lambda params, weights, e: stack.record(params, (weights["first"], weights["second"]), e))


@dataclasses.dataclass(frozen=True)
class Setting:
    """One connection at one size, with everything derived from it made once.

    given: the spec under test. width: D; blocks: copies of two branches; seed: of all numbers.
    """

    given: Connection
    width: int
    blocks: int
    seed: int

    @cached_property
    def connection(self) -> Connection:
        """The spec, fitted to the heads of the model."""
        return self.given.fit(GROUPS, self.width // HEADS)

    @property
    def unit_count(self) -> int:
        """Units of the connection."""
        return self.blocks * (2 if self.connection.unit == "sublayer" else 1)

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    @cached_property
    def start(self) -> Any:
        """The connection's parameters at the start."""
        init = lambda key: self.connection.init(key, self.unit_count, self.width)  # noqa: E731
        return compiled(init)(jax.random.key(self.seed))

    @cached_property
    def params(self) -> Any:
        """The start with noise on every entry, so that nothing holds only there."""
        rng = self.rng()
        noise = lambda p: np.float32(rng.normal(0, 0.1, np.shape(p)))  # noqa: E731
        return jax.tree.map(lambda p: jnp.asarray(np.asarray(p) + noise(p)), self.start)

    @cached_property
    def weights(self) -> Any:
        """Of the branches, the final norm and the outputs; gains are one."""
        d, rng = self.width, self.rng()
        draw = lambda *shape: jnp.asarray(np.float32(rng.normal(0, shape[-2] ** -0.5, shape)))  # noqa: E731

        def branch():
            sizes = {"query": d, "key": d // HEADS * GROUPS, "value": d // HEADS * GROUPS}
            matrices = {name: draw(self.blocks, d, size) for name, size in sizes.items()}
            return {"gain": jnp.asarray(np.ones((self.blocks, d), np.float32)), **matrices}

        final = jnp.asarray(np.ones(d, np.float32))
        return {"first": branch(), "second": branch(), "final": final, "head": draw(d, OUTPUTS)}

    @cached_property
    def e(self) -> Array:
        """The embedding [B, S, D]."""
        return jnp.asarray(np.float32(self.rng().normal(size=(BATCH, SEQUENCE, self.width))))

    @cached_property
    def g(self) -> Array:
        """A cotangent [B, S, V] of the outputs."""
        rng = np.random.default_rng(self.seed + 1)
        return jnp.asarray(np.float32(rng.normal(size=(BATCH, SEQUENCE, OUTPUTS))))

    def stack(self, **options) -> Stack:
        return stack_of(self.connection, self.blocks, **options)

    def run(self, params=None, weights=None, e=None, g=None, **options):
        """Outputs, and gradients {"connection", "branches", "embedding"}; what is not given is the setting's."""
        pick = lambda given, own: own if given is None else given  # noqa: E731
        arguments = (pick(params, self.params), pick(weights, self.weights), pick(e, self.e), pick(g, self.g))
        out, grads = program(self.stack(**options))(*arguments)
        return out, dict(zip(("connection", "branches", "embedding"), grads))

    @cached_property
    def scanned(self):
        return self.run()

    @cached_property
    def recorded(self):
        """h [B, S, D] and the record of a looped run, its weights included."""
        return recorded(self.stack())(self.params, self.weights, self.e)

    @cached_property
    def plain(self):
        """Outputs of the plain residual with the same weights."""
        return program(stack_of(Plain(), self.blocks))({"layers": {}, "shared": {}}, self.weights, self.e, self.g)[0]

    def model(self, constrain=no_constraint) -> Transformer:
        """A transformer of this width and depth with this connection."""
        config = ModelConfig(
            vocab_size=16, context=SEQUENCE, width=self.width, blocks=self.blocks, heads=HEADS, kv_heads=GROUPS,
            mlp_hidden=2 * self.width, norm_eps=EPS, embedding_std=1.0,
        )  # fmt: skip
        if self.width % 8:
            raise Skipped(f"the small transformer has 4 heads of even size; width={self.width} is not a multiple of 8")
        return Transformer(config, self.connection, constrain)

    @cached_property
    def model_params(self) -> Any:
        """The transformer's, drawn with numpy (compiling the initialisation takes longer than the checks)."""
        rng = self.rng()
        shapes = jax.eval_shape(self.model().init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]

        def draw(path, leaf):
            gain = jax.tree_util.keystr(path[-1:], simple=True).endswith("gain")
            return jnp.asarray(np.float32(rng.normal(gain, 0.1 if gain else self.width**-0.5, leaf.shape)))

        params = jax.tree_util.tree_map_with_path(draw, shapes)
        params["stack"]["connection"] = self.params
        return params

    @cached_property
    def tokens(self) -> np.ndarray:
        return self.rng().integers(0, 16, (BATCH, SEQUENCE), np.int32)


def stack_of(connection: Connection, blocks: int, **options) -> Stack:
    branch = Branch(tuple(connection.branch_norms))
    return Stack(connection, (branch, branch), blocks, **options)
