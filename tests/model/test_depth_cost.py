"""What depth costs the compiler: temporaries grow linearly, compile time does not grow.

Only compiled, never run. The width is a realistic one: full Attention Residuals store the logits of all readers beside
the history, L / D of its size, which a toy width would make look quadratic.
"""

import jax
import pytest
from variants import KINDS, name

from lmres.experiment.bench import compile_step
from lmres.model import ModelConfig
from lmres.residual import AttentionResiduals

CONFIG = {"vocab_size": 64, "context": 256, "width": 768, "heads": 8, "mlp_hidden": 768, "remat": "full"}
BATCH = 8
DEPTHS = (12, 24, 48)  # blocks


def compiled(connection, blocks):
    program, *_, seconds = compile_step(ModelConfig(blocks=blocks, **CONFIG), connection, BATCH)
    return program.memory_analysis().temp_size_in_bytes, seconds


@pytest.fixture(autouse=True)
def no_cache():
    """Compile times of cached programs say nothing."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.slow
@pytest.mark.parametrize("connection", [*KINDS, AttentionResiduals(block=4)], ids=name)
def test_temporaries_grow_linearly_and_compile_time_does_not(connection):
    small, middle, large = (compiled(connection, blocks) for blocks in DEPTHS)
    # Twice the depth is at most twice the memory (a history kept once per layer would be near four times).
    assert middle[0] <= 2.1 * small[0], f"{small[0] / 2**20:.1f} MiB at 12 blocks, {middle[0] / 2**20:.1f} at 24"
    assert large[0] <= 2.1 * middle[0], f"{middle[0] / 2**20:.1f} MiB at 24 blocks, {large[0] / 2**20:.1f} at 48"
    # Best of two: a single timing on a busy machine may be twice too long.
    seconds = min(large[1], compiled(connection, 48)[1])
    assert seconds <= 1.5 * small[1], f"compiling took {small[1]:.1f} s at 12 blocks, {seconds:.1f} at 48"
