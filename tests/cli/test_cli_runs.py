"""One run from training to text, stopped and resumed."""

import json
import shutil

import pytest

from lmres.train.metrics import read_metrics


def test_train_says_what_it_did(lmres, tiny, tmp_path):
    answer = lmres("train", tiny, "--folder", tmp_path / "run", "--json", "train.steps=2")
    assert answer.code == 0
    told = answer.json
    assert told["step"] == told["steps"] == 2 and told["stopped"] is None
    assert told["train_traces"] == 1
    assert told["evaluation"]["valid_bpb"] == pytest.approx(read_metrics(tmp_path / "run")[-1]["valid_bpb"])
    assert "cpu" in told["device"]
    assert "2 sub-layers, plain" in answer.err  # the structure, before anything is compiled
    assert "step 2/2 loss" in answer.err


def test_eval_gives_the_loss_that_training_saw_whatever_the_batch_size(lmres, finished):
    last = read_metrics(finished)[-1]
    for size in ((), ("--batch-size", 16)):
        answer = lmres("eval", finished, "--json", *size)
        assert answer.code == 0
        assert answer.json["step"] == 4
        assert answer.json["valid_loss"] == pytest.approx(last["valid_loss"], rel=1e-5)
        assert answer.json["valid_bpb"] == pytest.approx(last["valid_bpb"], rel=1e-5)
    earlier = lmres("eval", finished, "--step", 2)
    assert f"step 2: {read_metrics(finished)[2]['valid_loss']:.4f} nats per token" in earlier.out
    assert "bits per byte" in earlier.out


def test_eval_on_other_text(lmres, finished, tiny, tmp_path):
    text = tmp_path / "other.txt"
    text.write_text("zzzz qqqq " * 40)
    answer = lmres("eval", finished, f"data.valid={text}", "--json")
    assert answer.code == 0
    assert answer.json["valid_tokens"] == len(text.read_text())  # all but the first byte, and the separator
    assert answer.json["valid_loss"] > read_metrics(finished)[-1]["valid_loss"]


def test_generate(lmres, finished, tmp_path):
    one = lmres("generate", finished, "--prompt", "The é", "--max-tokens", 4, "--json")
    assert one.code == 0
    [result] = one.json["results"]
    assert result["prompt"] == "The é" and 1 <= len(result["tokens"]) <= 4
    streamed = lmres("generate", finished, "--prompt", "The é", "--max-tokens", 4)
    assert streamed.out == f"The é{result['continuation']}\n"
    assert "step 4" in streamed.err

    # A batch of unequal prompts: what each gets, it gets alone.
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"q": text}) + "\n" for text in ("A long one", "The é")))
    batch = lmres("generate", finished, "--prompts", prompts, "--key", "q", "--max-tokens", 4, "--json")
    assert batch.code == 0
    assert [r["prompt"] for r in batch.json["results"]] == ["A long one", "The é"]
    assert batch.json["results"][1]["tokens"] == result["tokens"]
    text = lmres("generate", finished, "--prompts", prompts, "--key", "q", "--max-tokens", 4).out
    assert text.startswith("--- 0\nA long one") and "\n--- 1\nThe é" in text


def test_draws_follow_the_seed(lmres, finished):
    def draw(seed):
        options = ("--temperature", 1, "--top-k", 50, "--seed", seed)
        return lmres("generate", finished, "--prompt", "ab", "--max-tokens", 8, *options, "--json").json[
            "results"
        ]

    assert draw(1) == draw(1) != draw(2)


def test_resume_goes_on_as_if_unbroken(lmres, tiny, run_copy, tmp_path):
    answer = lmres("train", run_copy, "--resume", "train.steps=6", "train.log_every=3")
    assert answer.code == 0
    assert "changed train.steps: 4 -> 6" in answer.err and "changed train.log_every: 2 -> 3" in answer.err
    assert "resumed from step 4" in answer.err
    assert "step 6 of 6" in answer.out
    assert lmres("train", tiny, "--folder", tmp_path / "whole", "train.steps=6").code == 0
    broken, whole = (
        [(line["step"], line["loss"]) for line in read_metrics(folder) if "loss" in line]
        for folder in (run_copy, tmp_path / "whole")
    )
    assert [step for step, _ in whole] == [1, 2, 3, 4, 5, 6]
    assert broken == whole

    again = lmres("train", run_copy, "--resume")
    assert again.code == 0 and "is finished at step 6" in again.err


