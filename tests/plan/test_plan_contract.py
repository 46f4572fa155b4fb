"""A train step of every connection, compiled for machines that are not here: what it sends, holds and keeps whole.

By default one machine for each mechanism; ``LMRES_FULL_MATRIX=1`` takes every connection to every machine.
"""

import dataclasses
import re
from typing import Literal

import jax
import jax.numpy as jnp
import pytest
from contract import MACHINES, TOKENS, WIDTH, argument_faults, array_faults, compiled, faults, memory_faults
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from variants import CARRIED, FULL_MATRIX, name

from lmres.plan.hlo import Shape
from lmres.residual import (
    MHC,
    AttentionResiduals,
    LIMe,
    MUDDFormer,
    Plain,
    RecentDeepCrossAttention,
)
from lmres.residual.interface import Axes

# A fixed state, a history, several inputs, keys and values that are lent.
SOME = {
    "v5p pod": [Plain(), RecentDeepCrossAttention(), LIMe()],
    "v5e slices": [Plain(), AttentionResiduals()],
    "16 h200": [Plain(), MHC(), MUDDFormer()],
}
PAIRS = [(machine, c) for machine, some in SOME.items() for c in (CARRIED if FULL_MATRIX else some)]


@pytest.fixture(autouse=True)
def compiler(request):
    """Skips what the extra ``plan`` is not installed for."""
    machine = request.node.callspec.params["machine"]
    request.getfixturevalue("needs_gpu" if "h200" in machine else "needs_tpu")


@pytest.mark.parametrize(("machine", "connection"), PAIRS, ids=lambda x: x if isinstance(x, str) else name(x))
def test_a_step_sends_holds_and_splits_what_it_should(machine, connection):
    found = faults(connection, MACHINES[machine])
    assert not found, "\n".join(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaky(Plain):
    """Plain with a fault."""

    fault: Literal["earlier tokens", "unnamed axes"]

    def read(self, params_l, state, l, context=None):
        return (jnp.roll(state, 1, axis=1) if self.fault == "earlier tokens" else state), ()

    def state_axes(self):
        return Axes(None, None, None) if self.fault == "unnamed axes" else super().state_axes()


@pytest.mark.parametrize(
    ("machine", "fault", "said"),
    [
        ("v5p pod", "earlier tokens", r"uses \['collective-permute'\]"),
        ("16 h200", "unnamed axes", r"(?s)numbers of activations over fsdp; 0 are expected.* makes \w+\[8,184,128\]"),
    ],
)
def test_faults_of_a_connection_are_found(machine, fault, said):
    assert re.search(said, "\n".join(faults(Leaky(fault=fault), MACHINES[machine])))


@pytest.mark.parametrize("machine", ["v5p pod"])
def test_other_faults_are_found(machine):
    step = compiled(Plain(), MACHINES[machine])
    whole = dataclasses.replace(step, arrays={("copy", Shape("bf16", (1, 2 * TOKENS, WIDTH)))})
    assert "whole rows where each device has a part" in array_faults(whole)[0]
    assert (
        "bytes more than plain" in memory_faults(dataclasses.replace(step, temporaries=2 * step.temporaries), step)[0]
    )
    state, batch = step.placed
    up = state["params"]["stack"]["mlp"]["up"]
    state = jax.tree.map(lambda placed: NamedSharding(up.mesh, P()) if placed is up else placed, state)
    (told,) = argument_faults(dataclasses.replace(step, placed=(state, batch)))
    assert told == "params/stack/mlp/up (2, 128, 256): 65536 of 65536 numbers on each of 64 devices"
