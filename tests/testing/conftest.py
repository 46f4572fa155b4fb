"""The kit compiles a dozen programs per connection: without this a worker runs out of memory mappings."""

import jax
import pytest


@pytest.fixture(autouse=True)
def programs_of_one_connection():
    yield
    jax.clear_caches()
