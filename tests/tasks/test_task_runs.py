"""Tasks through the command line: training, evaluation, resume, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmres.cli import main
from lmres.data import Splits
from lmres.train.evaluate import accuracy_by_position, measure_of
from lmres.train.loss import loss_sums, scored_sums
from lmres.train.metrics import read_metrics

PARITY = """
task: {kind: word, group: Z2, length: 8, valid_sequences: 20}
model: {width: 32, blocks: 2, heads: 2, context: 10}
optimizer: {learning_rate: 1e-2}
schedule: {kind: constant, warmup: 0}
train: {steps: 30, batch_size: 16, eval_every: 15, save_every: 15, log_every: 10}
log: {tensorboard: false}
"""


@pytest.fixture
def lmres(capfd):
    def run(*argv):
        capfd.readouterr()
        code = main([str(word) for word in argv])
        return code, *capfd.readouterr()

    return run


@pytest.fixture(scope="module")
def parity(tmp_path_factory):
    """(config file, folder of a run of 30 updates)."""
    folder = tmp_path_factory.mktemp("parity")
    (folder / "parity.yaml").write_text(PARITY)
    assert main(["train", str(folder / "parity.yaml"), "--folder", str(folder / "run")]) == 0
    return folder / "parity.yaml", folder / "run"


def test_scores_are_those_of_a_count_by_hand():
    logits = np.array(
        [[[3, 1, 2], [0, 1, 0], [5, 0, 0], [1, 0, 0]], [[0, 0, 1], [2, 1, 0], [0, 9, 0], [0, 1, 0]]], np.float32
    )  # most probable: 0 1 0 0 / 2 0 1 1
    targets = jnp.array([[0, 2, 0, 0], [2, 0, 0, 1]])
    weights = jnp.array([[1, 1, 0, 0], [1, 1, 1, 0]])
    sums = jax.tree.map(np.asarray, scored_sums(jnp.asarray(logits), targets, weights))
    assert sums.labels.tolist() == [2, 2, 1, 0] and sums.right.tolist() == [2, 1, 0, 0]
    assert accuracy_by_position(sums) == [1.0, 0.5, 0.0]
    assert tuple(sums[:3]) == tuple(jax.tree.map(np.asarray, loss_sums(jnp.asarray(logits), targets, weights)))
    gap = sums._replace(labels=np.array([1.0, 0, 2, 0]), right=np.array([1.0, 0, 1, 0]))
    np.testing.assert_array_equal(accuracy_by_position(gap), [1, np.nan, 0.5])
    assert np.isnan(accuracy_by_position(sums._replace(labels=np.zeros(4)))).all()


def test_text_is_not_scored():
    assert measure_of(Splits(train=None, valid=None, info=None, tokenizer=None)) is loss_sums


def test_parity_is_being_learned(parity):
    lines = read_metrics(parity[1])
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 30 and np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.02
    found = [line for line in lines if "valid_loss" in line]
    assert [line["step"] for line in found] == [15, 30]
    for line in found:
        assert 0.4 < line["valid_accuracy"] <= 1 and 0 <= line["valid_accuracy_last"] <= 1
        assert line["valid_tokens"] == 20 * 8 and "valid_bpb" not in line
        assert all(not isinstance(value, list) for value in line.values())


def test_eval_gives_accuracy_by_position(lmres, parity):
    last = read_metrics(parity[1])[-1]
    code, out, _ = lmres("eval", parity[1], "--json", "--batch-size", 8)
    told = json.loads(out)
    assert code == 0
    assert len(told["accuracy_by_position"]) == 8
    assert told["accuracy"] == told["valid_accuracy"] == pytest.approx(last["valid_accuracy"])
    assert np.mean(told["accuracy_by_position"]) == pytest.approx(told["accuracy"])
    assert told["accuracy_by_position"][-1] == pytest.approx(last["valid_accuracy_last"])
    assert told["valid_loss"] == pytest.approx(last["valid_loss"], rel=1e-5)
    code, out, _ = lmres("eval", parity[1])
    assert code == 0 and "nats per token, accuracy 0." in out
    assert out.splitlines()[-1].startswith("accuracy by position: ") and len(out.splitlines()[-1].split()) == 3 + 8


def test_eval_of_other_sequences(lmres, parity):
    code, out, _ = lmres("eval", parity[1], "--json", "task.length=5", "task.valid_sequences=9", "task.valid_seed=1")
    told = json.loads(out)
    assert code == 0 and told["valid_tokens"] == 5 * 9 and len(told["accuracy_by_position"]) == 5
    for setting, said in {
        "task.length=11": "model.context=10 is less than task.length=11",
        "task.length=0": "task.length=0 must be at least 1",
        "task.group=S3": "model.vocab_size=2 is less than the 6 ids of task.group=S3",
        "data.valid=a.txt": "data.valid has no effect with task.kind=word",
    }.items():
        code, _, err = lmres("eval", parity[1], setting)
        assert code == 1 and said in err


def test_training_says_what_it_trains_on(lmres, parity, tmp_path):
    code, out, err = lmres("train", parity[0], "--folder", tmp_path / "run", "train.steps=1")
    assert code == 0
    assert "word problem of Z2, 2 letters, 2 elements" in err and "vocabulary the task's" in err
    assert "sequences of 8 (2 of 10 places of a row are padding), 20 in all" in err
    assert "accuracy 0." in out and ", at the last position 0." in out


def test_resume_equals_unbroken(lmres, parity, tmp_path):
    folder = tmp_path / "run"
    assert lmres("train", parity[0], "--folder", folder, "train.steps=15")[0] == 0
    code, _, err = lmres("train", parity[0], "--folder", folder, "--resume")
    assert code == 0 and "resumed from step 15" in err
    ends = [
        [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in read_metrics(where)]
        for where in (parity[1], folder)
    ]
    assert ends[0] == ends[1]

    code, _, err = lmres("train", parity[0], "--folder", folder, "--resume", "train.steps=40", "task.train_seed=1")
    assert code == 1 and "with task.train_seed: 0 -> 1: the position in the data" in err


def test_there_is_nothing_to_generate_or_prepare(lmres, parity, tmp_path):
    for ids in ((), ("--ids",)):
        code, _, err = lmres("generate", parity[1], "--prompt", "1 0", *ids)
        assert code == 1 and "was trained with task.kind=word" in err and "lmres eval" in err
    code, _, err = lmres("data", "prepare", parity[0], "--output", tmp_path / "store")
    assert code == 1 and "task.kind=word makes its sequences as it goes" in err


def test_other_commands_take_a_task(lmres, parity, tmp_path):
    code, out, _ = lmres("inspect", parity[1], "--measure", "--json")
    assert code == 0 and json.loads(out)["settings"]["task.group"] == "Z2"
    code, out, _ = lmres("convert", parity[1], "residual.kind=hc", "--out", tmp_path / "hc", "--json")
    assert code == 0 and json.loads(out)["folder"] == str(tmp_path / "hc")


@pytest.mark.slow
def test_a_comparison_on_a_task(lmres, parity, tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(f"include: {parity[0]}\ncompare: {{variants: {{plain: {{}}, hc: {{residual.kind: hc}}}}}}\n")
    code, _, err = lmres("compare", path, "--folder", tmp_path / "two", "train.steps=2", "train.eval_every=0")
    assert code == 0, err
    result = json.loads((tmp_path / "two" / "comparison.json").read_text())
    assert result["data"] == {"task": "word problem of Z2, 2 letters, 2 elements", "vocabulary": "2"}
    assert "bits per label" in result["notes"]
