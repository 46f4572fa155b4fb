"""What a connection does to the streams and the sources of a run: gains of composites, entropies, similarities.

Three measures, each per token and then reduced over the tokens:

- composites: a signal that passes units i .. j is multiplied by the product of their maps. The forward gain of a
  composite is the absolute sum of a row (how much a stream can grow), the backward gain that of a column (how much its
  gradient can); the largest of them is the Amax gain of arXiv:2512.24880. They are 1 for doubly stochastic maps.
- source entropy: over how many sources a reader spreads its weights.
- similarity: cosines between streams; at 1 they have collapsed, and n streams are as good as one.

Legend: U units of the connection, R readers, J sources, B batch, S sequence, n streams, C channels of a stream.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from lmres.analysis.mixing import in_float32, kept_tokens, token_matrix
from lmres.model import Transformer
from lmres.residual.transfer import has_streams, stream_maps, stream_states


@dataclasses.dataclass(frozen=True, eq=False)
class Summary:
    """A measure over the tokens of a batch: ``mean``, ``largest`` and ``smallest``, float64 arrays of one shape."""

    mean: np.ndarray
    largest: np.ndarray
    smallest: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class CompositeGains:
    """Gains of the composites of units i .. j, [U, U] (first, last); NaN where the last is before the first.

    forward: of absolute row sums (over the sources of one target). backward: of absolute column sums. In each
    ``mean`` is the token's largest sum (the Amax gain), averaged over the tokens; ``largest`` and ``smallest`` are the
    extremes over all sums and tokens. Row 0 has the composites from the embedding up, per depth; the last column those
    down from the readout; the diagonal the units themselves. No units: factors.
    """

    forward: Summary
    backward: Summary


@dataclasses.dataclass(frozen=True, eq=False)
class SourceEntropy:
    """How a reader's weights are spread over its sources, [R] each.

    nats: the entropy of the absolute weights divided by their sum. effective: e to the power of it, a number of
    sources: 1 for a reader of one source, J where all J weigh the same.
    """

    nats: Summary
    effective: Summary


@dataclasses.dataclass(frozen=True, eq=False)
class StreamResult:
    """All three measures of one model on one batch; None where the connection has nothing to measure.

    connection: its name. units: U labels of the units. readers: R labels, the last one is "out".
    gains: None for growing states and where channels are mixed. entropy: None without a depth-mixing matrix.
    similarity: [U + 1], before each unit and after the last; None without two streams.
    tokens: number of tokens; padding is left out.
    """

    connection: str
    units: tuple[str, ...]
    readers: tuple[str, ...]
    gains: CompositeGains | None
    entropy: SourceEntropy | None
    similarity: Summary | None
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, strings and numbers; NaN stays."""
        return jax.tree.map(lambda x: x.tolist() if isinstance(x, np.ndarray) else x, dataclasses.asdict(self))


def composite_gains(maps: Array, keep: Array | None = None) -> CompositeGains:
    """Gains of all composites.

    maps: [U, B, S, n, n] (target, source), or [U, B, S, n, n, C]; see ``lmres.residual.transfer.stream_maps``.
    keep: [B, S] bool, the tokens that count; None for all.
    """
    maps = _by_token(maps, keep, axis=1)  # [U, tokens, n, n (, C)]
    if maps.ndim == 5:  # a channel is as good as another token
        maps = np.moveaxis(maps, -1, 2)
        maps = maps.reshape(len(maps), -1, *maps.shape[3:])
    units = len(maps)
    nan = np.full((units, units), np.nan)
    found = {side: Summary(*(nan.copy() for _ in range(3))) for side in ("forward", "backward")}
    products = np.empty((0, *maps.shape[1:]))  # of units i .. last, for each i
    for last in range(units):
        products = np.concatenate([maps[last] @ products, maps[last : last + 1]])
        sizes = np.abs(products)
        for side, axis in (("forward", -1), ("backward", -2)):
            sums = sizes.sum(axis)  # [last + 1, tokens, n]
            found[side].mean[: last + 1, last] = sums.max(-1).mean(-1)
            found[side].largest[: last + 1, last] = sums.max((-2, -1))
            found[side].smallest[: last + 1, last] = sums.min((-2, -1))
    return CompositeGains(**found)


