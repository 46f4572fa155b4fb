"""How much arithmetic a token costs, how fast a run is, and which part of the hardware's peak that is.

Model FLOPs of one training token. A multiply-add is two, and backward is twice forward: hence 6 and 3.

    6 x parameters of the matrices it goes through    attention and MLP of every block, and the output head
                                                      (also when its table is the embedding's); as often as a flow
                                                      has a source projected
  + 12 x blocks x heads x head_size x keys            scores and weighted sum: forward 4 x heads x head_size for each of
                                                      the keys that a query reads on average: (S + 1) / 2, or as many
                                                      as the flow allows
  + 3 x connection.cost(depth, width).flops           what carries information up the column

With flow.schedule=swept all but the output head is computed in each of n = flow.sweeps sweeps without gradient, a third
of a step each, and in k = flow.gradient_sweeps with: (n + 3 k) / 3 times. flow.start=plain is one more such third, of
ordinary attention.

Not counted: embedding lookups, norms, activations, softmax, rotary positions, and everything done twice
because of rematerialisation (the convention of arXiv:2204.02311, appendix B, but with only the causal half of
attention, since the other half is not needed).

Utilisation = FLOPs per token x tokens per second / (devices x peak FLOP/s of one device in bfloat16).
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

from lmres.flow import FlowConfig, keys_per_query
from lmres.flow.geometry import Feedback
from lmres.model.config import ModelConfig
from lmres.residual.interface import Connection

# Dense bfloat16 FLOP/s of one JAX device, by how ``device_kind`` begins; the longest match counts.
PEAK: dict[str, float] = {
    "NVIDIA A100": 312e12,  # NVIDIA A100 datasheet, all forms
    "NVIDIA H100": 989.4e12,  # NVIDIA H100 datasheet, SXM; it shows the figures with sparsity, twice these
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H200": 989.4e12,  # NVIDIA H200 datasheet, SXM
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA B200": 2250e12,  # NVIDIA HGX B200 datasheet: 36 PFLOP/s with sparsity for 8
    "NVIDIA L4": 121e12,  # NVIDIA L4 datasheet: 242 with sparsity
    "TPU v4": 275e12,  # Google Cloud TPU documentation, system architecture, for this and what follows
    "TPU v5 lite": 197e12,  # v5e
    "TPU v5e": 197e12,
    "TPU v5": 459e12,  # v5p
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,  # v6e
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,  # two JAX devices per chip
}


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of a device by ``jax.Device.device_kind``; None if unknown, as for CPUs."""
    # A name must end where the known one does: "NVIDIA L40S" is no "NVIDIA L4".
    known = [name for name in PEAK if device_kind == name or device_kind.startswith((f"{name} ", f"{name}-"))]
    return PEAK[max(known, key=len)] if known else None


def matrix_parameters(model: ModelConfig) -> tuple[int, int]:
    """(parameters of one block's matrices, parameters of the output head).

    Raises ValueError when ``model.vocab_size`` is not set yet.
    """
    if model.vocab_size is None:
        raise ValueError("model.vocab_size is not set; take the tokenizer's before counting FLOPs")
    attention = 2 * model.width * (model.heads + model.kv) * model.head_size * (model.heads_from == "projections")
    mlp = (3 if model.mlp == "swiglu" else 2) * model.width * model.hidden
    return attention + mlp, model.vocab_size * model.width


def keys_read(flow: FlowConfig, layers: int, tokens: int) -> float:
    """Mean number of keys that a query of one head is compared with."""
    if flow.combine == "gated":  # the own row apart, but no key twice
        return keys_per_query(flow.reads(layers), tokens)
    return statistics.fmean(keys_per_query(part, tokens) for part in flow.parts(layers))


def keys_computed(flow: FlowConfig, layers: int, tokens: int) -> float:
    """As ``keys_read``, with the keys that a query is compared with and that are masked."""
    if flow.is_standard:
        return tokens
    _, tiles, tile = flow.tiling(layers, tokens)
    reader = flow.reader(layers, tiles * tile, one_tile=tiles == 1)
    if flow.combine == "gated":
        return reader.keys(tile)
    return statistics.fmean(reader.keys(tile, part) for part in flow.parts(layers))


