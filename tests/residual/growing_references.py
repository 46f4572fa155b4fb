"""Connections over depth in numpy: their equations, written down a second time.

They are written from the papers, source by source, and share nothing with the library. What they return is the
column's output before the final norm. Only the branches (``layer`` and ``attention``) are also run by the library.
Legend: N blocks of two sub-layers, L = 2 N sub-layers, B batch, S sequence, D width, G heads.
"""

import itertools
import math

import numpy as np
from stream_references import rms, softmax

N, B, S, D, G = 5, 2, 3, 8, 2
L = 2 * N
rng = np.random.default_rng(0)
E = rng.normal(size=(B, S, D))
WEIGHTS = rng.normal(size=(L, 3, D, D)) / 2  # [l, 0] for a branch with one input
GAINS = 1 + rng.normal(size=(L, 3, D)) / 3


def layer(s, p, x, xp=np):
    """Sub-layer ``s`` of a block: one norm and one product per input; three inputs meet in a product."""
    normed = lambda x: x / xp.sqrt(xp.mean(x * x, -1, keepdims=True) + 1e-30)  # noqa: E731
    at = lambda x, way: xp.tanh(normed(x) * p["gain"][way] @ p["weight"][way])  # noqa: E731
    if s == 1:
        return at(x, 0)
    query, key, value = x if isinstance(x, (tuple, list)) else (x, x, x)
    return at(query, 0) * at(key, 1) + at(value, 2)


def sub_layer(l, x):
    return layer(l % 2, {"weight": WEIGHTS[l], "gain": GAINS[l]}, x)


def block(i, x):
    """Both sub-layers of block ``i`` with a plain residual; x may be (query, key, value, skip)."""
    x, skip = (x[:3], x[3]) if isinstance(x, (tuple, list)) else (x, x)
    x = skip + sub_layer(2 * i, x)
    return x + sub_layer(2 * i + 1, x)


def plain():
    h = E
    for i in range(N):
        h = block(i, h)
    return h


def weighted(weights, values):
    """Sum of values, each times its weight: a number, or one per token or channel."""
    spread = lambda w: w[..., None] if w.shape == (B, S) else w  # noqa: E731
    return sum(spread(np.asarray(w)) * v for w, v in zip(weights, values, strict=True))


# DenseFormer and MUDDFormer


def denseformer_rows(alpha, dilation, period):
    """{(i, j): weight of X_j in Y_i} from the flat weights."""
    rows, used = {}, 0
    for i in range(1, N + 1):
        if i % period:
            rows[i, i] = 1.0
            continue
        for j in range(i % dilation, i + 1, dilation):
            rows[i, j] = alpha[used]
            used += 1
    assert used == len(alpha)
    return rows


def denseformer_push(rows):
    """Every output is given to all its readers when it is complete, and then forgotten."""
    Y = [E] + [np.zeros_like(E) for _ in range(N)]
    for j in range(N + 1):
        X = block(j - 1, Y[j - 1]) if j else E
        for (i, source), weight in rows.items():
            if source == j:
                Y[i] = Y[i] + weight * X
    return Y[N]


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def muddformer(p, ways=4, dynamic=True, prepost=False, expand=1):
    """Token by token weights A = GELU(Norm(X_i) W1) W2 + a."""
    X, used = [E], dict.fromkeys(p, 0)

    def take(name, *shape):
        count, first = math.prod(shape), used[name]
        used[name] += count
        return p[name].ravel()[first : first + count].reshape(shape)

    def mix(ways, hidden):
        bias, w1 = take("bias", ways, len(X)), None
        if dynamic:
            w1, w2 = take("w1", hidden, D), take("w2", ways * len(X), hidden)
        gains = take("gain", ways, D) if prepost else None
        A = np.broadcast_to(bias[..., None, None], (*bias.shape, B, S))
        if w1 is not None:
            moving = gelu(rms(X[-1]) @ w1.T) @ w2.T
            A = A + np.moveaxis(moving.reshape(B, S, *bias.shape), (2, 3), (0, 1))
        if prepost:
            return [X[-1] + g * rms(weighted(a, map(rms, X))) for a, g in zip(A, gains, strict=True)]
        return [weighted(a, X) for a in A]

    inputs = [E] * ways
    for i in range(1, N + 1):
        X.append(block(i - 1, inputs if ways == 4 else inputs[0]))
        if i < N:
            inputs = mix(ways, ways * (i + 1))
    out = mix(1, (N + 1) * expand)[0]
    assert all(n == p[name].size for name, n in used.items())
    return out


# Softmax attention over depth


def attend(query, values, heads=1, temperature=1.0):
    """Sum of ``values`` with softmax weights over them, head by head; the key norm is over all channels."""
    size, keys, parts = D // heads, [rms(v) for v in values], []
    for h in range(heads):
        at = slice(h * size, (h + 1) * size)
        weights = softmax(np.stack([k[..., at] @ query[at] for k in keys]) / temperature, 0)
        parts.append(sum(w[..., None] * v[..., at] for w, v in zip(weights, values)))
    return np.concatenate(parts, -1)


def full_attention(queries, **options):
    values = [E]
    for l in range(L):
        values.append(sub_layer(l, attend(queries[l], values, **options)))
    return attend(queries[L], values, **options)


def block_attention(queries, size, **options):
    """Depth blocks of ``size`` sub-layers, from the pseudo-code: completed sums, and the running one."""
    done, running = [E], None
    for l in range(L):
        if l % size == 0 and running is not None:
            done, running = [*done, running], None
        sources = done if running is None else [*done, running]
        y = sub_layer(l, attend(queries[l], sources, **options))
        running = y if running is None else running + y
    return attend(queries[L], [*done, running], **options)


