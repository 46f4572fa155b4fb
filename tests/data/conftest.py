"""Cases copied to a temporary folder."""

import shutil
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "cases"


@pytest.fixture
def case(tmp_path):
    """Copies one case file or folder away from the checkout and returns its path as a string."""

    def copy(name: str) -> str:
        target = tmp_path / "cases" / name
        target.parent.mkdir(exist_ok=True)
        (shutil.copytree if (CASES / name).is_dir() else shutil.copyfile)(CASES / name, target)
        return str(target)

    return copy
