"""Files and overrides to configs: what is read, and what each mistake is answered with."""

import dataclasses
import typing
from pathlib import Path

import pytest

from lmres.config import ConfigError, RunConfig, check_config, load_compare, load_config
from lmres.residual import MHC, AttentionResiduals, HyperConnections, Plain, Residual

KINDS = {c.kind: {f.name for f in dataclasses.fields(c)} for c in typing.get_args(Residual)}
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def write(tmp_path):
    def write(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def problems(path, *overrides, load=load_config):
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return [line.removeprefix(f"{path.parent}/") for line in caught.value.problems]


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_config_loads_and_holds_together(path):
    runs = load_compare(path)[1].values() if "\ncompare:" in path.read_text() else [load_config(path)]
    for run in runs:
        check_config(run)
        if path.parent.name == "on":  # for one machine, of as many devices as the name ends with
            check_config(run, int(path.stem.rpartition("-")[2]))
            assert run.name == path.stem
        else:
            check_config(run, 8)
            assert run.name == "-".join(path.relative_to(CONFIGS).with_suffix("").parts)


def test_quickstart_compares_all_kinds():
    compare, runs = load_compare(CONFIGS / "quickstart.yaml")
    assert compare.variants == tuple(runs) == ("plain", "denseformer", "attnres", "hc", "mhc")
    assert compare.baseline == "plain"
    assert runs["mhc"].residual == MHC(streams=4)
    assert len({run.model for run in runs.values()}) == 1


def test_defaults(write):
    assert load_config(write("{}")) == RunConfig()
    assert (
        load_config(write("train:\n# steps: 3\n")) == RunConfig()
    )  # a section with everything commented out


def test_values(write):
    text = """
model: {vocab_size: null, width: 1_024, norm_eps: 1e-12, scan: false}
residual: {kind: attnres, block: 5}
data: {train: [a.txt, b.txt], tokenizer: no}
optimizer: {learning_rate: 3e-3, clip: 1, beta1: .9}
train.profile_steps: [3, 5]
schedule.warmup: 1e1
"""
    config = load_config(write("\ufeff" + text))
    assert config.model.width == 1024 and config.model.vocab_size is None and config.model.scan is False
    assert config.model.norm_eps == 1e-12 and config.optimizer.learning_rate == 0.003
    assert config.optimizer.clip == 1.0 and isinstance(config.optimizer.clip, float)
    assert config.residual == AttentionResiduals(block=5)
    assert config.data.train == ("a.txt", "b.txt") and config.data.tokenizer == "no"
    assert config.train.profile_steps == (3, 5) and config.schedule.warmup == 10.0


def test_overrides(write):
    path = write("model: {width: 64, heads: 2}\nresidual: {kind: attnres, block: 5}\n")
    config = load_config(
        path,
        [
            "model.width=128",
            "model.width=256",
            "train.profile_steps=[1, 2]",
            "data.train=*.txt",
            "log.wandb=",
        ],
    )
    assert (config.model.width, config.model.heads) == (256, 2)
    assert config.train.profile_steps == (1, 2) and config.data.train == "*.txt" and config.log.wandb is None
    assert config.residual == AttentionResiduals(block=5)
    assert load_config(path, ["residual.key_gain=true"]).residual == AttentionResiduals(
        block=5, key_gain=True
    )
    assert load_config(path, ["train={steps: 3, keep: 1}"]).train.steps == 3


def test_a_new_kind_drops_the_old_options(write):
    path = write("residual: {kind: attnres, block: 5, eps: 1e-3}\n")
    assert load_config(path, ["residual.kind=mhc"]).residual == MHC()
    assert load_config(path, ["residual.kind=mhc", "residual.streams=2"]).residual == MHC(streams=2)
    assert load_config(path, ["residual.streams=2", "residual.kind=mhc"]).residual == MHC(streams=2)
    assert load_config(path, ["residual={kind: hc, tanh: false}"]).residual == HyperConnections(tanh=False)
    assert load_config(path, ["residual.kind=attnres"]).residual == AttentionResiduals(block=5, eps=1e-3)
    # Without a kind the section is of the default's kind, in a file as in an override.
    assert load_config(write("{}"), ["residual.norm=post"]).residual == Plain(norm="post")


def test_include(write, tmp_path):
    (tmp_path / "base").mkdir()
    write("model: {width: 64, heads: 2}\nresidual: {kind: attnres, block: 5}\n", "base/base.yaml")
    write("include: base.yaml\ntrain.steps: 7\n", "base/middle.yaml")
    config = load_config(write("include: base/middle.yaml\nmodel.width: 32\nresidual.kind: hc\n"))
    assert (config.model.width, config.model.heads, config.train.steps) == (32, 2, 7)
    assert config.residual == HyperConnections()

    write("include: ../loop.yaml", "base/back.yaml")
    (line,) = problems(write("include: base/back.yaml\n", "loop.yaml"))
    assert "base/back.yaml:1:10: include: ../loop.yaml includes itself" in line
    (line,) = problems(write("model: {width: 2}\ninclude: [gone.yaml]\n"))
    assert line.startswith("run.yaml:2:10: include: no file ") and line.endswith("gone.yaml")
    write("model: {widht: 2}", "base/wrong.yaml")
    (line,) = problems(write("include: base/wrong.yaml\n"))
    assert line.startswith("base/wrong.yaml:1:16: model.widht: unknown key; did you mean 'width'?")


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (
            "model:\n  widht: 3\n",
            "run.yaml:2:10: model.widht: unknown key; did you mean 'width'? (keys: vocab_size, ",
        ),
        (
            "modle: {width: 3}\n",
            "run.yaml:1:8: modle: unknown section; did you mean 'model'? (sections: name, model, ",
        ),
        ("width: 3\n", "run.yaml:1:8: width: unknown section; did you mean 'model.width'?"),
        ("model: {steps: 3}\n", "run.yaml:1:16: model.steps: unknown key; did you mean 'train.steps'?"),
        ('model:\n  width: "3"\n', "run.yaml:2:10: model.width: expected integer, found '3' (text)"),
        ("model: {width: 3.0}\n", "run.yaml:1:16: model.width: expected integer, found 3.0 (number)"),
        ("train: {seed: true}\n", "run.yaml:1:15: train.seed: expected integer, found true"),
        ("model: {scan: 1}\n", "run.yaml:1:15: model.scan: expected true or false, found 1 (integer)"),
        ("train: {steps: null}\n", "run.yaml:1:16: train.steps: expected integer, found null"),
        (
            "optimizer: {clip: high}",
            "run.yaml:1:19: optimizer.clip: expected number or null, found 'high' (text)",
        ),
        ("optimizer: {eps: .inf}", "run.yaml:1:18: optimizer.eps: expected a finite number, found inf"),
        ("optimizer: {clip: .nan}", "run.yaml:1:19: optimizer.clip: expected a finite number, found nan"),
        (
            "optimizer: {kind: adam}",
            "run.yaml:1:19: optimizer.kind: expected one of adamw, muon, found 'adam' (text); "
            "did you mean 'adamw'?",
        ),
        (
            "residual: {kind: mch}\n",
            f"run.yaml:1:18: residual.kind: expected one of {', '.join(KINDS)}, found 'mch' "
            "(text); did you mean 'mhc'?",
        ),
        (
            "residual: {kind: dca, version: '3'}\n",
            "run.yaml:1:32: residual.version: expected one of 1, 2, 3, found '3' (text)",
        ),
        ("residual: {kind: 3}\n", "run.yaml:1:18: residual.kind: expected one of plain, rezero, "),
        (
            "residual: {kind: plain, streams: 4}\n",
            "run.yaml:1:34: residual.streams: unknown key of residual.kind=plain; it belongs to "
            "residual.kind="
            + " or ".join(kind for kind, keys in KINDS.items() if "streams" in keys)
            + " (keys: kind, norm, eps)",
        ),
        (
            "residual: {streams: 4}\n",
            "run.yaml:1:21: residual.streams: unknown key of residual.kind=plain; it belongs",
        ),
        (
            "residual: mhc\n",
            "run.yaml:1:11: residual: expected a section (a mapping such as residual.kind), found 'mhc'",
        ),
        ("train: 3\n", "run.yaml:1:8: train: expected a section (a mapping of steps, batch_size, "),
        ("name: 3\n", "run.yaml:1:7: name: expected text or null, found 3 (integer)"),
        (
            "train: {profile_steps: [1, a]}",
            "run.yaml:1:24: train.profile_steps: expected list of 2 integers or null, found [1, 'a'] (list)",
        ),
        (
            "train: {profile_steps: [1]}",
            "run.yaml:1:24: train.profile_steps: expected list of 2 integers or null",
        ),
        (
            "data: {train: [a, 3]}",
            "run.yaml:1:15: data.train: expected text or list of text or null, found ['a', 3]",
        ),
        (
            "task: {kind: word, lenght: 3}",
            "run.yaml:1:28: task.lenght: unknown key of task.kind=word; did you mean 'length'? (keys: kind, group, ",
        ),
        (
            "task: {length: 3}",
            "run.yaml:1:16: task.length: unknown key of task.kind=text; it belongs to task.kind=word (keys: kind)",
        ),
        (
            "task: {kind: wrod}",
            "run.yaml:1:14: task.kind: expected one of text, word, found 'wrod' (text); did you mean 'word'?",
        ),
        (
            "task: {kind: word, group: S5}",
            "run.yaml:1:27: task.group: expected one of Z2, Z6, S3, A4, S4, A5, swap-S4, swap-S5, found 'S5' (text)",
        ),
        (
            "data: {valid_fraction: 3.0}",
            "run.yaml:1:24: data.valid_fraction is 3.0; it must lie between 0 and 1",
        ),
        (
            "model: {width: {x: 3}}\n",
            "run.yaml:1:16: model.width: expected integer, found {'x': 3} (mapping)",
        ),
        (
            "model:\n  width: 3\n  width: 4\n",
            "run.yaml:3:3: model.width: given twice (first at run.yaml:2:10)",
        ),
        (
            "model: {width: 3}\nmodel.width: 4\n",
            "run.yaml:2:1: model.width: given twice (first at run.yaml:1:16)",
        ),
        ("model: {3: 4}\n", "run.yaml:1:9: keys must be text, found '3'"),
        ("model:\n\twidth: 3\n", "run.yaml:2:1: malformed YAML: found character '\\t'"),
        ("model: {width: 3\n", "run.yaml:2:1: malformed YAML: expected ',' or '}'"),
        ("model: \x07\n", "run.yaml:1:8: malformed YAML: character 0x7"),
        (
            "name: !!python/name:os.system x\n",
            "run.yaml:1:7: name: cannot read YAML tag python/name:os.system",
        ),
        ("model: &m {width: *m}\n", "run.yaml:1:8: model.width: an alias (*) stands inside what it repeats"),
        ("a: 1\n---\nb: 1\n", "run.yaml:2:1: malformed YAML"),
        ("", "run.yaml: expected sections such as model and train, found nothing; {} is all defaults"),
        ("- model\n", "run.yaml: expected sections such as model and train, found a list"),
        (
            "compare: {variants: {a: {}}}\n",
            "run.yaml:1:10: compare: this file is a comparison, not a single run",
        ),
    ],
)
def test_mistakes_in_files(write, text, start):
    lines = [
        line.replace("first at " + str(write("").parent) + "/", "first at ") for line in problems(write(text))
    ]
    assert lines[0].startswith(start)
    assert len(lines) == 1 or "alias" in start


