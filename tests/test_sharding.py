"""The sharding tables, their errors, and one train step lowered on meshes that are not here."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from variants import CARRIED, FULL_MATRIX, KINDS, name

import lmres.sharding as sharding
from lmres.flow import FlowConfig
from lmres.model import ModelConfig, Transformer
from lmres.residual import MHC, AttentionResiduals, MUDDFormer, Plain, ValueResidual
from lmres.sharding import AXES, MeshConfig, constrainer, make_mesh, param_shardings, spec_for
from lmres.train.config import OptimizerConfig, ScheduleConfig
from lmres.train.optimizer import make_optimizer
from lmres.train.schedule import make_schedule
from lmres.train.state import abstract_params, abstract_state
from lmres.train.step import train_step_function

CONFIG = ModelConfig(vocab_size=64, context=32, width=64, blocks=2, heads=4, kv_heads=4, mlp_hidden=128)


def test_mesh_sizes_must_multiply_to_the_devices():
    assert dict(make_mesh(MeshConfig(data=-1, fsdp=2)).shape) == {"data": 4, "fsdp": 2, "sequence": 1, "tensor": 1}
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
    rows = param_shardings(params, make_mesh(MeshConfig(data=1, fsdp=2, sequence=2, tensor=2)))  # who shares a row too
    assert rows["stack"]["mlp"]["gate"].spec == P(None, ("fsdp", "sequence"), "tensor")


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


def lowered_for_a_pod(connection, **settings):
    """(text of a train step for TPUs on an abstract mesh of 128 devices, the state, the state after it)."""
    mesh = AbstractMesh((8, 4, 2, 2), AXES, axis_types=(AxisType.Auto,) * 4)
    model = Transformer(dataclasses.replace(CONFIG, **settings), connection, constrainer(mesh))
    schedule = make_schedule(ScheduleConfig(), 100)
    optimizer = make_optimizer(OptimizerConfig(), schedule, connection, abstract_params(model))
    state = abstract_state(model, optimizer, mesh)
    rows = sharding.batch_sharding(mesh)
    ids = jax.ShapeDtypeStruct((32, CONFIG.context), jnp.int32, sharding=rows)
    batch = dict.fromkeys(("inputs", "targets", "segment_ids", "positions"), ids)
    batch["weights"] = jax.ShapeDtypeStruct(ids.shape, jnp.float32, sharding=rows)
    step = jax.jit(train_step_function(model, optimizer, schedule), donate_argnums=0)
    text = step.trace(state, batch).lower(lowering_platforms=("tpu",)).as_text()
    return text, state, jax.eval_shape(step, state, batch)[0]


@pytest.mark.parametrize("connection", CARRIED if FULL_MATRIX else KINDS, ids=name)
def test_train_step_lowers_for_a_pod_that_is_not_here(connection):
    """Contract: states and parameters divide, shardings agree."""
    text, state, new_state = lowered_for_a_pod(connection)
    assert '"data"=8, "fsdp"=4, "sequence"=2, "tensor"=2' in text
    assert text.count("sdy.sharding_constraint") >= 4, "embedding, states and logits are pinned"
    assert jax.tree.map(lambda a: a.shape, new_state) == jax.tree.map(lambda a: a.shape, state)


@pytest.mark.parametrize("connection", [Plain(), MHC(), AttentionResiduals()], ids=name)
def test_what_is_kept_can_lie_in_the_hosts_memory(connection):
    assert "pinned_host" in lowered_for_a_pod(connection, remat="offload")[0]
    assert "pinned_host" not in lowered_for_a_pod(connection, remat="dots")[0]


def compiled_loss(connection, config, flow=FlowConfig()):  # noqa: B008 - frozen
    """(compiled value_and_grad of a fixed weighting of the logits of packed rows, its arguments) on a mesh."""
    mesh = make_mesh(config, jax.devices()[: config.data * config.fsdp * config.sequence])
    model = Transformer(CONFIG, connection, constrainer(mesh), flow=flow)
    params = Transformer(CONFIG, connection, flow=flow).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    params = jax.device_put(params, param_shardings(params, mesh))
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (4, CONFIG.context))
    segments = np.where(np.arange(CONFIG.context) < 13, 1, 2) * np.ones_like(tokens)
    positions = np.where(segments == 1, np.arange(CONFIG.context), np.arange(CONFIG.context) - 13)
    batch = jax.device_put((tokens, segments, positions), sharding.batch_sharding(mesh))

    def loss(params, batch):
        logits = model.apply({"params": params}, *batch)
        return jnp.sin(jnp.arange(logits[0].size)).reshape(logits[0].shape).ravel() @ logits.sum(0).ravel()

    return jax.jit(jax.value_and_grad(loss)).lower(params, batch).compile(), (params, batch)


ONE, SPLIT = MeshConfig(data=1), MeshConfig(data=1, fsdp=2, sequence=4)


@pytest.mark.parametrize(
    ("connection", "kind"),
    [
        (Plain(), "standard"),
        (MHC(), "standard"),
        *(
            pytest.param(c, kind, marks=pytest.mark.slow)
            for c, kind in [
                (AttentionResiduals(), "standard"), (MUDDFormer(), "standard"), (ValueResidual(), "standard"),
                (Plain(), "block(2)"), (Plain(), "diagonal(-1/2)"), (Plain(), "standard + rectangle(4)"),
            ]
        ),
    ],
    ids=lambda x: getattr(x, "name", x),
)  # fmt: skip
def test_rows_split_over_devices_give_the_same_gradients(connection, kind):
    (one, at_one), (split, at_split) = (compiled_loss(connection, mesh, FlowConfig(kind)) for mesh in (ONE, SPLIT))
    (found, found_grads), (expected, grads) = (
        jax.tree.map(np.asarray, run(*at)) for run, at in ((split, at_split), (one, at_one))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(grads))
    chex.assert_trees_all_close(found_grads, grads, rtol=0, atol=1e-5 * largest)


def gathers(compiled):
    """How many of each collective that moves activations or parameters there are."""
    text = compiled.as_text()
    kinds = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    return {kind: len(re.findall(rf"= \S+ {kind}(?:-start)?\(", text)) for kind in kinds}


@pytest.mark.parametrize("connection", [c if i % 6 == 0 else pytest.param(c, marks=pytest.mark.slow)
                                        for i, c in enumerate(KINDS)], ids=name)  # fmt: skip
def test_connections_read_without_communication(connection):
    """The state follows batch and sequence, so carrying it up the column moves nothing between devices. What is beyond
    plain's is gathered parameters: none for members whose parameters are replicated."""
    plain = gathers(compiled_loss(Plain(), SPLIT)[0])
    assert plain["all-gather"] > 0, "rows of keys and values are gathered"
    found = gathers(compiled_loss(connection, SPLIT)[0])
    assert {k: max(n - plain[k], 0) for k, n in found.items()} == dict.fromkeys(plain, 0)


def test_data_axis_crosses_slices_and_no_other_does():
    class Device:
        platform, device_kind, process_index = "tpu", "TPU v5 lite", 0

        def __init__(self, i, slice_index):
            self.id, self.slice_index, self.coords, self.core_on_chip = i, slice_index, (i % 4, 0, 0), 0

    devices = [Device(i, i // 4) for i in range(8)]
    mesh = make_mesh(MeshConfig(data=-1, fsdp=2, tensor=2), devices)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "sequence": 1, "tensor": 2}
    assert [{d.slice_index for d in row.flat} for row in mesh.devices] == [{0}, {1}]
    with pytest.raises(ValueError, match=r"mesh\.data=1 is not a multiple of the 2 slices"):
        make_mesh(MeshConfig(data=1, fsdp=8), devices)
