"""The programs that are planned: a train step, a decoding step, a prefill, with arguments that have shapes and
shardings and no contents."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lmres.flow.config import FlowConfig
from lmres.generate import cache
from lmres.generate.decode import serving
from lmres.model import ModelConfig, Transformer
from lmres.residual import Connection
from lmres.sharding import MeshConfig, batch_sharding, make_mesh, param_shardings
from lmres.train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from lmres.train.flops import flops_per_token
from lmres.train.session import build_model
from lmres.train.state import abstract_params
from lmres.train.update import build_update

What = Literal["train", "decode", "prefill"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """The sections of a config that a plan depends on.

    batch, tokens: of decode and prefill: rows, and tokens of context (decode) or prompt (prefill) in each.
    """

    model: ModelConfig
    residual: Connection
    flow: FlowConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    train: TrainConfig
    mesh: MeshConfig
    what: What = "train"
    batch: int = 1
    tokens: int = 1

    def check(self) -> None:
        """Raises ValueError, naming the config key, for what a plan cannot go without."""
        if self.model.vocab_size is None:
            raise ValueError(
                "model.vocab_size is not set; a plan reads no data, so give the tokenizer's: model.vocab_size=NUMBER"
            )
        if self.what == "train" and self.train.batch_size % self.train.accumulate:
            raise ValueError(
                f"train.batch_size={self.train.batch_size} is not a multiple of "
                f"train.accumulate={self.train.accumulate}"
            )
        if self.what != "train" and self.tokens > self.model.context:
            raise ValueError(f"--context {self.tokens} is more than model.context={self.model.context}")


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function and its abstract arguments.

    held: parts of the arguments by what they are ("parameters", "optimiser state", "cache", "batch").
    tokens: that one call works on, over all devices.
    """

    function: Callable
    arguments: tuple[Any, ...]
    held: dict[str, Any]
    mesh: Mesh
    tokens: int

    def lower(self) -> Any:
        """The program, ready to be compiled."""
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):  # tells GPU kernels what they are compiled for
            return self.function.lower(*self.arguments)


def make_program(setting: Setting, devices: list[Any]) -> Program:
    """The program of a setting on devices.

    Raises ValueError, naming the config key and the numbers, for sizes that do not divide.
    """
    setting.check()
    mesh = make_mesh(setting.mesh, devices)
    make = {"train": _train, "decode": _decode, "prefill": _prefill}[setting.what]
    return make(setting, mesh)


def check_rows(what: str, rows: float, mesh: Mesh | AbstractMesh) -> int:
    """Into how many parts the mesh splits a batch. what: where the number of rows comes from.

    Raises ValueError when the rows cannot be split so.
    """
    parts = math.prod(mesh.shape[axis] for axis in batch_sharding(mesh).spec[0])
    if rows % parts:
        raise ValueError(f"{what} = {rows} is not a multiple of mesh.data x mesh.fsdp = {parts}; change one of them")
    return parts


def check_micro_batch(train: TrainConfig, mesh: Mesh | AbstractMesh) -> int:
    """As ``check_rows``, of a micro-batch of training."""
    what = f"train.batch_size={train.batch_size} / train.accumulate={train.accumulate}"
    return check_rows(what, train.batch_size / train.accumulate, mesh)


def _train(setting: Setting, mesh: Mesh) -> Program:
    check_micro_batch(setting.train, mesh)
    model = build_model(setting.model, setting.residual, setting.flow, None, mesh)
    update = build_update(model, setting.optimizer, setting.schedule, setting.train, mesh)
    state, batch = update.state_like, update.batch_like
    held = {"parameters": state["params"], "optimiser state": state["opt_state"], "batch": batch}
    tokens = setting.train.batch_size * setting.model.context
    return Program(update.jitted(), (state, batch), held, mesh, tokens)


def _served(setting: Setting, mesh: Mesh) -> tuple[Transformer, Any]:
    """The model that generates, and its parameters in the shards of training."""
    model = serving(build_model(setting.model, setting.residual, setting.flow, None, None))
    params = abstract_params(model)
    return model, _placed(params, param_shardings(params, mesh))


