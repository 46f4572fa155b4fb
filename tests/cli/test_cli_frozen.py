"""The command line as users' scripts know it; a change here is a change for them."""

import argparse
import subprocess
import sys

import pytest

from lmres.cli.parsing import make_parser

DEVICE, FOLDER, JSON = "--device", "--folder --overwrite --resume", "--json"
COMMANDS = {
    "train": f"config overrides {DEVICE} --distributed {FOLDER} {JSON} --weights-from",
    "eval": f"run_folder overrides --batch-size --batches {DEVICE} {JSON} --step",
    "generate": (
        f"run_folder {DEVICE} --ids {JSON} --key --max-tokens --prompt --prompts --seed --step --temperature "
        "--top-k --top-p"
    ),
    "compare": f"config overrides {DEVICE} {FOLDER} {JSON}",
    "convert": f"run_folder overrides {DEVICE} {JSON} --out --step --tolerance",
    "variants": f"--depth --dtype {JSON} --width",
    "bench": f"config overrides {DEVICE} --flow {JSON} --output --rounds --variants",
    "plan": (
        f"config overrides --batch --buffers --compiles --context {JSON} --minutes --search --slices --topology --what"
    ),
    "growth": f"configs overrides --blocks --chips --compiles --figure {JSON} --machine --out --parts --rows",
    "data prepare": f"source overrides {JSON} --output --overwrite",
    "data show": f"store {JSON} --verify",
    "inspect": f"run_folder {DEVICE} {JSON} --measure --no-verify",
    "config": f"prefix {JSON}",
}


def commands(parser, prefix=""):
    """All commands of a parser that have none of their own, by name."""
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        return {prefix.strip(): parser}
    return {
        k: v for name, sub in groups[0].choices.items() for k, v in commands(sub, f"{prefix} {name}").items()
    }


def test_commands_and_options_are_these():
    found = {}
    for name, parser in commands(make_parser()).items():
        words = [word for action in parser._actions for word in (action.option_strings or [action.dest])]
        assert {"-h", "--help", "--traceback"} <= set(words)
        found[name] = set(words) - {"-h", "--help", "--traceback"}
    assert found == {name: set(words.split()) for name, words in COMMANDS.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(lmres, name):
    code, out, _ = lmres(*name.split(), "--help")
    assert code == 0
    assert f"example:\n  lmres {name}" in out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nope"],
        ["train"],
        ["train", "a.yaml", "--bogus"],
        ["train", "a.yaml", "b.yaml"],
        ["variants", "x=1"],
    ],
)
def test_usage_errors(lmres, argv):
    code, out, err = lmres(*argv)
    assert code == 2 and out == "" and "usage: lmres" in err


def test_help_imports_nothing_heavy():
    program = "import sys; from lmres.cli import main; main(['--help']); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not {"jax", "numpy", "rich", "pydantic", "grain", "matplotlib"} & set(
        found.split("\n")[-2].split()
    )


def test_settings_may_stand_between_options():
    from lmres.cli.parsing import parse

    args = parse(["train", "a.yaml", "train.steps=1", "--folder", "x", "model.width=8", "--json"])
    assert args.overrides == ["train.steps=1", "model.width=8"] and args.folder == "x" and args.json
