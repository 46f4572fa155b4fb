"""The pre-norm transformer on the token x layer grid in plain loops over tokens, layers, heads and cells.

Written from the definitions, with the plain residual; it shares no code with the library but the read sets.
"""

import jax
import jax.numpy as jnp
import numpy as np


def rms(x, gain, eps):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def rope(x, position, base):
    """x: [B, heads, K], one position."""
    half = x.shape[-1] // 2
    angle = position * base ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


def made_of(p, x, t, config):
    """Keys and values [B, G, K] that attention parameters ``p`` make of a state [B, D]."""
    u = rms(x, p["norm"]["gain"], config.norm_eps)
    key = jnp.einsum("bd,dgk->bgk", u, p["key"])
    if config.qk_norm:
        key = rms(key, p["key_norm"]["gain"], config.norm_eps)
    return rope(key, t - 1, config.rope_base), jnp.einsum("bd,dgk->bgk", u, p["value"])


def channel(p, inputs, j, t, config):
    """Key and value [B, G, K] of channel ``j`` from all layers' inputs, a list of [B, D]."""
    found = []
    for side in ("key", "value"):
        q = p[side]
        normed = [rms(x, q["gain"][l], config.norm_eps) for l, x in enumerate(inputs)]
        mixed = 0
        for l, x in enumerate(normed):
            weight = q["bias"][j, l] + sum(normed[h] @ q["router"][j, l, h // 2] for h in range(0, len(normed), 2))
            mixed = mixed + weight[..., None] * x if jnp.ndim(weight) else mixed + weight * x
        u = rms(mixed, q["channel_gain"][j], config.norm_eps)
        found.append(jnp.einsum("bd,dgk->bgk", u, q["projection"][j]))
    key = rms(found[0], p["key_norm"], config.norm_eps) if config.qk_norm else found[0]
    return rope(key, t - 1, config.rope_base), found[1]


def softmax_read(query, cells, share, config):
    """query [B, H, K] over cells (key, value, bias): the heads ``share`` of it, [B, heads, K]; zeros over nothing."""
    each = config.heads // config.kv
    found = []
    for head in share:
        q = query[:, head]
        if not cells:
            found.append(jnp.zeros_like(q))
            continue
        keys = jnp.stack([key[:, head // each] for key, _, _ in cells], 1)
        values = jnp.stack([value[:, head // each] for _, value, _ in cells], 1)
        logits = jnp.einsum("bk,bnk->bn", q, keys) * config.head_size**-0.5 + jnp.stack([b for *_, b in cells])
        found.append(jnp.einsum("bn,bnk->bk", jax.nn.softmax(logits), values))
    return jnp.stack(found, 1)


def logits_of(*args, **options):
    """[B, T, V]; arguments as in ``columns_of``."""
    return columns_of(*args, **options)[0]


def columns_of(params, tokens, config, flow, recurrent=False, feedback=False, channels=0, before=None):
    """(logits [B, T, V], {(t, l): h[t, l]}). recurrent, feedback, channels: whether the past is read in these forms;
    else producer or consumer keys of the sources that the flow's read sets allow. before: the states of an earlier
    sweep, which what lies above the reader is made from; None to run exactly."""
    L, own = config.blocks, params.get("cells", {})
    attention, mlp = params["stack"]["attention"], params["stack"]["mlp"]
    at = lambda tree, l: jax.tree.map(lambda p: p[l - 1], tree)  # noqa: E731
    parts = flow.parts(L)
    bias = own.get("bias", jnp.zeros((L, L + 1)))
    consumer = recurrent or flow.projection == "consumer"
    states, memory, pooled, out = {}, {}, {}, []

    def keys(l, s, m):
        """Of source m at token s for reader l."""
        found = states if before is None or m <= l else before
        if feedback and (s, m) in memory:
            return made_of(at(attention, l), memory[s, m], s, config)
        if channels and m == L and s in pooled:
            return pooled[s][(l - 1) % channels]
        if m == L + 1 and not consumer:
            return made_of(own["output"], found[s, L], s, config)
        return made_of(at(attention, l if consumer else m), found[s, m - 1], s, config)

    table = params["embed"]["table"]
    for t in range(1, tokens.shape[1] + 1):
        states[t, 0] = table[tokens[:, t - 1]]
        for l in range(1, L + 1):
            p, x = at(attention, l), states[t, l - 1]
            u = rms(x, p["norm"]["gain"], config.norm_eps)
            query = jnp.einsum("bd,dhk->bhk", u, p["query"])
            if config.qk_norm:
                query = rms(query, p["query_norm"]["gain"], config.norm_eps)
            query = rope(query, t - 1, config.rope_base)

            def read(reads, share, keep=lambda s, m: True, bias=bias, t=t, l=l, query=query):
                cells = [
                    (*keys(l, s, m), bias[l - 1, m - 1])
                    for s in range(1, t + 1)
                    for m in range(1, reads.sources + 1)
                    if bool(reads.allows(t, l, s, m)) and keep(s, m)
                ]
                return softmax_read(query, cells, share, config)

            every = range(config.heads)
            if flow.combine == "gated":
                row = [(*keys(l, s, l), 0.0) for s in range(1, t + 1)]
                row = softmax_read(query, row, every, config)
                y = row + jnp.tanh(own["gate"][l - 1])[:, None] * read(parts[0], every, lambda s, m, l=l: m != l)
            else:
                shares = np.split(np.arange(config.heads), len(parts))
                y = jnp.concatenate([read(part, share) for part, share in zip(parts, shares)], 1)
            x = x + jnp.einsum("bhk,hkd->bd", y, p["out"])
            p = at(mlp, l)
            u = rms(x, p["norm"]["gain"], config.norm_eps)
            states[t, l] = x + (jax.nn.silu(u @ p["gate"]) * (u @ p["up"])) @ p["down"]
        if feedback:
            weights = jax.nn.softmax(own["source"]["weights"])
            memory[t, L + 1] = sum(weights[m] * states[t, m] for m in range(L + 1))
        if channels:
            inputs = [states[t, l] for l in range(L)]
            pooled[t] = [channel(own["source"], inputs, j, t, config) for j in range(channels)]
        out.append(rms(states[t, L], params["final_norm"]["gain"], config.norm_eps) @ table.T)
    return jnp.stack(out, 1), states