def two_source_attention(queries):
    """One depth block: a gate between the embedding and the sum of all outputs."""
    h, total = E, 0
    for l in range(L):
        total = total + sub_layer(l, h)
        gate = 1 / (1 + np.exp((rms(E) - rms(total)) @ queries[l + 1]))[..., None]
        h = (1 - gate) * E + gate * total
    return h


def attention_push(queries):
    """Every output goes into the numerators and denominators of all its readers when it is complete."""
    above, below = np.zeros((L + 1, B, S, D)), np.zeros((L + 1, B, S, 1))
    for j in range(L + 1):
        value = E if j == 0 else sub_layer(j - 1, above[j - 1] / below[j - 1])
        for l in range(j, L + 1):
            size = np.exp(rms(value) @ queries[l])[..., None]
            above[l], below[l] = above[l] + size * value, below[l] + size
    return above[L] / below[L]


def delta_attention(queries, gates, size=1, **options):
    """The stream, and beside it gated attention over what completed depth blocks changed."""
    h, ends = E, [np.zeros_like(E), E]  # the stream where depth blocks ended
    for l in range(L):
        if l % size == 0 and l:
            ends.append(h)
        changes = [after - before for before, after in itertools.pairwise(ends)]
        h = h + sub_layer(l, h + gates[l] * attend(queries[l], changes, **options))
    return h


# DeepCrossAttention


def gated(p, version, bias, reader, values, norm):
    """GRN of version 1 to 3: ``bias`` is one scalar or vector per source."""
    total = 0
    for b, v in zip(bias, values, strict=True):
        gate = b
        if version == 3:
            key = rms(v) * p["gain"][reader] if norm == "rms" else v
            gate = b + np.maximum(key @ p["w"][reader], 0)[..., None]
        total = total + gate * v
    return total


def deep_cross_attention(p, ways=(3, 1), version=3, norm="none"):
    values, used, reader = [E], 0, 0
    for l in range(L + 1):
        xs = []
        for _ in range(ways[l % len(ways)] if l < L else 1):
            bias = p["bias"][used : used + len(values)]
            xs.append(gated(p, version, bias, reader, values, norm))
            used, reader = used + len(values), reader + 1
        if l < L:
            values.append(sub_layer(l, xs if len(xs) > 1 else xs[0]))
    assert used == len(p["bias"])
    return xs[0]


def recent_cross_attention(p, last, ways=(3, 1), version=3, norm="none"):
    """The embedding, the sum of all outputs but the last k, and these; biases in the order e, sum, newest, ..."""
    outputs, reader = [], 0
    for l in range(L + 1):
        newest = outputs[::-1][:last]
        values, slots = [E, *newest], [0, *range(2, 2 + len(newest))]
        if l > last:
            values.append(sum(outputs[: l - last])), slots.append(1)
        xs = []
        for _ in range(ways[l % len(ways)] if l < L else 1):
            xs.append(gated(p, version, p["bias"][reader][slots], reader, values, norm))
            reader += 1
        if l < L:
            outputs.append(sub_layer(l, xs if len(xs) > 1 else xs[0]))
    assert reader == len(p["bias"])
    return xs[0]


# Keys and values of other layers: blocks with real attention


def split(x):
    return x.reshape(B, S, G, D // G)


def attention(p, x, mix, xp=np):
    """Attention over the sequence; ``mix(key, value)`` says what keys and values are used.

    Returns the output and the layer's own keys and values.
    """
    x = x / xp.sqrt(xp.mean(x * x, -1, keepdims=True)) * p["gain"][0]
    query, key, value = (split(x @ w) for w in p["weight"])
    used_key, used_value = mix(key, value)
    logits = xp.where(np.tri(S, dtype=bool), xp.einsum("bshk,bthk->bhst", query, used_key), -xp.inf)
    weights = xp.exp(logits - logits.max(-1, keepdims=True))
    y = xp.einsum("bhst,bthk->bshk", weights / weights.sum(-1, keepdims=True), used_value)
    return xp.tanh(y.reshape(B, S, D)), key, value


def attention_column(mix):
    """The plain residual, but layer i uses what ``mix(i, keys, values)`` gives, which has those of all up to i."""
    h, keys, values = E, [], []

    def used(key, value):
        keys.append(key), values.append(value)
        return mix(len(keys) - 1, keys, values)

    for i in range(N):
        h = h + attention({"weight": WEIGHTS[2 * i], "gain": GAINS[2 * i]}, h, used)[0]
        h = h + sub_layer(2 * i + 1, h)
    return h


def own(i, keys, values):
    """Standard attention."""
    return keys[i], values[i]


def lime_mix(router):
    """router: [2, ...] flat, of key and value."""

    def mix(i, keys, values):
        if i == 0:
            return keys[0], values[0]
        first, mixed = G * G * (i * (i + 1) // 2 - 1), []
        for row, layers in zip(router, (keys, values)):
            w = row[first : first + G * G * (i + 1)].reshape(G, i + 1, G)
            heads = [sum(w[h, j, g] * layers[j][:, :, g] for j in range(i + 1) for g in range(G)) for h in range(G)]
            mixed.append(np.stack(heads, 2))
        return mixed

    return mix


def value_mix(pairs):
    """pairs: (weight of the first layer's values, weight of the own) of the layers above the first."""
    return lambda i, keys, values: (
        keys[i],
        values[0] if i == 0 else pairs[i - 1][0] * values[0] + pairs[i - 1][1] * values[i],
    )
