"""Float64 for the tests that ask for it."""

import jax
import pytest


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