def flow_matrices(model: ModelConfig, flow: FlowConfig, blocks: int) -> int:
    """Parameters of matrices, and numbers that are used as if they were, which a token goes through beside the
    blocks' own; a matrix that is used twice counts twice."""
    store, width = flow.store(blocks), model.width
    projection = 2 * width * model.kv * model.head_size  # of a key and a value
    if store.projection == "channels":  # instead of the layers' own
        router = 2 * store.channels * blocks * width * ((blocks + 1) // 2 + 1)
        return (store.channels - blocks) * projection + router
    memory = (blocks + 1) * width if isinstance(flow.geometry, Feedback) else 0
    return memory + projection * sum(projector != source or source == blocks for projector, source in store.slots)


def flops_per_token(
    model: ModelConfig,
    connection: Connection,
    sequence: int | None = None,
    applications: int | None = None,
    flow: FlowConfig = FlowConfig(),  # noqa: B008 - frozen
    masked: bool = False,
) -> dict[str, float]:
    """FLOPs of one training token (forward and backward): {"matrices", "attention", "connection", "total"}.

    sequence: tokens per row; None for ``model.context``. applications: how many blocks a token goes through;
      None for ``model.blocks``, more when blocks are used several times. flow: by default ordinary attention.
      masked: count what is computed by XLA, which is more than what is needed: masked keys too.

    Raises ValueError when ``model.vocab_size`` is not set, or the flow does not fit so many blocks.
    """
    sequence = model.context if sequence is None else sequence
    blocks = model.blocks if applications is None else applications
    block, head = matrix_parameters(model)
    depth = blocks if connection.unit == "block" else 2 * blocks
    swept = flow.schedule == "swept"
    passes = (flow.sweeps + 3 * flow.gradient_sweeps) / 3 if swept else 1.0
    before = 1 / 3 if swept and flow.start == "plain" else 0.0
    keys = (keys_computed if masked else keys_read)(flow, blocks, sequence)
    keys = passes * keys + before * (sequence if masked else (sequence + 1) / 2)
    passes += before
    parts = {
        "matrices": 6.0 * (passes * (blocks * block + flow_matrices(model, flow, blocks)) + head),
        "attention": 12.0 * blocks * model.heads * model.head_size * keys,
        "connection": 3.0 * passes * connection.cost(depth, model.width).flops,
    }
    return parts | {"total": sum(parts.values())}


def utilisation(
    tokens_per_second: float, flops_per_token: float, device_kind: str, devices: int
) -> float | None:
    """Part of the peak of ``devices`` devices that the model's own arithmetic uses; None if unknown."""
    peak = peak_flops(device_kind)
    return None if peak is None else tokens_per_second * flops_per_token / (devices * peak)


def show(value: float | None, form: str = ".1%") -> str:
    """``value`` formatted, "n/a" for None."""
    return "n/a" if value is None else format(value, form)


class Throughput:
    """Tokens per second and the time left, without compiling and without pauses.

    The clock starts at the end of the first step, which compiles; time inside ``pause()`` (evaluating,
    saving) does not count. With results read one step late, a pause also hides what is left of the step that
    was under way.

    steps: at which the run ends. clock: seconds.
    """

    def __init__(self, steps: int, clock: Callable[[], float] = time.perf_counter):
        self._steps, self._clock = steps, clock
        self._paused = 0.0  # seconds, since ever
        self._first: tuple[int, float] | None = None  # (step, working time) where counting began
        self._last = (0, 0.0)
        self._window = (0, 0.0)  # (tokens since the last rate(), working time then)

    def _now(self) -> float:
        return self._clock() - self._paused

    def update(self, step: int, tokens: float) -> None:
        """Step ``step`` is done, and had ``tokens`` tokens over all devices."""
        self._last = (step, self._now())
        if self._first is None:
            self._first, self._window = self._last, (0, self._last[1])
        else:
            self._window = (self._window[0] + tokens, self._window[1])

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time spent in here is not the steps'. Not to be nested."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - start

    def rate(self) -> float | None:
        """Tokens per second of the steps since the last call; None while there is none to tell."""
        tokens, since = self._window
        elapsed = self._last[1] - since
        self._window = (0, self._last[1])
        return tokens / elapsed if tokens and elapsed > 0 else None

    def remaining(self) -> float | None:
        """Seconds of steps left at the run's mean speed, without pauses to come. None before step two."""
        if self._first is None or self._last[0] <= self._first[0]:
            return None
        each = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        return each * max(self._steps - self._last[0], 0)