def test_inspect(lmres, run_copy):
    found = lmres("inspect", run_copy, "--json")
    assert found.code == 0
    assert [(c["step"], c["problem"], c["parameters"]) for c in found.json["checkpoints"]] == [
        (2, None, 8256),
        (4, None, 8256),
    ]
    assert found.json["settings"]["model.width"] == 16

    newest = run_copy / "checkpoints" / "4"
    for array in (newest / "state").rglob("d/*"):
        array.write_bytes(array.read_bytes()[:10])
    (run_copy / "checkpoints" / "6.orbax-checkpoint-tmp").mkdir()
    damaged = lmres("inspect", run_copy)
    assert damaged.code == 1
    assert "2     complete" in damaged.out and "unfinished: 6.orbax" in damaged.out
    # The last complete one is used, and that is said.
    for command in (("eval",), ("generate", "--prompt", "a", "--max-tokens", 1)):
        answer = lmres(command[0], run_copy, *command[1:])
        assert answer.code == 0 and "using step 2" in answer.err and "step 2 of" in answer.err


def test_resume_starts_where_there_is_nothing_yet(lmres, tiny, tmp_path):
    answer = lmres("train", tiny, "--folder", tmp_path / "run", "--resume", "train.steps=1")
    assert answer.code == 0
    assert "holds no checkpoint yet: starting at step 0" in answer.err


def test_a_used_folder_is_refused_or_overwritten(lmres, tiny, run_copy):
    refused = lmres("train", tiny, "--folder", run_copy)
    assert refused.code == 1 and "holds checkpoints of a run (newest: step 4)" in refused.err
    assert (run_copy / "checkpoints" / "4").is_dir()
    assert lmres("train", tiny, "--folder", run_copy, "--overwrite", "train.steps=1").code == 0
    assert [p.name for p in (run_copy / "checkpoints").iterdir()] == ["1"]


def test_weights_from_another_run(lmres, tiny, finished, tmp_path):
    answer = lmres("train", tiny, "--folder", tmp_path / "new", "--weights-from", finished, "train.steps=1")
    assert answer.code == 0
    assert (
        "started at step 0 with the parameters of" in answer.err and "step 4; a fresh optimiser" in answer.err
    )
    first = read_metrics(tmp_path / "new")[0]
    assert first["step"] == 1 and first["loss"] < read_metrics(finished)[0]["loss"] - 0.1


def test_a_run_that_diverges_keeps_its_last_good_checkpoint(lmres, run_copy):
    answer = lmres("train", run_copy, "--resume", "train.steps=40", "optimizer.learning_rate=1e9")
    assert answer.code == 3
    assert "not finite" in answer.err and "Traceback" not in answer.err
    assert "optimizer.learning_rate (now 1e+09)" in answer.err
    found = lmres("inspect", run_copy, "--json")
    assert found.code == 0 and found.json["checkpoints"][-1]["problem"] is None
    step = found.json["checkpoints"][-1]["step"]
    assert f"the last good checkpoint is step {step}" in answer.err
    assert lmres("eval", run_copy, "--batches", 1).code == 0


def test_ready_made_ids(lmres, tiny, tmp_path):
    ids = tmp_path / "ids.jsonl"
    ids.write_text(
        "".join(json.dumps({"input_ids": [(i * k) % 50 for i in range(40)]}) + "\n" for k in range(1, 21))
    )
    folder = tmp_path / "run"
    assert (
        lmres("train", tiny, "--folder", folder, f"data.train={ids}", "data.valid=null", "train.steps=1").code
        == 0
    )
    assert "bits per byte" not in lmres("eval", folder).out
    answer = lmres("generate", folder, "--prompt", "1 2 3", "--max-tokens", 3, "--json")
    assert answer.code == 0
    assert answer.json["results"][0]["prompt"] == [1, 2, 3] and len(answer.json["results"][0]["tokens"]) == 3
    ids.unlink()  # the data may be gone by then
    told = lmres("generate", folder, "--ids", "--prompt", "1 2 3", "--max-tokens", 3)
    assert [int(word) for word in told.out.split()] == [1, 2, 3, *answer.json["results"][0]["tokens"]]


def test_a_store_is_trained_on_as_it_was_prepared(lmres, tiny, tmp_path):
    source = shutil.copy(tiny.parent / "small_train.jsonl", tmp_path)
    prepared = lmres(
        "data", "prepare", source, "data.valid_fraction=0.1", "--output", tmp_path / "store", "--json"
    )
    assert prepared.code == 0
    assert prepared.json["splits"]["valid"]["documents"] == 12 and prepared.json["tokenizer"] == "bytes-257"
    shown = lmres("data", "show", tmp_path / "store", "--verify")
    assert shown.code == 0 and "valid: 12 documents" in shown.out and "verified" in shown.out
    store = (f"data.train={tmp_path / 'store'}", "data.valid=null")
    assert lmres("train", tiny, "--folder", tmp_path / "run", *store, "train.steps=1").code == 0

    tokens = tmp_path / "store" / "valid" / "tokens.bin"
    tokens.write_bytes(b"\0\0" + tokens.read_bytes()[2:])
    assert lmres("data", "show", tmp_path / "store").code == 0
    assert "differ from those written" in lmres("data", "show", tmp_path / "store", "--verify").err
