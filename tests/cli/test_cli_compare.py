"""Comparisons, the list of variants, and the benchmark."""

import json
import math
import re
import typing

import pytest

from lmres.cli import main
from lmres.experiment.result import ComparisonResult
from lmres.residual import AppendOnly, Residual
from lmres.train.metrics import read_metrics
from lmres.train.preempt import StopSignals


@pytest.fixture(scope="module")
def comparison(tiny):
    """A config of two variants, one of which diverges."""
    path = tiny.parent / "two.yaml"
    path.write_text(
        "include: tiny.yaml\n"
        "name: two\n"
        "compare:\n"
        "  variants:\n"
        "    plain: {residual.kind: plain}\n"
        "    hc: {residual.kind: hc, residual.streams: 2}\n"
    )
    return path


@pytest.fixture(scope="module")
def compared(comparison):
    folder = comparison.parent / "compared"
    assert main(["compare", str(comparison), "--folder", str(folder)]) == 0
    return folder


def test_report_and_results(compared):
    result = ComparisonResult.from_json((compared / "comparison.json").read_text())
    assert result.names == ["plain", "hc"] and result.baseline == "plain"
    for run in result.runs:
        lines = read_metrics(compared / f"{run.name}-seed0")
        assert run.steps == [1, 2, 3, 4] and run.valid_steps == [2, 4]
        assert run.train_loss == [line["loss"] for line in lines if "loss" in line]
        assert run.final_bpb == lines[-1]["valid_bpb"]
        assert run.seconds[0] == 0 and all(a < b for a, b in zip(run.seconds, run.seconds[1:]))
        assert run.peak_memory_bytes > 3 * 4 * run.params  # parameters and two moments, at least
        assert run.mixing.mean.shape == (3, 3) and run.mixing.error < 1e-5
        assert run.config["residual"]["kind"] == run.name
    plain, hc = result.runs
    assert (plain.params, plain.connection_params) == (8256, 0)
    assert hc.params - plain.params == hc.connection_params > 0
    # Entropy of the validation text's bytes, counted here from the text itself.
    texts = [
        json.loads(line)["text"] for line in (compared.parent / "small_valid.jsonl").read_text().splitlines()
    ]
    text = "".join(texts).encode()
    entropy = -sum(c / len(text) * math.log2(c / len(text)) for c in map(text.count, set(text)))
    assert f"{entropy:.4f} bits per byte" in result.notes
    report = (compared / "report.html").read_text()
    assert "<svg" in report and "hc-dynamic-2" in report and f"{entropy:.4f}" in report


def test_resume_repeats_nothing_that_is_over(lmres, comparison, compared):
    before = {path: path.stat().st_mtime_ns for path in compared.rglob("metrics.jsonl")}
    answer = lmres("compare", comparison, "--folder", compared, "--resume")
    assert answer.code == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert answer.err.count("is finished") == 2
    lines = answer.out.splitlines()
    assert re.match(r"plain +\d\.\d{4} ", lines[1]) and lines[2].startswith("hc")
    assert "scores" in lines[3] and lines[-1] == f"report: {compared / 'report.html'}"

    told = lmres("compare", comparison, "--folder", compared, "--resume", "--json").json
    assert [run["name"] for run in told["runs"]] == ["plain", "hc"] and told["baseline"] == "plain"


def test_a_used_folder_is_refused(lmres, comparison, compared):
    answer = lmres("compare", comparison, "--folder", compared)
    assert answer.code == 1 and "holds a comparison" in answer.err
    assert (compared / "report.html").exists()
    answer = lmres("compare", comparison, "--folder", compared, "--resume", "model.width=32")
    assert answer.code == 1 and answer.err.count("model.width: 16 -> 32") == 2
    assert (compared / "report.html").exists()


