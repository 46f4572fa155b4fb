"""``python -m lmres``: the command line."""

import sys

from lmres.cli import main

sys.exit(main())
