"""What goes wrong is said in a readable line, with an exit code that is not 0 and without a traceback."""

import shutil

import jax
import pytest
from cli_helpers import CASES

from lmres.cli import runtime


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["train", "nope.yaml"], ["nope.yaml", "No such file"]),
        (["train", "{tiny}", "model.wdth=3"], ["model.wdth", "did you mean 'width'"]),
        (["train", "{tiny}", "model.width=x"], ["model.width", "integer", "'x'"]),
        (["train", "{tiny}", "model.heads=3"], ["model.width=16", "model.heads=3"]),
        (["train", "{tiny}", "train.batch_size=6"], ["train.batch_size=6", "mesh.data=8"]),
        (["train", "{tiny}", "mesh.data=2"], ["mesh.data=2", "number of devices, 8"]),
        (["train", "{tiny}", "data.train=nope.txt"], ["data.train", "nope.txt"]),
        (["train", "{tiny}", "model.vocab_size=100"], ["tokenizer bytes", "257", "the model has 100"]),
        (["train", "{tiny}", "model.context=60000", "train.steps=1"], ["context 60000", "60001"]),
        (["train", "{tiny}", "--device", "gpu"], ["--device gpu", "no such device"]),
        (["train", "{tiny}", "--weights-from", "nope"], ["nope is not the folder of a run"]),
        (["train", "{tiny}", "--weights-from", "{run}", "--resume"], ["--weights-from", "--resume"]),
        (
            ["train", "{run}", "--resume", "model.width=32"],
            ["cannot resume", "model.width: 16 -> 32", "shape"],
        ),
        (["train", "{run}", "--resume", "residual.kind=mhc"], ["residual.kind: plain -> mhc"]),
        (["train", "{run}", "--weights-from", "{run}"], ["is the folder of the new run too"]),
        (
            ["train", "{tiny}", "--folder", "other", "--weights-from", "{run}", "model.blocks=2"],
            ["model.blocks: 1 -> 2"],
        ),
        (["eval", "nope"], ["nope is not the folder of a run", "no such folder"]),
        (["eval", "{run}", "--step", "3"], ["--step 3", "[2, 4]"]),
        (["eval", "{run}", "--batch-size", "0"], ["--batch-size 0"]),
        (
            ["eval", "{run}", "residual.kind=attnres"],
            ["another architecture", "residual.kind: 'plain' -> 'attnres'"],
        ),
        (["generate", "{run}", "--prompt", ""], ["prompt 0 is empty"]),
        (
            ["generate", "{run}", "--prompt", "0123456789", "--max-tokens", "7"],
            ["prompt 0 has 10 tokens", "with 7 new tokens", "17", "model.context=16"],
        ),
        (
            ["generate", "{run}", "--prompt", "0123456789abcdefg"],
            ["prompt 0 has 17 tokens", "model.context=16"],
        ),
        (["generate", "{run}", "--prompt", "a", "--top-k", "3"], ["--top-k", "--temperature"]),
        (["generate", "{run}", "--prompt", "a", "--temperature", "-1"], ["temperature=-1.0"]),
        (["generate", "{run}", "--prompts", "nope.jsonl"], ["nope.jsonl", "No such file"]),
        (["generate", "{run}", "--prompts", "{train}"], ["line 1", "no key 'prompt'", "found: "]),
        (["generate", "{run}", "--prompt", "x y", "--ids"], ["prompt 0", "ids", "x y"]),
        (["compare", "{tiny}"], ["compare.variants is missing"]),
        (["variants", "--depth", "3"], ["--depth 3", "even"]),
        (["bench", "--variants", "mhc-5"], ["no variant 'mhc-5'", "did you mean 'mhc-4'"]),
        (["bench", "--rounds", "0"], ["--rounds 0"]),
        (["data", "prepare", "nope.txt", "--output", "x"], ["data.train", "nope.txt"]),
        (["data", "show", "nope"], ["nope"]),
        (["inspect", "nope"], ["nope is not the folder of a run"]),
        (["config", "nope"], ["no setting begins with 'nope'", "residual"]),
    ],
    ids=lambda x: " ".join(x)[:50] if isinstance(x, list) else None,
)
def test_errors(lmres, tiny, finished, tmp_path, monkeypatch, argv, parts):
    monkeypatch.chdir(tmp_path)
    before = sorted(p.name for p in (finished / "checkpoints").iterdir())
    names = {"tiny": tiny, "run": finished, "train": tiny.parent / "small_train.jsonl"}
    code, out, err = lmres(*(word.format(**names) for word in argv))
    assert code == 1 and out == ""
    assert any(line.startswith("error: ") for line in err.splitlines()) and "Traceback" not in err
    for part in parts:
        assert part in err
    assert sorted(p.name for p in (finished / "checkpoints").iterdir()) == before


@pytest.mark.parametrize(
    ("case", "settings", "parts"),
    [
        ("invalid_utf8.txt", [], [":3:", "offset 100"]),
        ("missing_text.jsonl", [], [":3:", "'text'"]),
        ("truncated.jsonl.gz", [], ["truncated.jsonl.gz"]),
        ("id_out_of_range.jsonl", ["data.format=ids", "model.vocab_size=256"], ["3", "256"]),
    ],
)
def test_data_at_fault(lmres, tiny, tmp_path, case, settings, parts):
    data = shutil.copy(CASES / case, tmp_path)
    found = lmres(
        "train", tiny, "--folder", tmp_path / "run", f"data.train={data}", "data.valid=null", *settings
    )
    assert found.code == 1
    last = found.err.splitlines()[-1]
    assert last.startswith("error: ") and case in last
    for part in parts:
        assert part in last
    assert not (tmp_path / "run").exists()


def test_traceback_on_request(lmres, monkeypatch):
    assert "Traceback" in lmres("eval", "nope", "--traceback").err
    monkeypatch.setenv("LMRES_TRACEBACK", "1")
    assert "Traceback" in lmres("eval", "nope").err
    monkeypatch.setenv("LMRES_TRACEBACK", "0")
    assert "Traceback" not in lmres("eval", "nope").err


def test_a_missing_device_leaves_jax_as_it_was(lmres):
    before = jax.config.jax_platforms
    assert lmres("variants").code == 0
    with pytest.raises(ValueError, match="--device tpu: no such device"):
        runtime.start("tpu")
    assert jax.config.jax_platforms == before


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert runtime.cache_folder("auto") == tmp_path / "lmres" / "xla"
    assert runtime.cache_folder("here") != runtime.cache_folder("auto")
