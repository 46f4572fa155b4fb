"""The command line in this process, on tiny models and copied text."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from cli_helpers import CASES

from lmres.cli import main

# Batches of 8, since the tests run on eight simulated devices.
TINY = """
model: {{width: 16, blocks: 1, heads: 2, context: 16}}
data: {{train: {data}/small_train.jsonl, valid: {data}/small_valid.jsonl, cache_dir: {data}/cache}}
optimizer: {{learning_rate: 1e-2}}
schedule: {{kind: constant, warmup: 0}}
train: {{steps: 4, batch_size: 8, eval_every: 2, save_every: 2, log_every: 2}}
log: {{tensorboard: false}}
"""


class Answer(NamedTuple):
    """Exit code, stdout and stderr of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def lmres(capfd):
    """``lmres("train", ...)`` runs a command and returns its answer."""

    def run(*argv):
        capfd.readouterr()
        code = main([str(word) for word in argv])
        return Answer(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Path of a config; its folder holds the text too."""
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("small_train.jsonl", "small_valid.jsonl"):
        shutil.copy(CASES / name, folder)
    path = folder / "tiny.yaml"
    path.write_text(TINY.format(data=folder))
    return path


@pytest.fixture(scope="module")
def finished(tiny):
    """Folder of a run of four updates with checkpoints of steps 2 and 4; ``run_copy`` may be changed."""
    folder = tiny.parent / "finished"
    assert main(["train", str(tiny), "--folder", str(folder)]) == 0
    return folder


@pytest.fixture
def run_copy(finished, tmp_path):
    """A copy of ``finished`` that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))
