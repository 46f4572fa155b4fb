"""The report: one file that needs nothing else, with every run's name and numbers, escaped; and the result's JSON."""

import dataclasses
import io
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from lmres.analysis import MixingResult
from lmres.experiment.report import print_table, render_report, split_configs, table_rows, write_report
from lmres.experiment.result import ComparisonResult, RunResult, plain_baseline

NASTY = '<script>alert("x")</script>'


def mixing(name):
    spread = np.tril(np.full((3, 3), 0.125))
    labels = ("attn 1", "mlp 1", "out"), ("embed", "attn 1", "mlp 1")
    return MixingResult(name, "u = A' H", "arXiv:0000.00000", np.tri(3), spread, spread, *labels, 3.4e-7, 64)


def run(name, connection, seed=0, final=1.5, **changes):
    fields = {
        "steps": [1, 2, 3, 4],
        "seconds": [0.5, 1.0, 1.5, 2.0],
        "train_loss": [5.0, 4.0, 3.0, 2.5],
        "valid_steps": [0, 2, 4],
        "valid_bpb": [8.0, 2.0, final],
        "params": 1_000_000,
        "connection_params": 0,
        "tokens_per_second": 2000.0,
        "peak_memory_bytes": 2**30,
        "mixing": mixing(connection),
        "config": {"residual": {"kind": connection}, "train": {"seed": seed, "steps": 4}},
    }
    return RunResult(name, connection, seed, **{**fields, **changes})


def comparison(**changes):
    more = {
        "params": 1_200_000,
        "connection_params": 200_000,
        "tokens_per_second": 1500.0,
        "peak_memory_bytes": 3 * 2**29,
    }
    runs = [
        run("streams", "hc-dynamic-4", 0, 1.40, **more),
        run("streams", "hc-dynamic-4", 1, 1.44, **more, notes="a spike near step 3"),
        run("plain", "plain", 0, 1.50),
        run("plain", "plain", 1, 1.56),
    ]
    facts = {"data": {"train": "some text"}, "machine": {"device": "2 x CPU"}, "versions": {"lmres": "9.9.9"}}
    fields = {"title": "A comparison", "runs": runs, "baseline": "plain", "date": "2026-01-02", **facts}
    return ComparisonResult(**{**fields, **changes})


