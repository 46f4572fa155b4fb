"""Whole runs: resume bitwise, other meshes, other architectures, accumulation, one compile, what stops a run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import KINDS, draw, name, slow_but

from lmres.data import DataConfig
from lmres.flow import FlowConfig
from lmres.model import ModelConfig, Transformer
from lmres.residual import MHC, AttentionResiduals, MUDDFormer, Plain
from lmres.sharding import MeshConfig, make_mesh
from lmres.train.checkpoint import CheckpointError, Checkpoints
from lmres.train.config import LogConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from lmres.train.fingerprint import CheckpointMismatch
from lmres.train.loop import TrainingDiverged
from lmres.train.metrics import read_metrics
from lmres.train.progress import Reporter
from lmres.train.run import train_run
from lmres.train.step import gradients

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "then",
    "it",
    "ran",
    "over",
    "to",
    "see",
    "what",
    "the",
    "dog",
    "was",
    "doing",
    "by",
    "the",
    "old",
    "red",
    "barn",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(rng.choice(WORDS, rng.integers(5, 60)))}) for _ in range(80)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder


def sections(text, **changes):
    parts = {
        "name": "test",
        "model": ModelConfig(width=16, blocks=2, heads=2, context=16, mlp_hidden=24),
        "residual": Plain(),
        "flow": FlowConfig(),
        "data": DataConfig(train=str(text / "text.jsonl"), cache_dir=str(text / "cache")),
        "optimizer": OptimizerConfig(learning_rate=1e-2),
        "schedule": ScheduleConfig(warmup=0.1),
        "train": TrainConfig(steps=30, batch_size=8, eval_every=0, save_every=0, log_every=10),
        "mesh": MeshConfig(),
        "log": LogConfig(tensorboard=False),
    }
    for key, value in changes.items():
        section, _, field = key.partition("__")
        parts[section] = dataclasses.replace(parts[section], **{field: value}) if field else value
    return parts


def run(folder, parts, mode="new", devices=1, **options):
    stored = {k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for k, v in parts.items()}
    return train_run(
        **parts, folder=folder, stored_config=stored, mode=mode, reporter=Reporter(quiet=True),
        devices=jax.devices()[:devices], **options,
    )  # fmt: skip


@pytest.mark.parametrize("connection", slow_but([Plain(), MUDDFormer()], KINDS), ids=name)
def test_thirty_steps_equal_fifteen_and_fifteen_bitwise(text, tmp_path, connection):
    parts = sections(text, residual=connection, model__dropout=0.1, optimizer__kind="muon", train__accumulate=2)
    _, straight = run(tmp_path / "straight", parts)
    assert straight.train_traces == 1
    # The interrupted run is planned for 30 steps, and stopped after 15, as by a preemption.
    _interrupted(tmp_path / "halves", parts, at=15)
    _, resumed = run(tmp_path / "halves", parts, mode="resume")
    assert resumed.step == 30 and resumed.train_traces == 1
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(straight.state), jax.tree.leaves(resumed.state), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
    lines = [read_metrics(tmp_path / kind) for kind in ("straight", "halves")]
    drop = {"tokens_per_second"}
    strip = lambda rows: [{k: v for k, v in row.items() if k not in drop} for row in rows]  # noqa: E731
    assert strip(lines[0]) == strip(lines[1])
    assert straight.evaluation == resumed.evaluation
    losses = [row["loss"] for row in lines[0] if "loss" in row]
    assert len(losses) == 30 and losses[-1] < losses[0] - 0.5, "it learns"


def _interrupted(folder, parts, at):
    from lmres.train import run as runs

    class Signals(runs.StopSignals):
        def requested(self, step):
            return "SIGTERM" if step == at else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "StopSignals", Signals)
        _, result = run(folder, parts)
    assert (result.step, result.stopped) == (at, "SIGTERM")


def test_saved_on_a_mesh_resumes_on_one_device(text, tmp_path):
    parts = sections(text, residual=MHC(), train__steps=4)
    _, wide = run(tmp_path / "run", parts | {"mesh": MeshConfig(4, 2, 1)}, devices=8)
    again = sections(text, residual=MHC(), train__steps=4)
    _, one = run(tmp_path / "run", again, mode="resume")
    assert one.step == 4 and one.train_traces == 0, "a finished run trains no further"
    kept = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(ValueError, match=r"train\.steps=3 is less than the 4 updates"):
        run(tmp_path / "run", sections(text, residual=MHC(), train__steps=3), mode="resume")
    assert (tmp_path / "run" / "config.yaml").read_text() == kept
    assert abs(one.evaluation["valid_loss"] - wide.evaluation["valid_loss"]) <= 1e-5 * wide.evaluation["valid_loss"]


def test_another_architecture_is_refused_with_the_differences(text, tmp_path):
    run(tmp_path / "run", sections(text, train__steps=2))
    with pytest.raises(CheckpointMismatch) as refused:
        run(
            tmp_path / "run",
            sections(text, train__steps=4, residual=AttentionResiduals(), model__blocks=3),
            mode="resume",
        )
    text_of = str(refused.value)
    assert "model.blocks: 2 -> 3" in text_of and "residual.kind: 'plain' -> 'attnres'" in text_of
    with pytest.raises(CheckpointError, match="holds checkpoints of a run"):
        run(tmp_path / "run", sections(text, train__steps=4))


def test_weights_of_another_run_start_at_step_zero(text, tmp_path):
    _, first = run(tmp_path / "a", sections(text, train__steps=6))
    _, second = run(
        tmp_path / "b", sections(text, train__steps=1, optimizer__learning_rate=1e-9), weights_from=tmp_path / "a"
    )
    assert second.step == 1
    assert abs(second.evaluation["valid_loss"] - first.evaluation["valid_loss"]) < 1e-4


def test_not_finite_stops_and_keeps_the_last_good_checkpoint(text, tmp_path):
    parts = sections(text, train__save_every=2, train__steps=6, optimizer__clip=None)
    run(tmp_path / "run", parts | {"train": dataclasses.replace(parts["train"], steps=4)})
    broken = parts | {"optimizer": dataclasses.replace(parts["optimizer"], learning_rate=1e30)}
    with pytest.raises(TrainingDiverged, match=r"last good checkpoint is step 4.*learning_rate"):
        run(
            tmp_path / "run",
            broken | {"train": dataclasses.replace(parts["train"], steps=12, save_every=4)},
            mode="resume",
        )
    with Checkpoints(tmp_path / "run" / "checkpoints", mode="read") as checkpoints:
        restored = checkpoints.restore_params()
    assert restored.step == 4 and all(np.all(np.isfinite(p)) for p in jax.tree.leaves(restored.state))


def test_gradients_do_not_depend_on_accumulation_or_devices(text):
    """Rows of very unequal length: the mean is over real tokens, however the rows are grouped."""
    from lmres.data import load_splits
    from lmres.train.feed import Feed

    config = DataConfig(train=str(text / "text.jsonl"), cache_dir=str(text / "cache"), packing="none")
    splits = load_splits(config, 128, 8)
    model = Transformer(ModelConfig(vocab_size=257, width=16, blocks=1, heads=2, context=128), Plain())
    params = draw(model)
    host = splits.train.batch(0)
    assert len(set(host["weights"].sum(1))) > 1
    results = []
    for accumulate, devices in ((1, 1), (4, 1), (1, 2), (2, 4)):
        mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
        batch = next(Feed(splits.train, mesh, 8).train(0))
        results.append(jax.jit(lambda p, b, a=accumulate: gradients(model, p, b, a, 1e-4))(params, batch))
    for other in results[1:]:
        for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)


def test_evaluation_does_not_depend_on_its_batch_size(text, tmp_path):
    losses = []
    for size in (1, 3, 8):
        parts = sections(text, train__steps=1, train__eval_batch_size=size)
        losses.append(run(tmp_path / str(size), parts)[1].evaluation["valid_loss"])
    assert max(losses) - min(losses) < 1e-5


def test_an_all_padding_batch_changes_nothing_to_nan():
    model = Transformer(ModelConfig(vocab_size=8, width=16, blocks=1, heads=2, context=4), Plain())
    zeros = jnp.zeros((2, 4), jnp.int32)
    batch = {"inputs": zeros, "targets": zeros, "segment_ids": zeros, "positions": zeros, "weights": jnp.zeros((2, 4))}
    grads, sums = gradients(model, draw(model), batch, 1, 0.0)
    assert sums.tokens == 0 and all(np.all(g == 0) for g in jax.tree.leaves(grads))


def test_an_update_that_breaks_the_parameters_is_not_saved(text, tmp_path):
    """The last step's own loss is finite; what it leaves behind is not."""
    broken = sections(text, train__steps=1, optimizer__learning_rate=1e39, optimizer__clip=None, schedule__warmup=0.0)
    with pytest.raises(TrainingDiverged, match="no checkpoint was saved"):
        run(tmp_path / "run", broken)
    with Checkpoints(tmp_path / "run" / "checkpoints", mode="read") as checkpoints:
        assert checkpoints.steps() == []


def test_too_few_steps_in_the_data_are_found_before_the_first(text, tmp_path):
    parts = sections(text, data__repeat="never", train__steps=100000)
    with pytest.raises(ValueError, match=r"data\.repeat=never: the training text is \d+ steps.*train\.steps=100000"):
        run(tmp_path / "run", parts)


def test_weights_may_go_on_at_another_context(text, tmp_path):
    run(tmp_path / "a", sections(text, train__steps=2))
    _, longer = run(tmp_path / "b", sections(text, train__steps=1, model__context=32), weights_from=tmp_path / "a")
    assert longer.step == 1
    with pytest.raises(CheckpointMismatch, match=r"model\.blocks: 2 -> 1"):
        run(tmp_path / "c", sections(text, train__steps=1, model__blocks=1), weights_from=tmp_path / "a")
