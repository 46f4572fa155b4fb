"""What a train step of any connection may do on machines that are not here, as rules over compiled programs.

Small sizes, chosen so that what an array is can be told from its shape: the tokens of a row that one device holds are
8 x 23, and nothing else is a multiple of that. Nothing is rematerialised: what is computed again is sent again, and how
much that is depends on what the backward pass needs.
"""

import collections
import dataclasses
import functools
import math

import jax
import numpy as np

from lmres.flow.config import FlowConfig
from lmres.model import ModelConfig
from lmres.plan.collectives import BETWEEN, Collective, collectives
from lmres.plan.hlo import Module, Shape
from lmres.plan.lowering import Setting, make_program
from lmres.plan.planning import islands, nothing_cached
from lmres.plan.topology import parse_topology, topology_devices
from lmres.residual import Connection, Plain
from lmres.residual.interface import AppendOnly
from lmres.sharding import AXES, MeshConfig
from lmres.train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from lmres.train.state import count

TOKENS = 8 * 23  # of one row on a device; a device holds one row, or a part of one
WIDTH, BLOCKS, HEADS, HEAD, KV, HIDDEN, VOCAB = 128, 2, 4, 32, 2, 256, 512
LANES = 128  # the last axis is padded to these on a TPU
PADDING = 16 * 1024  # numbers: small arrays are sent as whole tiles of 1024; less than one activation
LARGE = 8 * BLOCKS * WIDTH  # parameters of more numbers than this, all but gains of norms, must be split


@dataclasses.dataclass(frozen=True)
class Machine:
    """A topology, a mesh on it, and what its compiler is told."""

    topology: str
    mesh: MeshConfig
    slices: int = 1
    options: tuple[tuple[str, bool | int], ...] = ()

    def setting(self, connection: Connection) -> Setting:
        mesh = self.mesh
        model = ModelConfig(
            vocab_size=VOCAB, context=TOKENS * mesh.sequence, width=WIDTH, blocks=BLOCKS, heads=HEADS, kv_heads=KV,
            mlp_hidden=HIDDEN, dtype="bfloat16", remat="none",
        )  # fmt: skip
        train = TrainConfig(batch_size=mesh.data * mesh.fsdp)
        return Setting(model, connection, FlowConfig(), OptimizerConfig(), ScheduleConfig(), train, mesh)


