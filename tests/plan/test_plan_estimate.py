"""Estimates order candidates and make advice; what a compiler says in a refusal is read."""

import dataclasses
import math
from pathlib import Path

import pytest

import lmres.plan.search
from lmres.config import load_config
from lmres.flow.config import FlowConfig
from lmres.model import ModelConfig
from lmres.plan.advice import advise, candidates, changed, ranked
from lmres.plan.estimate import estimate, state_shapes
from lmres.plan.lowering import Setting, step_flops
from lmres.plan.planning import Memory, Plan, told_memory
from lmres.plan.roofline import Bound
from lmres.plan.topology import parse_topology
from lmres.residual import MHC, AttentionResiduals, Plain
from lmres.sharding import AXES, MeshConfig, mesh_sizes
from lmres.train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from lmres.train.state import count

GIB = 2**30
CONFIGS = Path(__file__).parent.parent.parent / "configs"
PARTS = ("model", "residual", "optimizer", "schedule", "train", "mesh")
BOUND = Bound(0.0, 0.0, 0.0, 0.0, "memory")
MODEL = ModelConfig(
    vocab_size=32768, context=4096, width=2048, blocks=16, heads=16, kv_heads=8, mlp_hidden=8192, dtype="bfloat16"
)
SETTING = Setting(
    MODEL, Plain(), FlowConfig(), OptimizerConfig(), ScheduleConfig(), TrainConfig(batch_size=128),
    MeshConfig(data=-1, fsdp=16),
)  # fmt: skip
TOPOLOGY = parse_topology("v5e:8x8")


@pytest.fixture(scope="module")
def shapes():
    return state_shapes(SETTING)


def guess(shapes, **changes):
    return estimate(
        changed(SETTING, {key.replace("__", "."): value for key, value in changes.items()}), TOPOLOGY, shapes
    )


def test_the_state_is_counted_exactly(shapes):
    # Parameters, two moments and gradients in float32, over 16; norms' gains are on every device.
    whole = 16 * (2048 * 128 * (2 * 16 + 2 * 8) + 3 * 2048 * 8192) + 32768 * 2048
    gains = 2 * 16 * 2048 + 2048
    assert guess(shapes).state == pytest.approx(4 * 4 * (whole / 16 + gains), rel=1e-6)
    assert guess(shapes, train__accumulate=2).state == pytest.approx(5 * 4 * (whole / 16 + gains), rel=1e-6)


def test_estimates_move_as_they_must(shapes):
    none, dots, full = (guess(shapes, model__remat=policy) for policy in ("none", "dots", "full"))
    assert none.activations > dots.activations > full.activations
    assert guess(shapes, model__remat="offload").activations == full.activations
    assert none.roofs[0] < dots.roofs[0] < full.roofs[0]
    assert full.activations == 16 * 2048 * 2 * (2 * 4096)  # the input of each block for two rows
    half = guess(shapes, model__remat="full", train__accumulate=2)
    assert half.activations == full.activations / 2 and half.roofs[2] > full.roofs[2]
    streams = dataclasses.replace(SETTING, residual=MHC(streams=4), model=dataclasses.replace(MODEL, remat="full"))
    assert estimate(streams, TOPOLOGY, state_shapes(streams)).activations == 4 * full.activations
    heads = guess(shapes, mesh__tensor=4, train__accumulate=4)  # two rows again, and a quarter of the heads
    assert heads.transient < guess(shapes).transient / 2


