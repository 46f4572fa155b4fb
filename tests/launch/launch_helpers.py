"""Where the launchers are, and what they are started with."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
LMRES = f"{sys.executable} -m lmres"


def environment(**variables):
    """The machine's, without what another launcher or cluster would leave in it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LMRES_", "SLURM_", "JAX_COORDINATOR"))}
    return {**kept, "PYTHONPATH": str(ROOT), **variables}
