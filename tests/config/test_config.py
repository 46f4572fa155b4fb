"""Round trips, checks between keys, changes on resume, the structure in words, the table of keys."""

import dataclasses
import json
import re
import typing
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmres.config import (
    ABSENT,
    RESUME,
    Change,
    ConfigError,
    RunConfig,
    check_config,
    describe_structure,
    diff,
    dump_yaml,
    field_table,
    from_dict,
    load_config,
    resumable_changes,
    to_dict,
)
from lmres.config.changes import rule_of
from lmres.config.schema import hints, members, sections
from lmres.data import DataConfig
from lmres.flow import FlowConfig
from lmres.residual import MHC, AttentionResiduals, DenseFormer, HyperConnections, Plain
from lmres.tasks import WordProblem

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    [
        "null",
        "3",
        "3e-3",
        "0o7",
        "010",
        "yes",
        "no",
        "12:30",
        "2001-01-01",
        "1_0",
        ".5",
        "~",
        "<<",
        "=",
        "*.txt",
        "a: b",
        "\x85",
    ]
)
LIMITED = {  # what DataConfig refuses on its own
    "valid_fraction": st.floats(0.01, 0.99),
    "vocab_size": st.none() | st.integers(1, 2**40),
    "split_seed": st.integers(0, 2**63 - 1),
    "seed": st.integers(0, 2**32 - 1),
}


def strategy(annotation):
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(strategy(args[0]), min_size=1, max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(strategy, args))
    if len(members(annotation)) > 1:
        return st.one_of(*map(strategy, members(annotation)))
    simple = {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: TEXT,
        bool: st.booleans(),
        type(None): st.none(),
    }
    return simple[annotation] if annotation in simple else builds(annotation)


# Any number of blocks has these; others depend on it, and are in test_flow_section.py.
FLOWS = [FlowConfig(), FlowConfig(schedule="parallel"), FlowConfig(sweeps=7, gradient_sweeps=1, groups=4)]


def builds(cls):
    if cls is FlowConfig:
        return st.sampled_from(FLOWS)
    fields = {name: strategy(annotation) for name, annotation in hints(cls).items()}
    return st.builds(cls, **(fields | LIMITED if cls is DataConfig else fields))


CONFIGS = builds(RunConfig)


def keys():
    yield "name"
    for name, section in sections().items():
        for cls in section.classes.values():
            yield from (f"{name}.{field.name}" for field in dataclasses.fields(cls))


def with_(config=None, **values):
    """A config with changes given as section__key=value, or section=object."""
    config = config or RunConfig()
    for path, value in values.items():
        name, _, key = path.partition("__")
        part = dataclasses.replace(getattr(config, name), **{key: value}) if key else value
        config = dataclasses.replace(config, **{name: part})
    return config


