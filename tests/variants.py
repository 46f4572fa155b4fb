"""The connections that tests run over, and how to move parameters away from their start."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmres.residual import (
    MHC,
    AttentionResiduals,
    DeepCrossAttention,
    DeepNorm,
    DeltaAttentionResiduals,
    DenseFormer,
    DynamicLIMe,
    FracConnections,
    GatedResidual,
    GeneralizedHyperConnections,
    HyperConnections,
    LAuReL,
    LayerScale,
    LIMe,
    MUDDFormer,
    MultiGateResiduals,
    PerStreamMHC,
    Plain,
    RecentDeepCrossAttention,
    ResidualMatrix,
    ReZero,
    ValueResidual,
)

EPS = 1e-12
# Whether steps are lowered and compiled for every connection x machine that is not here, which takes long.
FULL_MATRIX = bool(os.environ.get("LMRES_FULL_MATRIX"))

# One of each mechanism, for expensive tests: fixed states, histories, blocks as units, several inputs, keys and values
# that are lent, norms of its own.
KINDS = [
    Plain(),
    DenseFormer(),
    AttentionResiduals(),
    HyperConnections(),
    MHC(),
    GatedResidual(),
    MUDDFormer(),
    DeepCrossAttention(),
    LIMe(),
]

# Every option that changes the function.
ALL = [
    Plain(),
    Plain(norm="post"),
    Plain(norm="sandwich"),
    DenseFormer(),
    DenseFormer(dilation=2, period=1),
    DenseFormer(dilation=2, period=3),
    AttentionResiduals(eps=EPS),
    AttentionResiduals(block=2, eps=EPS),
    AttentionResiduals(block=3, key_gain=True, eps=EPS),
    HyperConnections(),
    HyperConnections(streams=2, norm="rms"),
    HyperConnections(streams=2, dynamic=False),
    HyperConnections(streams=1),
    MHC(norm_eps=EPS),
    MHC(streams=2, eps=0.0, readout="sum", norm_gain=True, norm_eps=EPS),
    MHC(constraint="permutations", norm_eps=EPS),
    MHC(constraint="kronecker", norm_eps=EPS),
    MHC(constraint="circulant", streams=3, norm_eps=EPS),
    MHC(constraint="identity", norm_eps=EPS),
    MHC(reads="previous", norm_eps=EPS),
    MHC(reads="previous", constraint="identity", norm_eps=EPS),
    PerStreamMHC(),
    FracConnections(),
    FracConnections(fractions=2, dynamic=False),
    GeneralizedHyperConnections(streams=3),
    GeneralizedHyperConnections(streams=4, fractions=4, dynamic=False),
    GatedResidual(),
    GatedResidual(streams=2, rank=3, std=0.3),
    MultiGateResiduals(slots=3),
    MultiGateResiduals(slots=8, eps=EPS),
    ReZero(),
    ReZero(norm="input"),
    LayerScale(),
    LayerScale(start=1.0),
    DeepNorm(alpha=2.0),
    DeepNorm(alpha=2.0, norm="input"),
    LAuReL(),
    LAuReL(weights="softmax"),
    LAuReL(weights="none", rank=2),
    LAuReL(rank=2, previous=3),
    LAuReL(weights="gemma", rank=2),
    ResidualMatrix(keys=6),
    ResidualMatrix(keys=6, ways=(1,)),
    AttentionResiduals(heads=2, eps=EPS),
    AttentionResiduals(block=2, heads=2, temperature=2.0, eps=EPS),
    DeltaAttentionResiduals(eps=EPS),
    DeltaAttentionResiduals(block=2, heads=2, gate="none", eps=EPS),
    MUDDFormer(),
    MUDDFormer(ways=(1,), dynamic="static"),
    MUDDFormer(norm="prepost", expand_last=True),
    DeepCrossAttention(),
    DeepCrossAttention(ways=(1,), version=1),
    DeepCrossAttention(version=2),
    DeepCrossAttention(norm="rms", eps=EPS),
    RecentDeepCrossAttention(norm="rms", eps=EPS),
    RecentDeepCrossAttention(version=1, last=1, ways=(1,)),
    ValueResidual(),
    ValueResidual(mode="fixed"),
    LIMe(),
    LIMe(routers="shared", start="identity"),
    DynamicLIMe(),
    DynamicLIMe(ways=(3, 1)),
]


# One of each kind.
MEMBERS = list({c.kind: c for c in reversed([*KINDS, *ALL])}.values())[::-1]

# And with options that change what is carried and sent: depth blocks, heads, other norms, shifted and earlier reads.
CARRIED = [
    *MEMBERS,
    Plain(norm="sandwich"),
    AttentionResiduals(block=2),
    AttentionResiduals(heads=2),
    DeltaAttentionResiduals(block=2, heads=2),
    MHC(reads="previous"),
    LAuReL(rank=2, previous=3),
]


def slow_but(fast, connections):
    """``connections`` as parameters of a test of which the fast selection keeps those in ``fast``."""
    return [c if c in fast else pytest.param(c, marks=pytest.mark.slow) for c in connections]


MEMBERS_SOME_SLOW = slow_but(KINDS, MEMBERS)


def name(connection) -> str:
    """A test id that is unique among the lists above."""
    options = [str(v) for k, v in vars(connection).items() if k != "kind"]
    return f"{connection.kind}({','.join(options)})"


def randomised(params, seed=0, size=0.05):
    """``params`` with normal noise on every entry, so that no connection is at its start."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten(
        [
            p + size * jax.random.normal(k, p.shape, jnp.promote_types(p.dtype, jnp.float32))
            for p, k in zip(leaves, keys)
        ]
    )


def draw(model, seed=0):
    """Parameters of ``model`` drawn with numpy, none of them at its start; saves compiling the real initialisation."""
    shapes = jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, 1), jnp.int32))["params"], jax.random.key(0))
    rng = np.random.default_rng(seed)

    def one(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # Weights of sums are near one: near zero, norms would blow rounding up.
        centre = 1.0 if name.endswith(("gain", "static_beta", "shared/bias")) else 0.0
        matrix = leaf.ndim > 2 and "connection" not in name
        size = leaf.shape[-2] ** -0.5 if matrix else 0.05
        return jnp.asarray(centre + rng.normal(0, size, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(one, shapes)
