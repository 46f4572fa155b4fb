"""What a flow that trains in one parallel pass computes: its FLOPs against XLA's count, its keys against its
description."""

import functools

import jax
import jax.extend
import numpy as np
import pytest
from jax.interpreters import partial_eval
from variants import draw

from lmres.flow import FlowConfig, reads_of
from lmres.model import ModelConfig, Transformer
from lmres.residual.plain import Plain
from lmres.testing.counting import count
from lmres.train.flops import flops_per_token, keys_computed

B, T, L = 8, 64, 4
# Attention is a third of block(4); elementwise work, which the formula leaves out, stays below a tenth.
MODEL = ModelConfig(vocab_size=32, context=T, width=64, blocks=L, heads=2, mlp_hidden=160)
TOKENS = np.random.default_rng(0).integers(0, 32, (B, T))
# Cells per query that a flow may be compared with beyond a tenth of its description: patches of the nearest tokens.
PATCH = 4 * L

FAST = [FlowConfig("block(2)"), FlowConfig("block(2)", combine="gated"), FlowConfig("moda")]
SLOW = [
    *(FlowConfig(f"block({L})"), FlowConfig("rectangle(4)"), FlowConfig("diagonal(-1)"), FlowConfig("diagonal(-1/2)")),
    *(FlowConfig("diagonal(-1/4)"), FlowConfig("cone(0)"), FlowConfig("map(1,1,2,2)")),
    *(FlowConfig("standard + block(2)"), FlowConfig("standard", bias=0.0)),
]
ALIKE = [
    *(FlowConfig("diagonal(-1)", border="drop"), FlowConfig("cone(0)", adopt="optional")),
    *(FlowConfig(f"lag({T})"), FlowConfig(f"chunk({T})"), FlowConfig("moda", combine="gated")),
]


def name(flow):
    return f"{flow.kind}-{flow.border}-{flow.combine}"


def counted(f, *args):
    """FLOPs of a token in ``f``, without what no result depends on: XLA drops it."""
    closed = jax.make_jaxpr(f)(*args)
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    kept = [leaf for leaf, needed in zip(jax.tree.leaves(args), used, strict=True) if needed]
    run = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(jaxpr, closed.consts))
    return count(lambda *leaves: run(*leaves), *kept).flops / (B * T)


@functools.cache
def counts_of(flow):
    """(forward, whole training step) FLOPs of a token."""
    model = Transformer(MODEL, Plain(), flow=flow)
    params = draw(model)

    def loss(params):
        return model.apply({"params": params}, TOKENS).mean()

    return counted(loss, params), counted(jax.value_and_grad(loss), params)


@pytest.mark.parametrize("flow", [*FAST, *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW)], ids=name)
def test_formula_is_what_xla_computes(flow):
    forward, step = counts_of(flow)
    ours = flops_per_token(MODEL, Plain(), flow=flow, masked=True)["total"]
    # Elementwise work is left out of the formula, and no product of matrices.
    assert 0.95 * forward < ours / 3 < forward
    assert 0.95 * step < ours < step
    # Nothing is computed twice.
    assert 2.95 * forward < step < 3.05 * forward


def described(flow):
    """Keys per query that a causal implementation without skipping compares: twice the mean of those read by the
    layer that reads most, since one compiled body serves all layers."""
    parts = [reads_of(part, T).sum((0, 2, 3)).max() / T for part in flow.parts(L)]
    own = reads_of(FlowConfig("standard").reads(L), T).sum() / (L * T) if flow.combine == "gated" else 0
    foreign = [reads_of(part, T) for part in flow.parts(L)]
    if flow.combine == "gated":  # the own row in one softmax, what the geometry adds to it in another
        for l in range(L):
            foreign[0][:, l, :, l] = False
        parts = [foreign[0].sum((0, 2, 3)).max() / T]
    return 2 * (own + np.mean(parts))


@pytest.mark.parametrize("flow", [*FAST, *SLOW, *ALIKE], ids=name)
def test_keys_computed_are_those_of_the_description(flow):
    keys = keys_computed(flow, L, T)
    assert keys <= 1.1 * described(flow) + PATCH
    assert keys >= 0.9 * described(flow) - PATCH
    ordinary, masked = (flops_per_token(MODEL, Plain(), flow=flow, masked=m)["attention"] for m in (False, True))
    assert masked / ordinary == pytest.approx(keys / (ordinary / (12 * L * MODEL.width)))


@pytest.mark.parametrize(
    ("flow", "keys"),
    [
        (FlowConfig(), T),
        (FlowConfig("deep"), L * T + 1),  # token by token: the own cell, and every row
        (FlowConfig("deep", combine="gated"), 1 + T + (L - 1) * T),  # the own row apart, and every other
        (FlowConfig("top", schedule="swept", groups=4), T + T // 4),
        (FlowConfig("chunk(16)"), L * T + 16),
        (FlowConfig("cone(1)", schedule="wavefront"), L * T + 1),
        # The top layer's own row lies where the others' lie, so the heads that read the top are given both.
        (FlowConfig("standard + top"), ((T + 1) + (2 * T + 1)) / 2),
    ],
    ids=lambda x: f"{x.kind}-{x.schedule}" if isinstance(x, FlowConfig) else "",
)
def test_keys_computed_by_other_schedules(flow, keys):
    assert keys_computed(flow, L, T) == keys
