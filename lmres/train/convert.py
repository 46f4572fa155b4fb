"""A trained plain pre-norm model under another connection, its function kept.

What the branches have learned is taken over as it is. The connection's own parameters are those with which it is the
plain residual: its start, or what ``Connection.as_plain`` makes of the plain model's gains. The flow stays, and the
ordinary one may become another, whose own parameters start. Whether the function was kept is measured, on the logits,
before anything is written.

A converted run is a new run: its folder holds a checkpoint of step 0 with a fresh optimiser, so it is trained with
``lmres train FOLDER --resume``, from update 0 of its schedule and from the start of its data.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax import Array
from jax.sharding import Mesh

from lmres.data import Splits
from lmres.flow.config import FlowConfig
from lmres.model import ModelConfig, Transformer
from lmres.residual import Connection, Plain
from lmres.sharding import param_shardings
from lmres.train.checkpoint import Checkpoints
from lmres.train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from lmres.train.digest import named
from lmres.train.feed import Feed, eval_batch_size
from lmres.train.fingerprint import (
    CheckpointError,
    CheckpointMismatch,
    architecture,
    differences,
    function_of,
    stored_architecture,
)
from lmres.train.optimizer import make_optimizer
from lmres.train.progress import Reporter
from lmres.train.run import CHECKPOINTS
from lmres.train.schedule import make_schedule
from lmres.train.session import build_model, describe_devices
from lmres.train.state import TrainState, abstract_params, abstract_state, count, init_params

TOLERANCE = 1e-4  # largest |difference| between two logits
_ROWS, _TOKENS = 2, 512  # at most, of the batch on which logits are compared
_CONNECTION = "stack/connection/"
_NORMS = ("stack/attention/norm/gain", "stack/mlp/norm/gain", "final_norm/gain")


class ConversionError(CheckpointError):
    """A run cannot be converted; nothing was written."""


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What was converted, and how well the function was kept.

    step: of the checkpoint that was read. connection: name of the new one. parameters: of the new model, and
    ``connection_parameters`` of its connection alone. difference: largest |difference| between the two models' logits
    over ``tokens`` tokens of ``batch`` ("validation text" or "drawn tokens"); logit: the largest |logit| there.
    """

    step: int
    connection: str
    parameters: int
    connection_parameters: int
    difference: float
    logit: float
    tokens: int
    batch: str


