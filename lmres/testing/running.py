"""Checks of the ways to run a connection: they must all give the same numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lmres.generate import extend, prefill
from lmres.sharding import MeshConfig, batch_sharding, constrainer, make_mesh, param_shardings
from lmres.testing.report import Skipped, compare
from lmres.testing.setting import BATCH, SEQUENCE, Setting, compiled

TOLERANCE = 2e-5
PROMPT = 4


def scan(s: Setting) -> dict[str, Any]:
    """One compiled copy for all depths, against a Python loop."""
    hint = (
        "A unit's number l is traced in a scan and an int in a loop: use jnp.where and lax.cond on it, and no Python "
        "state. A growing state has a backward pass of its own, see AppendOnly"
    )
    return {"error": compare(s.scanned, s.run(scan=False), TOLERANCE, "scanned and looped", hint)}


def remat(s: Setting) -> dict[str, Any]:
    """The backward pass recomputes everything, or all but products with weights."""
    hint = "Recomputing must repeat the same numbers: no side effects, no random numbers without a key of their own"
    return {
        f"error, {kind}": compare(s.run(remat=kind), s.scanned, TOLERANCE, f"remat={kind!r} and remat='none'", hint)
        for kind in ("full", "dots")
    }


def decode(s: Setting) -> dict[str, Any]:
    """A transformer reads a prompt into its cache, then one token at a time."""
    model, params, tokens = s.model(), s.model_params, s.tokens
    full = compiled(lambda p, t: model.apply({"params": p}, t))(params, tokens)
    ones = np.ones_like(tokens)
    positions = np.arange(SEQUENCE, dtype=np.int32) * ones
    part = slice(0, PROMPT)
    arrays = (tokens, ones, positions)
    read = compiled(prefill, static_argnums=(0, 5))
    step = compiled(extend, static_argnums=0)
    logits, past = read(model, params, *(a[:, part] for a in arrays), SEQUENCE)
    pieces = [logits]
    for t in range(PROMPT, SEQUENCE):
        logits, past = step(model, params, past, *(a[:, t : t + 1] for a in arrays), jnp.int32(t))
        pieces.append(logits)
    hint = (
        "Logits are [batch, position, token id]. In decoding a connection sees one token, [B, 1, D]: it must not "
        "depend on the sequence length, on where a token stands in the array, or on earlier calls"
    )
    cached = np.concatenate(pieces, axis=1)
    return {"error": compare({"logits": cached}, {"logits": full}, TOLERANCE, "cached and full", hint)}


def sharded(s: Setting) -> dict[str, Any]:
    """Outputs and gradients on a mesh of all devices, the state pinned as ``state_axes`` says."""
    count = len(jax.devices())
    if count < 2:
        raise Skipped("needs at least 2 devices, and there is 1 (on a CPU: JAX_NUM_CPU_DEVICES=8)")
    tensor = 2 if count % 4 == 0 and s.width % 4 == 0 else 1
    fsdp = 2 if count % (2 * tensor) == 0 else 1
    sequence = 2 if count % (2 * tensor * fsdp) == 0 else 1
    mesh = make_mesh(MeshConfig(count // fsdp // tensor // sequence, fsdp, tensor, sequence))
    rng = np.random.default_rng(s.seed + 3)
    e, g = (np.float32(rng.normal(size=(BATCH * count, *one.shape[1:]))) for one in (s.e, s.g))

    rows = batch_sharding(mesh)
    replicated = NamedSharding(mesh, P())
    matrix = NamedSharding(mesh, P(None, "fsdp" if fsdp > 1 else None, "tensor" if tensor > 1 else None))
    weights = jax.tree.map(lambda w: jax.device_put(w, matrix if w.ndim == 3 else replicated), s.weights)
    connection = {"stack": {"connection": s.params}}
    params = jax.device_put(connection, param_shardings(connection, mesh))["stack"]["connection"]
    found = s.run(params, weights, jax.device_put(e, rows), jax.device_put(g, rows), constrain=constrainer(mesh))

    # On one device a few rows at a time, in the program that the other checks have compiled.
    outputs, grads = zip(*(s.run(e=e[i : i + BATCH], g=g[i : i + BATCH]) for i in range(0, len(e), BATCH)))
    expected = {
        "connection": jax.tree.map(_sum, *(one["connection"] for one in grads)),
        "branches": jax.tree.map(_sum, *(one["branches"] for one in grads)),
        "embedding": np.concatenate([one["embedding"] for one in grads]),
    }
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    hint = "See state_axes, and what the connection itself assumes about devices"
    error = compare(found, (np.concatenate(outputs), expected), TOLERANCE, f"a mesh of {sizes} and one device", hint)
    return {"error": error, "devices": count}


def _sum(*arrays: Any) -> np.ndarray:
    return np.sum([np.asarray(a) for a in arrays], axis=0)
