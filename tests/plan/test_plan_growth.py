"""Growth: what is compiled and kept, the table and the figure of it; and two sizes with the real compiler."""

import json
import xml.etree.ElementTree as ET

import pytest

from lmres.analysis import Growth, Panel, growth_figure
from lmres.cli import main
from lmres.flow.config import FlowConfig
from lmres.model import ModelConfig
from lmres.plan.growth import as_text, checked, grow, key_of, on_paper, points
from lmres.plan.growth_report import panels, parts, tables
from lmres.plan.lowering import Setting
from lmres.residual import MHC, Plain
from lmres.sharding import MeshConfig
from lmres.train.config import OptimizerConfig, ScheduleConfig, TrainConfig

GIB = 2**30
MODEL = ModelConfig(vocab_size=512, context=128, width=64, blocks=2, heads=4, dtype="bfloat16", remat="full")


def setting(residual, **changes):
    return Setting(
        MODEL, residual, FlowConfig(), OptimizerConfig(), ScheduleConfig(), TrainConfig(batch_size=8, **changes),
        MeshConfig(),
    )  # fmt: skip


SETTINGS = {"small-plain": setting(Plain(), accumulate=2), "small-mhc": setting(MHC(streams=2))}


def answer(peak, seconds=0.5, by="memory"):
    """What ``by_compile`` gives; seconds=None for a refusal."""
    bound = (
        None if seconds is None else {"compute": 0.25, "memory": seconds, "network": 0.1, "seconds": seconds, "by": by}
    )
    held = {"parameters": GIB, "optimiser state": 2 * GIB, "batch": 8}
    known = None if seconds is None else GIB
    return {
        "fits": seconds is not None, "refused": "too large" if seconds is None else None,
        "memory": {"held": held, "activations": known, "temporaries": known, "peak": round(peak * GIB)},
        "work": None if seconds is None else {"model_flops": 3e14, "recomputed_flops": 1e14, "moved": 25e9},
        "collectives": [] if seconds is None else [{"kind": "all-gather", "count": 96.0, "bytes": 4e9, "sent": 3e9}],
        "bound": bound, "unknown_loops": 0, "compile_seconds": 1.0,
    }  # fmt: skip


class Compiler:
    """Answers without compiling, and remembers what it was asked. fails: at that call."""

    def __init__(self, fails=None):
        self.asked, self.fails = [], fails

    def __call__(self, point):
        if len(self.asked) == self.fails:
            raise KeyboardInterrupt
        self.asked.append(point.key)
        return answer(150, None) if point.chips == 1 else answer(64 / point.chips * point.setting.model.blocks)


@pytest.fixture(scope="module")
def wanted():
    return points(SETTINGS, "v5p", (1, 4, 16)) + points(SETTINGS, "v5p", (4,), (2, 4), rows=1)


@pytest.fixture(scope="module")
def found(wanted):
    return grow(wanted, None, lambda document: None, compile_=Compiler())


def test_a_point_has_its_rows_on_every_device_and_all_devices_split_the_parameters():
    point = points(SETTINGS, "v5p", (16,), (8,), rows=2)[0]
    assert point.key == ("small-plain", 16, 8) and point.topology.name == "v5p:2x2x4"
    changed = point.setting
    assert changed.train.batch_size == 32 and changed.train.accumulate == 1
    assert changed.mesh == MeshConfig(data=1, fsdp=-1) and changed.model.blocks == 8 and point.own_blocks == 2
    assert points(SETTINGS, "tpu7x", (4,))[0].setting.train.batch_size == 8  # two devices to a chip
    with pytest.raises(ValueError, match="--chips 5"):
        points(SETTINGS, "v5p", (5,))
    with pytest.raises(ValueError, match=r"width.*64"):
        on_paper(points(SETTINGS, "v5p", (4096,)))


def test_each_point_is_compiled_once_and_kept_at_once(wanted):
    kept, lines, compiler = [], [], Compiler()
    document = grow(wanted, None, kept.append, compile_=compiler, tell=lines.append)
    assert compiler.asked == list(dict.fromkeys(point.key for point in wanted))  # of two asked alike, one
    assert [sum(p["compiled"] is not None for p in d["points"]) for d in kept] == [*range(1, 9), 8]
    assert "compiling 1 of 8: small-plain, 2 blocks, v5p:1x1x1" in lines[0] and "min left" in lines[2]
    assert "150.00 GiB, does not fit" in lines[1] and "32.00 GiB, fits" in lines[3]
    assert document == kept[-1] == checked(json.loads(as_text(document)))
    assert len(as_text(document).splitlines()) == 8 + 2


