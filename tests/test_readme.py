"""What the README shows runs, and what it names exists."""

import json
import re
import shlex
import typing
from pathlib import Path

import pytest
from flax import nnx

from lmres.cli.parsing import parse
from lmres.plan.growth import checked
from lmres.plan.growth_report import tables
from lmres.residual import Residual
from lmres.testing import CHECKS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language, text=README):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.M | re.S)[1]


def class_body(source):
    """The lines of the class ``Weighted`` with its decorator."""
    return re.search(r"^@dataclasses.*?(?=\n\n)", source, re.M | re.S)[0].splitlines()


def test_python_examples_run_in_order(capsys):
    space = {}
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), space)
    mine, e = space["Weighted"](), space["e"]
    params = mine.init(None, 6, 32)
    params["layers"]["weight"] = params["layers"]["weight"] + 0.25
    h, record = space["run_layers"](mine, params, space["layers"], e)
    matrix = space["depth_mixing"](mine, record.contexts, e)
    reads = space["recompose"](matrix, e, record.outputs)
    assert space["jnp"].allclose(reads[:-1], space["jnp"].stack(record.reads), atol=1e-5)
    assert matrix[3, 1, 0, 0] == 1.25 and h.shape == e.shape
    linen = space["ResidualStack"](mine, (space["ModuleBranch"]("mlp", space["MLP"]()),), repeats=2)
    assert linen.init_with_output(space["jax"].random.key(0), e)[0][0].shape == e.shape
    assert space["NNXStack"](mine, (space["Layer"],), repeats=2, width=32, rngs=nnx.Rngs(0))(e).shape == e.shape

    shown = section("In your own code").split("here it prints")[1].split("```")[1].strip().splitlines()
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line != "  ..."] == [printed[0], *printed[1:3], printed[-1]]
    assert len(printed) == 1 + len(CHECKS)


def test_own_connection_is_15_lines_and_the_one_that_is_tested():
    own = section("In your own code").split("**Your own connection**")[1]
    (code,) = blocks("python", own)
    body = class_body(code)
    assert len(body) <= 15
    rest = [line for line in code.splitlines() if line and line not in body]
    assert [line.split()[0] for line in rest] == ["import", "from", "from", "print(check_residual(Weighted()))"]
    assert body == class_body((ROOT / "tests/testing/test_own_connection.py").read_text(encoding="utf-8"))


def test_every_connection_has_its_row():
    rows = re.findall(r"^\| `([^`]+)`", section("The connections"), re.M)
    kinds = [member.__dataclass_fields__["kind"].default for member in typing.get_args(Residual)]
    assert {row.split()[0] for row in rows if row != "residual.kind"} == set(kinds)
    assert re.search(r"holds (\d+) ways up the column", README)[1] == str(len(kinds))


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


def test_the_tables_of_growth_are_those_of_its_file():
    found = checked(json.loads((ROOT / ".github/growth.json").read_text(encoding="utf-8")))
    assert all(point["compiled"] for point in found["points"])
    for table in tables(found):
        assert table in section("Growth")
