"""Where the input files are."""

from pathlib import Path

CASES = Path(__file__).parents[1] / "data" / "cases"
