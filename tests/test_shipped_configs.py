"""Golden dumps of every shipped config: parameters, shapes, roles, shardings. A diff is to be reviewed.

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
from lmres.sharding import AXES, param_shardings
from lmres.train.optimizer import is_decayed, kind_of
from lmres.train.state import abstract_params, count

ROOT = Path(__file__).parent.parent
DUMPS = Path(__file__).parent / "dumps"
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def runs(path):
    """(name, config) of a file: itself, or the variants of a comparison."""
    if "compare" in yaml.safe_load(path.read_text(encoding="utf-8")):
        return list(load_compare(path)[1].items())
    return [(path.stem, load_config(path))]


def dump(name, config):
    """Lines that say what the config builds, sharded on a mesh of 2 x 2 x 2."""
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or 258)  # 258: splits in two
    params = abstract_params(Transformer(model, config.residual, flow=config.flow))
    shardings = param_shardings(params, AbstractMesh((2, 2, 1, 2), AXES, axis_types=(AxisType.Auto,) * 4))
    yield f"{name}: {label(config.residual, config.flow)}, {count(params):,} parameters"
    for (path, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
    ):
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        split = ", ".join(str(axis) for axis in sharding.spec)
        decay = "decayed" if is_decayed(path, config.residual.no_decay) else "not decayed"
        yield f"  {where} {leaf.dtype}{list(leaf.shape)} {kind_of(path).role}, {decay}, split ({split})"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_config_is_as_reviewed(path):
    lines = []
    for name, config in runs(path):
        check_config(config)
        lines += dump(name, config)
    text = "\n".join(lines) + "\n"
    golden = DUMPS / f"{path.relative_to(ROOT / 'configs').with_suffix('').as_posix().replace('/', '_')}.txt"
    if os.environ.get("LMRES_UPDATE_DUMPS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert golden.exists(), f"no dump of {path.name}: see the head of this file"
    assert text == golden.read_text(encoding="utf-8"), f"{path.name} builds something else: see the head of this file"
