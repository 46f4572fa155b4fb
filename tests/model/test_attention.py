"""Attention against a slow loop written from the definition, in float64 and float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmres.model import KeyValues, ModelConfig, Transformer
from lmres.model.config import check_ways
from lmres.model.layers import Args, Attention, attend, rotate
from lmres.residual import ResidualMatrix
from lmres.train.flops import matrix_parameters


def slow_attention(query, key, value, allowed):
    """One query position and head at a time."""
    out = np.zeros(query.shape)
    batch, steps, heads, size = query.shape
    per_group = heads // key.shape[2]
    for b, s, h in np.ndindex(batch, steps, heads):
        g = h // per_group
        readable = [t for t in range(key.shape[1]) if allowed[b, s, t]]
        scores = np.array([query[b, s, h] @ key[b, t, g] for t in readable]) / np.sqrt(size)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[b, s, h] = sum(w * value[b, t, g] for w, t in zip(weights, readable))
    return out


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-13), ("float32", 1e-5)])
@pytest.mark.parametrize("sources", [1, 2])
def test_attend_matches_the_definition(dtype, tolerance, sources):
    rng = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        query = rng.normal(size=(2, 6, 4, 8)).astype(dtype)
        reads = tuple(
            KeyValues(*(rng.normal(size=(2, 6 - 2 * i, 2, 8)).astype(dtype) for _ in range(2))) for i in range(sources)
        )
        masks = [rng.random((2, 1, 6, r.key.shape[1])) < 0.6 for r in reads]
        masks[0][..., 0] = True  # every position reads something
        y = attend(query, reads, tuple(map(jnp.asarray, masks)), "xla")
        key, value = (np.concatenate([getattr(r, n) for r in reads], 1) for n in ("key", "value"))
        expected = slow_attention(query, key, value, np.concatenate(masks, -1)[:, 0])
        assert y.dtype == dtype
        np.testing.assert_allclose(y, expected, atol=tolerance)
        if sources == 1:
            causal = attend(query, reads, (None,), "xla")
            expected = slow_attention(query, key, value, np.broadcast_to(np.tri(6, dtype=bool), (2, 6, 6)))
            np.testing.assert_allclose(causal, expected, atol=tolerance)
        else:
            with pytest.raises(ValueError, match="mask for each"):
                attend(query, reads, (None, masks[1]), "xla")


def test_rotary_scores_depend_on_distance_only():
    rng = np.random.default_rng(1)
    q, k = (rng.normal(size=(1, 1, 1, 16)).astype("float32") for _ in range(2))
    score = lambda i, j: float(  # noqa: E731
        jnp.sum(rotate(q, jnp.array([[i]]), 1e4) * rotate(k, jnp.array([[j]]), 1e4))
    )
    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)
    np.testing.assert_array_equal(rotate(q, jnp.array([[0]]), 1e4), q)


def test_heads_can_be_cut_from_separate_inputs():
    """model.heads_from=input: no matrices; the three inputs are the heads, and the heads the output."""
    config = ModelConfig(vocab_size=8, context=8, width=16, heads=4, heads_from="input")
    attention = Attention(config, norms=(), ways=3)
    rng = np.random.default_rng(0)
    inputs = tuple(jnp.asarray(rng.normal(size=(2, 5, 16)), jnp.float32) for _ in range(3))
    args = Args(jnp.zeros((2, 5), jnp.int32))  # position 0 throughout: no rotation
    assert attention.init(jax.random.key(0), inputs, 0, args) == {}
    y, new = attention.apply({}, inputs, 0, args)
    q, k, v = (np.asarray(x).reshape(2, 5, 4, 4) for x in inputs)
    logits = np.einsum("bshk,bthk->bhst", q, k) / 2.0
    logits[..., ~np.tri(5, dtype=bool)] = -np.inf
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(y, np.einsum("bhst,bthk->bshk", weights, v).reshape(2, 5, 16), atol=1e-5)
    np.testing.assert_allclose(new.value, v, atol=1e-6)


def test_heads_from_the_input_need_room_and_three_inputs():
    with pytest.raises(ValueError, match=r"model\.kv_heads=2 must be left out"):
        ModelConfig(width=16, heads=4, kv_heads=2, heads_from="input").check()
    with pytest.raises(ValueError, match=r"model\.width=16 into heads: model\.heads=4 of 8"):
        ModelConfig(width=16, heads=4, head_dim=8, heads_from="input").check()
    with pytest.raises(ValueError, match=r"residual.ways=\[1\] gives attention one input"):
        check_ways("sublayer", (1,), "input")
    check_ways("sublayer", (3, 1), "input")
    config = ModelConfig(vocab_size=8, context=8, width=16, blocks=2, heads=4, heads_from="input")
    model = Transformer(config, ResidualMatrix(keys=6))
    params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    assert not jax.tree.leaves(params["stack"].get("attention", {}))
    assert matrix_parameters(config)[0] == 3 * 16 * config.hidden
