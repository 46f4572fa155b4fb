"""A small transformer for tests of flows, its parameters drawn without compiling their start."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from variants import draw

from lmres.flow.config import FlowConfig
from lmres.model import ModelConfig, Transformer
from lmres.residual import Plain

CONFIG = ModelConfig(vocab_size=17, context=8, width=16, blocks=3, heads=2, dtype="float64")
TOKENS = np.random.default_rng(0).integers(0, 17, (2, 6))


def drawn(flow=FlowConfig(), config=CONFIG):  # noqa: B008 - frozen
    """Parameters away from their start."""
    return jax.tree.map(lambda p: jnp.asarray(p, config.dtype), draw(Transformer(config, Plain(), flow=flow)))


@functools.cache
def program(flow, config):
    """The model as one function, so that it is compiled once for all that ask for it."""
    model = Transformer(config, Plain(), flow=flow)
    return jax.jit(lambda params, *args: model.apply({"params": params}, *args))


def logits(flow, params, *args, config=CONFIG, tokens=TOKENS):
    return np.asarray(program(flow, config)(params, tokens, *args))


def with_gradient(flow, params, *args, config=CONFIG, tokens=TOKENS):
    """A function of weights [B, S] to (logits, gradient of their weighted squares): one program for all weights."""
    model = Transformer(config, Plain(), flow=flow)

    def loss(params, weights):
        found = model.apply({"params": params}, tokens, *args)
        return (weights[..., None] * found**2).sum(), found

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def both(weights):
        (_, found), grads = run(params, jnp.asarray(weights, config.dtype))
        return found, grads

    return both


def scheduled(flow, schedule, **more):
    return dataclasses.replace(flow, schedule=schedule, **more)


def same(a, b, rtol=1e-10):
    """Equal within ``rtol`` of the largest entry of each array."""

    def close(x, y):
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * max(1.0, float(np.abs(y).max(initial=0))))

    chex.assert_trees_all_equal_structs(a, b)
    jax.tree.map(close, a, b)
