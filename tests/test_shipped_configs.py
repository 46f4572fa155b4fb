"""Golden dumps of every shipped config: parameters, shapes, roles, shardings, bytes, FLOPs. A diff is to be reviewed.

After a change that is meant: LMRES_UPDATE_DUMPS=1 python -m pytest tests/test_shipped_configs.py, and read the diff.
"""

import dataclasses
import os
from pathlib import Path

import jax
import pytest
import yaml
from jax.sharding import AbstractMesh, AxisType

from lmres.config import check_config, load_compare, load_config
from lmres.experiment.bench import label
from lmres.model import Transformer
from lmres.plan.lowering import device_bytes
from lmres.plan.machines import MACHINES
from lmres.sharding import AXES, mesh_sizes
from lmres.train.flops import flops_per_token
from lmres.train.optimizer import is_decayed, kind_of, make_optimizer
from lmres.train.schedule import make_schedule
from lmres.train.state import abstract_params, abstract_state, count

ROOT = Path(__file__).parent.parent
DUMPS = Path(__file__).parent / "dumps"
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
POD = ("125m", "1b", "7b", "70b")  # configs for many devices begin so


def runs(path):
    """(name, config) of a file: itself, or the variants of a comparison."""
    if "compare" in yaml.safe_load(path.read_text(encoding="utf-8")):
        return list(load_compare(path)[1].items())
    return [(path.stem, load_config(path))]


def dump(name, config, whole=True):
    """Lines that say what the config builds, sharded on a mesh of 2 x 2 x 2, and of a pod's on its own mesh.

    whole: False leaves out what is that of the config it includes.
    """
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or 258)  # 258: splits in two
    built = Transformer(model, config.residual, flow=config.flow)
    params, train = abstract_params(built), config.train
    optimizer = make_optimizer(config.optimizer, make_schedule(config.schedule, train.steps), config.residual, params)
    state = abstract_state(built, optimizer, mesh_of(dict.fromkeys(AXES, 2) | {"sequence": 1}))
    flops = flops_per_token(model, config.residual, flow=config.flow)["total"]
    yield f"{name}: {label(config.residual, config.flow)}, {count(params):,} parameters"
    tokens = train.batch_size * model.context
    yield f"  model FLOPs: {flops:,.0f} per token, {flops * tokens:.6e} per step of {tokens:,} tokens"
    if whole:
        yield held(state)
    if name.startswith(POD):
        yield held(abstract_state(built, optimizer, mesh_of(mesh_sizes(config.mesh, devices(name)))))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state["params"]) if whole else ():
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        split = ", ".join(str(axis) for axis in leaf.sharding.spec)
        decay = "decayed" if is_decayed(path, config.residual.no_decay) else "not decayed"
        yield f"  {where} {leaf.dtype}{list(leaf.shape)} {kind_of(path).role}, {decay}, split ({split})"


def devices(name):
    """Of the machine that a config of ``configs/on`` is for (64 of ``7b-mhc-h200-64``), or 256."""
    words = name.split("-")
    return int(words[-1]) if words[-1].isdigit() and words[-2] in MACHINES else 256


def mesh_of(sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def held(state):
    """A line with the bytes of a training state on each device."""
    mesh = jax.tree.leaves(state["params"])[0].sharding.mesh
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    parameters, optimiser = device_bytes(state["params"]), device_bytes(state["opt_state"])
    return f"  bytes per device ({axes}): {parameters:,} parameters, {optimiser:,} optimiser state"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_config_is_as_reviewed(path):
    lines = []
    for name, config in runs(path):
        check_config(config)
        lines += dump(name, config, whole=path.parent.name != "on")
    text = "\n".join(lines) + "\n"
    golden = DUMPS / f"{path.relative_to(ROOT / 'configs').with_suffix('').as_posix().replace('/', '_')}.txt"
    if os.environ.get("LMRES_UPDATE_DUMPS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert golden.exists(), f"no dump of {path.name}: see the head of this file"
    assert text == golden.read_text(encoding="utf-8"), f"{path.name} builds something else: see the head of this file"