def test_tokens_split_over_devices_are_fewer_and_their_keys_are_sent(shapes):
    whole, split = (guess(shapes, mesh__fsdp=64 // n, mesh__sequence=n, model__remat="full") for n in (1, 4))
    assert split.state == whole.state and split.activations == whole.activations
    assert split.roofs[:2] == whole.roofs[:2]
    keys = 3 * 16 * (2 * 4096) * 2 * 2 * 8 * 128 * 3  # thrice per block, of three more parts of each row
    assert split.roofs[2] - whole.roofs[2] == pytest.approx(keys / TOPOLOGY.machine.link)
    fewer = guess(shapes, mesh__fsdp=16, mesh__sequence=4, train__accumulate=4, model__remat="full")
    assert fewer.activations == whole.activations / 4
    with pytest.raises(ValueError, match=r"model\.context=4096 is not a multiple of mesh\.sequence=3"):
        estimate(changed(SETTING, {"mesh.fsdp": 1, "mesh.sequence": 3}), parse_topology("v5e:1x3"), shapes)


def test_what_a_connection_holds_and_moves_is_counted(shapes):
    streams = dataclasses.replace(SETTING, residual=MHC(streams=4))
    history = dataclasses.replace(SETTING, residual=AttentionResiduals(block=8))
    plain, on_tpu, grown = guess(shapes), *(estimate(s, TOPOLOGY, state_shapes(s)) for s in (streams, history))
    numbers = 2 * 4096 * 2048  # of one vector for each token on a device
    gathered = 2 * (count(state_shapes(streams)["params"]) - count(shapes["params"])) / 16 * 2
    assert on_tpu.transient - plain.transient == pytest.approx(numbers * 4 * 64 + gathered)
    assert grown.transient - plain.transient == pytest.approx(numbers * (4 + 2) * 16, rel=1e-3)
    on_gpus = estimate(streams, parse_topology("h200:8x8"), state_shapes(streams))
    assert on_gpus.transient < on_tpu.transient - numbers * 4 * 40
    moved = (MHC(streams=4).cost(32, 2048).moved - Plain().cost(32, 2048).moved) * numbers * 2 * 3 * 6
    assert on_tpu.roofs[1] - plain.roofs[1] == pytest.approx(moved / TOPOLOGY.machine.hbm, rel=0.05)


def test_flops_of_a_step():
    step = step_flops(changed(SETTING, {"model.remat": "full"}))
    head = 6.0 * 32768 * 2048 * 128 * 4096
    assert step["recomputed"] == pytest.approx((step["model"] - head) / 3) and step["total"] == sum(
        (step["model"], step["recomputed"])
    )
    assert step_flops(SETTING)["recomputed"] == 0
    decode = dataclasses.replace(SETTING, what="decode", batch=4, tokens=4096)
    block = 2048 * 128 * (2 * 16 + 2 * 8) + 3 * 2048 * 8192
    matrices, attention = 2 * (16 * block + 32768 * 2048), 4 * 16 * 16 * 128 * 4096
    connection = Plain().cost(32, 2048).flops
    assert step_flops(decode)["total"] == pytest.approx(4 * (matrices + attention + connection))


def test_candidates_are_meshes_that_multiply(shapes):
    found = list(candidates(SETTING, 64))
    assert all(math.prod(c[f"mesh.{axis}"] for axis in AXES) == 64 for c in found)
    assert {c["mesh.sequence"] for c in found} == {c["mesh.tensor"] for c in found} == {2**k for k in range(7)}
    deep = dataclasses.replace(SETTING, flow=FlowConfig("deep"))  # its tokens run in turn
    assert {c["mesh.sequence"] for c in candidates(deep, 64)} == {1}
    assert {c["model.remat"] for c in found} == {"none", "dots", "full"}
    assert {c["train.accumulate"] for c in found} == {1, 2, 4, 8, 16, 32, 64, 128}
    good = ranked(SETTING, TOPOLOGY, shapes)
    assert 0 < len(good) < len(found)
    assert [e.order for _, e in good] == sorted(e.order for _, e in good)
    for changes, _ in good:  # one row per part of the batch at least, heads that divide
        micro = 128 // changes["train.accumulate"]
        assert micro % (changes["mesh.data"] * changes["mesh.fsdp"]) == 0 and 8 % changes["mesh.tensor"] == 0
    slices = parse_topology("v5e:8x8", 2)
    assert all(changes["mesh.data"] % 2 == 0 for changes, _ in ranked(SETTING, slices, shapes))


def test_a_mesh_that_does_not_multiply_is_told():
    assert mesh_sizes(MeshConfig(data=-1, tensor=4), 64)["data"] == 16
    with pytest.raises(ValueError, match=r"mesh\.fsdp=5.*number of devices, 64"):
        mesh_sizes(MeshConfig(data=-1, fsdp=5), 64)


def refused(peak):
    memory = Memory({"parameters": 1}, None, None, None, None, peak, round(15.75 * GIB), round(15.2 * GIB))
    return Plan(
        SETTING, TOPOLOGY, {}, memory, None, [], None, [], 0, 1, 0.0, 0.0, refused="RESOURCE_EXHAUSTED"
    )  # fmt: skip


def test_advice_is_scaled_by_what_the_compiler_found(shapes):
    peak = guess(shapes).peak
    mild, strict = advise(refused(peak)), advise(refused(2 * peak))
    assert all(row.peak <= 15.2 * GIB for row in [*mild, *strict]) and mild
    (remat,) = [row for row in mild if set(row.changes) == {"model.remat"}]
    assert remat.peak == pytest.approx(guess(shapes, model__remat=remat.changes["model.remat"]).peak)
    assert {"train.accumulate", "train.batch_size"} & {key for row in mild + strict for key in row.changes}
    assert all("fewer tokens" in row.note for row in mild if "train.batch_size" in row.changes)


def test_where_nothing_fits_there_is_no_advice(shapes):
    assert advise(refused(1000 * guess(shapes).peak)) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "memory required for HLO temporaries (16.5G) exceeds available HBM (15.75G).",
            (16.5 * GIB, 15.75 * GIB),  # arguments of 1 GiB included
        ),
        ("Ran out of memory in memory space hbm. Used 20.25G of 15.75G hbm.", (20.25 * GIB, 15.75 * GIB)),
        ("Out of memory while trying to allocate 64.00GiB.", (64 * GIB, 16 * GIB)),
        ("nothing about sizes", (16 * GIB + 1, 16 * GIB)),
    ],
)
def test_a_refusal_s_numbers_are_read(text, found):
    assert told_memory(text, GIB, 16 * GIB) == found