def convert_run(
    *,
    source: Path,
    step: int | None,
    model: ModelConfig,
    residual: Connection,
    flow: FlowConfig = FlowConfig(),  # noqa: B008 - frozen
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    train: TrainConfig,
    mesh: Mesh,
    splits: Splits | None,
    folder: Path,
    stored_config: dict[str, Any],
    tolerance: float = TOLERANCE,
    reporter: Reporter | None = None,
) -> Conversion:
    """Writes a new run whose model is that of another run under ``residual`` and ``flow``.

    Args:
      source: folder of a plain pre-norm run. step: of its checkpoint; None for the newest that can be read.
      model: of the new run, with ``vocab_size``; no parameter of it may mean something else than in the source.
      residual .. train: sections of the new run.
      mesh: where the work is done; the checkpoint does not depend on it.
      splits: whose validation rows the logits are compared on; None for drawn tokens.
      folder: of the new run; may exist if it is empty. It appears when all of it is written.
      stored_config: the new run's whole config as JSON.
      tolerance: largest |difference| of a logit, in float32.

    Raises: ConversionError with the reason, CheckpointMismatch with the keys in which ``model`` differs,
      CheckpointError if no checkpoint can be read.
    """
    reporter = reporter or Reporter()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConversionError(f"{folder} is there already and not empty; choose another folder")
    new = build_model(model, residual, flow, None, mesh)
    old, plain, restored = _read_plain(source, step, new, mesh, splits, reporter)
    schedule_of_run = make_schedule(schedule, train.steps)
    update = make_optimizer(optimizer, schedule_of_run, residual, abstract_params(new))
    like = abstract_state(new, update, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    params = jax.device_put(convert_params(plain, new, train.seed), shardings["params"])
    sizes = count(params), count(params["stack"]["connection"])
    reporter.line(
        f"{residual.name}: {sizes[0]:,} parameters, {sizes[1]:,} of them the connection's, on {describe_devices(mesh)}"
    )
    what, batch = _batch(splits, mesh, model)
    difference, logit, tokens = compare_logits(old, plain, new, params, batch)
    told = (
        f"logits of {tokens:,} tokens ({what}) differ by at most {difference:.3g}; "
        f"the largest is {logit:.3g}, allowed are {tolerance:g}"
    )
    if not difference <= tolerance:
        if model.norm_eps > 1e-8:
            told += f". model.norm_eps={model.norm_eps:g} counts for more where a connection's states are smaller"
        if old.flow != new.flow:
            told += f". flow.kind={flow.kind} reads other cells than {old.flow.kind}: see flow.adopt and flow.bias"
        raise ConversionError(f"{residual.name} does not keep the function of {source}: {told}. Nothing was written")
    reporter.line(told)
    state = TrainState(
        params=params,
        opt_state=jax.jit(update.init, out_shardings=shardings["opt_state"])(params),
        step=jax.device_put(jnp.zeros((), jnp.int32), shardings["step"]),
    )
    shape = architecture(dataclasses.asdict(new.config), dataclasses.asdict(residual), like["params"], flow)
    meta = {
        "config": stored_config,
        "architecture": shape,
        "tokenizer": restored.meta.get("tokenizer"),
        "device": describe_devices(mesh),
        "data_position": 0,
        "converted_from": {"run": str(source), "step": restored.step, "difference": difference},
    }
    with _appearing(folder) as place:
        with Checkpoints(place / CHECKPOINTS, keep=train.keep, report=reporter.line) as checkpoints:
            checkpoints.save(0, state, meta)
        (place / "config.yaml").write_text(yaml.safe_dump(stored_config, sort_keys=False), encoding="utf-8")
    reporter.line(f"saved step 0 in {folder / CHECKPOINTS}, with a fresh optimiser")
    return Conversion(restored.step, residual.name, *sizes, difference, logit, tokens, what)


def convert_params(plain: Any, model: Transformer, seed: int = 0) -> Any:
    """Parameters with which ``model`` is the plain pre-norm model of the same sizes.

    Args:
      plain: that model's parameters.
      model: unbound, with another connection.
      seed: of the parameters that neither the plain model nor ``as_plain`` settles.

    A gain that the attention's input has once per way is the plain model's gain in every way. Parameters of branches
    that the plain model does not have keep their start: the caller is to compare the logits.

    Raises ConversionError if no parameters do, or a branch differs.
    """
    connection, width = model.connection, model.config.width
    depth = model.config.blocks * (2 if connection.unit == "sublayer" else 1)
    gains = jnp.stack([plain["stack"][branch]["norm"]["gain"] for branch in ("attention", "mlp")], axis=1)
    start = connection.init(jax.random.key(seed), depth, width)
    own = connection.as_plain(start, gains.reshape(-1, width), plain["final_norm"]["gain"])
    if own is None:
        raise ConversionError(f"{connection.name} is another function than pre-norm; no parameters make them equal")
    like = abstract_params(model)
    there = {name: leaf for name, leaf in named(plain) if not name.startswith(_CONNECTION)}
    there |= {_CONNECTION + name: leaf for name, leaf in named(own)}
    wanted = dict(named(like))
    lost = [name for name in there if name not in wanted and name not in _NORMS]  # these may have moved
    if lost:
        raise ConversionError(f"{connection.name}: the new model has no place for {', '.join(lost)}")
    if wanted.keys() - there.keys():
        there = dict(named(jax.jit(partial(init_params, model))(jax.random.key(seed)))) | there

    def one(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        value = there[name]
        if value.ndim == leaf.ndim - 1 and name in _NORMS:
            value = jnp.broadcast_to(value[:, None], leaf.shape)
        if value.shape != leaf.shape:
            raise ConversionError(f"{name}: {list(value.shape)} in the plain model, {list(leaf.shape)} in the new one")
        return value.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, like)


def compare_logits(
    old: Transformer, old_params: Any, new: Transformer, new_params: Any, batch: dict[str, Array]
) -> tuple[float, float, int]:
    """(largest |difference| of a logit, largest |logit| of ``old``, tokens compared), computed in float32.

    batch: {"inputs", "segment_ids", "positions"}, [B, S] int each; tokens of segment 0 are left out.
    """
    difference, logit = _compared(_in_float32(old), old_params, _in_float32(new), new_params, batch)
    return float(difference), float(logit), int(np.sum(np.asarray(batch["segment_ids"]) != 0))


@partial(jax.jit, static_argnums=(0, 2))
def _compared(old, old_params, new, new_params, batch):
    # Accelerators multiply float32 coarsely by default.
    with jax.default_matmul_precision("highest"):
        one, other = (
            model.apply({"params": params}, batch["inputs"], batch["segment_ids"], batch["positions"])
            for model, params in ((old, old_params), (new, new_params))
        )
    keep = (batch["segment_ids"] != 0)[..., None]
    largest = lambda x: jnp.max(jnp.where(keep, jnp.abs(x), 0))  # noqa: E731 - NaN stays NaN
    return largest(one - other), largest(one)


def _in_float32(model: Transformer) -> Transformer:
    attention = "auto" if model.config.attention == "cudnn" else model.config.attention  # cuDNN's is for 16 bits only
    return model.clone(config=dataclasses.replace(model.config, dtype="float32", attention=attention))


def _read_plain(source, step, new, mesh, splits, reporter):
    """(the plain model, its parameters, what was restored), compared with the new model before it is read."""
    with Checkpoints(source / CHECKPOINTS, mode="read", report=reporter.line) as checkpoints:
        meta = checkpoints.meta(step)
        stored = stored_architecture(meta)
        kind, norm = (stored["residual"].get(key) for key in ("kind", "norm"))
        if (kind, norm) != ("plain", "pre"):
            said = f"residual.kind={kind}" + (f" residual.norm={norm}" if kind == "plain" else "")
            raise ConversionError(f"{source} was trained with {said}; only plain pre-norm runs can be converted")
        old = build_model(new.config, Plain(**stored["residual"]), _flow_before(stored["flow"], new.flow), None, mesh)
        like = abstract_params(old)
        shape = architecture(dataclasses.asdict(old.config), dataclasses.asdict(old.connection), like, old.flow)
        changed = differences({"model": stored["model"]}, {"model": shape["model"]})
        if changed:
            raise CheckpointMismatch("a conversion changes the connection alone, and this is another model", changed)
        tokenizer = meta.get("tokenizer")
        if splits is not None and splits.info.tokenizer != tokenizer:
            raise ConversionError(
                f"{source} was trained with the tokenizer {tokenizer}, the data have {splits.info.tokenizer}: "
                "ids would mean something else"
            )
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            like, param_shardings(like, mesh),
        )  # fmt: skip
        restored = checkpoints.restore_params(target, architecture=shape, step=step)
    reporter.line(f"step {restored.step} of {source}: {old.connection.name}, {count(restored.state):,} parameters")
    return old, restored.state, restored


