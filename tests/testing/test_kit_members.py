"""One connection of each kind passes the whole equivalence kit."""

import jax
import pytest
from variants import KINDS, MEMBERS, name, slow_but

from lmres.testing import CHECKS, check_residual


@pytest.mark.parametrize("connection", slow_but(KINDS, MEMBERS), ids=name)
def test_every_member_passes(connection):
    report = check_residual(connection)
    reasons = {} if connection.has_matrix else {"matrix": "it mixes channels"}
    assert set(report.passed) == set(CHECKS) - set(reasons)
    assert all(reason in report.skipped[check] for check, reason in reasons.items())
    assert report.passed["sharded"]["devices"] == jax.device_count()