MACHINES = {
    "v5p pod": Machine("v5p:8x8x16", MeshConfig(data=16, fsdp=16, sequence=2, tensor=2)),
    "v5e slices": Machine("v5e:4x4", MeshConfig(data=2, fsdp=8, tensor=2), slices=2),
    # Products by cuBLAS: compiling Triton's takes a third of the time, and sends nothing.
    "16 h200": Machine(
        "h200:2x8", MeshConfig(data=1, fsdp=8, tensor=2), options=(("xla_gpu_enable_triton_gemm", False),)
    ),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled step. arguments: abstract. placed: shardings of the arguments, as the compiler says."""

    machine: Machine
    connection: Connection
    arguments: tuple
    placed: tuple
    temporaries: int
    found: list[Collective]
    arrays: set[tuple[str, Shape]]  # (operation, array) of all that is computed outside of fusions


@functools.cache
def compiled(connection: Connection, machine: Machine) -> Step:
    topology = parse_topology(machine.topology, machine.slices)
    program = make_program(machine.setting(connection), topology_devices(topology))
    with nothing_cached():
        done = program.lower().compile(dict(machine.options))
    module = Module(done.as_text())
    held = ("parameter", "get-tuple-element", "tuple", "while")
    return Step(
        machine, connection, program.arguments, done.input_shardings[0], done.memory_analysis().temp_size_in_bytes,
        collectives(module, islands(program.mesh.devices.flat, topology)),
        {(i.opcode, shape) for _, i, _ in module.running() if i.opcode not in held for shape in i.shapes},
    )  # fmt: skip


def faults(connection: Connection, machine: Machine) -> list[str]:
    """What is wrong with a connection's step on a machine, in words; what it may do is said at each rule."""
    step, plain = compiled(connection, machine), compiled(Plain(), machine)
    first = plain_faults(plain) if connection == Plain() else []
    return [*first, *sent_faults(step, plain), *memory_faults(step, plain), *argument_faults(step), *array_faults(step)]


def numbers(shape: Shape) -> int:
    return math.prod(shape.sizes)


def tokens_of(shape: Shape) -> int:
    """How many of an array's axes are of tokens."""
    return sum(size % TOKENS == 0 for size in shape.sizes)


@dataclasses.dataclass
class Sent:
    """Numbers that a device sends, but for (g - 1) / g: an all-reduce counts twice, as a reduce-scatter and a gather.

    activations: by mesh axes. gathered: of weights, over the axes that split them. reduced: all other, of gradients and
    losses. between: of what goes between slices.
    """

    kinds: set[str]
    activations: collections.Counter
    gathered: float
    reduced: float
    between: float


def sent(step: Step) -> Sent:
    total = Sent(set(), collections.Counter(), 0.0, 0.0, 0.0)
    mesh = [getattr(step.machine.mesh, axis) for axis in AXES]
    for one in step.found:
        if one.group == 1:
            continue
        total.kinds.add(one.kind)
        places = np.unravel_index(np.array(one.devices, int), mesh)
        axes = "+".join(axis for axis, at in zip(AXES, places) if len(set(at.tolist())) > 1)
        axes = "slices" if one.kind.endswith(BETWEEN) else axes
        for shape in one.arrays:
            size = one.times * numbers(shape) * (2 if "all-reduce" in one.kind else 1)
            if axes == "slices":
                total.between += size / 2
            # Gradients that were joined into one vector may have any length; they go over the parts of the batch.
            joined = len(shape.sizes) == 1 and axes not in ("tensor", "sequence")
            if tokens_of(shape) and not joined:
                total.activations[axes] += size
            elif one.kind == "all-gather" and set(axes.split("+")) <= {"fsdp", "sequence"}:
                total.gathered += size
            else:
                total.reduced += size
    return total


def plain_activations(machine: Machine) -> dict[str, int]:
    """What a plain step sends of activations, by mesh axes.

    tensor: the embedding's rows; of each branch its output, and the gradient of its input; the gradient of the final
    norm's output; and of the loss three numbers per token. sequence: keys and values of the other parts, gathered for
    each product with them forward and backward, and their gradients.
    """
    row, mesh = TOKENS * WIDTH, machine.mesh
    keys = TOKENS * mesh.sequence * KV // mesh.tensor * HEAD
    over = {"tensor": 2 * (row * (2 + 4 * BLOCKS) + 3 * TOKENS)}
    return over | ({"sequence": BLOCKS * (4 * keys + 2 * 2 * keys)} if mesh.sequence > 1 else {})


def weights(machine: Machine) -> int:
    """Numbers in the weights of blocks and table that one part of tensor uses."""
    block = WIDTH * HEAD * (2 * HEADS + 2 * KV) + 3 * WIDTH * HIDDEN
    return (BLOCKS * block + VOCAB * WIDTH) // machine.mesh.tensor


def plain_faults(step: Step) -> list[str]:
    """What plain sends, which the other rules compare with: activations to the number, weights gathered for the forward
    and the backward pass (the table's rows once more, to be looked up), and gradients of each weight once, the table's
    twice, in two stages of which the first leaves a part."""
    found, bad = sent(step), []
    expected = plain_activations(step.machine)
    if dict(found.activations) != expected:
        bad.append(f"sends {dict(found.activations)} numbers of activations; {expected} are expected")
    table = VOCAB * WIDTH // step.machine.mesh.tensor
    limits = {"gathered": 2 * weights(step.machine) + table, "reduced": 3 * weights(step.machine) + PADDING}
    for what, limit in limits.items():
        if getattr(found, what) > limit:
            bad.append(f"{what}: {getattr(found, what):.0f} numbers of weights or gradients; {limit} are expected")
    return bad


def sent_faults(step: Step, plain: Step) -> list[str]:
    """Reads and writes follow the tokens, so a connection sends what the plain residual sends, and beside it:

    - the gradients of its own parameters, which all devices hold, in two stages at most (within the parts of an axis,
      then between them); of those that all units share, after each unit, since a loop carries their sum;
    - with inputs of query, key and value apart, two gradients of inputs more per block, which were one sum;
    - LIMe mixes over heads, which tensor splits: it sends its sums and keys of a block, but never its history.
    """
    found, usual, bad = sent(step), sent(plain), []
    row, mesh = TOKENS * WIDTH, step.machine.mesh
    held = step.arguments[0]["params"]["stack"]["connection"]
    own = count(held["layers"]) + (depth(step.connection) + 1) * count(held["shared"])
    mixed = 24 * BLOCKS * TOKENS * KV * HEAD if step.connection.kind == "lime" else 0
    allowed = collections.Counter(usual.activations)
    allowed["tensor"] += 2 * row * BLOCKS * (min(step.connection.ways[0], 3) - 1) + mixed
    for axes, size in found.activations.items():
        if size > allowed[axes]:
            bad.append(f"sends {size:.0f} numbers of activations over {axes}; {allowed[axes]:.0f} are expected")
    limits = {"gathered": 2 * own, "reduced": 4 * own + mixed}
    for what, more in limits.items():
        size, limit = getattr(found, what), getattr(usual, what) + more + PADDING
        if size > limit:
            bad.append(f"{what}: {size:.0f} numbers of weights or gradients; {limit:.0f} are expected")
    parts = mesh.fsdp * mesh.sequence
    limit = weights(step.machine) / parts + 2 * own + PADDING
    if found.between > limit:
        bad.append(f"sends {found.between:.0f} numbers between slices, and has gradients of {limit:.0f}")
    kinds = {"all-gather", "all-reduce", "reduce-scatter"}
    if step.machine.slices > 1:
        kinds.add("all-reduce" + BETWEEN)
    if mixed:
        kinds.add("all-to-all")  # of the router's few numbers
    if not found.kinds <= kinds:
        bad.append(f"uses {sorted(found.kinds - kinds)}")
    return bad


def depth(connection: Connection) -> int:
    """Units of the connection in the stack."""
    return BLOCKS * (2 if connection.unit == "sublayer" else 1)


def vectors(step: Step) -> float:
    """The state in vectors of width D, as it lies in memory: fractions of a vector are padded to whole lanes."""
    connection = step.connection
    state = max(connection.cost(depth(connection), WIDTH).state, 1.0)
    parts = getattr(connection, "fractions", 1)
    return state * (parts * LANES / WIDTH if parts > 1 else 1)


def memory_faults(step: Step, plain: Step) -> list[str]:
    """Each unit keeps, with nothing rematerialised, its state, what its mixing weights are made of, and the factors of
    its products in float32: at most eight arrays as large as the state and the read together."""
    more = step.temporaries - plain.temporaries
    limit = 8 * depth(step.connection) * (vectors(step) + 1) * TOKENS * WIDTH * 4
    return [f"needs {more} bytes more than plain, over {limit:.0f}"] if more > limit else []


def argument_faults(step: Step) -> list[str]:
    """All parameters and moments but a connection's are split over all axes but data's, by what the compiler says."""
    bad, mesh = [], step.machine.mesh
    parts = mesh.fsdp * mesh.sequence * mesh.tensor
    leaves = jax.tree_util.tree_leaves_with_path(step.arguments[0])
    for (path, leaf), placed in zip(leaves, jax.tree.leaves(step.placed[0]), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        here = math.prod(placed.shard_shape(leaf.shape))
        if leaf.size > LARGE and "connection" not in name and here * parts != leaf.size:
            bad.append(f"{name} {leaf.shape}: {here} of {leaf.size} numbers on each of {parts} devices")
    return bad


def array_faults(step: Step) -> list[str]:
    """No array holds more tokens than the device's own.

    One axis of tokens: at most the states of all blocks and a read more, or the inputs of all blocks, and none with
    whole rows as wide as the model where rows are split. Two: the scores of all blocks.
    """
    bad, mesh = [], step.machine.mesh
    row, whole = TOKENS * WIDTH, TOKENS * mesh.sequence
    state = step.connection.cost(depth(step.connection), WIDTH).state
    kept = 1 if isinstance(step.connection, AppendOnly) else BLOCKS
    largest = {
        1: row * max(kept * (max(state, 1) + 1), BLOCKS * max(2, *step.connection.ways)),
        2: BLOCKS * HEADS // mesh.tensor * TOKENS * whole,
    }
    for opcode, shape in sorted(step.arrays, key=str):
        size, axes = numbers(shape), tokens_of(shape)
        if axes and size > largest.get(axes, 0):
            bad.append(
                f"{opcode} makes {shape}, {size} numbers of activations; {largest.get(axes, 0):.0f} are expected"
            )
        elif axes == 1 and mesh.sequence > 1 and size >= whole * WIDTH and any(n % whole == 0 for n in shape.sizes):
            bad.append(f"{opcode} makes {shape}, whole rows where each device has a part")
    return bad