def _flow_before(stored: dict[str, Any], flow: FlowConfig) -> FlowConfig:
    """The flow of a checkpoint that is to go on with ``flow``: the same, or the ordinary one."""
    changed = differences({"flow": stored}, {"flow": function_of(flow)})
    if not changed:
        return flow
    if differences(stored, function_of(FlowConfig())):
        raise CheckpointMismatch("a conversion keeps the flow, unless it is the ordinary one", changed)
    return FlowConfig()


def _batch(splits: Splits | None, mesh: Mesh, model: ModelConfig) -> tuple[str, dict[str, Array]]:
    """(what it is, the batch): the first validation rows, or tokens drawn with a fixed seed."""
    rows, length = eval_batch_size(_ROWS, _ROWS, mesh), min(_TOKENS, model.context)
    if splits is not None:
        batch = next(Feed(splits.valid, mesh, rows).evaluation(1))
        what = "validation text"
    else:
        tokens = np.random.default_rng(0).integers(0, model.vocab_size, (rows, length), np.int32)
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
        batch = {"inputs": tokens, "segment_ids": np.ones_like(tokens), "positions": positions}
        what = "drawn tokens"
    return what, {key: batch[key][:, :length] for key in ("inputs", "segment_ids", "positions")}


@contextlib.contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A place to write to, which becomes ``folder`` at the end, or is gone when something fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as place:
        yield Path(place) / "run"
        os.replace(Path(place) / "run", folder)