def source_entropy(matrix: Array, keep: Array | None = None) -> SourceEntropy:
    """Entropy of each reader's weights.

    matrix: [R, J, B, S], the depth-mixing matrix; with a trailing C axis every channel counts as a token.
    keep: [B, S] bool, the tokens that count; None for all.
    """
    weights = np.abs(_by_token(matrix, keep, axis=2))
    weights = weights.reshape(*weights.shape[:2], -1)
    sums = weights.sum(axis=1, keepdims=True)
    shares = weights / np.where(sums == 0, 1.0, sums)
    nats = -np.sum(shares * np.log(np.where(shares == 0, 1.0, shares)), axis=1)  # [R, tokens]
    return SourceEntropy(_summary(nats), _summary(np.exp(nats)))


def stream_similarity(states: Array, keep: Array | None = None) -> Summary:
    """Cosines between the streams of each state, over all pairs of streams and all tokens: [U + 1].

    states: [U + 1, B, S, n, C] with n of at least 2; see ``lmres.residual.transfer.stream_states``. A stream that is
    zero has the cosine 0 with every other.
    keep: [B, S] bool, the tokens that count; None for all.
    """
    states = _by_token(states, keep, axis=1)  # [U + 1, tokens, n, C]
    n = states.shape[-2]
    if n < 2:
        raise ValueError(f"similarity is between streams, and there is {n}")
    norms = np.linalg.norm(states, axis=-1, keepdims=True)
    directions = states / np.where(norms == 0, 1.0, norms)
    first, second = np.triu_indices(n, 1)
    cosines = np.einsum("utac,utbc->utab", directions, directions)[:, :, first, second]
    return _summary(cosines.reshape(len(cosines), -1))


def model_streams(
    model: Transformer,
    params: Any,
    tokens: Array,
    segments: Array | None = None,
    positions: Array | None = None,
) -> StreamResult:
    """Records ``model`` over one batch and takes all three measures.

    Arguments, precision and what is raised as in ``model_mixing``. What leaves the device are the matrix, the maps and
    the states of all tokens: measure on a few thousand tokens.
    """
    kept = kept_tokens(tokens, segments)
    keep = np.ones(np.shape(tokens), bool) if segments is None else np.asarray(segments) != 0
    connection, blocks = model.connection, model.config.blocks
    matrix, maps, states = jax.device_get(_recorded(in_float32(model), params, tokens, segments, positions))
    sublayers = [f"{part} {i + 1}" for i in range(blocks) for part in ("attn", "mlp")]
    units = sublayers if connection.unit == "sublayer" else [f"block {i + 1}" for i in range(blocks)]
    return StreamResult(
        connection=connection.name,
        units=tuple(units),
        readers=(*sublayers, "out"),
        gains=None if maps is None else composite_gains(maps, keep),
        entropy=None if matrix is None else source_entropy(matrix, keep),
        similarity=None if states is None or states.shape[-2] < 2 else stream_similarity(states, keep),
        tokens=kept,
    )


@partial(jax.jit, static_argnums=0)
def _recorded(model, params, tokens, segments, positions):
    """(matrix [R, J, B, S], maps, states), None for what the connection has not."""
    connection = model.connection
    with jax.default_matmul_precision("highest"):
        _, e, record = model.apply({"params": params}, tokens, segments, positions, method="record")
        matrix = token_matrix(connection, record, e)[0] if connection.has_matrix else None
        if not has_streams(connection, record.state):
            return matrix, None, None
        try:
            maps = stream_maps(connection, record.contexts, record.state, e)
        except ValueError:
            if connection.has_matrix:
                raise
            return matrix, None, None
        return matrix, maps, stream_states(connection, record.contexts, e, record.outputs)


def _by_token(values: Array, keep: Array | None, axis: int) -> np.ndarray:
    """``values`` in float64 with the two axes B, S at ``axis`` made one, of the tokens that count."""
    values = np.asarray(values, np.float64)
    keep = np.ones(values.shape[axis : axis + 2], bool) if keep is None else np.asarray(keep, bool)
    return values[(slice(None),) * axis + (keep,)]


def _summary(values: np.ndarray) -> Summary:
    return Summary(values.mean(-1), values.max(-1), values.min(-1))
