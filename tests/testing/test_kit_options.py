"""Every option that changes the function passes the equivalence kit."""

import pytest
from variants import ALL, MEMBERS, name

from lmres.testing import CHECKS, check_residual


@pytest.mark.slow
@pytest.mark.parametrize("connection", [c for c in ALL if c not in MEMBERS], ids=name)
def test_every_option_passes(connection):
    """Without the checks that run the same functions once more in another way."""
    check_residual(connection, only=[check for check in CHECKS if check not in ("remat", "decode", "sharded")])
