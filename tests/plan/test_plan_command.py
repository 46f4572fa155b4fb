"""``lmres plan`` with the real compilers: what it says of a small model, and of one that does not fit."""

import json
import re

import pytest

from lmres.plan.machines import MACHINES

KEYS = {
    "format", "what", "residual", "topology", "mesh", "settings", "tokens", "fits", "refused", "headroom", "memory",
    "work", "collectives", "bound", "buffers", "unknown_loops", "lower_seconds", "compile_seconds", "notes", "advice",
}  # fmt: skip
INNER = {
    "topology": "name slices devices kind memory peak_flops hbm_bandwidth link_bandwidth network_bandwidth source",
    "memory": "held activations temporaries program host peak available limit",
    "work": "model_flops recomputed_flops compiler_flops compiler_bytes moved compiler_seconds",
    "bound": "compute memory network seconds by incomplete",
}
BIG = ("residual.kind=plain", "train.batch_size=4096", "model.vocab_size=32768", "model.blocks=1")


def test_a_train_step_on_tpus(plan, needs_tpu):
    code, out, _ = plan("--topology", "v5e:2x2", "--buffers", "40", "--json")
    found = json.loads(out)
    assert code == 0 and found["fits"] and found["refused"] is None
    assert set(found) == KEYS and found["format"] == 1
    for key, names in INNER.items():
        assert set(found[key]) == set(names.split())
    assert found["topology"]["devices"] == 4 and found["mesh"]["fsdp"] == 4 and found["tokens"] == 8 * 128
    memory, work = found["memory"], found["work"]
    assert set(memory["held"]) == {"parameters", "optimiser state", "batch"}
    assert memory["held"]["optimiser state"] == pytest.approx(2 * memory["held"]["parameters"], rel=0.01)
    parts = sum(memory["held"].values()) + memory["activations"] + memory["temporaries"] + memory["program"]
    assert memory["peak"] == pytest.approx(parts, rel=0.2)  # arguments are padded in memory
    assert work["model_flops"] > work["recomputed_flops"] > 0 and work["moved"] > 0
    assert found["unknown_loops"] == 0
    kinds = {row["kind"]: row for row in found["collectives"]}
    assert kinds and all(row["count"] >= 1 and row["sent"] > 0 for row in kinds.values())
    assert found["bound"]["compute"] == pytest.approx(
        (work["model_flops"] + work["recomputed_flops"]) / MACHINES["v5e"].peak
    )
    assert any(re.fullmatch(r"lmres/\w+/\w+\.py:\d+", row["source"]) for row in found["buffers"])


def test_a_train_step_on_gpus(plan, needs_gpu):
    code, out, _ = plan("--topology", "h200:1x8", "--json")
    found = json.loads(out)
    assert code == 0 and found["fits"] and found["topology"]["kind"] == "NVIDIA H200"
    assert set(found) == KEYS and "cuDNN" in found["notes"][0]
    row = 128 * 2 * 64 * 2  # bytes of a device's row of two streams; one for each block is kept, and little else
    assert 2 * row <= found["memory"]["activations"] <= 40 * row
    assert {"all-gather", "reduce-scatter"} <= {row["kind"] for row in found["collectives"]}
    assert any(row["source"].startswith("lmres/model/layers.py:") for row in found["buffers"])


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_generation_on_tpus(plan, needs_tpu, what):
    code, out, _ = plan("--topology", "v5e:2x2", "--what", what, "--batch", "8", "--context", "128", "--json")
    found = json.loads(out)
    assert code == 0 and found["what"] == what and found["fits"]
    assert found["tokens"] == (8 if what == "decode" else 8 * 128)
    assert found["work"]["recomputed_flops"] == 0 and found["memory"]["activations"] == 0
    if what == "decode":  # 2 layers of 2 rows of 128 slots, keys and values of 64 numbers, and their places
        assert found["memory"]["held"]["cache"] == 2 * 2 * 128 * 2 * 64 * 2 + 2 * 2 * 128 * 4


