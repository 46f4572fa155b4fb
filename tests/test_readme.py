"""What the README shows runs, and what it names exists."""

import re
import shlex
from pathlib import Path

import pytest

from lmres.cli.parsing import parse

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language, text=README):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.M | re.S)[1]


def test_python_examples_run_in_order():
    space = {}
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), space)
    mine = space["Weighted"]()
    params = mine.init(None, 6, 32)
    params["layers"]["weight"] = params["layers"]["weight"] + 0.25
    h, record = space["run_layers"](mine, params, space["layers"], space["e"])
    matrix = space["depth_mixing"](mine, record.contexts, space["e"])
    reads = space["recompose"](matrix, space["e"], record.outputs)
    assert space["jnp"].allclose(reads[:-1], space["jnp"].stack(record.reads), atol=1e-5)
    assert matrix[3, 1, 0, 0] == 1.25 and h.shape == space["e"].shape
    own = section("In your own code").split("**Your own connection**")[1]
    (code,) = blocks("python", own)
    assert len(code.strip().splitlines()) - 2 <= 15, "two imports and 15 lines"


@pytest.mark.parametrize("title", ["Run it", "Test it"])
def test_headline_commands_are_one_block_of_one_command(title):
    (command,) = blocks("sh", section(title))
    assert len(command.strip().splitlines()) == 1


def test_commands_are_understood_and_files_exist():
    commands = 0
    for block in blocks("sh"):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            for part in re.split(r"&&|;|&", line.split("  #")[0]):
                words = shlex.split(part)
                at = next((i for i, word in enumerate(words) if word.endswith("lmres") or word == "lmres"), None)
                if at is None:
                    continue
                parse(words[at + 1 :])  # exits for what it does not know
                commands += 1
                for word in words:
                    if word.startswith("configs/"):
                        assert (ROOT / word).exists(), word
    assert commands >= 6
    for image in re.findall(r"\]\((\.github/[^)]+)\)", README):
        assert (ROOT / image).exists()