class Page(HTMLParser):
    """Checks nesting and collects the tags and the text."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.text, self.attributes = [], [], [], []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        self.text.append(data)


def test_rows_set_every_number_beside_the_baseline():
    plain, streams = table_rows(comparison())
    assert (plain.name, plain.is_baseline, plain.is_best, plain.seeds) == ("plain", True, False, 2)
    assert plain.bpb == pytest.approx(1.53) and plain.bpb_spread == pytest.approx(0.06 / math.sqrt(2))
    assert streams.is_best and streams.bpb == pytest.approx(1.42)
    assert streams.bpb_difference == pytest.approx(-0.11)
    # Seed by seed: -0.10 and -0.12.
    assert streams.bpb_difference_spread == pytest.approx(0.02 / math.sqrt(2))
    assert streams.params_ratio == pytest.approx(1.2) and streams.connection_share == pytest.approx(1 / 6)
    assert streams.tokens_per_second_ratio == pytest.approx(0.75)
    assert streams.peak_memory_ratio == pytest.approx(1.5)
    assert streams.notes == "a spike near step 3"


def test_without_a_plain_run_there_is_nothing_to_set_beside():
    runs = [run("streams", "hc", final=1.4), run("other", "mhc-4", final=1.3)]
    assert plain_baseline(runs) is None and plain_baseline(comparison().runs) == "plain"
    result = comparison(runs=runs, baseline=None)
    for row in table_rows(result):
        for name in ("bpb_difference", "params_ratio", "tokens_per_second_ratio", "peak_memory_ratio"):
            assert math.isnan(getattr(row, name))
        assert [beside for _, beside in row.cells()][1] == "n/a"
    assert "no plain residual" in render_report(result)


def test_unknown_memory_and_diverged_runs_are_not_available():
    runs = [
        run("plain", "plain", peak_memory_bytes=None),
        run("bad", "hc", final=math.nan),
        run("none", "hc", valid_steps=[], valid_bpb=[]),
    ]
    plain, bad, none = table_rows(comparison(runs=runs))
    assert plain.cells()[5] == ("n/a", "") and bad.cells()[5][1] == "n/a"
    assert bad.cells()[1] == none.cells()[1] == ("n/a", "n/a") and not bad.is_best
    Page(render_report(comparison(runs=runs)))


def test_the_report_is_one_file_that_needs_nothing_else(tmp_path):
    path = write_report(comparison(), tmp_path / "deep" / "report.html")
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert page.tags.count("svg") == 3, "losses and two pictures"
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    # Namespaces are names, not addresses.
    rest = re.sub(r'"data:image/png;base64,[^"]*"', "", html)
    rest = rest.replace("http://www.w3.org/2000/svg", "").replace("http://www.w3.org/1999/xlink", "")
    assert not re.search(r"https?:|//[a-z]|@import", rest)
    references = [v for k, v in page.attributes if k in ("href", "src", "xlink:href", "srcset", "data")]
    assert all(reference.startswith(("#", "data:")) for reference in references)
    assert all(address.startswith("#") for address in re.findall(r"url\(([^)]*)\)", html))
    assert [p.name for p in path.parent.iterdir()] == ["report.html"], "a partial file was left behind"


def test_the_report_has_every_name_and_number():
    result = comparison()
    text = " ".join(Page(render_report(result)).text)
    for said in (
        "A comparison", "plain", "streams", "hc-dynamic-4", "1.5300 ± 0.0424", "1.4200 ± 0.0283", "−0.1100 ± 0.0141",
        "1.00 M", "1.20 M", "×1.20", "200 k", "17 %", "2,000", "1,500", "×0.75", "1,024.0 MiB", "1,536.0 MiB", "×1.50",
        "u = A' H", "arXiv:0000.00000", "3.4e-07", "residual.kind", "2026-01-02", "some text", "2 x CPU", "9.9.9",
        "a spike near step 3", "2 seeds", "Lowest validation: streams, 1.4200", "1.000 ± 0.125",
    ):  # fmt: skip
        assert said in text, said
    for one in result.runs:
        assert f"seed: {one.seed}" in text, "the resolved config"


def test_nothing_from_outside_becomes_markup():
    result = comparison(title=NASTY, notes=NASTY, data={NASTY: NASTY})
    config = {"a": {NASTY: NASTY}}
    runs = [dataclasses.replace(r, name=r.name + NASTY, notes=NASTY, config=config) for r in result.runs]
    html = render_report(dataclasses.replace(result, runs=runs, baseline="plain" + NASTY))
    page = Page(html)
    assert "script" not in page.tags and "<script" not in html.lower()
    assert "plain" + NASTY in " ".join(page.text)


def test_a_report_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def broken(result):
        raise RuntimeError("no")

    monkeypatch.setattr("lmres.experiment.report.render_report", broken)
    with pytest.raises(RuntimeError):
        write_report(comparison(), path)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_configs_are_split_into_what_is_shared_and_what_differs():
    same, differing = split_configs({
        "a": [{"m": {"w": 8}, "r": {"k": "x"}, "seed": 0}, {"m": {"w": 8}, "r": {"k": "x"}, "seed": 1}],
        "b": [{"m": {"w": 8}, "r": {"k": "y", "n": None}, "seed": 0}],
    })  # fmt: skip
    assert same == {"m.w": 8}
    assert differing == [("r.k", ["x", "y"]), ("seed", ["0, 1", "0"]), ("r.n", ["–", "none"])]


def test_json_round_trip():
    result = comparison()
    diverged = run(
        "bad",
        "hc",
        final=math.inf,
        train_loss=[5.0, math.nan, math.nan, math.nan],
        mixing=None,
        tokens_per_second=math.nan,
    )
    result = dataclasses.replace(result, runs=[*result.runs, diverged])
    text = result.to_json()
    json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    again = ComparisonResult.from_json(text)
    assert again.to_json() == text
    assert again.runs[0].valid_bpb == result.runs[0].valid_bpb
    assert again.runs[0].mixing.readers == ("attn 1", "mlp 1", "out")
    np.testing.assert_array_equal(again.runs[0].mixing.mean, np.tri(3))
    assert again.runs[-1].mixing is None and math.isnan(again.runs[-1].final_bpb)
    assert render_report(again) == render_report(ComparisonResult.from_json(again.to_json()))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"format": 99, "runs": []}',
        '{"format": 1}',
        '{"format": 1, "title": "", "runs": [{}]}',
        "no",
    ],
)
def test_other_files_are_refused(text):
    with pytest.raises(ValueError):
        ComparisonResult.from_json(text)


def test_inconsistent_results_are_refused():
    with pytest.raises(ValueError, match="lengths differ"):
        run("plain", "plain", seconds=[1.0])
    with pytest.raises(ValueError, match="baseline"):
        comparison(baseline="nobody")


def test_the_table_is_plain_text_where_there_is_no_terminal():
    out = io.StringIO()
    result = comparison()
    runs = [dataclasses.replace(r, name=r.name.replace("streams", "[bold]streams")) for r in result.runs]
    print_table(dataclasses.replace(result, runs=runs), Console(file=out, width=40))
    header, *lines = out.getvalue().splitlines()
    assert header.startswith("run") and len(lines) == 2, "wrapped, though nobody looks"
    assert lines[1].startswith("[bold]streams (2 seeds)") and "1.4200 ± 0.0283 (−0.1100 ± 0.0141)" in lines[1]
    assert "\x1b" not in out.getvalue() and "│" not in out.getvalue()


def test_the_table_is_drawn_on_a_terminal():
    out = io.StringIO()
    print_table(comparison(), Console(file=out, force_terminal=True, width=160))
    assert "│" in out.getvalue() and "1.4200 ± 0.0283" in out.getvalue()
