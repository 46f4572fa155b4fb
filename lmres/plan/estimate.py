"""What a train step needs, guessed from sizes alone: to put candidates in order, and to say what would fit.

Per device, with t = tokens of a micro-batch on it, D width, b bytes of a number of ``model.dtype``:

    state        parameters, optimiser state, and gradients like the parameters (twice with accumulation)
    activations  kept for the backward pass: with model.remat=full s t D b of every block (s: the connection's state;
                 once for all blocks where it grows), with "dots" the outputs of products with weights as well, with
                 "none" all that a block computes; "offload" keeps on the device what "full" does
    transient    scores of one block's attention, one block's activations, copies of the connection's state (t D times
                 the bytes in ``_COPIES`` for each of its s vectors, where there is more than one), the block's gathered
                 weights, logits (3 copies), and on TPUs the output head, the embedding and their gradients

The time is a bound like ``roofline``'s: memory is that of the weights, of attention's scores (read or written about
three times in each pass) and of the connection (as often as ``_UNFUSED``), network what FSDP, data, tensor and sequence
parallelism have to send. The factors are those of plans that were compiled (``configs/README.md``). Real figures
differ, above all in what the compiler keeps at the same time; a plan that was compiled corrects the memory by
``scale``.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from lmres.plan.lowering import Setting, check_micro_batch, device_bytes, step_flops
from lmres.plan.topology import Topology
from lmres.residual.interface import AppendOnly
from lmres.sharding import mesh_sizes, param_shardings
from lmres.train.optimizer import make_optimizer
from lmres.train.schedule import make_schedule
from lmres.train.session import build_model
from lmres.train.state import abstract_params

_SCORES = 12  # bytes per score: float32 twice and the model's dtype twice, of what softmax and its gradient hold
# Bytes per number of the state: that many copies of streams in float32 are alive at once in a block's backward pass,
# which GPUs' compiler fuses better; of a growing history its reads and their gradients.
_COPIES = {"tpu": 64, "cuda": 16}
_HISTORY = 16
# Bytes per number of the output head: 2, and 4 of its gradient; likewise the embedding.
_TABLES = {"tpu": 12, "cuda": 0}
_UNFUSED = 6  # how many times as much the compilers move for a connection as one fused kernel per unit would


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes per device. roofs: seconds per step of compute, memory and network."""

    state: float
    activations: float
    transient: float
    roofs: tuple[float, float, float]

    @property
    def seconds(self) -> float:
        """The bound."""
        return max(self.roofs)

    @property
    def order(self) -> float:
        """The bound and a tenth of all three: of candidates with much the same bound, that with less to overlap."""
        return self.seconds + sum(self.roofs) / 10

    @property
    def peak(self) -> float:
        return self.state + self.activations + self.transient


def state_shapes(setting: Setting) -> dict[str, Any]:
    """Shapes of parameters and optimiser state, without shardings: what an estimate starts from."""
    params = abstract_params(build_model(setting.model, setting.residual, setting.flow, None, None))
    schedule = make_schedule(setting.schedule, setting.train.steps)
    optimizer = make_optimizer(setting.optimizer, schedule, setting.residual, params)
    return {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}


def estimate(setting: Setting, topology: Topology, shapes: dict[str, Any]) -> Estimate:
    """The estimate of a train step. shapes: of ``state_shapes``, of any setting with the same model, connection and
    optimiser.

    Raises ValueError, naming the config key, for sizes that do not divide.
    """
    model, train = setting.model, setting.train
    sizes = mesh_sizes(setting.mesh, topology.size)
    if sizes["data"] % topology.slices:
        raise ValueError(f"mesh.data={sizes['data']} is not a multiple of the {topology.slices} slices")
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    tensor, parts = sizes["tensor"], check_micro_batch(train, mesh) * sizes["sequence"]
    if model.context % sizes["sequence"]:
        raise ValueError(f"model.context={model.context} is not a multiple of mesh.sequence={sizes['sequence']}")
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes, param_shardings(shapes, mesh),
    )  # fmt: skip
    parameters, optimiser = device_bytes(placed["params"]), device_bytes(placed["opt_state"])
    tokens = train.batch_size / train.accumulate * model.context / parts
    activations, transient = _activations(setting, tokens, tensor, topology.machine.platform)
    whole = sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))
    tables = _TABLES[topology.machine.platform] * model.vocab_size * model.width
    return Estimate(
        state=parameters * (2 + (train.accumulate > 1)) + optimiser,
        activations=activations,
        transient=transient + (2 * whole / model.blocks * _width(setting) + tables) / tensor,
        roofs=_roofs(setting, topology, sizes, parameters, optimiser, whole, tokens),
    )


