"""``generate`` against a plain loop of full forward passes; batches, stopping, limits, meshes."""

import dataclasses
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generate_helpers import VOCAB, make_model, random_params, random_tokens

from lmres.generate import Sampling, decode, generate, padded_length
from lmres.residual import MHC, AttentionResiduals, DenseFormer, Plain
from lmres.sharding import MeshConfig, constrainer, make_mesh, param_shardings

CONTEXT = 48
PROMPTS = [random_tokens(n, seed=n).tolist() for n in (1, 5, 9, 17)]


@cache
def made(connection):
    model = make_model(connection, context=CONTEXT)
    return model, random_params(model)


def slow_greedy(model, params, prompts, count):
    """The definition: a full forward pass per token, without a cache; rows are filled up on the right."""
    forward = jax.jit(lambda p, t: model.apply({"params": p}, t))
    rows = [list(p) for p in prompts]
    for _ in range(count):
        tokens = np.zeros((len(rows), CONTEXT), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        logits = np.asarray(forward(params, tokens))
        for i, row in enumerate(rows):
            row.append(int(logits[i, len(row) - 1].argmax()))
    return [row[len(p) :] for row, p in zip(rows, prompts)]


@pytest.mark.parametrize("connection", [Plain(), AttentionResiduals(block=3), MHC()], ids=lambda c: c.name)
def test_greedy_tokens_are_those_of_the_full_model_in_any_batch(connection):
    model, params = made(connection)
    expected = slow_greedy(model, params, PROMPTS, 12)
    assert len({tuple(row) for row in expected}) > 1
    assert generate(model, params, PROMPTS, 12) == expected
    assert generate(model, params, PROMPTS[::-1], 12) == expected[::-1]
    assert [generate(model, params, [prompt], 12)[0] for prompt in PROMPTS] == expected


def test_prompts_up_to_the_whole_context():
    """The shortest and the longest prompt allowed, in one batch."""
    model, params = made(Plain())
    for count in (1, 5):
        prompts = [random_tokens(CONTEXT - count).tolist(), [3]]
        assert generate(model, params, prompts, count) == slow_greedy(model, params, prompts, count)


def test_samples_depend_on_the_seed_and_the_prompt_alone():
    model, params = made(Plain())
    options = {"temperature": 1.5, "top_k": 15, "top_p": 0.95, "seed": 4}
    prompts = [*PROMPTS, PROMPTS[1]]
    together = generate(model, params, prompts, 8, **options)
    assert generate(model, params, prompts, 8, **options) == together
    assert together[1] != together[4], "equal prompts must get draws of their own"
    backwards = generate(model, params, prompts[::-1], 8, **options)
    assert backwards == [together[i] for i in (1, 3, 2, 4, 0)], (
        "of equal prompts, the first gets the first's draws"
    )
    assert generate(model, params, [PROMPTS[2]], 8, **options) == [together[2]]
    assert generate(model, params, prompts, 8, **options | {"seed": 5}) != together


def test_tokens_are_handed_over_as_they_come():
    model, params = made(Plain())
    seen = []
    new = generate(model, params, PROMPTS, 12, on_token=lambda row, token: seen.append((row, token)))
    assert [row for row, _ in seen] == list(range(4)) * 12
    assert [[token for r, token in seen if r == row] for row in range(4)] == new


def test_rows_stop_at_eos(monkeypatch):
    model, params = made(Plain())
    free = generate(model, params, PROMPTS, 12)
    eos, seen = free[0][4], []

    def cut(row):
        return row[: row.index(eos) + 1] if eos in row else row

    stopped = generate(model, params, PROMPTS, 12, eos_id=eos, on_token=lambda *at: seen.append(at))
    assert stopped == [cut(row) for row in free]
    assert len(seen) == sum(map(len, stopped))

    # Alone, the run ends with the row: one step is under way when the eos is read, no more.
    steps, step = [], decode._step
    monkeypatch.setattr(decode, "_step", lambda *args: steps.append(1) or step(*args))
    (row,) = generate(model, params, PROMPTS[:1], 12, eos_id=eos)
    assert row == cut(free[0]) and len(steps) == min(len(row) + 1, 12)


def test_what_cannot_be_done_is_refused_before_anything_is_compiled():
    model, params = made(Plain())[0], None  # so nothing can be run
    with pytest.raises(
        ValueError, match=r"prompt 1 has 40 tokens.*with 9 new tokens.*49, more than model.context=48"
    ):
        generate(model, params, [[1], [1] * 40], 9)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(model, params, [[1], []], 9)
    with pytest.raises(
        ValueError, match=f"prompt 0 holds id {VOCAB}, outside the vocabulary, 0 to {VOCAB - 1}"
    ):
        generate(model, params, [[1, VOCAB]], 9)
    with pytest.raises(ValueError, match="holds id -1"):
        generate(model, params, [[-1]], 9)
    with pytest.raises(ValueError, match=f"eos_id={VOCAB}"):
        generate(model, params, [[1]], 9, eos_id=VOCAB)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        generate(model, params, [[1]], 0)
    for option in ({"temperature": -1.0}, {"top_k": 0}, {"top_p": 2.0}, {"seed": -1}):
        with pytest.raises(ValueError, match=next(iter(option))):
            generate(model, params, [[1]], 9, **option)
    assert generate(model, params, [], 9) == []
    with pytest.raises(TypeError):
        generate(model, params, [[1.5]], 9)


def test_logits_that_are_not_finite_are_reported():
    model, params = made(Plain())
    broken = jax.tree_util.tree_map_with_path(
        lambda path, p: p * np.nan if "final_norm" in jax.tree_util.keystr(path) else p, params
    )
    with pytest.raises(FloatingPointError, match=r"prompt 0 .* after 0 new tokens"):
        generate(model, broken, PROMPTS, 12)


def test_padded_lengths():
    assert [padded_length(n, 100) for n in (0, 1, 16, 17, 32, 33, 64, 65, 100)] == [
        16,
        16,
        16,
        32,
        32,
        64,
        64,
        100,
        100,
    ]
    assert padded_length(3, 5) == 5


TRACES = []


@dataclasses.dataclass(frozen=True)
class Counting(Plain):
    """A plain residual that notes each time a forward pass is traced."""

    kind: Literal["counting"] = "counting"

    def open(self, params, e, depth):
        TRACES.append(e.shape)
        return e


def test_programs_per_run():
    model, params = made(Counting())
    TRACES.clear()
    generate(model, params, [[1, 2], [3]], 6)
    assert TRACES == [(2, 16, 16), (2, 1, 16)]
    generate(model, params, [[1], [2]], 6, seed=3)
    generate(model, params, [[1] * 17, [2] * 9], 6, eos_id=3)
    assert len(TRACES) == 2, "prompts of one bucket share both programs"
    generate(model, params, [[1] * 18, [2] * 9], 6)
    assert TRACES[2:] == [(2, 32, 16), (2, 1, 16)]


def test_a_step_takes_over_the_memory_of_the_cache():
    model, params = made(Plain())
    rows, state = decode._start(model, params, PROMPTS, 12, seed=0)
    decode._step(model, Sampling(), params, rows, state)
    assert all(buffer.is_deleted() for buffer in jax.tree.leaves(state.past))


@pytest.mark.parametrize("connection", [Counting(), DenseFormer()], ids=lambda c: c.name)
def test_sharded_parameters(connection):
    """Three prompts on eight devices, for a model that pins its shardings in training."""
    model = make_model(connection, context=CONTEXT, vocab_size=24, kv_heads=2)
    params, prompts = random_params(model), [[1, 2, 3], [4], [5] * 12]
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    sharded = jax.device_put(params, param_shardings(params, mesh))
    expected = generate(model, params, prompts, 6, temperature=0.8, seed=1)
    TRACES.clear()
    found = generate(model.clone(constrain=constrainer(mesh)), sharded, prompts, 6, temperature=0.8, seed=1)
    assert found == expected
    if connection == Counting():
        assert len(TRACES) == 2, "the cache must come out of a step sharded as it went in"


def test_bfloat16_runs():
    model = make_model(AttentionResiduals(), context=CONTEXT, dtype="bfloat16")
    new = generate(model, random_params(model), PROMPTS, 5)
    assert [len(row) for row in new] == [5] * 4 and jnp.all(jnp.array(new) < VOCAB)