def test_files_that_cannot_be_read(tmp_path):
    assert problems(tmp_path / "gone.yaml") == ["gone.yaml: No such file or directory"]
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    assert problems(tmp_path / "latin.yaml") == ["latin.yaml: not UTF-8 text (byte 9)"]


@pytest.mark.parametrize(
    ("override", "rest"),
    [
        ("foo", "expected section.key=value"),
        ("=3", "expected section.key=value"),
        ("model..width=3", "expected section.key=value"),
        ("model.widht=3", "model.widht: unknown key; did you mean 'width'?"),
        ("modle.width=3", "modle: unknown section; did you mean 'model'?"),
        ("model.width=three", "model.width: expected integer, found 'three' (text)"),
        ("model.width.x=3", "model.width: expected integer, found {'x': 3} (mapping)"),
        ("model.width=[3", "malformed YAML: expected ',' or ']'"),
        ("model=3", "model: expected a section (a mapping of vocab_size, "),
        ("residual.kind=mch", "residual.kind: expected one of plain, "),
        (
            "residual.block=3",
            "residual.block: unknown key of residual.kind=plain; it belongs to residual.kind=attnres",
        ),
        ("data.valid_fraction=2.0", "data.valid_fraction is 2.0"),
    ],
)
def test_mistakes_in_overrides(write, override, rest):
    (line,) = problems(write("model: {width: 8}\n"), override)
    assert line.startswith(f"override {override!r}: {rest}")


