"""What a train step needs, guessed from sizes alone: to put candidates in order, and to say what would fit.

Per device, with t = tokens of a micro-batch on it, D width, b bytes of a number of ``model.dtype``:

    state        parameters, optimiser state, and gradients like the parameters (twice with accumulation)
    activations  kept for the backward pass: with model.remat=full s t D b of every block (s: the connection's state;
                 once for all blocks where it grows), with "dots" the outputs of products with weights as well, with
                 "none" all that a block computes; "offload" keeps on the device what "full" does
    transient    scores of one block's attention, one block's activations, its gathered weights, logits (3 copies)

The time is a bound like ``roofline``'s: memory is that of the weights, of attention's scores (read or written about
three times in each pass) and of the connection, network what FSDP, data and tensor parallelism have to send. Real
figures differ, above all in what the compiler keeps at the same time; a plan that was compiled corrects the memory by
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
    tensor, parts = sizes["tensor"], check_micro_batch(train, mesh) * sizes.get("sequence", 1)
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes, param_shardings(shapes, mesh),
    )  # fmt: skip
    parameters, optimiser = device_bytes(placed["params"]), device_bytes(placed["opt_state"])
    tokens = train.batch_size / train.accumulate * model.context / parts
    activations, transient = _activations(setting, tokens, tensor)
    whole = sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))
    return Estimate(
        state=parameters * (2 + (train.accumulate > 1)) + optimiser,
        activations=activations,
        transient=transient + 2 * whole / model.blocks * _width(setting) / tensor,
        roofs=_roofs(setting, topology, sizes, parameters, optimiser, whole, tokens),
    )


def _width(setting: Setting) -> int:
    return {"float64": 8, "float32": 4, "bfloat16": 2}[setting.model.dtype]


def _activations(setting: Setting, tokens: float, tensor: int) -> tuple[float, float]:
    """(kept for the backward pass, needed for a moment) in bytes."""
    model, connection, bytes_ = setting.model, setting.residual, _width(setting)
    depth = model.blocks * (2 if connection.unit == "sublayer" else 1)
    state = connection.cost(depth, model.width).state
    carried = state + model.blocks if isinstance(connection, AppendOnly) else max(state, 1) * model.blocks
    products = (model.heads + 2 * model.kv) * model.head_size / tensor + 2 * model.width
    products += (2 if model.mlp == "swiglu" else 1) * model.hidden / tensor
    scores = tokens * model.context * model.heads / tensor * _SCORES
    rest = (2 * model.width + model.hidden / tensor + 2 * model.heads * model.head_size / tensor) * 2
    kept = carried * model.width * tokens * bytes_
    block = tokens * (products + rest + 4 * max(state if state < 8 else 2, 1) * model.width) * bytes_
    if model.remat in ("none", "dots"):
        kept += model.blocks * tokens * products * bytes_
    if model.remat == "none":
        kept += model.blocks * (scores * bytes_ / _SCORES + tokens * rest * bytes_)
    logits = 3 * tokens * model.vocab_size / tensor * 4
    return kept, max(scores + block, logits)


def _roofs(setting, topology, sizes, parameters, optimiser, whole, tokens) -> tuple[float, float, float]:
    """Seconds of compute, memory and network. tokens: of a micro-batch on a device; whole: number of parameters."""
    model, machine, accumulate = setting.model, topology.machine, setting.train.accumulate
    fsdp, data, tensor = sizes["fsdp"], sizes["data"], sizes["tensor"]
    weights = whole * _width(setting) / tensor
    gathered = 3 * accumulate * weights * (fsdp - 1) / fsdp  # forward, backward, and the gradients' reduction
    reduced = 2 * parameters * (data - 1) / data
    again = 6 if model.remat == "full" else 4  # all-reduces of a block: two per pass through it
    split = accumulate * again * model.blocks * tokens * model.width * _width(setting) * 2 * (tensor - 1) / tensor
    network = (gathered + reduced + split) / machine.link
    if machine.platform == "cuda" and topology.shape[0] > 1 and machine.network:
        gpus, hosts = topology.shape[1], topology.shape[0]
        inside = max(gpus // tensor, 1)  # members of an FSDP group on one host share what must leave it
        far = gathered / min(inside, fsdp) if fsdp * tensor > gpus else 0.0
        network = max(network, (far + (reduced if data > 1 and hosts > 1 else 0.0)) / machine.network)
    passes = 4 if model.remat == "full" else 3  # forward passes that cost as much: backward is two
    connection = setting.residual.cost(model.blocks * (2 if setting.residual.unit == "sublayer" else 1), model.width)
    scores = model.blocks * model.heads / tensor * model.context * 4 * (3 * (passes + (model.remat == "dots")))
    moved = accumulate * (3 * weights + tokens * (scores + passes * connection.moved * model.width * _width(setting)))
    memory = (moved + 2 * (parameters + optimiser)) / machine.hbm
    compute = step_flops(setting)["total"] / topology.size / machine.peak
    return compute, memory, network
