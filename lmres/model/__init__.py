"""model: the decoder-only transformer.

``config`` its sizes, ``layers`` the two branches (attention, MLP) and their parts, ``transformer`` the whole;
``grid`` runs it where attention reads other cells of the token x layer grid than its own row. It knows the residual
connection only through its interface, and nothing of meshes: shardings come in as a ``constrain`` function.

May import: ops, residual, flow, jax, flax.
"""

from lmres.model.config import ModelConfig
from lmres.model.layers import KeyValues
from lmres.model.transformer import Past, Transformer

__all__ = ["KeyValues", "ModelConfig", "Past", "Transformer"]