def test_an_interrupted_run_is_gone_on_with_and_a_diverged_one_reported(lmres, comparison, tmp_path):
    folder = tmp_path / "runs"
    bad = ("compare.variants.hc.optimizer.learning_rate=1e9", "compare.variants.hc.train.save_every=1")
    assert (
        lmres(
            "train", comparison.parent / "tiny.yaml", "--folder", folder / "plain-seed0", "train.steps=2"
        ).code
        == 0
    )
    answer = lmres("compare", comparison, "--folder", folder, "--resume", *bad)
    assert answer.code == 3
    assert "resumed from step 2" in answer.err and "changed train.steps: 2 -> 4" in answer.err
    assert "hc, seed 0: diverged: step " in answer.out
    plain, hc = ComparisonResult.from_json((folder / "comparison.json").read_text()).runs
    assert plain.steps == [1, 2, 3, 4] and math.isfinite(plain.final_bpb)
    assert "not finite" in hc.notes and math.isnan(hc.final_bpb) and hc.connection_params > 0
    assert "not finite" in (folder / "report.html").read_text()
    again = lmres("compare", comparison, "--folder", folder, "--resume", *bad)
    assert again.code == 3 and again.err.count("is finished") == 2


def test_a_comparison_that_is_told_to_stop_goes_on_later(lmres, comparison, tmp_path, monkeypatch):
    folder = tmp_path / "runs"
    with monkeypatch.context() as patch:
        patch.setattr(StopSignals, "requested", lambda self, step: "SIGTERM" if step == 3 else None)
        answer = lmres("compare", comparison, "--folder", folder)
    assert answer.code == 143 and answer.out == ""
    assert "stopped by SIGTERM; go on with the same command and --resume" in answer.err
    assert [p.name for p in folder.iterdir()] == ["plain-seed0"]  # not one run more, and no report
    answer = lmres("compare", comparison, "--folder", folder, "--resume")
    assert answer.code == 0 and "resumed from step 3" in answer.err
    runs = ComparisonResult.from_json((folder / "comparison.json").read_text()).runs
    assert [run.steps for run in runs] == [[1, 2, 3, 4]] * 2


def test_variants_lists_every_member(lmres):
    told = lmres("variants", "--json", "--depth", 6, "--width", 32, "--dtype", "bfloat16").json
    rows = {row["name"]: row for row in told["variants"]}
    assert len(rows) == len(told["variants"])
    for member in typing.get_args(Residual):
        own = [row for row in rows.values() if row["kind"] == member.kind]
        assert own and all(row["equation"] and "arXiv" in row["source"] for row in own)
        assert {row["state"] for row in own} == {"growing" if issubclass(member, AppendOnly) else "fixed"}
    assert all(set(row["checks"]) <= set(told["checks"]) for row in rows.values())
    assert "matrix" in rows["mhc-4"]["checks"] and "matrix" not in rows["rmt-64"]["checks"]
    assert "alpha" in rows["deepnorm"]["left_out"] and rows["plain"]["left_out"] == ""
    # plain: three vectors of 32 two-byte numbers for each of six sub-layers, one addition per number.
    assert rows["plain"]["bytes"] == 3 * 6 * 32 * 2 and rows["plain"]["flops"] == 6 * 32
    assert rows["plain"]["parameters"] == 0 and rows["plain-post"]["start_tolerance"] is None
    assert rows["attnres-full"]["parameters"] == 7 * 32
    assert rows["denseformer-1x1"]["unit"] == "block" and rows["denseformer-1x1"]["parameters"] == 2 + 3 + 4
    assert rows["hc-static-2"]["settings"] == "residual.kind=hc residual.streams=2 residual.dynamic=false"


def test_variants_settings_build_what_they_name(lmres, tiny):
    from lmres.config import load_config

    for row in lmres("variants", "--json").json["variants"]:
        assert load_config(tiny, row["settings"].split()).residual.name == row["name"]
    assert "attnres-block4" in lmres("variants").out


def test_bench(lmres, tmp_path):
    small = ("model.width=16", "model.blocks=1", "model.heads=2", "model.context=16")
    answer = lmres(
        "bench", *small, "--variants", "hc-static-2", "--rounds", 2, "--output", tmp_path / "b.json", "--json"
    )
    assert answer.code == 0
    assert answer.json == json.loads((tmp_path / "b.json").read_text())
    plain, static = answer.json["rows"]
    assert (plain["name"], plain["ratio"], static["name"]) == ("plain", 1.0, "hc-static-2")
    assert static["connection_parameters"] == 16 and static["peak_bytes"] > 0
    assert answer.json["batch_size"] == 8 and answer.json["versions"]["jax"]


def test_config(lmres):
    told = {row["key"]: row for row in lmres("config", "--json").json}
    assert told["train.steps"]["default"] == "1000"
    out = lmres("config", "residual").out
    assert "residual.streams = 4" in out and "[residual.kind=mhc]" in out and "train.steps" not in out
