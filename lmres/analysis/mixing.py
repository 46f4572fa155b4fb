"""The depth-mixing matrix of a transformer over a batch, reduced over tokens, with its own proof.

A reader is a sub-layer, or the readout; a source is the embedding or a sub-layer's output. The matrix says how much of
each source is in what each reader gets. It is the right matrix if the reads recomposed from it are the reads
that the model really made: ``MixingResult.error`` is the largest deviation, measured on the same batch.

Legend: L sub-layers, B batch, S sequence, D width.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmres.model import Transformer
from lmres.residual import Connection, depth_mixing, recompose
from lmres.residual.mixing import pick_way, replay

VALUE = 2  # of attention's inputs, the one whose content is passed on


@dataclasses.dataclass(frozen=True, eq=False)
class MixingResult:
    """How much of each source is in what each reader gets, over the tokens of a batch.

    connection, equation, source: name of the connection, its equation in one line, its paper.
    mean: [L + 1, L + 1] float64 (reader, source), mean over tokens; 0 above the diagonal.
    spread: [L + 1, L + 1] float64, standard deviation of the weights over tokens.
    share_spread: [L + 1, L + 1] float64, the same for shares, that is, with each token's rows divided by their sums of
      absolute values; it leaves out what the norms undo.
    readers: L + 1 labels, "attn 1", "mlp 1", ..., "out". sources: L + 1 labels, "embed", "attn 1", "mlp 1", ...
    error: largest |recomposed - real read| over all tokens, channels and readers, relative to the reader's largest
      |read|.
    tokens: number of tokens averaged over; padding is left out.
    channelwise: the connection weighs every channel differently, and ``mean``, ``spread`` and ``share_spread`` are of
      the weights averaged over channels. ``error`` is always that of the full weights.
    """

    connection: str
    equation: str
    source: str
    mean: np.ndarray
    spread: np.ndarray
    share_spread: np.ndarray
    readers: tuple[str, ...]
    sources: tuple[str, ...]
    error: float
    tokens: int
    channelwise: bool = False

    @property
    def normalised(self) -> np.ndarray:
        """``mean`` with every row divided by the sum of its absolute values.

        Readers feed norms that do not see the scale of a row, so this is what reaches the branch.
        """
        sums = np.abs(self.mean).sum(axis=1, keepdims=True)
        return self.mean / np.where(sums == 0, 1.0, sums)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, strings and numbers, for JSON."""
        return {
            k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "MixingResult":
        """The inverse of ``to_dict``."""
        arrays = {k: np.asarray(fields[k], np.float64) for k in ("mean", "spread", "share_spread")}
        labels = {k: tuple(fields[k]) for k in ("readers", "sources")}
        return cls(**{**fields, **arrays, **labels})


def model_mixing(
    model: Transformer,
    params: Any,
    tokens: Array,
    segments: Array | None = None,
    positions: Array | None = None,
    way: int = VALUE,
) -> MixingResult:
    """Records ``model`` over one batch and reduces its depth-mixing matrix.

    Branches compute in float32 here even if the model's dtype is narrower: the matrix is that of the function, and its
    error is not hidden behind rounding. What leaves the device are three [L + 1, L + 1] arrays and a number.

    Args:
      model: unbound; its connection may be any.
      params: the model's parameters, ``variables["params"]``.
      tokens, segments, positions: [B, S] as the model takes them; tokens of segment 0 are left out.
      way: which input of attention, where it has several: 0 query, 1 key, 2 value.

    Raises ValueError if every token is padding, or if the connection has no such matrix.
    """
    kept, model = kept_tokens(tokens, segments), in_float32(model)
    mean, spread, share_spread, error = jax.device_get(_measure(model, way, params, tokens, segments, positions))
    names = [f"{part} {i + 1}" for i in range(model.config.blocks) for part in ("attn", "mlp")]
    connection = model.connection
    return MixingResult(
        connection=connection.name,
        equation=connection.equation,
        source=connection.source,
        mean=mean.astype(np.float64),
        spread=spread.astype(np.float64),
        share_spread=share_spread.astype(np.float64),
        readers=(*names, "out"),
        sources=("embed", *names),
        error=float(error),
        tokens=kept,
        channelwise=connection.channelwise,
    )


def kept_tokens(tokens: Array, segments: Array | None) -> int:
    """Number of tokens that are not padding. Raises ValueError without any."""
    kept = int(np.prod(np.shape(tokens))) if segments is None else int(np.sum(np.asarray(segments) != 0))
    if not kept:
        raise ValueError("all tokens are padding (segments == 0), so there is nothing to average over")
    return kept


def in_float32(model: Transformer) -> Transformer:
    """The model in float32 if it computes in something narrower."""
    config = model.config
    if config.dtype != "bfloat16":
        return model
    # cuDNN's attention takes 16-bit floats only.
    attention = "auto" if config.attention == "cudnn" else config.attention
    return model.clone(config=dataclasses.replace(config, dtype="float32", attention=attention))


@partial(jax.jit, static_argnums=(0, 1))
def _measure(model, way, params, tokens, segments, positions):
    # Accelerators multiply float32 coarsely by default, which would drown the error in rounding.
    with jax.default_matmul_precision("highest"):
        _, e, record = model.apply({"params": params}, tokens, segments, positions, method="record")
        h, _ = model.connection.close(None, record.state, record.contexts[-1])
        reads = jnp.stack([*(pick_way(x, way) for x in record.reads), h])
        keep = jnp.ones(tokens.shape) if segments is None else segments != 0
        per_token, recomposed = token_matrix(model.connection, record, e, way)
        average = lambda x: jnp.sum(x * keep, axis=(-2, -1)) / jnp.sum(keep)  # noqa: E731
        deviation = lambda x: jnp.sqrt(average((x - average(x)[..., None, None]) ** 2))  # noqa: E731
        sums = jnp.sum(jnp.abs(per_token), axis=1, keepdims=True)
        shares = per_token / jnp.where(sums == 0, 1, sums)
        largest = lambda x: jnp.max(jnp.abs(x) * keep[..., None], axis=(1, 2, 3))  # noqa: E731
        scale = largest(reads)
        error = jnp.max(largest(recomposed - reads) / jnp.where(scale == 0, 1, scale))
        return average(per_token), deviation(per_token), deviation(shares), error


def token_matrix(connection: Connection, record, e: Array, way: int = VALUE) -> tuple[Array, Array]:
    """The matrix per token [L + 1, L + 1, B, S], averaged over channels, and the recomposed reads [L + 1, B, S, D]."""
    inner = len(record.outputs) // (len(record.contexts) - 1)
    if not connection.channelwise:
        matrix = depth_mixing(connection, record.contexts, e, inner, way)
        return matrix, recompose(matrix, e, record.outputs)

    # The full matrix has a D axis: L^2 B S D numbers, too many for a deep model. One source at a time instead.
    values = jnp.stack([e, *record.outputs])
    ones = jnp.ones(e.shape, jnp.promote_types(e.dtype, jnp.float32))
    blocks = connection.unit == "block" and inner > 1

    def column(recomposed, source):
        one_hot, value = source
        weights = replay(connection, record.contexts, [w * ones for w in one_hot], blocks, way)
        return recomposed + weights * value, jnp.mean(weights, axis=-1)

    start = jnp.zeros(values.shape, ones.dtype)
    recomposed, columns = jax.lax.scan(column, start, (jnp.eye(len(values), dtype=ones.dtype), values))
    return jnp.moveaxis(columns, 0, 1), recomposed
