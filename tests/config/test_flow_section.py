"""The section ``flow``: what is read, what each mistake is answered with, what a resumed run may change, in words."""

import dataclasses
import re

import pytest

from lmres.config import (
    ConfigError,
    RunConfig,
    check_config,
    describe_structure,
    diff,
    dump_yaml,
    flow_facts,
    from_dict,
    load_compare,
    load_config,
    resumable_changes,
    to_dict,
)
from lmres.flow import FlowConfig, critical_path
from lmres.model import ModelConfig
from lmres.residual import HyperConnections

FOUR = "model: {blocks: 4, context: 32}\n"


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(FOUR + text)
        return path

    return write


@pytest.mark.parametrize("kind", ["block(2)", "diagonal(-1/2)", "cone(1)", "map(1,1,3,3)", "chunk(8)", "deep"])
def test_a_flow_is_read_beside_any_connection(write, kind):
    path = write(f"residual: {{kind: hc}}\nflow:\n  kind: {kind}\n  bias: -2\n")
    config = load_config(path)
    assert config.flow == FlowConfig(kind=kind, bias=-2.0) and config.residual == HyperConnections()
    check_config(config)
    assert from_dict(to_dict(config)) == config
    path.write_text(dump_yaml(config))
    assert load_config(path) == config
    assert load_config(write(""), [f"flow.kind={kind}", "flow.bias=-2"]).flow == config.flow


@pytest.mark.parametrize(
    ("flow", "line"),
    [
        ("{kind: blok(2)}", "flow.kind='blok(2)' is no geometry; write one of standard, map, block, "),
        ("{kind: 'map(1,1,3)'}", "flow.kind=map(1,1,3): map(1,1,3): 3 target layers are given for 4 layers"),
        ("{kind: 'map(1,1,3,5)'}", "flow.kind=map(1,1,3,5): map(1,1,3,5): target layers must be in 1 .. 4"),
        (
            "{kind: deep, schedule: parallel}",
            "flow.schedule=parallel cannot run flow.kind=deep exactly over 32 tokens: its slope is 3, its tile 1",
        ),
        ("{kind: top, schedule: swept, groups: 0}", "flow.groups=0 must be at least 1"),
        ("{kind: standard + deep + top}", "flow.kind=standard + deep + top shares 4 key/value heads among 3"),
        ("{kind: pool(2), schedule: parallel}", "flow.schedule=parallel cannot run flow.kind=pool(2) exactly"),
        ("{kind: deep, combine: gate}", "flow.combine: expected one of joint, gated, found 'gate' (text)"),
        ("{border: drop}", "flow.border=drop has no meaning for flow.kind=standard"),
        ("{kind: 3}", "flow.kind: expected text, found 3 (integer)"),
        ("{schedule: wave}", "flow.schedule: expected one of auto, parallel, "),
        ("{adopt: often}", "flow.adopt: expected one of optional, mandatory or null, found 'often' (text)"),
        ("{kinds: deep}", "flow.kinds: unknown key; did you mean 'kind'?"),
    ],
)
def test_a_mistake_is_answered_with_its_place(write, flow, line):
    path = write(f"flow: {flow}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert re.match(rf"{path}:2:\d+: {re.escape(line)}", str(caught.value))


def test_a_mistake_of_an_override_names_it(write):
    with pytest.raises(ConfigError, match=r"^override 'flow\.kind=cone\(-1\)': .*slope of a cone must not be negative"):
        load_config(write("flow: {kind: deep}\n"), ["flow.kind=cone(-1)"])


def test_what_python_puts_together_is_checked_too():
    config = RunConfig(model=ModelConfig(blocks=2), flow=FlowConfig("map(1,1,1)"))
    with pytest.raises(ConfigError, match=r"flow\.kind=map\(1,1,1\).*3 target layers are given for 2 layers"):
        check_config(config)
    with pytest.raises(ConfigError, match=r"model\.blocks=0"):  # and nothing of a flow over no layers
        check_config(dataclasses.replace(config, model=ModelConfig(blocks=0)))


def test_a_resumed_run_may_change_how_cells_are_run_but_not_which():
    old = RunConfig(flow=FlowConfig("top", schedule="swept"))
    new = RunConfig(flow=FlowConfig("deep", bias=0.0, sweeps=5, gradient_sweeps=1, groups=4))
    changes = resumable_changes(old, new)
    assert [change.key for change in changes.applied] == [
        "flow.schedule", "flow.sweeps", "flow.gradient_sweeps", "flow.groups",
    ]  # fmt: skip
    assert [str(change) for change, _ in changes.refused] == ["flow.kind: top -> deep", "flow.bias: null -> 0.0"]


def test_a_config_stored_before_there_were_flows_is_of_the_ordinary_one():
    stored = to_dict(RunConfig())
    del stored["flow"]
    assert from_dict(stored) == RunConfig() and diff(from_dict(stored), RunConfig()) == []


def test_flows_are_compared_under_names_that_can_be_folders(write):
    shared = "compare:\n  variants:\n    - {residual.kind: plain}\n"
    _, runs = load_compare(write(shared + "    - {flow.kind: diagonal(-1/2)}\n    - {flow.kind: block(2)}\n"))
    assert list(runs) == ["plain", "plain-diagonal(-1:2)", "plain-block(2)"]
    assert [run.flow.kind for run in runs.values()] == ["standard", "diagonal(-1/2)", "block(2)"]


@pytest.mark.parametrize(
    ("flow", "schedule", "steps", "cached"),
    [
        (FlowConfig(), "parallel", 4, (1, 2, 3, 4)),
        (FlowConfig("block(2)"), "parallel", 4, (1, 2, 3, 4)),
        (FlowConfig("cone(1)"), "wavefront", 4 + 11, (1, 2, 3, 4)),
        (FlowConfig("chunk(4)"), "chunked", 3 * 4, (1, 2, 3, 4)),
        (FlowConfig("deep"), "sequential", 12 * 4, (1, 2, 3, 4)),
        (FlowConfig("top", schedule="swept", sweeps=1, groups=2), "swept", 2 * 4 * 3, (4,)),
        (FlowConfig("top", schedule="swept", start="plain"), "swept", 4 + 4 * 3, (4,)),
        (FlowConfig("pool(2)"), "sequential", 12 * 4, (4,)),
    ],
)
def test_facts(flow, schedule, steps, cached):
    facts = flow_facts(flow, 4, 12)
    assert (facts.schedule, facts.steps, facts.cached) == (schedule, steps, cached)
    if schedule != "swept":
        assert steps >= critical_path(flow.reads(4), 12)


def test_facts_of_heads_that_are_shared_out():
    facts = flow_facts(FlowConfig("standard + deep"), 2, 3)
    assert facts.reads == "(s, l), s <= t | (t, l); (s, m), all m, s < t"
    assert facts.keys_per_query == ((1 + 2 + 3) / 3 + (1 + 3 + 5) / 3) / 2
    assert flow_facts(FlowConfig("deep", projection="consumer"), 2, 3).slots == 4


def test_structure_in_words():
    plain = RunConfig(model=ModelConfig(blocks=4, context=12))
    lines = describe_structure(dataclasses.replace(plain, flow=FlowConfig("cone(1)")))
    line, exempt = (line for line in lines if line not in describe_structure(plain))
    assert line.startswith("attention reads cone(1), (t, l); (s, m), s < t, m <= l + lambda (t - s): ")
    assert line.endswith("run wavefront, 15 steps one after the other for 12 tokens")
    assert "exempt: the norms' gains, the parameters of the flow, and of" in exempt
