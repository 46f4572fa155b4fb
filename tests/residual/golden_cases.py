"""Reference cases as (connection, parameters, branches): one adapter per method.

An adapter takes ``(case, arrays)``: the manifest's entry and the arrays by key. It must be differentiable in
``arrays``.
"""

import jax.numpy as jnp

from lmres.residual import MHC, AttentionResiduals, DenseFormer, HyperConnections, LAuReL, PerStreamMHC


def per_layer(arrays, count, *names):
    """Stacks the manifest's per-layer arrays: (our name, pattern with {l}) pairs."""
    return {ours: jnp.stack([arrays[f"param.{theirs.format(l=l)}"] for l in range(count)]) for ours, theirs in names}


def weights(arrays, name="W"):
    """The branches' weights in order."""
    count = sum(k.removeprefix(f"branch.{name}").isdigit() for k in arrays if k.startswith(f"branch.{name}"))
    return [arrays[f"branch.{name}{k}"] for k in range(count)]


def tanh_branches(arrays):
    """One ``tanh(z @ W)`` per unit."""
    return [lambda z, w=w: jnp.tanh(z @ w) for w in weights(arrays)]


def denseformer(case, arrays):
    hyper = case["hyper"]
    spec = DenseFormer(dilation=hyper["dilation"], period=hyper["period"])
    blocks = sorted(int(k.removeprefix("alpha")) for k in hyper["alpha_source_indices"])
    shared = {"alpha": jnp.concatenate([arrays[f"param.alpha{b}"] for b in blocks])}

    def block(z, group):  # with its own additive skips
        for w in group:
            z = z + jnp.tanh(z @ w)
        return z

    all_weights, per_block = weights(arrays), hyper["sub_per_block"]
    groups = [all_weights[i : i + per_block] for i in range(0, len(all_weights), per_block)]
    return spec, {"layers": {}, "shared": shared}, [lambda z, g=g: block(z, g) for g in groups]


def attention_residuals(case, arrays):
    hyper = case["hyper"]
    gain = hyper["norm_gain"]
    spec = AttentionResiduals(block=hyper["block_size"], key_gain=gain, eps=hyper["eps"])
    names = [("query", "query{l}")] + [("gain", "norm_gain{l}")] * gain
    shared = per_layer(arrays, hyper["n_sublayers"] + 1, *names)
    return spec, {"layers": {}, "shared": shared}, tanh_branches(arrays)


def mhc(case, arrays):
    hyper, shared = case["hyper"], {}
    spec = MHC(
        streams=hyper["n_streams"],
        iters=hyper["sinkhorn_iters"],
        eps=hyper["eps"],
        norm_eps=hyper["norm_eps"],
        norm_gain=hyper["norm_gain"],
        readout=hyper["readout"],
    )
    names = [("phi", "fn{l}"), ("alpha", "scale{l}"), ("bias", "base{l}")]
    names += [("gain", "norm_gain{l}")] * hyper["norm_gain"]
    layers = per_layer(arrays, hyper["n_sublayers"], *names)
    if hyper["readout"] == "head":
        shared = {
            "head_phi": arrays["param.head_fn"],
            "head_alpha": arrays["param.head_scale"][0],
            "head_bias": arrays["param.head_base"],
        }
    return spec, {"layers": layers, "shared": shared}, tanh_branches(arrays)


def hyper_connections(case, arrays):
    hyper = case["hyper"]
    rms = "RMSNorm" in case["variant"]
    spec = HyperConnections(
        streams=hyper["n_streams"], dynamic=hyper["dynamic"], tanh=hyper["tanh"], norm="rms" if rms else "layer"
    )
    names = ["static_alpha", "static_beta"]
    if hyper["dynamic"]:
        names += ["dynamic_alpha_fn", "dynamic_beta_fn", "dynamic_alpha_scale", "dynamic_beta_scale"]
        names += ["gamma"] * rms
    layers = per_layer(arrays, hyper["n_sublayers"], *[(n, "l{l}." + n) for n in names])
    layers = {n: v.reshape(v.shape[0]) if n.endswith("scale") else v for n, v in layers.items()}
    if hyper["dynamic"]:
        layers["dynamic_alpha_fn"] = layers["dynamic_alpha_fn"].swapaxes(1, 2)
    return spec, {"layers": layers, "shared": {}}, tanh_branches(arrays)


def mhc_per_stream(case, arrays):
    hyper = case["hyper"]
    spec = PerStreamMHC(streams=hyper["n_streams"], iters=hyper["sinkhorn_iters"])
    names = ["static_alpha", "static_beta", "dynamic_alpha_fn", "dynamic_beta_fn", "gamma"]
    names += ["pre_branch_scale", "residual_scale", "h_post_scale"]
    layers = per_layer(arrays, hyper["n_sublayers"], *[(n, "l{l}." + n) for n in names])
    layers["dynamic_alpha_fn"] = layers["dynamic_alpha_fn"][:, 0].swapaxes(1, 2)
    scales = [layers.pop("pre_branch_scale"), layers.pop("residual_scale")]
    layers["dynamic_alpha_scale"] = jnp.concatenate(scales, axis=1)
    layers["dynamic_beta_scale"] = layers.pop("h_post_scale")
    return spec, {"layers": layers, "shared": {}}, tanh_branches(arrays)


def laurel(case, arrays):
    hyper, mode = case["hyper"], case["hyper"]["mode"]
    previous = max(v.shape[0] for k, v in arrays.items() if k.startswith("param.gam")) if mode == "pa" else 0
    weights_of = {"rw": "softmax", "rw_lr": "softmax", "gemma": "gemma"}
    spec = LAuReL(weights=weights_of.get(mode, "none"), rank=hyper["rank"], previous=previous)
    names, count = [], hyper["n_layers"]
    if mode == "gemma":  # two matrices that are applied from the left
        names = [("down", "lau{l}.left"), ("up", "lau{l}.right"), ("gain", "lau{l}.norm")]
    else:
        names = [("weights", "rw{l}")] * ("rw" in mode) + [("down", "A{l}"), ("up", "Bm{l}")] * (hyper["rank"] > 0)
    layers = per_layer(arrays, count, *names)
    if mode == "gemma":
        layers |= {k: layers[k].swapaxes(1, 2) for k in ("down", "up")}
    gammas = [arrays[f"param.gam{l}"] for l in range(count)] if previous else []
    shared = {"gamma": jnp.concatenate(gammas)} if previous else {}
    return spec, {"layers": layers, "shared": shared}, tanh_branches(arrays)
