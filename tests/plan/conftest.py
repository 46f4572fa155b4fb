"""A small model to be planned, and ``lmres plan`` on it in this process."""

import importlib.util

import pytest

from lmres.cli import main

# Compiled in seconds; libtpu's compiler takes longer the larger the arrays are.
SMALL = """
model: {vocab_size: 512, context: 128, width: 64, blocks: 2, heads: 4, dtype: bfloat16, remat: full}
residual: {kind: mhc, streams: 2, constraint: permutations}
train: {batch_size: 8}
mesh: {data: 1, fsdp: -1}
"""


def installed(module):
    """Whether a module of the extra is there, its parents included."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture
def needs_tpu():
    if not installed("libtpu"):
        pytest.skip("lmres[plan] is not installed: no libtpu")


@pytest.fixture
def needs_gpu():
    if not installed("jax_plugins.xla_cuda13") and not installed("jax_plugins.xla_cuda12"):
        pytest.skip("lmres[plan] is not installed: no CUDA plugin")


@pytest.fixture
def plan(tmp_path, capsys):
    """``plan(*words)`` runs ``lmres plan`` on the small model and gives (exit code, stdout, stderr)."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")

    def run(*words):
        capsys.readouterr()
        code = main(["plan", str(path), *words])
        return code, *capsys.readouterr()

    return run
