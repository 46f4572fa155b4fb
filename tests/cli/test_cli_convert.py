"""``lmres convert``: from a finished plain run to a new one that trains on, and what it refuses."""

import shutil

import pytest
from variants import KINDS, name

from lmres.cli.variants import settings
from lmres.train.metrics import read_metrics


def test_a_converted_run_is_evaluated_and_trained_on(lmres, finished, tmp_path):
    out = tmp_path / "hc"
    words = ("residual.kind=hc", "residual.streams=2", "train.steps=3")
    answer = lmres("convert", finished, *words, "--out", out, "--json")
    assert answer.code == 0
    told = answer.json
    assert told["folder"] == str(out) and told["run"] == str(finished) and told["step"] == 4
    assert told["connection"] == "hc-dynamic-2" and told["batch"] == "validation text"
    assert told["difference"] <= told["tolerance"] == 1e-4 < told["logit"]
    assert told["parameters"] == 8256 + told["connection_parameters"]
    assert f"step 4 of {finished}: plain, 8,256 parameters" in answer.err
    assert f"lmres train {out} --resume" in answer.err and "from step 0 of 3" in answer.err

    before, after = lmres("eval", finished, "--json"), lmres("eval", out, "--json")
    assert after.json["step"] == 0
    assert after.json["valid_loss"] == pytest.approx(before.json["valid_loss"], abs=1e-5)
    shown = lmres("inspect", out, "--json")
    assert shown.code == 0 and [c["step"] for c in shown.json["checkpoints"]] == [0]
    assert shown.json["settings"]["residual.kind"] == "hc"

    refused = lmres("train", out)
    assert refused.code == 1 and "holds checkpoints of a run (newest: step 0)" in refused.err
    trained = lmres("train", out, "--resume", "optimizer.learning_rate=1e-3")
    assert trained.code == 0 and "resumed from step 0" in trained.err and "step 3 of 3" in trained.out
    measured = lmres("inspect", out, "--no-verify", "--measure")
    assert measured.code == 0 and "measuring step 3" in measured.err
    assert "over how many sources" in measured.out and "cosine of streams" in measured.out
    gains = lmres("inspect", out, "--no-verify", "--measure", "--json").json["measures"]["gains"]
    assert gains["forward"]["mean"][0][0] == pytest.approx(1, abs=0.2) and gains["forward"]["mean"][1][0] is None
    first = read_metrics(out)[0]
    assert first["step"] == 1 and first["loss"] < read_metrics(finished)[0]["loss"] - 0.1


@pytest.mark.slow  # tests/train/test_convert.py has the same without the command line
@pytest.mark.parametrize("connection", KINDS, ids=name)
def test_every_kind_is_converted_or_refused(lmres, finished, tmp_path, connection):
    answer = lmres("convert", finished, *settings(connection).split(), "--out", tmp_path / "new", "--step", "2")
    if answer.code:
        assert answer.code == 1 and "no parameters make them equal" in answer.err and list(tmp_path.iterdir()) == []
        return
    assert f"{tmp_path / 'new'}: {connection.name} with the function of {finished}, step 2" in answer.out


def test_data_that_are_gone_are_replaced_by_drawn_tokens(lmres, tiny, finished, tmp_path):
    source = tmp_path / "run"
    shutil.copytree(finished, source)
    config = (source / "config.yaml").read_text()
    (source / "config.yaml").write_text(config.replace("small_train.jsonl", "gone.jsonl"))
    answer = lmres("convert", source, "residual.kind=attnres", "--out", tmp_path / "new", "--json")
    assert answer.code == 0 and answer.json["batch"] == "drawn tokens"
    assert "data cannot be read" in answer.err and "gone.jsonl" in answer.err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["{run}"], ["name the connection", "residual.kind=hc"]),
        (["nope", "residual.kind=hc"], ["nope is not the folder of a run"]),
        (["{run}", "residual.kind=nope"], ["residual.kind", "'nope'"]),
        (["{run}", "residual.kind=hc", "residual.streams=0"], ["residual.streams=0"]),
        (["{run}", "residual.kind=hc", "--step", "3"], ["--step 3", "[2, 4]"]),
        (["{run}", "residual.kind=hc", "--tolerance", "0"], ["--tolerance 0"]),
        (
            ["{run}", "residual.kind=hc", "model.width=32", "model.rope_base=5"],
            ["model.width: 16 -> 32", "model.rope_base: 10000.0 -> 5.0", "the connection alone"],
        ),
        (["{run}", "residual.norm=post"], ["plain-post is another function than pre-norm; no parameters make them"]),
        (["{run}", "residual.kind=attnres", "--tolerance", "1e-12"], ["differ by at most", "allowed are 1e-12"]),
        (["{run}", "residual.kind=hc", "data.train=nope.txt"], ["data.train", "nope.txt"]),
        (["{run}", "residual.kind=hc", "--device", "gpu"], ["--device gpu", "no such device"]),
    ],
    ids=lambda x: " ".join(x)[:50] if x and x[0] in ("{run}", "nope") else None,
)
def test_errors_leave_nothing(lmres, finished, tmp_path, monkeypatch, words, parts):
    monkeypatch.chdir(tmp_path)
    code, out, err = lmres("convert", *(word.format(run=finished) for word in words), "--out", "new")
    assert code == 1 and out == "" and "Traceback" not in err
    assert any(line.startswith("error: ") for line in err.splitlines())
    for part in parts:
        assert part in err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_used_is_refused(lmres, finished):
    answer = lmres("convert", finished, "residual.kind=hc", "--out", finished)
    assert answer.code == 1 and "is there already and not empty" in answer.err
    assert lmres("convert", finished, "residual.kind=hc").code == 2  # --out is missing
