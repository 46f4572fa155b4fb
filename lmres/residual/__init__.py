"""residual: every way to carry information up the column.

One file per connection: its formula, shapes and cost at the head, then a frozen dataclass with pure functions.
``interface`` is the contract, ``stack`` runs branches under a connection, ``append`` is the backward pass for growing
histories, ``mixing`` the depth-mixing matrix, ``linen`` and ``nnx`` the thin Flax modules. What families share stands
in ``weighted`` (reads that are weighted sums of a history), ``depth_attention`` (softmax over depth; ``two_phase`` is
its fast form), ``depth_gates``, ``key_values`` and ``streams``. To add a connection: write its file and
add the class to ``Residual`` below; the config, the command line, the table and the tests find it there.

May import: ops, jax, flax (only ``linen`` and ``nnx``). Knows nothing of attention, MLPs, meshes or training.
"""

from lmres.residual.attention_residuals import AttentionResiduals
from lmres.residual.deep_cross_attention import DeepCrossAttention
from lmres.residual.delta_attention_residuals import DeltaAttentionResiduals
from lmres.residual.denseformer import DenseFormer
from lmres.residual.dynamic_lime import DynamicLIMe
from lmres.residual.fractions import FracConnections, GeneralizedHyperConnections
from lmres.residual.gated_residual import GatedResidual
from lmres.residual.hyper_connections import HyperConnections
from lmres.residual.interface import AppendOnly, Connection, Cost, History, layer_params
from lmres.residual.laurel import LAuReL
from lmres.residual.lime import LIMe
from lmres.residual.matrix import ResidualMatrix
from lmres.residual.mhc import MHC
from lmres.residual.mhc_per_stream import PerStreamMHC
from lmres.residual.mixing import depth_mixing, recompose
from lmres.residual.muddformer import MUDDFormer
from lmres.residual.multi_gate import MultiGateResiduals
from lmres.residual.plain import Plain
from lmres.residual.recent_deep_cross_attention import RecentDeepCrossAttention
from lmres.residual.scaled import DeepNorm, LayerScale, ReZero
from lmres.residual.stack import Stack, run_layers
from lmres.residual.value_residual import ValueResidual

Residual = (
    Plain
    | ReZero
    | LayerScale
    | DeepNorm
    | LAuReL
    | DenseFormer
    | MUDDFormer
    | DeepCrossAttention
    | RecentDeepCrossAttention
    | AttentionResiduals
    | DeltaAttentionResiduals
    | MultiGateResiduals
    | HyperConnections
    | FracConnections
    | GeneralizedHyperConnections
    | MHC
    | PerStreamMHC
    | GatedResidual
    | ResidualMatrix
    | ValueResidual
    | LIMe
    | DynamicLIMe
)
"""Every connection; a tagged union by ``kind``."""

__all__ = [
    "MHC",
    "AppendOnly",
    "AttentionResiduals",
    "Connection",
    "Cost",
    "DeepCrossAttention",
    "DeepNorm",
    "DeltaAttentionResiduals",
    "DenseFormer",
    "DynamicLIMe",
    "FracConnections",
    "GatedResidual",
    "GeneralizedHyperConnections",
    "History",
    "HyperConnections",
    "LAuReL",
    "LIMe",
    "LayerScale",
    "MUDDFormer",
    "MultiGateResiduals",
    "PerStreamMHC",
    "Plain",
    "ReZero",
    "RecentDeepCrossAttention",
    "Residual",
    "ResidualMatrix",
    "Stack",
    "ValueResidual",
    "depth_mixing",
    "layer_params",
    "recompose",
    "run_layers",
]
