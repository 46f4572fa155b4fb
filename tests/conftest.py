"""Eight simulated CPU devices, quick compiles and a persistent cache of them, set before jax is imported anywhere."""

import os
import tempfile
from pathlib import Path

from compiling import QUICK, flags

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags(QUICK)}"
cache = Path(os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "lmres-test-cache")))
cache.mkdir(parents=True, exist_ok=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("MPLBACKEND", "Agg")

import jax  # noqa: E402 - after the environment is set
import pytest  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def programs_are_dropped():
    """Compiled programs of one file are of no use to the next, and thousands of them fill the memory."""
    yield
    jax.clear_caches()
