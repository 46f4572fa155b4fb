"""The sharding tables, their errors, and one train step lowered on meshes that are not here."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from variants import KINDS, name

import lmres.sharding as sharding
from lmres.model import ModelConfig, Transformer
from lmres.residual import Plain
from lmres.sharding import AXES, MeshConfig, constrainer, make_mesh, param_shardings, spec_for
from lmres.train.config import OptimizerConfig, ScheduleConfig
from lmres.train.optimizer import make_optimizer
from lmres.train.schedule import make_schedule
from lmres.train.state import abstract_params, abstract_state
from lmres.train.step import train_step_function

CONFIG = ModelConfig(vocab_size=64, context=32, width=64, blocks=2, heads=4, kv_heads=4, mlp_hidden=128)


def test_mesh_sizes_must_multiply_to_the_devices():
    assert dict(make_mesh(MeshConfig(data=-1, fsdp=2)).shape) == {"data": 4, "fsdp": 2, "tensor": 1}
    with pytest.raises(ValueError, match=r"mesh\.fsdp=3.*number of devices, 8"):
        make_mesh(MeshConfig(fsdp=3))
    with pytest.raises(ValueError, match=r"at most one may be -1"):
        make_mesh(MeshConfig(data=-1, fsdp=-1))
    with pytest.raises(ValueError, match=r"mesh\.data=2.*number of devices, 8"):
        make_mesh(MeshConfig(data=2))


def test_every_large_parameter_is_split_as_the_tables_say():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    params = abstract_params(Transformer(CONFIG, Plain()))
    specs = {
        jax.tree_util.keystr(path, simple=True, separator="/"): s.spec
        for path, s in jax.tree_util.tree_leaves_with_path(param_shardings(params, mesh))
    }
    assert specs["embed/table"] == P("tensor", "fsdp")
    assert specs["stack/attention/query"] == P(None, "fsdp", "tensor", None)
    assert specs["stack/attention/out"] == P(None, "tensor", None, "fsdp")
    assert specs["stack/mlp/down"] == P(None, "tensor", "fsdp")
    assert specs["stack/mlp/norm/gain"] == P(None, None)
    large = [path for path, p in jax.tree_util.tree_leaves_with_path(params) if p.size > CONFIG.width * CONFIG.blocks]
    assert all(any(specs[jax.tree_util.keystr(p, simple=True, separator="/")]) for p in large)


def test_sizes_that_do_not_divide_name_the_config_key():
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=8))
    params = abstract_params(Transformer(CONFIG, Plain()))
    with pytest.raises(ValueError, match=r"attention/key: model\.kv_heads=4 is not a multiple of mesh\.tensor=8"):
        param_shardings(params, mesh)


def test_collisions_are_found(monkeypatch):
    mesh = make_mesh(MeshConfig(fsdp=2))
    monkeypatch.setitem(sharding.MESH, "mlp", ("fsdp",))
    with pytest.raises(ValueError, match=r"axes 'embed' and 'mlp' are both split over mesh axis 'fsdp'"):
        spec_for(("embed", "mlp"), (64, 128), mesh, "parameter mlp/up")


@pytest.mark.parametrize("connection", KINDS, ids=name)
def test_train_step_lowers_for_a_pod_that_is_not_here(connection):
    """Contract: an abstract mesh of 64 devices, lowered for TPU; states and parameters divide, shardings agree."""
    mesh = AbstractMesh((8, 4, 2), AXES, axis_types=(AxisType.Auto,) * 3)
    model = Transformer(CONFIG, connection, constrainer(mesh))
    schedule = make_schedule(ScheduleConfig(), 100)
    optimizer = make_optimizer(OptimizerConfig(), schedule, connection, abstract_params(model))
    state = abstract_state(model, optimizer, mesh)
    rows = sharding.batch_sharding(mesh)
    ids = jax.ShapeDtypeStruct((32, CONFIG.context), jnp.int32, sharding=rows)
    batch = dict.fromkeys(("inputs", "targets", "segment_ids", "positions"), ids)
    batch["weights"] = jax.ShapeDtypeStruct(ids.shape, jnp.float32, sharding=rows)
    step = jax.jit(train_step_function(model, optimizer, schedule), donate_argnums=0)
    text = step.trace(state, batch).lower(lowering_platforms=("tpu",)).as_text()
    assert '"data"=8, "fsdp"=4, "tensor"=2' in text
    assert text.count("sdy.sharding_constraint") >= 4, "embedding, states and logits are pinned"
    new_state, _ = jax.eval_shape(step, state, batch)
    assert jax.tree.map(lambda a: a.shape, new_state) == jax.tree.map(lambda a: a.shape, state)
