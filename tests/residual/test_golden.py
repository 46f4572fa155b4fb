"""Reference vectors computed in float64 by other programs (see tests/golden/README.md): outputs and all gradients.

Tolerances are relative to the largest entry of each array.
"""

import json
from pathlib import Path

import golden_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import AS_IN_USE

from lmres.ops import sinkhorn
from lmres.residual import run_layers

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = {c["file"]: c for c in json.loads((GOLDEN / "manifest.json").read_text())["cases"]}
ADAPTERS = {  # by the beginning of the file's name
    "denseformer_": golden_cases.denseformer,
    "mudd_": golden_cases.muddformer,
    "dca_": golden_cases.deep_cross_attention,
    "attnres_": golden_cases.attention_residuals,
    "hc_": golden_cases.hyper_connections,
    "mhc_n": golden_cases.mhc,
    "mhc_perstream_": golden_cases.mhc_per_stream,
    "laurel_": golden_cases.laurel,
    "lime_": golden_cases.lime,
    "dynlime_": golden_cases.dynamic_lime,
    "valueres_": golden_cases.value_residual,
}
STACKS = [name for name in CASES if not name.startswith("sinkhorn_")]
TOLERANCE = {"float64": (1e-12, 1e-9), "float32": (1e-5, 1e-4)}


@pytest.fixture(params=["float64", "float32"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


def load(name, dtype):
    with np.load(GOLDEN / name) as arrays:
        return {k: v.astype(dtype) for k, v in arrays.items()}


def assert_close(actual, expected, tolerance, what):
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    scale = np.max(np.abs(expected)) if expected.size else 0.0
    error = np.max(np.abs(np.asarray(actual, np.float64) - expected)) if expected.size else 0.0
    assert error <= tolerance * max(scale, 1e-30) or error <= tolerance * 1e-3, f"{what}: {error:.2e} of {scale:.2e}"


class Opened:
    """A connection whose input already is the state (the `*_streams` cases)."""

    def __init__(self, spec):
        self._spec = spec

    def __getattr__(self, name):
        return getattr(self._spec, name)

    def open(self, params, e, depth):
        return e


@pytest.mark.parametrize("name", STACKS)
def test_stack_matches_reference(name, dtype):
    case, arrays = CASES[name], load(name, dtype)
    (adapt,) = (adapter for start, adapter in ADAPTERS.items() if name.startswith(start))
    out_tolerance, grad_tolerance = TOLERANCE[dtype]
    inputs = {k: v for k, v in arrays.items() if k.startswith(("in.", "param.", "branch."))}

    def forward(inputs):
        spec, params, branches = adapt(case, inputs)
        if not case["hyper"].get("expand_input", True):
            spec = Opened(spec)
        y, record = run_layers(spec, params, branches, inputs["in.x"])
        outputs = {"y": y, "streams": record.state}
        return sum(jnp.sum(outputs[k[7:]] * v) for k, v in arrays.items() if k.startswith("loss.w.")), (outputs, record)

    # Rounding in float32 is that of programs as they are used.
    run = jax.jit(jax.value_and_grad(forward, has_aux=True), compiler_options=AS_IN_USE if dtype == "float32" else None)
    (loss, (outputs, record)), grads = run(inputs)
    for key in arrays:
        if key.startswith("out."):
            assert_close(outputs[key[4:]], arrays[key], out_tolerance, key)
    # The loss is a sum whose terms cancel: their size is the scale of its error.
    size = sum(np.abs(arrays["out." + k[7:]] * v).sum() for k, v in arrays.items() if k.startswith("loss.w."))
    assert abs(float(loss) - float(arrays["loss.value"])) <= out_tolerance * size
    for l, x in enumerate(record.reads):
        for kind in ("branch_in", "h"):
            if f"aux.{kind}{l}" in arrays:
                assert_close(x, arrays[f"aux.{kind}{l}"], out_tolerance, f"{kind}{l}")
    checked = 0
    for key, expected in arrays.items():
        if key.startswith("grad."):
            # Gradients of single scales are sums over all tokens, in which large terms cancel (golden/README.md).
            wide = 10.0 if expected.size <= 3 and dtype == "float32" else 1.0
            assert_close(grads[key[5:]], expected, wide * grad_tolerance, key)
            checked += 1
    assert checked == len(inputs)


SINKHORN = {
    "paper": {"first": 0},
    "eps1e-6": {"first": 1, "eps": 1e-6},
    "pkg": {"first": 0, "floor": 1e-12},
    "pkg_log": {"first": 0},
}


@pytest.mark.parametrize("name", ["sinkhorn_n2.npz", "sinkhorn_n4.npz"])
def test_sinkhorn_matches_reference(name, dtype):
    arrays = load(name, dtype)
    tolerances = TOLERANCE[dtype]
    families = [k.split(".")[1] for k in arrays if k.startswith("in.")]
    if dtype == "float32":  # resolves logits of 1e4 to 1e-3 only, so the extreme families are a float64 check
        families = [f for f in families if f in ("normal1", "normal3", "identity8", "zeros")]
    for convention, options in SINKHORN.items():
        for iters in sorted({int(k.split(".")[3].removeprefix("iters")) for k in arrays if k.startswith("out.")}):

            def run(z, w, iters=iters, options=options):
                m = sinkhorn(jnp.moveaxis(z, (-2, -1), (0, 1)), iters, **options)
                m = jnp.moveaxis(m, (0, 1), (-2, -1))
                return jnp.sum(m * w), m

            run = jax.jit(jax.grad(run, has_aux=True))  # one compile for all families: their shapes are the same
            for family in families:
                key = f"{family}.{convention}.iters{iters}"
                grad, m = run(arrays[f"in.{family}.logits"], arrays[f"loss.w.{family}"])
                assert np.all(np.isfinite(m)), key
                assert_close(m, arrays[f"out.{key}"], tolerances[0], key)
                assert_close(grad, arrays[f"grad.{key}"], tolerances[1], f"grad.{key}")