def _decode(setting: Setting, mesh: Mesh) -> Program:
    """One token more for each row of a cache that is full but for it; the cache is updated in place."""
    check_rows("--batch", setting.batch, mesh)
    model, params = _served(setting, mesh)
    past = _cache(model, setting.batch, setting.tokens, mesh)
    rows = _rows(setting.batch, 1, mesh)
    slot = jax.ShapeDtypeStruct((), jnp.int32)
    out = (batch_sharding(mesh), jax.tree.map(lambda leaf: leaf.sharding, past))
    function = jax.jit(functools.partial(cache.extend, model), donate_argnums=1, out_shardings=out)
    held = {"parameters": params, "cache": past}
    return Program(function, (params, past, rows, rows, rows, slot), held, mesh, setting.batch)


def _prefill(setting: Setting, mesh: Mesh) -> Program:
    """Reads prompts into a fresh cache of as many slots; no logits, as in ``lmres.generate.decode``."""
    check_rows("--batch", setting.batch, mesh)
    model, params = _served(setting, mesh)
    rows = _rows(setting.batch, setting.tokens, mesh)
    past = _cache(model, setting.batch, setting.tokens, mesh)

    def read(params, tokens, segments, positions):
        return cache.prefill(model, params, tokens, segments, positions, setting.tokens)[1]

    function = jax.jit(read, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, past))
    held = {"parameters": params, "batch": (rows, rows, rows)}
    return Program(function, (params, rows, rows, rows), held, mesh, setting.batch * setting.tokens)


def _cache(model: Transformer, batch: int, slots: int, mesh: Mesh) -> Any:
    """The cache's shapes, its batch axis split like a batch's."""
    like = jax.eval_shape(functools.partial(cache.empty_cache, model.config, batch, slots, model.flow))
    rows = batch_sharding(mesh).spec
    layers = _placed(like.layers, NamedSharding(mesh, P(None, *rows)))
    return _placed(like, NamedSharding(mesh, rows))._replace(layers=layers)


def _rows(batch: int, tokens: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, tokens), jnp.int32, sharding=batch_sharding(mesh))


def _placed(tree: Any, shardings: Any) -> Any:
    """ShapeDtypeStructs with shardings: one for all, or a tree of them."""
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of sharded ShapeDtypeStructs on one device, without padding."""
    return sum(
        math.prod(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def step_flops(setting: Setting) -> dict[str, float]:
    """FLOPs of one call over all devices: {"model", "recomputed", "total"}.

    model: by ``lmres.train.flops``; a third of a training token's where nothing is differentiated, and without the
    output head in a prefill. recomputed: what rematerialisation does again: with model.remat=full the forward pass of
    all blocks, with "dots" and "offload" that of attention's scores and of the connection.
    """
    model, what = setting.model, setting.what
    per = flops_per_token(model, setting.residual, flow=setting.flow)
    head = 6.0 * model.vocab_size * model.width
    if what == "train":
        tokens = setting.train.batch_size * model.context
        weightless = per["attention"] + per["connection"]
        again = {"none": 0.0, "dots": weightless, "offload": weightless, "full": per["total"] - head}[model.remat]
        return _total(tokens * per["total"], tokens * again / 3)
    if what == "prefill":
        per = flops_per_token(model, setting.residual, sequence=setting.tokens, flow=setting.flow)
        return _total(setting.batch * setting.tokens * (per["total"] - head) / 3, 0.0)
    # The last of a row reads about twice the keys that its tokens read on average.
    per = flops_per_token(model, setting.residual, sequence=setting.tokens, flow=setting.flow)
    attention = per["attention"] * 2 * setting.tokens / (setting.tokens + 1) if setting.flow.is_standard else 0.0
    rest = per["total"] - (per["attention"] if setting.flow.is_standard else 0.0)
    return _total(setting.batch * (rest + attention) / 3, 0.0)


def _total(model: float, recomputed: float) -> dict[str, float]:
    return {"model": model, "recomputed": recomputed, "total": model + recomputed}