@pytest.fixture
def searched(monkeypatch):
    """``searched(name, factors, slower)``: what a search finds for a config on 256 v5e, where it does not fit as it is.

    factors: the compiler's peaks over the estimates, in turn. slower: its bounds over them, by ``mesh.sequence``.
    """

    def run(name, factors, slower=lambda sequence: 1.0):
        config = load_config(CONFIGS / f"{name}.yaml")
        setting = dataclasses.replace(SETTING, **{part: getattr(config, part) for part in PARTS})
        topology, shapes, coming = parse_topology("v5e:16x16"), state_shapes(setting), iter(factors)
        room = topology.machine.memory * 0.95
        assert estimate(setting, topology, shapes).peak > room

        def compiled(asked, *_):
            guess = estimate(asked, topology, shapes)
            plan = refused(round(guess.peak * next(coming)))
            memory = dataclasses.replace(plan.memory, limit=room)
            bound = dataclasses.replace(BOUND, seconds=guess.seconds * slower(asked.mesh.sequence))
            return dataclasses.replace(plan, setting=asked, memory=memory, bound=bound, refused=None)

        monkeypatch.setattr(lmres.plan.search, "make_plan", compiled)
        found = lmres.plan.search.search(setting, topology, [], compiles=len(factors))
        assert found.best is not None and found.best[1].memory.peak <= room
        assert found.best[1].setting.train.batch_size == config.train.batch_size
        assert found.best[1].bound.seconds == min(plan.bound.seconds for _, plan in found.tried if plan.fits)
        return found

    return run


@pytest.mark.parametrize(
    ("name", "factors"), [("7b-mhc", (1.0,)), ("70b-plain", (1.3, 1.1)), ("70b-attnres", (1.25, 1.3, 1.0))]
)
def test_a_search_ends_with_what_fits(searched, name, factors):
    assert 1 <= len(searched(name, factors).tried) <= len(factors)


def test_a_search_leaves_a_way_of_splitting_that_is_slower_than_estimated(searched):
    found = searched("7b-mhc", (1.0, 1.0, 1.0), lambda sequence: 2.5 if sequence == 4 else 1.0)
    ways = [tuple(changes[f"mesh.{axis}"] for axis in ("sequence", "tensor")) for changes, _ in found.tried]
    assert ways[0] == (4, 1) and (4, 1) not in ways[1:]
    assert found.best[0]["mesh.sequence"] != 4
