"""Which parameters of growing connections move from their start, and which cannot."""

import numpy as np
import pytest
from growing_references import D, L
from growing_stack import gradient, moved, noise, start

from lmres.residual import (
    AttentionResiduals,
    DeltaAttentionResiduals,
    DynamicLIMe,
)

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("size, heads", [(1, 2), (3, 1), (4, 2)])
def test_zero_queries_move_and_gains_do_not(size, heads):
    """All queries but the first reader's, which has one source and never gets a gradient."""
    connection = AttentionResiduals(block=size, heads=heads, key_gain=True)
    grads = gradient(connection, start(connection))["shared"]
    assert not np.any(grads["gain"])
    rows = np.abs(grads["query"]).max(-1)
    assert rows[0] == 0 and np.all(rows[1:] > 1e-6)
    assert connection.no_gradient == {"query": (0,), "gain": (0,)}
    moved_grads = gradient(connection, moved(connection))["shared"]
    for name in ("query", "gain"):
        rows = np.abs(moved_grads[name]).max(-1)
        assert rows[0] == 0 and np.all(rows[1:] > 1e-6)


def test_closed_gates_move_and_their_queries_do_not():
    connection = DeltaAttentionResiduals(block=3)
    params = start(connection, query=noise(L, D))
    grads = gradient(connection, params)
    assert np.all(grads["layers"]["gate"] != 0) and not np.any(grads["shared"]["query"])
    grads = gradient(connection, {**params, "layers": {"gate": np.ones(L)}})["shared"]["query"]
    rows = np.abs(grads).max(-1)
    assert np.all(rows[:3] == 0) and np.all(rows[3:] > 1e-6), "one source in the first depth block"


def test_dynamic_lime_moves_from_its_start_but_for_the_only_source():
    connection = DynamicLIMe()
    grads = gradient(connection, start(connection))
    for name in ("weight", "bias"):
        rows = np.abs(grads["shared"][name].reshape(len(grads["shared"][name]), -1)).max(-1)
        assert rows[0] == 0 and np.all(rows[1:] > 0)
    assert not np.any(grads["layers"]["gain"])
