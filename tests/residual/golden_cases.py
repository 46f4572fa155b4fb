"""Reference cases as (connection, parameters, branches): one adapter per method.

An adapter takes ``(case, arrays)``: the manifest's entry and the arrays by key. It must be differentiable in
``arrays``.
"""

import jax
import jax.numpy as jnp

from lmres.residual import (
    MHC,
    AttentionResiduals,
    DeepCrossAttention,
    DenseFormer,
    DynamicLIMe,
    HyperConnections,
    LAuReL,
    LIMe,
    MUDDFormer,
    PerStreamMHC,
    ValueResidual,
)
from lmres.residual.interface import Lent


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


def product_branch(arrays, k):
    """``tanh(q W) tanh(k Wk) + tanh(v Wv)`` of a tuple of inputs, or ``tanh(x W)`` of one."""
    first, key, value = (arrays.get(f"branch.{n}{k}") for n in ("W", "Wk", "Wv"))
    if key is None:
        return lambda x: jnp.tanh(x @ first)
    return lambda x: jnp.tanh(x[0] @ first) * jnp.tanh(x[1] @ key) + jnp.tanh(x[2] @ value)


def muddformer(case, arrays):
    hyper = case["hyper"]
    blocks, expand = hyper["n_blocks"], hyper.get("expand_last", False)
    flat = lambda name: jnp.concatenate([arrays[name.format(i)].ravel() for i in range(blocks)])  # noqa: E731
    shared = {
        "bias": flat("param.dense_bs{}"),
        "w1": jnp.concatenate([arrays[f"param.dense{i}.w1"] for i in range(blocks)]),
        "w2": flat("param.dense{}.w2"),
    }

    def block(k):
        named = {f"branch.W{k}": arrays[f"branch.Wq{k}"]} | {
            f"branch.{n}{k}": arrays[f"branch.{n}{k}"] for n in ("Wk", "Wv")
        }
        return lambda x: x[3] + product_branch(named, k)(x[:3])

    return MUDDFormer(expand_last=expand), {"layers": {}, "shared": shared}, [block(k) for k in range(blocks)]


def deep_cross_attention(case, arrays):
    hyper, package = case["hyper"], "package" in case["variant"]
    depth, ways = hyper["n_sublayers"], hyper["n_outputs"]
    # The package's eps is the machine's for the dtype at hand.
    eps = float(jnp.finfo(arrays["in.x"].dtype).eps)
    spec = DeepCrossAttention(ways=(ways,), norm="rms" if package else "none", eps=eps)
    name = "param.grn{l}.{n}" if package else "param.{n}{l}"
    readers = range(depth + 1)
    gather = lambda n: [arrays[name.format(l=l, n=n)] for l in readers]  # noqa: E731
    shared = {
        "bias": jnp.concatenate([b.reshape(-1, b.shape[-1]) for b in gather("bias")]),
        "w": jnp.concatenate(gather("w")),
    }
    if package:  # one gain for all outputs of an aggregation
        shared["gain"] = jnp.concatenate(
            [jnp.broadcast_to(g, w.shape) for g, w in zip(gather("gain"), gather("w"), strict=True)]
        )
    return spec, {"layers": {}, "shared": shared}, [product_branch(arrays, k) for k in range(depth)]


def lime(case, arrays):
    hyper = case["hyper"]
    layers, heads, size = hyper["n_layers"], hyper["heads"], hyper["dim"] // hyper["heads"]
    spec = LIMe(routers="shared", kv_heads=heads, head_size=size)
    router = jnp.concatenate([arrays[f"param.router{l}"].ravel() for l in range(1, layers)])[None]

    def block(k):
        def run(x):
            # The head is the fastest index of a feature.
            both = (x.x @ arrays[f"branch.Wkv{k}"]).reshape(*x.x.shape[:2], 2 * size, heads).swapaxes(-1, -2)
            key, value = both[..., :size], both[..., size:]
            used = [
                mix.gathered + jnp.einsum("hg,bsgk->bshk", mix.own, own)
                for mix, own in ((x.key, key), (x.value, value))
            ]
            y = (jnp.tanh(used[0]) * used[1]).reshape(x.x.shape) @ arrays[f"branch.Wo{k}"]
            return Lent(x.x + y, key, value)

        return run

    return spec, {"layers": {}, "shared": {"router": router}}, [block(k) for k in range(layers)]


def dynamic_lime(case, arrays):
    hyper = case["hyper"]
    layers, views = hyper["n_layers"], hyper["views"]
    stacked = lambda name: [arrays[f"param.mix{l}.{name}"] for l in range(layers)]  # noqa: E731
    params = {
        "layers": {"gain": jnp.stack(stacked("0.g"))},
        "shared": {"weight": jnp.concatenate(stacked("1.weight")), "bias": jnp.concatenate(stacked("1.bias"))},
    }

    def branch(w):
        return lambda x: jnp.tanh((x if views == 1 else x[0] * jnp.tanh(x[1])) @ w)

    return DynamicLIMe(ways=(views,)), params, [branch(w) for w in weights(arrays)]


def value_residual(case, arrays):
    hyper = case["hyper"]
    layers, heads, size = hyper["n_layers"], hyper["heads"], hyper["dim"] // hyper["heads"]
    mode = {"fixed": "fixed", "learned": "learned", "sv": "shared"}[hyper["mode"]]
    spec = ValueResidual(mode=mode, kv_heads=heads, head_size=size)
    shared = {"weights": jnp.stack([arrays[f"param.lam{l}"] for l in range(layers - 1)])} if mode == "learned" else {}

    def block(k):
        def run(x):
            split = lambda a: a.reshape(*a.shape[:2], heads, size)  # noqa: E731
            query, key = (split(x.x @ arrays[f"branch.{n}{k}"]) for n in ("Wq", "Wk"))
            own = x.x @ arrays[f"branch.Wv{k}"] if f"branch.Wv{k}" in arrays else jnp.zeros_like(x.x)
            value = x.value.gathered + x.value.own * split(own)
            logits = jnp.einsum("bshk,bthk->bhst", query, key) / size**0.5
            logits = jnp.where(jnp.tri(logits.shape[-1], dtype=bool), logits, -jnp.inf)
            y = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(logits), value).reshape(x.x.shape)
            return Lent(x.x + y @ arrays[f"branch.Wo{k}"], key, split(own))

        return run

    return spec, {"layers": {}, "shared": shared}, [block(k) for k in range(layers)]
