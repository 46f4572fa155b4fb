"""The launchers, run as a person runs them, with nothing of a cluster on the machine."""

import os
import shutil
import subprocess

import pytest
from launch_helpers import LAUNCH, ROOT, environment


@pytest.fixture
def launch():
    """``launch("local.sh", "--dry-run", ...)`` runs a launcher to its end. Variables are keyword arguments."""

    def run(script, *words, **variables):
        command = [shutil.which("bash"), LAUNCH / script, *map(str, words)]
        return subprocess.run(
            command, env=environment(**variables), cwd=ROOT, capture_output=True, text=True, timeout=60
        )

    return run


@pytest.fixture
def programs(tmp_path):
    """``programs(gcloud="echo hello")`` puts programs on the PATH; gives the variables for it, and LOG, a file."""

    def make(**scripts):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, text in scripts.items():
            file = folder / name
            file.write_text(f"#!/usr/bin/env bash\n{text}\n")
            file.chmod(0o755)
        return {"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")}

    return make