def test_all_problems_at_once(write):
    path = write(
        "model:\n  widht: 3\n  heads: two\nresidual:\n  kind: mhc\n  block: 3\n"
        "train:\n  steps: 1\n  steps: 2\n"
    )
    starts = [
        line.split(": ")[0] + ": " + line.split(": ")[1]
        for line in problems(path, "log.wandb=3", "foo", "x.y=1")
    ]
    assert sorted(starts) == [
        "override 'foo': expected section.key=value",
        "override 'log.wandb=3': log.wandb",
        "override 'x.y=1': x",
        "run.yaml:2:10: model.widht",
        "run.yaml:3:10: model.heads",
        "run.yaml:6:10: residual.block",
        "run.yaml:9:3: train.steps",
    ]


def test_a_section_that_is_no_mapping_is_reported_under_overrides(write):
    (line,) = problems(write("train: 3\n"), "train.steps=4")
    assert line.startswith("run.yaml:1:8: train: expected a section")


def test_compare(write):
    path = write(
        """
residual: {kind: attnres, block: 5}
compare:
  seeds: [1, 2]
  variants:
    same:
    v1.5 plain: {residual.kind: plain}
    narrow: {residual: {streams: 2, kind: mhc}, model.width: 64}
"""
    )
    compare, runs = load_compare(path, ["train.steps=3", "compare.variants.narrow.residual.iters=7"])
    assert compare.variants == ("same", "v1.5 plain", "narrow")
    assert compare.seeds == (1, 2) and compare.baseline is None
    assert [run.residual for run in runs.values()] == [
        AttentionResiduals(block=5),
        Plain(),
        MHC(streams=2, iters=7),
    ]
    assert [run.model.width for run in runs.values()] == [256, 256, 64]
    assert {run.train.steps for run in runs.values()} == {3}
    assert load_compare(path, ["compare.seeds=[4]"])[0].seeds == (4,)


