"""Small models with random, not initial, connection parameters: at the start most connections are the plain
residual."""

import jax
import jax.numpy as jnp
import numpy as np

from lmres.flow import FlowConfig
from lmres.generate import extend, prefill
from lmres.model import ModelConfig, Transformer

VOCAB = 23


def make_model(connection, flow=FlowConfig(), **config):  # noqa: B008 - frozen
    sizes = {
        "vocab_size": VOCAB,
        "context": 12,
        "width": 16,
        "blocks": 3,
        "heads": 4,
        "mlp_hidden": 24,
    } | config
    return Transformer(ModelConfig(**sizes), connection, flow=flow)


def random_params(model, scale=0.4, seed=0):
    """The connection's start plus noise, gains around one, everything else normal with a fan-in's size. Drawn
    by numpy: compiling ``model.init`` would take longer than any test here."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    rng = np.random.default_rng(seed)

    def draw(path, shape):
        name = path[-1].key
        size = {"table": 0.02, "gain": scale}.get(name, model.config.width**-0.5)
        return (rng.standard_normal(shape.shape) * size + (name == "gain")).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    connection, width = model.connection, model.config.width
    depth = model.config.blocks * (2 if connection.unit == "sublayer" else 1)
    start = connection.init(jax.random.key(0), depth, width)
    params["stack"]["connection"] = jax.tree.map(
        lambda p: (np.asarray(p) + scale * rng.standard_normal(p.shape)).astype(np.float32), start
    )
    return params


def random_tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, shape, np.int32)


def full_logits(model, params, tokens):
    """Logits of a forward pass over whole rows, without a cache or padding."""
    return np.asarray(jax.jit(lambda p, t: model.apply({"params": p}, t))(params, tokens))


def assert_close(actual, expected, tolerance, what=""):
    """Within ``tolerance`` of the largest expected entry."""
    error = np.max(np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64)))
    scale = np.max(np.abs(np.asarray(expected, np.float64)))
    assert error <= tolerance * scale, f"{what}: off by {error:.2e}, largest entry {scale:.2e}"


run_prefill = jax.jit(prefill, static_argnums=(0, 5))
run_extend = jax.jit(extend, static_argnums=0, donate_argnums=2)


def padded(tokens, lengths, size):
    """Rows cut to ``lengths`` and moved to the right end of ``size`` columns: tokens, segments, positions."""
    positions = np.arange(size) - (size - np.asarray(lengths)[:, None])
    segments = (positions >= 0).astype(np.int32)
    positions = np.maximum(positions, 0).astype(np.int32)
    return (
        np.where(segments, np.take_along_axis(tokens, positions, 1), 0).astype(np.int32),
        segments,
        positions,
    )


def logits_by_cache(model, params, tokens):
    """[C, C, V]: row r is ``tokens[r]`` read as a prompt of r + 1 tokens and then one token at a time.

    All rows run in one batch, padded on the left, so each prompt length is tested and only two programs are
    compiled.
    """
    count, context = tokens.shape
    lengths = np.arange(1, count + 1)
    at, segments, positions = padded(tokens, lengths, context)
    logits, past = run_prefill(model, params, at, segments, positions, 2 * context)
    found = np.full((count, context, logits.shape[-1]), np.nan, logits.dtype)
    for row, length in enumerate(lengths):
        found[row, :length] = logits[row, context - length :]
    for step in range(context - 1):
        position = lengths + step
        real = position < context
        token = tokens[np.arange(count), np.minimum(position, context - 1)]
        logits, past = run_extend(
            model, params, past, token[:, None], real[:, None].astype(np.int32),
            np.where(real, position, 0)[:, None].astype(np.int32), context + step,
        )  # fmt: skip
        found[real, position[real]] = np.asarray(logits)[real, 0]
    return found