@given(CONFIGS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_dict_and_yaml_keep_every_value(tmp_path_factory, config):
    values = to_dict(config)
    assert json.loads(json.dumps(values)) == values
    assert from_dict(values) == config
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(dump_yaml(config), encoding="utf-8", newline="")
    assert load_config(path) == config
    assert diff(config, from_dict(values)) == []


@given(CONFIGS, CONFIGS)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_difference_is_applied_or_refused(old, new):
    changes = resumable_changes(old, new)
    assert sorted([*changes.applied, *(change for change, _ in changes.refused)], key=str) == sorted(
        diff(old, new), key=str
    )
    assert (not diff(old, new)) == (old == new)


def test_from_dict_refuses_what_it_does_not_know():
    with pytest.raises(ConfigError) as caught:
        from_dict({"model": {"widht": 3, "heads": "4"}})
    assert sorted(line.split(";")[0] for line in caught.value.problems) == [
        "model.heads: expected integer, found '4' (text)",
        "model.widht: unknown key",
    ]


def test_every_key_is_in_one_row_of_the_resume_table():
    rules = {rule_of(key) for key in keys()}
    assert rules == set(RESUME), "a row of RESUME has no key"
    for rule in RESUME:
        for pattern in rule.keys:
            assert "*" in pattern or pattern in set(keys()), f"RESUME names {pattern}, which is no key"
        assert rule.reason


def test_changes_on_resume():
    old = with_(residual=HyperConnections(streams=2))
    new = with_(
        residual=AttentionResiduals(),
        train__steps=2000,
        optimizer__clip=None,
        model__width=128,
        data__train=("a", "b"),
    )
    changes = resumable_changes(old, new)
    assert [str(change) for change in changes.applied] == [
        "optimizer.clip: 1.0 -> null",
        "train.steps: 1000 -> 2000",
    ]
    refused = {change.key: change for change, _ in changes.refused}
    assert refused["model.width"] == Change("model.width", 256, 128)
    assert refused["residual.kind"] == Change("residual.kind", "hc", "attnres")
    assert refused["residual.streams"] == Change("residual.streams", 2, ABSENT)
    assert refused["residual.block"] == Change("residual.block", ABSENT, 1)
    assert refused["data.train"] == Change("data.train", None, ["a", "b"])
    assert all(reason for _, reason in changes.refused)


def test_a_config_stored_before_there_were_tasks_is_of_text():
    stored = to_dict(RunConfig())
    del stored["task"]
    assert from_dict(stored) == RunConfig() and diff(from_dict(stored), RunConfig()) == []
    changes = resumable_changes(from_dict(stored), with_(task=WordProblem()))
    assert not changes.applied
    assert Change("task.kind", "text", "word") in [change for change, _ in changes.refused]
    assert Change("task.length", ABSENT, 24) in [change for change, _ in changes.refused]


@pytest.mark.parametrize(
    ("config", "devices", "lines"),
    [
        (
            with_(train__steps=0, train__eval_every=-1),
            None,
            ["train.steps=0 must be at least 1", "train.eval_every=-1"],
        ),
        (with_(optimizer__learning_rate=0.0), None, ["optimizer.learning_rate=0.0 must be above 0"]),
        (with_(optimizer__beta2=1.0), None, ["optimizer.beta2=1.0 must be in [0, 1)"]),
        (
            with_(train__save_every=-5, train__keep=0),
            None,
            ["train.save_every=-5", "train.keep=0 must be at least 1"],
        ),
        (
            with_(model__width=100, model__heads=3),
            None,
            ["model.width=100 is not a multiple of model.heads=3"],
        ),
        (
            with_(model__heads=0, residual=AttentionResiduals(block=0)),
            None,
            ["model.heads=0 must be at least 1", "residual.block=0 must be at least 1"],
        ),
        (with_(residual=MHC(iters=0)), None, ["residual.streams=4 and residual.iters=0 must be at least 1"]),
        (with_(schedule__warmup=2.5), None, ["schedule.warmup=2.5 must be a whole number"]),
        (
            with_(schedule__warmup=2000.0),
            None,
            ["schedule.warmup=2000 take 2000 updates, more than train.steps=1000"],
        ),
        (
            with_(schedule__kind="wsd", schedule__warmup=0.5, schedule__decay_fraction=0.6),
            None,
            ["schedule.warmup=0.5 and schedule.decay_fraction=0.6 take 1100 updates, more than"],
        ),
        (
            with_(train__profile_steps=(5, 3)),
            None,
            ["train.profile_steps=[5, 3] must be two updates in order"],
        ),
        (
            with_(model__vocab_size=256),
            None,
            ["model.vocab_size=256 is less than the 257 ids of data.tokenizer=bytes"],
        ),
        (
            with_(model__vocab_size=300, data__vocab_size=301, data__train="x"),
            None,
            ["data.vocab_size=301 is more than model.vocab_size=300"],
        ),
        (
            with_(task=WordProblem(length=300, train_seed=-1), model__vocab_size=5),
            None,
            ["task.train_seed=-1 must be in 0 .. 2**32 - 1"],
        ),
        (
            with_(task=WordProblem(length=300), model__vocab_size=5, data__train="a.txt", data__seed=3),
            None,
            [
                "model.context=256 is less than task.length=300; raise the one or lower the other",
                "model.vocab_size=5 is less than the 6 ids of task.group=S3; leave it out or raise it",
                "data.train has no effect with task.kind=word, whose sequences are made, not read; leave it out",
                "data.seed has no effect with task.kind=word",
            ],
        ),
        (
            with_(task=WordProblem(), mesh__tensor=4),
            8,
            ["model.vocab_size=6 (of task.group=S3) is not a multiple of mesh.tensor=4"],
        ),
        (with_(train__accumulate=3), None, ["train.batch_size=32 is not a multiple of train.accumulate=3"]),
        (
            with_(train__accumulate=8),
            8,
            ["train.batch_size=32 / train.accumulate=8 = 4 is not a multiple of mesh.data=8; change one"],
        ),
        (
            with_(train__accumulate=8, mesh__fsdp=4),
            8,
            ["train.batch_size=32 / train.accumulate=8 = 4 is not a multiple of mesh.data=2 x mesh.fsdp=4"],
        ),
        (
            with_(train__accumulate=8, mesh__fsdp=8),
            None,
            ["train.batch_size=32 / train.accumulate=8 = 4 is not a multiple of mesh.fsdp=8"],
        ),
        (with_(train__eval_batch_size=4), 8, ["train.eval_batch_size=4 is not a multiple of mesh.data=8"]),
        (
            with_(mesh__fsdp=3),
            8,
            ["mesh.data=-1, mesh.fsdp=3, mesh.sequence=1, mesh.tensor=1: the product must be the number of devices, 8"],
        ),
        (
            with_(mesh__data=4),
            8,
            ["mesh.data=4, mesh.fsdp=1, mesh.sequence=1, mesh.tensor=1: the product must be the number of devices, 8"],
        ),
        (
            with_(mesh__fsdp=-1),
            None,
            ["mesh.data=-1, mesh.fsdp=-1, mesh.sequence=1, mesh.tensor=1: sizes must be positive, and at most"],
        ),
        (with_(mesh__fsdp=0), None, ["mesh.data=-1, mesh.fsdp=0, mesh.sequence=1, mesh.tensor=1: sizes must be"]),
        (
            with_(mesh__tensor=8, model__mlp_hidden=12),
            8,
            [
                "model.heads=4 is not a multiple of mesh.tensor=8",
                "model.kv_heads=4 is not a multiple of mesh.tensor=8",
                "model.mlp_hidden=12 is not a multiple of mesh.tensor=8",
                "model.vocab_size=257 (of data.tokenizer=bytes) is not a multiple of mesh.tensor=8",
            ],
        ),
        (
            with_(mesh__fsdp=16, model__width=72, model__head_dim=16),
            None,
            ["model.width=72 is not a multiple of mesh.fsdp=16"],
        ),
    ],
)
def test_checks_between_keys(config, devices, lines):
    with pytest.raises(ConfigError) as caught:
        check_config(config, devices)
    assert len(caught.value.problems) == len(lines)
    for problem, line in zip(caught.value.problems, lines):
        assert problem.startswith(line)


@given(CONFIGS, st.none() | st.integers(1, 64))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_checks_answer_any_values(config, devices):
    try:
        check_config(config, devices)
    except ConfigError as error:
        assert all(
            re.search(r"(model|residual|schedule|task|train|mesh|data|optimizer)\.\w+", p) for p in error.problems
        )


def test_checks_let_through_what_fits():
    for devices in (None, 1, 2, 4, 8):
        check_config(RunConfig(), devices)
    check_config(with_(mesh__tensor=4, model__vocab_size=512, model__kv_heads=4), 8)
    check_config(with_(task=WordProblem(length=256), model__vocab_size=6), 8)
    check_config(with_(residual=AttentionResiduals(block=5), train__profile_steps=(3, 3)))


@pytest.mark.parametrize(
    ("residual", "line"),
    [
        (AttentionResiduals(block=5), "24 sub-layers, attnres-block5: 5 depth blocks of 5, the last has 4"),
        (AttentionResiduals(block=4), "24 sub-layers, attnres-block4: 6 depth blocks of 4"),
        (AttentionResiduals(block=30), "24 sub-layers, attnres-block30: 1 depth block of 24, shorter than"),
        (
            AttentionResiduals(),
            "24 sub-layers, attnres-full: each reads the embedding and all outputs before it",
        ),
        (
            DenseFormer(dilation=2, period=5),
            "12 blocks, denseformer-2x5: averages after 2 of 12 blocks (5, 10), over every 2nd output back "
            "(block 10: 0, 2, 4, 6, 8, 10); the last period has 2 of 5 blocks, read as they are",
        ),
        (
            DenseFormer(),
            "12 blocks, denseformer-1x1: averages after 12 of 12 blocks (1, 2, 3, 4, ..., 11, 12)",
        ),
        (DenseFormer(period=13), "12 blocks, denseformer-1x13: no average, the plain residual"),
        (
            HyperConnections(streams=5),
            "24 sub-layers, hc-dynamic-5: 5 streams, weights that depend on the streams; ",
        ),
        (
            MHC(),
            "24 sub-layers, mhc-4: 4 streams, mixed doubly stochastically (20 Sinkhorn iterations), ",
        ),
        (Plain(), "24 sub-layers, plain: h <- h + g(Norm h)"),
    ],
)
def test_structure_in_words(residual, line):
    config = with_(residual=residual, model__blocks=12)
    model, first, *rest = describe_structure(config)
    assert model.startswith(
        "12 blocks of attention and MLP = 24 sub-layers of width 256; 4 heads of 64; swiglu of 704"
    )
    assert first.startswith(line)
    assert rest[-2] == "1000 updates of 32 sequences of 256 tokens: 8192 tokens per update, 8192000 in all"
    assert rest[-1] == "learning rate: 50 updates of warm-up to 0.003, then a cosine to 0.0003 at update 1000"


def test_structure_of_any_size():
    for cls in sections()["residual"].classes.values():
        for blocks in (1, 2, 3):
            lines = describe_structure(with_(residual=cls(), model__blocks=blocks))
            assert all(line and "\n" not in line for line in lines)


def test_the_table_documents_every_key():
    rows = field_table()
    assert {row.key for row in rows} == set(keys())
    assert all(row.doc and row.type for row in rows)
    by_key = {(row.key, row.when): row for row in rows}
    assert (
        by_key["model.kv_heads", ""].doc
        == "key/value heads (grouped-query attention), None for as many as heads."
    )
    assert by_key["optimizer.beta2", ""][:4] == ("optimizer.beta2", "number", "0.95", "of AdamW")
    assert by_key["residual.kind", ""].type.startswith("one of plain, rezero, layerscale, deepnorm, ")
    assert by_key["residual.streams", "residual.kind=mhc"].default == "4"
