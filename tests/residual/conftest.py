"""Fixtures that several files of these tests ask for."""

import jax
import pytest


@pytest.fixture
def x64():
    """Float64 throughout a test."""
    with jax.enable_x64(True):
        yield
