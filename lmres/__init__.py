"""lmres: language models in JAX/Flax whose residual connection is a choice.

Rooms, and the one way their imports go (each room's ``__init__`` says more)::

    ops <- residual <- model <- train, generate, analysis, experiment <- cli
    data, tasks     know nothing of the model
    sharding        is the only file that knows mesh axis names
    config          composes every room's own config into one run config

Nothing is imported here: ``import lmres.residual`` costs only what that room needs.
"""

__version__ = "0.1.0"