def test_what_is_missing_is_compiled_and_nothing_else(wanted, found):
    kept, first = [], Compiler(fails=3)
    with pytest.raises(KeyboardInterrupt):
        grow(wanted, None, kept.append, compile_=first)
    second, lines = Compiler(), []
    part = grow(wanted, kept[-1], kept.append, compiles=2, compile_=second, tell=lines.append)
    assert "3 of 8 points are still to be compiled" in lines[-1]
    third = Compiler()
    whole = grow(wanted, part, kept.append, compile_=third)
    assert [*first.asked, *second.asked, *third.asked] == [key_of(point) for point in found["points"]]
    assert whole == found
    idle = Compiler()
    assert grow(wanted[:1], found, kept.append, compile_=idle) == found and idle.asked == []


def test_a_changed_config_is_compiled_again(wanted, found):
    changed = points({"small-plain": setting(Plain(norm="post"))}, "v5p", (1, 4))
    again = Compiler()
    grow(changed, found, lambda document: None, compile_=again)
    assert again.asked == [point.key for point in changed]


def test_one_document_is_of_one_machine_and_number_of_rows(found):
    for name, other in (("machine", points(SETTINGS, "v4", (4,))), ("rows", points(SETTINGS, "v5p", (4,), rows=2))):
        with pytest.raises(ValueError, match=f"--{name} {found[name]}; give another --out"):
            grow(other, found, lambda document: None, compile_=Compiler())
    for wrong in ([], {"format": 0, "points": []}, {"format": 1}):
        with pytest.raises(ValueError, match="not what lmres growth wrote"):
            checked(wrong)


def test_the_tables(found):
    by_chips, by_blocks = tables(found)
    paper = next(p["paper"] for p in found["points"] if key_of(p) == ("small-plain", 4, 2))
    lines = by_chips.splitlines()
    assert lines[0] == "By chips of v5p, 1 x 128 tokens per device:"
    assert lines[2] == "| per device and step |  | 1 | 4 | 16 |"
    small = f"{paper['peak'] / GIB:.1f}"
    assert lines[4] == f"| peak, GiB | small-plain | 150 ✗ ({small}) | 32.0 ({small}) | 8.0 ({small}) |"
    assert lines[5].startswith("|  | small-mhc | 150 ✗")
    assert lines[6] == "| sent, GB | small-plain | – (0) | 3.0 (0.0) | 3.0 (0.0) |"
    assert lines[8].startswith("| bound, s | small-plain | – (0.00 ") and "| 0.50 m (0.00 " in lines[8]
    lines = by_blocks.splitlines()
    assert lines[0] == "By blocks, 4 v5p, 1 x 128 tokens per device:" and lines[2].endswith("| 2 | 4 |")
    assert "| 32.0 (" in lines[4] and "| 64.0 (" in lines[4]
    whole = parts(found).splitlines()
    assert len(whole) == 4 + 8
    start = "| small-plain | 2 | 4 | 1.0 | 2.0 | 1.0 | 1.0 | 32.0 | 400 T | 25.0 | "
    assert start + "0.25 | 0.50 | 0.10 | all-gather 3.0 GB, 96 |" in whole
    assert "| small-mhc | 2 | 1 | 1.0 | 2.0 |  |  | 150 |  | – |  |  |  |  |" in whole


def test_what_is_still_to_be_compiled_has_its_estimate(wanted):
    document = grow(wanted, None, lambda document: None, compiles=0, compile_=Compiler())
    assert "| peak, GiB | small-plain | … (" in tables(document)[0] and len(parts(document).splitlines()) == 4
    assert "by formula" in growth_figure(panels(document))


