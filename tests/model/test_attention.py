"""Attention against a slow loop written from the definition, in float64 and float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmres.model import KeyValues
from lmres.model.layers import attend, rotate


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