def test_what_the_compiler_refuses_is_told_with_what_would_fit(plan, needs_tpu):
    code, out, _ = plan("--topology", "v5e:2x2", *BIG, "--json")
    found = json.loads(out)
    assert code == 4 and not found["fits"] and "RESOURCE_EXHAUSTED" in found["refused"]
    assert found["memory"]["peak"] > found["memory"]["available"] > 15 * 2**30
    assert found["work"] is None and found["bound"] is None and found["buffers"] == []
    changes = [row["changes"] for row in found["advice"]]
    assert {"train.accumulate"} in [set(change) for change in changes]
    assert all(row["peak"] <= 0.95 * 16 * 2**30 for row in found["advice"])


def test_a_plan_as_text(plan, needs_tpu):
    code, out, err = plan("--topology", "v6e:2x2", "--what", "decode", "--batch", "4", "--buffers", "40")
    assert code == 0 and "compiling for 4 TPU v6 lite" in err
    for part in (
        "decode of mhc-lite-2 on v6e:2x2: 4 TPU v6 lite",
        "one token for each of 4 rows",
        "\nfits: ",
        "headroom",
    ):
        assert part in out, part
    for part in ("cache ", "bound, by ", "all-gather", "lmres/ops/", "figures: Google Cloud TPU documentation"):
        assert part in out, part
    assert "activations" not in out


def test_generation_over_two_slices(plan, needs_tpu):
    words = ("--topology", "v5e:2x2", "--slices", "2", "mesh.data=2", "--what", "decode", "--batch", "8", "--json")
    code, out, _ = plan(*words, "train.batch_size=3")  # a training batch is not asked for
    found = json.loads(out)
    assert code == 0 and found["topology"]["devices"] == 8 and found["topology"]["slices"] == 2
    assert found["mesh"]["data"] == 2 and found["memory"]["held"]["cache"] < 128 * 2**10


def test_a_search_finds_what_fits(plan, needs_tpu):
    code, out, err = plan("--topology", "v5e:2x2", "residual.kind=plain", "--search", "--compiles", "2", "--json")
    found = json.loads(out)
    assert code == 0 and found["best"]["plan"]["fits"]
    assert 1 <= len(found["tried"]) <= 2 < found["candidates"] and found["stopped"]
    assert all(set(row["changes"]) >= {"mesh.data", "mesh.fsdp", "model.remat"} for row in found["tried"])
    fitting = [row["plan"]["bound"]["seconds"] for row in found["tried"] if row["plan"]["fits"]]
    assert found["best"]["plan"]["bound"]["seconds"] == min(fitting)
    assert "compiling 1 of at most 2" in err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--topology", "v5p:8x8"], ["v5p wants 3 sizes", "v5p:AxBxC"]),
        (["--topology", "v8:8x8"], ["unknown device 'v8'", "v6e"]),
        (["--topology", "v5e:2x2", "mesh.fsdp=3"], ["mesh.fsdp=3", "number of devices, 4"]),
        (["--topology", "v5e:2x2", "mesh.fsdp=8", "mesh.data=1"], ["mesh.fsdp=8", "number of devices, 4"]),
        (["--topology", "v5e:2x2", "train.batch_size=6"], ["train.batch_size=6", "mesh.fsdp=4"]),
        (
            ["--topology", "v5e:2x2", "model.vocab_size=null"],
            ["model.vocab_size is not set", "model.vocab_size=NUMBER"],
        ),
        (["--topology", "v5e:2x2", "--what", "decode", "--batch", "3"], ["--batch = 3", "mesh.fsdp = 4"]),
        (["--topology", "v5e:2x2", "--what", "prefill", "--context", "512"], ["--context 512", "model.context=128"]),
        (["--topology", "v5e:2x2", "--what", "decode", "--search"], ["--search", "--what decode"]),
        (["--topology", "v5e:2x2", "--compiles", "0"], ["--compiles 0"]),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_compiled(plan, needs_tpu, words, parts):
    code, out, err = plan(*words)
    assert code == 1 and out == ""
    assert all(part in err for part in parts), err
    assert "Traceback" not in err


def test_a_machine_that_cannot_be_built_is_told(plan, needs_tpu):
    code, _, err = plan("--topology", "v5e:3x5", "mesh.fsdp=1", "mesh.data=15", "train.batch_size=15")
    assert code == 1 and "knows no such machine" in err