def test_the_figure(found):
    by_chips, by_blocks = panels(found)
    assert [(line.name, line.x) for line in by_chips.lines] == [("plain", [1, 4, 16]), ("mhc", [1, 4, 16])]
    assert by_chips.lines[0].size == "0.14 M"
    assert by_chips.lines[0].compiled == [150, 32, 8] and by_chips.limit == 95
    assert [(line.size, line.x, line.compiled) for line in by_blocks.lines] == [("", [2, 4], [32, 64])] * 2
    svg = growth_figure([by_chips, by_blocks])
    shown = [text.text for text in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    for text in ("plain", "mhc", "compiled", "by formula", "memory", "chips", "blocks", "16", "By blocks, 4 v5p"):
        assert text in shown, text
    assert len(svg) < 60e3 and svg == growth_figure([by_chips, by_blocks])
    assert growth_figure([Panel("<a> $x$", "x", 1.0, [Growth("b&", "", [1, 2], [None, None], [1, 2])])])
    with pytest.raises(ValueError, match="nothing to draw"):
        growth_figure([])


@pytest.fixture
def growth(tmp_path, capsys, monkeypatch):
    """``growth(*words)`` runs the command beside two configs and gives (exit code, stdout, stderr)."""
    for name, residual in (("plain", "{kind: plain}"), ("mhc", "{kind: mhc, streams: 2, constraint: permutations}")):
        text = "model: {vocab_size: 512, context: 128, width: 64, blocks: 2, heads: 4, dtype: bfloat16, remat: full}\n"
        (tmp_path / f"{name}.yaml").write_text(f"{text}residual: {residual}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def run(*words):
        capsys.readouterr()
        code = main(["growth", *words])
        return code, *capsys.readouterr()

    return run


def test_the_command_compiles_keeps_and_shows(growth, tmp_path, needs_tpu):
    asked = ("plain.yaml", "--machine", "v5e", "--chips", "1,4", "--out", "found.json", "model.blocks=1")
    code, out, err = growth(*asked, "--compiles", "1")
    assert code == 0 and "… (" in out and "1 of 2 points are still to be compiled" in err
    code, out, err = growth(*asked, "--figure", "images/growth.svg")
    assert code == 0 and "compiling 1 of 1: plain, 1 blocks, v5e:2x2" in err
    kept = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    one, four = (point["compiled"] for point in kept["points"])
    assert one["fits"] and one["collectives"] == [] and four["collectives"] and four["bound"]["network"] > 0
    parameters = [found["memory"]["held"]["parameters"] for found in (one, four)]
    assert parameters[0] == 4 * kept["points"][0]["parameters"] and parameters[1] < 0.3 * parameters[0]
    assert one["work"]["model_flops"] == four["work"]["model_flops"]  # as many rows on every device
    drawn = (tmp_path / "images/growth.svg").read_text(encoding="utf-8")
    code, again, err = growth("--out", "found.json", "--figure", "growth.svg")  # from what was kept
    assert (code, again, err) == (0, out, "")
    assert (tmp_path / "growth.svg").read_text(encoding="utf-8") == drawn


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ((), ["--out found.json", "no CONFIG"]),
        (("plain.yaml", "--chips", "1,x"), ["--chips 1,x", "1,16,256"]),
        (("plain.yaml", "--chips", "3"), ["--chips 3", "v5p has 1, 4, 8"]),
        (("plain.yaml", "--blocks", "0"), ["--blocks 0"]),
        (("plain.yaml", "--rows", "0"), ["--rows 0"]),
        (("plain.yaml", "--compiles", "-1"), ["--compiles -1"]),
        (("plain.yaml", "--machine", "v9"), ["--machine v9", "v5p"]),
        (("plain.yaml", "--chips", "4096"), ["width", "64"]),
        (("plain.yaml", "model.heads=3"), ["model.heads=3"]),
        (("plain.yaml", "plain.yaml"), ["called plain"]),
        (("plain.yaml", "model.vocab_size=null"), ["model.vocab_size"]),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_compiled(growth, words, parts):
    code, out, err = growth(*words, "--out", "found.json")
    assert code == 1 and out == "" and "Traceback" not in err
    assert all(part in err for part in parts), err


def test_a_file_of_something_else_is_not_touched(growth, tmp_path):
    (tmp_path / "found.json").write_text("[1]", encoding="utf-8")
    code, _, err = growth("plain.yaml", "--out", "found.json")
    assert code == 1 and "--out found.json: not what lmres growth wrote" in err
    assert (tmp_path / "found.json").read_text(encoding="utf-8") == "[1]"
