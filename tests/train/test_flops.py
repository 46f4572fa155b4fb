"""FLOPs against XLA's own count and by hand; speed against a clock that is set by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from lmres.flow import Chunks, FlowConfig, ReadSet, Term, keys_per_query, parse, reads_of
from lmres.flow.readset import BOTTOM
from lmres.model import ModelConfig, Transformer
from lmres.residual.plain import Plain
from lmres.train.flops import (
    Throughput,
    flops_per_token,
    flow_matrices,
    matrix_parameters,
    peak_flops,
    show,
    utilisation,
)
from lmres.train.optimizer import kind_of
from lmres.train.state import abstract_params

MODEL = ModelConfig(
    vocab_size=96, context=16, width=32, blocks=3, heads=4, kv_heads=2, head_dim=6, mlp_hidden=40
)


def test_by_hand():
    # query 32x24, key and value 32x12, out 24x32, three MLP matrices 32x40, head 96x32
    block, head = 768 + 2 * 384 + 768 + 3 * 1280, 3072
    assert matrix_parameters(MODEL) == (block, head)
    parts = flops_per_token(MODEL, Plain())
    assert parts["matrices"] == 6 * (3 * block + head)
    assert parts["attention"] == 6 * 3 * 4 * 6 * 17
    assert parts["connection"] == 3 * 6 * 32  # one addition per sub-layer and channel, forward and backward
    assert parts["total"] == sum(parts[key] for key in ("matrices", "attention", "connection"))
    gelu = dataclasses.replace(MODEL, mlp="gelu")
    assert matrix_parameters(gelu)[0] == block - 1280


def test_options():
    assert flops_per_token(MODEL, Plain(), sequence=5)["attention"] == 6 * 3 * 4 * 6 * 6
    twice = flops_per_token(MODEL, Plain(), applications=6)
    once = flops_per_token(MODEL, Plain())
    head = 6 * 96 * 32
    assert twice["matrices"] - head == 2 * (once["matrices"] - head)
    with pytest.raises(ValueError, match=r"model\.vocab_size"):
        flops_per_token(ModelConfig(), Plain())


@dataclasses.dataclass(frozen=True)
class ByBlock(Plain):
    unit = "block"


def test_depth_is_counted_in_the_connections_unit():
    assert flops_per_token(MODEL, ByBlock())["connection"] == 3 * 3 * 32


def counted_by_xla(model, sequence):
    """FLOPs of a token in the forward pass of the model itself, as XLA counts: elementwise ones included."""
    transformer = Transformer(model, Plain())
    tokens = jax.ShapeDtypeStruct((8, sequence), jnp.int32)
    params = jax.eval_shape(lambda key, t: transformer.init(key, t)["params"], jax.random.key(0), tokens)
    lowered = jax.jit(lambda p, t: transformer.apply({"params": p}, t)).lower(params, tokens)
    return lowered.cost_analysis()["flops"] / (8 * sequence)


@pytest.mark.parametrize("options", [{}, {"mlp": "gelu", "tie_embeddings": False, "kv_heads": 4}])
def test_against_the_compilers_count(options):
    model = ModelConfig(
        vocab_size=512, width=128, blocks=2, heads=4, kv_heads=2, head_dim=48, mlp_hidden=256, scan=False
    )
    model = dataclasses.replace(model, **options)
    ours = flops_per_token(model, Plain(), sequence=1)
    assert ours["total"] / 3 == pytest.approx(counted_by_xla(model, 1), rel=0.03)
    # XLA multiplies the masked half of the scores too: S positions for each token instead of (S + 1) / 2.
    more = counted_by_xla(model, 128) - counted_by_xla(model, 1)
    attention = flops_per_token(model, Plain(), sequence=128)["attention"] / 3
    assert attention * 2 * 128 / 129 == pytest.approx(more, rel=0.15)


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("TPU7x", 1153.5),
        ("NVIDIA L40S", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("TPU v3", None),
        ("cpu", None),
    ],
)
def test_peaks(kind, tera):
    peak = peak_flops(kind)
    assert peak is None if tera is None else peak == tera * 1e12


def test_utilisation():
    assert utilisation(1e6, 1e9, "TPU v4", 8) == pytest.approx(1e15 / (8 * 275e12))
    assert show(utilisation(1e6, 1e9, "cpu", 1)) == "n/a" and show(0.4567) == "45.7%"


def test_throughput_leaves_out_compiling_and_pauses():
    now = [100.0]
    speed = Throughput(steps=10, clock=lambda: now[0])
    assert speed.rate() is None and speed.remaining() is None

    def step(number, seconds, tokens=50):
        now[0] += seconds
        speed.update(number, tokens)

    step(1, 60.0)  # compiles
    assert speed.rate() is None and speed.remaining() is None
    step(2, 2.0)
    step(3, 2.0)
    assert speed.rate() == 25.0 and speed.remaining() == 14.0
    with speed.pause():
        now[0] += 1000.0
    step(4, 1.0)
    assert speed.rate() == 50.0
    assert speed.remaining() == pytest.approx(6 * 5.0 / 3)
    assert speed.rate() is None, "no step since"


def test_throughput_of_a_resumed_run_counts_from_where_it_began():
    now = [0.0]
    speed = Throughput(steps=100, clock=lambda: now[0])
    for number in (91, 92, 93):
        now[0] += 1.0
        speed.update(number, 10)
    assert speed.remaining() == 7.0 and speed.rate() == 10.0


@pytest.mark.parametrize("sequence", [1, 7, 16, 128])
def test_ordinary_attention_is_counted_as_before_there_were_flows(sequence):
    parts = flops_per_token(MODEL, Plain(), sequence, flow=FlowConfig("standard", schedule="parallel"))
    assert parts["attention"] == 6.0 * 3 * 4 * 6 * (sequence + 1)
    assert parts == flops_per_token(MODEL, Plain(), sequence)


def test_a_flow_is_counted_by_the_keys_it_reads():
    once = flops_per_token(MODEL, Plain())
    deep = flops_per_token(MODEL, Plain(), flow=FlowConfig("deep"))  # the own cell, and 3 layers of all before
    assert deep["attention"] == pytest.approx(once["attention"] * (1 + 3 * 7.5) / 8.5)
    assert {**deep, "attention": 0, "total": 0} == {**once, "attention": 0, "total": 0}


def test_sweeps_are_counted_for_all_but_the_head():
    once = flops_per_token(MODEL, Plain(), flow=FlowConfig("top"))
    swept = flops_per_token(MODEL, Plain(), flow=FlowConfig("top", schedule="swept", sweeps=1, gradient_sweeps=2))
    head = 6 * 96 * 32
    assert swept["total"] - head == pytest.approx((once["total"] - head) * (1 + 3 * 2) / 3)
    assert swept["matrices"] - head == pytest.approx((once["matrices"] - head) * 7 / 3)


READ_SETS = [
    "standard", "map(1,1,4,2)", "block(2)", "moda", "rectangle(3)", "diagonal(-1/2)", "diagonal(2/3)", "cone(1)",
    "cone(1/2)", "recurrent", "top", "deep", "lag(3)", "chunk(4)", "feedback",
]  # fmt: skip


@pytest.mark.parametrize("adopt", [None, "optional", "mandatory"])
@pytest.mark.parametrize("kind", READ_SETS)
def test_keys_per_query_are_those_counted_cell_by_cell(kind, adopt):
    reads = dataclasses.replace(parse(kind), adopt=adopt).reads(4)
    for tokens in (1, 2, 5, 13, 16):
        assert keys_per_query(reads, tokens) == reads_of(reads, tokens).sum() / (4 * tokens)


def test_keys_per_query_with_chunks_of_two_sizes():
    reads = ReadSet((Term(chunks=Chunks("same", 4)), Term(low=BOTTOM, chunks=Chunks("earlier", 6), near=1)), 3, 3)
    for tokens in (3, 12, 17):
        assert keys_per_query(reads, tokens) == reads_of(reads, tokens).sum() / (3 * tokens)


def test_keys_of_shared_heads_and_of_a_gated_branch():
    both = flops_per_token(MODEL, Plain(), flow=FlowConfig("standard + deep"))["attention"]
    each = [flops_per_token(MODEL, Plain(), flow=FlowConfig(kind))["attention"] for kind in ("standard", "deep")]
    assert both == pytest.approx(sum(each) / 2)
    gated = flops_per_token(MODEL, Plain(), flow=FlowConfig("top", combine="gated"))["attention"]
    once = flops_per_token(MODEL, Plain())["attention"]  # the lower two of three layers read the top of all before
    assert gated == pytest.approx(once * (8.5 + 2 / 3 * 7.5) / 8.5)


@pytest.mark.parametrize(
    ("flow", "times"),
    [
        (FlowConfig("deep"), 0),
        (FlowConfig("deep", output=True), 1),  # the output cell's
        (FlowConfig("recurrent"), 3),  # each of three layers projects the source above it too
        (FlowConfig("deep", projection="consumer"), 6),  # each of the other two
    ],
    ids=str,
)
def test_projections_of_a_flow_are_counted_as_often_as_they_are_used(flow, times):
    assert flow_matrices(MODEL, flow, 3) == times * 2 * 32 * 2 * 6


@pytest.mark.parametrize("flow", [FlowConfig("deep", output=True), FlowConfig("pool(2)")], ids=lambda f: f.kind)
def test_matrices_of_a_flow_are_those_of_its_model(flow):
    def matrices(flow):
        leaves = jax.tree_util.tree_leaves_with_path(abstract_params(Transformer(MODEL, Plain(), flow=flow)))
        counted = [leaf.size for path, leaf in leaves if kind_of(path).role == "matrix" or "router" in str(path)]
        return sum(counted)

    mixing = 2 * 2 * 3 * 32 * (flow.kind == "pool(2)")  # weights of 2 channels over 3 layers, for keys and for values
    assert flow_matrices(MODEL, flow, 3) - mixing == matrices(flow) - matrices(FlowConfig())


def test_a_plain_start_is_a_third_of_a_step_more():
    swept = FlowConfig("deep", schedule="swept", sweeps=2)
    one, other = (flops_per_token(MODEL, Plain(), flow=f) for f in (swept, dataclasses.replace(swept, start="plain")))
    third = flops_per_token(MODEL, Plain())
    head = 6 * 96 * 32
    assert other["total"] - one["total"] == pytest.approx((third["total"] - head) / 3)