def _width(setting: Setting) -> int:
    return {"float64": 8, "float32": 4, "bfloat16": 2}[setting.model.dtype]


def _activations(setting: Setting, tokens: float, tensor: int, platform: str) -> tuple[float, float]:
    """(kept for the backward pass, needed for a moment) in bytes."""
    model, connection, bytes_ = setting.model, setting.residual, _width(setting)
    depth = model.blocks * (2 if connection.unit == "sublayer" else 1)
    state = connection.cost(depth, model.width).state
    grows = isinstance(connection, AppendOnly)
    carried = state + model.blocks if grows else max(state, 1) * model.blocks
    copies = state * (_HISTORY if grows else _COPIES[platform]) if state > 1 else 0
    products = (model.heads + 2 * model.kv) * model.head_size / tensor + 2 * model.width
    products += (2 if model.mlp == "swiglu" else 1) * model.hidden / tensor
    scores = tokens * model.context * model.heads / tensor * _SCORES
    rest = (2 * model.width + model.hidden / tensor + 2 * model.heads * model.head_size / tensor) * 2
    kept = carried * model.width * tokens * bytes_
    block = tokens * ((products + rest + 4 * model.width) * bytes_ + copies * model.width)
    if model.remat in ("none", "dots"):
        kept += model.blocks * tokens * products * bytes_
    if model.remat == "none":
        kept += model.blocks * (scores * bytes_ / _SCORES + tokens * rest * bytes_)
    logits = 3 * tokens * model.vocab_size / tensor * 4
    return kept, max(scores + block, logits)


def _roofs(setting, topology, sizes, parameters, optimiser, whole, tokens) -> tuple[float, float, float]:
    """Seconds of compute, memory and network. tokens: of a micro-batch on a device; whole: number of parameters."""
    model, machine, accumulate = setting.model, topology.machine, setting.train.accumulate
    data, tensor, sequence = sizes["data"], sizes["tensor"], sizes["sequence"]
    shards, full = sizes["fsdp"] * sequence, model.remat == "full"
    weights = whole * _width(setting) / tensor
    gathered = 3 * accumulate * weights * (shards - 1) / shards  # forward, backward, and the gradients' reduction
    reduced = 2 * parameters * (data - 1) / data
    # Of each block, each way: two all-reduces of outputs; keys and values of the tokens that other devices have.
    outputs = 2 * 2 * model.width * (tensor - 1) / tensor
    keys = 2 * model.kv / tensor * model.head_size * (sequence - 1)
    numbers = accumulate * (3 if full else 2) * model.blocks * tokens * _width(setting)
    network = (gathered + reduced + numbers * (outputs + keys)) / machine.link
    if machine.platform == "cuda" and topology.shape[0] > 1 and machine.network:
        gpus = topology.shape[1]
        inside = max(gpus // tensor, 1)  # members of a group with the same weights on one host share what must leave it
        far = gathered / min(inside, shards) if shards * tensor > gpus else 0.0
        far += numbers * keys / min(inside, sequence) if sequence * tensor > gpus else 0.0
        network = max(network, (far + (reduced if data > 1 else 0.0)) / machine.network)
    passes = 4 if full else 3  # forward passes that cost as much: backward is two
    connection = setting.residual.cost(model.blocks * (2 if setting.residual.unit == "sublayer" else 1), model.width)
    scores = model.blocks * model.heads / tensor * model.context * 4 * (3 * (passes + (model.remat == "dots")))
    carried = _UNFUSED * passes * connection.moved * model.width * _width(setting)
    memory = (accumulate * (3 * weights + tokens * (scores + carried)) + 2 * (parameters + optimiser)) / machine.hbm
    compute = step_flops(setting)["total"] / topology.size / machine.peak
    return compute, memory, network
