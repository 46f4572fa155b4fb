"""Entries and windows of arrays at an index that is not negative.

The functions of jax wrap negative indices around, which are three operations and a kernel of their own each time.
"""

from functools import partial

import jax

take = partial(jax.lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False)
put = partial(jax.lax.dynamic_update_index_in_dim, allow_negative_indices=False)
take_window = partial(jax.lax.dynamic_slice_in_dim, allow_negative_indices=False)
put_window = partial(jax.lax.dynamic_update_slice_in_dim, allow_negative_indices=False)
