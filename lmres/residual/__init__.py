"""residual: every way to carry information up the column.

One file per connection: its formula, shapes and cost at the head, then a frozen dataclass with pure functions.
``interface`` is the contract, ``stack`` runs branches under a connection, ``append`` is the backward pass for growing
histories, ``mixing`` the depth-mixing matrix, ``linen`` the thin Flax module. To add a connection: write its file and
add the class to ``Residual`` below; the config, the command line, the table and the tests find it there.

May import: ops, jax, flax (only ``linen``). Knows nothing of attention, MLPs, meshes or training.
"""

from lmres.residual.attention_residuals import AttentionResiduals
from lmres.residual.denseformer import DenseFormer
from lmres.residual.fractions import FracConnections, GeneralizedHyperConnections
from lmres.residual.gated_residual import GatedResidual
from lmres.residual.hyper_connections import HyperConnections
from lmres.residual.interface import AppendOnly, Connection, Cost, History, layer_params
from lmres.residual.laurel import LAuReL
from lmres.residual.matrix import ResidualMatrix
from lmres.residual.mhc import MHC
from lmres.residual.mhc_per_stream import PerStreamMHC
from lmres.residual.mixing import depth_mixing, recompose
from lmres.residual.multi_gate import MultiGateResiduals
from lmres.residual.plain import Plain
from lmres.residual.scaled import DeepNorm, LayerScale, ReZero
from lmres.residual.stack import Stack, run_layers

Residual = (
    Plain
    | DenseFormer
    | AttentionResiduals
    | HyperConnections
    | FracConnections
    | GeneralizedHyperConnections
    | MHC
    | PerStreamMHC
    | GatedResidual
    | MultiGateResiduals
    | ReZero
    | LayerScale
    | DeepNorm
    | LAuReL
)
"""Every connection; a tagged union by ``kind``."""

__all__ = [
    "MHC",
    "AppendOnly",
    "AttentionResiduals",
    "Connection",
    "Cost",
    "DeepNorm",
    "DenseFormer",
    "FracConnections",
    "GatedResidual",
    "GeneralizedHyperConnections",
    "History",
    "HyperConnections",
    "LAuReL",
    "LayerScale",
    "MultiGateResiduals",
    "PerStreamMHC",
    "Plain",
    "ReZero",
    "Residual",
    "ResidualMatrix",
    "Stack",
    "depth_mixing",
    "layer_params",
    "recompose",
    "run_layers",
]
