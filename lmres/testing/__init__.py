"""testing: the equivalence kit, for the connections here and for your own.

    from lmres.testing import check_residual
    print(check_residual(Weighted()))       # raises ResidualCheckError, saying what is wrong and what would be right

``kit`` is the entry and the list of checks; ``report`` what comes out; ``setting`` the small stacks and models that
the checks share, compiled once each. The checks: ``functions`` the four functions themselves, ``running`` the ways to
run them (scanned, rematerialised, cached, sharded), ``declared`` what a connection states as data; ``counting``
counts operations as XLA does.

May import: residual, model, generate, sharding, train.optimizer, ops, chex. Nothing imports it but tests and the
command line.
"""

from lmres.testing.kit import CHECKS, Check, check_residual
from lmres.testing.report import Report, ResidualCheckError

__all__ = ["CHECKS", "Check", "Report", "ResidualCheckError", "check_residual"]
