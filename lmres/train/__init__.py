"""train: from a config's sections to a trained, saved, resumable model.

``config`` the settings; ``schedule``, ``optimizer``, ``loss``, ``state``, ``step``, ``update`` the update; ``feed`` and
``evaluate`` the data's way in; ``checkpoint`` (with ``digest`` and ``fingerprint``), ``metrics``, ``preempt``,
``progress``, ``flops`` the loop's helpers; ``session`` builds all parts of a run, ``loop`` runs them, ``run`` is the
whole from start to end.

May import: data, tasks, model, residual, ops, sharding; jax, optax, orbax.
"""
