"""What a read set implies when its cells are counted one by one: critical path, sweeps, keys per query, masks.

All of it is numpy on the host, from ``ReadSet.allows`` alone, and so the check of whatever is claimed in closed form.
"""

import numpy as np

from lmres.flow.readset import ReadSet


def reads_of(reads: ReadSet, tokens: int) -> np.ndarray:
    """Which cell reads which: [T, L, T, M] bool, over (t, l, s, m), each counted from 0 in the array."""
    t, l, s, m = np.ogrid[1 : tokens + 1, 1 : reads.layers + 1, 1 : tokens + 1, 1 : reads.sources + 1]
    return reads.allows(t, l, s, m)


def keys_per_query(reads: ReadSet, tokens: int) -> float:
    """Mean number of keys that a cell reads.

    Pairs of tokens are alike if they are equally far apart and agree on which chunks they share; of each kind one is
    looked at. From some distance on all are alike.
    """
    sizes = sorted({term.chunks.size for term in reads.terms if term.chunks is not None})
    last = max([*sizes, *(reads.settled_distance(term, tokens) for term in reads.terms)], default=0)
    last = min(last, tokens - 1)
    pairs, readers, sources = [], [], []
    for d in range(last + 1):
        place = np.arange(d, tokens)
        shared = np.zeros(len(place), int)
        for i, size in enumerate(sizes):
            shared += (place // size == (place - d) // size) << i
        _, first, count = np.unique(shared, return_index=True, return_counts=True)
        pairs.extend(count)
        readers.extend(place[first] + 1)
        sources.extend(place[first] + 1 - d)
    # Tokens still farther apart share no chunk, as those at the last distance, whose kind comes last.
    pairs[-1] += (tokens - 1 - last) * (tokens - last) // 2
    t, s = np.array(readers)[:, None, None], np.array(sources)[:, None, None]
    l, m = np.ogrid[1 : reads.layers + 1, 1 : reads.sources + 1]
    keys = reads.allows(t, l, s, m).sum((1, 2))
    return float(np.dot(pairs, keys) / (tokens * reads.layers))


def critical_path(reads: ReadSet, tokens: int) -> int:
    """Cells on the longest chain in which each cell needs the one before: no schedule that computes every cell once has
    fewer steps."""
    return int(_longest(reads, tokens, lambda t, s, l, m: np.zeros_like(m), column=1).max())


def sweeps_needed(reads: ReadSet, tokens: int, groups: int = 1) -> int:
    """Sweeps after which every cell is exact, whatever the keys and values were at the start.

    groups: 1 is Jacobi (all tokens at once, layer by layer); g is cyclic Gauss-Seidel over the groups t mod g, in
    order. Within a sweep a read is up to date if its source is in an earlier group, or in the reader's and not above
    it; otherwise it is one sweep old.
    """

    def stale(t, s, l, m):
        here, there = t % groups, s % groups
        return ((there > here) | ((there == here) & (m > l))).astype(int)

    return 1 + int(_longest(reads, tokens, stale, column=0).max())


def exact_prefix(reads: ReadSet, tokens: int, sweeps: int, groups: int = 1) -> int:
    """Number of leading tokens that are exact after so many sweeps."""
    for count in range(tokens, 0, -1):
        if sweeps_needed(reads, count, groups) <= sweeps:
            return count
    return 0


def _longest(reads: ReadSet, tokens: int, weight, column: int) -> np.ndarray:
    """Longest path into each cell, [T, L]: ``column`` per cell, and ``weight(t, s, l, m)`` per read, all from 0."""
    allowed = reads_of(reads, tokens)
    # One row more at the bottom: h[t, 0], the embedding, which costs nothing.
    longest = np.zeros((tokens, reads.layers + 1), int)
    sources = np.arange(reads.sources)
    for t in range(tokens):
        for l in range(reads.layers):
            s, m = np.nonzero(allowed[t, l])
            before = longest[s, sources[m]] + weight(t, s, l, m)
            longest[t, l + 1] = column + max(longest[t, l], before.max(initial=0))
    return longest[:, 1:]
