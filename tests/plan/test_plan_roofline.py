"""The bound is the slowest of three roofs, by hand."""

import dataclasses

import pytest

from lmres.plan.machines import MACHINES
from lmres.plan.roofline import bound

V5E, H200 = MACHINES["v5e"], MACHINES["h200"]


def test_each_roof_by_hand():
    found = bound(V5E, flops=197e12, moved=2 * 819e9, sent=0.5 * 200e9)
    assert (found.compute, found.memory, found.network) == pytest.approx((1.0, 2.0, 0.5))
    assert found.seconds == pytest.approx(2.0) and found.by == "memory" and not found.incomplete


def test_what_leaves_a_gpu_host_is_slower():
    near = bound(H200, flops=989.4e12, moved=0.0, sent=450e9)
    far = bound(H200, flops=989.4e12, moved=0.0, sent=450e9, far=2 * 50e9)
    assert near.network == pytest.approx(1.0) and far.network == pytest.approx(2.0)
    assert near.by == "compute" and far.by == "network"


def test_what_is_not_published_is_not_invented():
    found = bound(V5E, flops=197e12, moved=0.0, sent=3 * 200e9, far=1.0)
    assert found.network is None and found.seconds == pytest.approx(3.0) and "TPU v5 lite" in found.incomplete


def test_the_peak_is_that_of_the_training_room():
    assert bound(dataclasses.replace(V5E, kind="TPU v5"), 459e12, 0.0, 0.0).compute == pytest.approx(1.0)