def test_compare_list(write):
    _, runs = load_compare(write("compare: {variants: [{residual.kind: plain}, {residual.kind: hc}]}"))
    assert list(runs) == ["plain", "hc-dynamic-4"]
    (line,) = problems(write("compare: {variants: [{}, {train.steps: 3}]}"), load=load_compare)
    assert line.startswith("run.yaml:1:26: compare.variants.1: two variants are called plain")


def test_overrides_change_the_variants_there_are(write):
    path = write("compare: {variants: {plain: {}, mhc: {residual.kind: mhc}}}")
    (line,) = problems(path, "compare.variants.mch.train.steps=3", load=load_compare)
    assert line.startswith(
        "override 'compare.variants.mch.train.steps=3': no variant 'mch'; did you mean 'mhc'?"
    )
    path = write("compare: {variants: [{residual.kind: plain}]}")
    (line,) = problems(path, "compare.variants.plain.train.steps=3", load=load_compare)
    assert line.endswith("compare.variants is a list, which is replaced only as a whole")


def test_mistakes_in_comparisons(write):
    text = """
model: {widht: 3}
compare:
  seeds: [0, 0]
  baseline: plian
  variants:
    plain: {residual.kind: plain}
    mhc: {residual.kind: mhc, residual.streamz: 2}
    odd: plain
"""
    lines = problems(write(text), load=load_compare)
    assert [line.split(";")[0].split(" (")[0] for line in lines] == [
        "run.yaml:2:16: model.widht: unknown key",
        "run.yaml:8:49: residual.streamz: unknown key of residual.kind=mhc",
        "run.yaml:9:10: compare.variants.odd: expected settings like {residual.kind: mhc}, found 'plain'",
        "run.yaml:5:13: compare.baseline: no variant 'plian'",
        "compare.seeds=[0, 0] must be different numbers, at least one",
    ]
    (line,) = problems(write("model: {width: 3}\n"), load=load_compare)
    assert "compare.variants is missing" in line
    (line,) = problems(write("compare: {variants: {a: {}}, sedes: [1]}"), load=load_compare)
    assert line.startswith("run.yaml:1:37: compare.sedes: unknown key; did you mean 'seeds'?")
    (line,) = problems(write("compare: {variants: 3}"), load=load_compare)
    assert line.startswith("run.yaml:1:21: compare.variants: expected")
