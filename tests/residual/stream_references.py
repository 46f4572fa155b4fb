"""Connections of constant size in numpy: their equations, written down a second time.

They are written from the papers, slot by slot or token by token, and share nothing with the library. Branches are
``tanh(Norm(x) W)``.
Legend: n streams or slots, m fractions, L sub-layers, B batch, S sequence, D width.
"""

import itertools

import numpy as np

L, B, S, D = 4, 2, 3, 8
rng = np.random.default_rng(0)
E = rng.normal(size=(B, S, D))
WEIGHTS = rng.normal(size=(L, D, D)) / 2
GAINS, FINAL_GAIN = 1 + rng.normal(size=(L, D)) / 3, 1 + rng.normal(size=D) / 3


def rms(x, axis=-1):
    return x / np.sqrt(np.mean(x * x, axis=axis, keepdims=True))


def layer_norm(x, eps=1e-5):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x, axis=-1):
    x = np.exp(x - x.max(axis, keepdims=True))
    return x / x.sum(axis, keepdims=True)


def sub_layer(l, x):
    """A branch without a norm of its own."""
    return np.tanh(x @ WEIGHTS[l])


def plain(gains=1.0, final_gain=1.0):
    h, gains = E, np.broadcast_to(gains, (L, D))
    for l in range(L):
        h = h + sub_layer(l, rms(h) * gains[l])
    return rms(h) * final_gain


def slots_reference(p, n, m, tau=1.0):
    """Equations of the three papers with explicit sums over slots; B is [m, n] per sub-layer."""
    size = D // m
    H = [E[..., (j % m) * size : (j % m + 1) * size] for j in range(n)]
    for l in range(L):
        q = {k: v[l] for k, v in p["layers"].items()}
        alpha = [[q["static_alpha"][s, c] for c in range(m + n)] for s in range(n)]
        beta = q["static_beta"]
        full = beta.ndim == 2
        write = [[beta[j, i] if full else beta[j] * (j % m == i) for j in range(n)] for i in range(m)]
        if "dynamic_alpha_fn" in q:
            s_a, s_b = q["dynamic_alpha_scale"], q["dynamic_beta_scale"]
            w_b = q["dynamic_beta_fn"].reshape(-1, size)
            for s in range(n):
                normed = layer_norm(H[s])
                for c in range(m + n):
                    alpha[s][c] = alpha[s][c] + s_a * np.tanh(normed @ q["dynamic_alpha_fn"][c] / tau)
                for i in range(m):
                    if full or s % m == i:
                        write[i][s] = write[i][s] + s_b * np.tanh(normed @ w_b[i if full else 0] / tau)
        mix = lambda c, H=H, alpha=alpha: sum(np.asarray(alpha[s][c])[..., None] * H[s] for s in range(n))  # noqa: E731
        y = sub_layer(l, rms(np.concatenate([mix(i) for i in range(m)], -1)))
        parts = [y[..., i * size : (i + 1) * size] for i in range(m)]
        H = [mix(m + j) + sum(np.asarray(write[i][j])[..., None] * parts[i] for i in range(m)) for j in range(n)]
    total = [sum(H[j] for j in range(i, n, m)) * (n / m) / len(range(i, n, m)) for i in range(m)]
    return rms(np.concatenate(total, -1))


def reference_mixing(kind, logits, n, iters=20):
    """H_res [target, source] of one token."""
    if kind == "identity":
        return np.eye(n)
    if kind == "sinkhorn":
        return paper_sinkhorn(logits.reshape(n, n).T, iters)
    if kind == "kronecker":
        result, swap = np.eye(1), np.eye(2)[::-1]
        for pair in logits.reshape(-1, 2):
            a, b = softmax(pair)
            result = np.kron(result, a * np.eye(2) + b * swap)
        return result
    if kind == "circulant":  # shift k takes stream s to s + k
        corners = [np.eye(n)[[(t - k) % n for t in range(n)]] for k in range(n)]
    else:
        corners = [np.eye(n)[list(order)] for order in itertools.permutations(range(n))]
    return sum(w * P for w, P in zip(softmax(logits), corners, strict=True))


def paper_sinkhorn(logits, iters):
    """RowNorm(ColNorm(M)), over and over (arXiv:2512.24880, Eq. 9)."""
    M = np.exp(logits - logits.max(axis=0, keepdims=True))
    for _ in range(iters):
        M = M / M.sum(axis=0, keepdims=True)
        M = M / M.sum(axis=1, keepdims=True)
    return M


def mhc_reference(c, p):
    """One token at a time; for reads of the previous sub-layer's weights too."""
    n, result = c.streams, np.zeros_like(E)
    for b, s in np.ndindex(B, S):
        X = np.tile(E[b, s], (n, 1))
        pre_before = np.eye(n)[0]
        for l in range(L):
            q = {k: v[l] for k, v in p["layers"].items()}
            z = q["phi"] @ rms(X.reshape(-1))
            k = len(z) - 2 * n
            alpha = np.repeat(q["alpha"], [n, n, k] if k else [n, n])
            z = alpha * z + q["bias"]
            pre, post = sigmoid(z[:n]), 2 * sigmoid(z[n : 2 * n])
            used = pre if c.reads == "own" else pre_before
            y = sub_layer(l, rms(used @ X))
            X = reference_mixing(c.constraint, z[2 * n :], n, c.iters) @ X + np.outer(post, y)
            pre_before = pre
        head = np.ones(n)
        if c.reads == "previous":
            head = pre_before
        elif c.readout == "head":
            q = p["shared"]
            head = sigmoid(q["head_alpha"] * (q["head_phi"] @ rms(X.reshape(-1))) + q["head_bias"])
        result[b, s] = rms(head @ X)
    return result


def gated_reference(p, n):
    def mixer(X, gamma, down, up):
        N = rms(X) * (1 + gamma)
        flat = N.reshape(B, S, -1) / n
        hidden = flat @ down
        gates = sigmoid(hidden * sigmoid(hidden) @ up).reshape(N.shape)
        return (gates * N).mean(-2), flat

    X = np.repeat(E[..., None, :], n, -2)
    for l in range(L):
        q = {k: v[l] for k, v in p["layers"].items()}
        x, flat = mixer(X, q["gamma"], q["down"], q["up"])
        X = X + 2 * sigmoid(flat @ q["inject"])[..., None] * sub_layer(l, x)[..., None, :]
    q = p["shared"]
    return mixer(X, q["head_gamma"], q["head_down"], q["head_up"])[0]


def multi_gate_reference(p, n):
    q, slots = p["shared"], [E]
    for l in range(L + 1):
        logits = np.stack([rms(s) @ q["query"][l] / np.sqrt(D) for s in slots])
        x = (softmax(logits, 0)[..., None] * np.stack(slots)).sum(0)
        if l == L:
            return rms(x)
        v = sub_layer(l, rms(x))
        if len(slots) < n:
            slots.append(v)
            continue
        u, b = q["gate"][l - (n - 1)], q["gate_bias"][l - (n - 1)]
        gates = [sigmoid(rms(s) @ u / np.sqrt(D) + b[i])[..., None] for i, s in enumerate(slots)]
        slots = [(1 - g) * s + g * v for g, s in zip(gates, slots)]
