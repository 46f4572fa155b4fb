"""The structure that results from a config, in words, printed when a run starts."""

import functools

from lmres.config.checks import residual_depth
from lmres.config.flows import flow_facts
from lmres.config.schema import RunConfig
from lmres.flow.config import FlowConfig
from lmres.model.config import ModelConfig
from lmres.residual import (
    MHC,
    AttentionResiduals,
    DeepCrossAttention,
    DeepNorm,
    DeltaAttentionResiduals,
    DenseFormer,
    DynamicLIMe,
    FracConnections,
    GatedResidual,
    GeneralizedHyperConnections,
    HyperConnections,
    LAuReL,
    LayerScale,
    LIMe,
    MUDDFormer,
    MultiGateResiduals,
    PerStreamMHC,
    RecentDeepCrossAttention,
    Residual,
    ResidualMatrix,
    ReZero,
    ValueResidual,
)
from lmres.tasks import Task, Text
from lmres.train.config import OptimizerConfig, ScheduleConfig, TrainConfig


def describe_structure(config: RunConfig) -> list[str]:
    """Lines on the model, the connection and its depth, parameter groups, updates and learning rate."""
    residual, depth = config.residual, residual_depth(config.model, config.residual)
    units = "sub-layers" if residual.unit == "sublayer" else "blocks"
    cost = residual.cost(depth, config.model.width)
    size = f"{_count(cost.params, 'parameter')} and keeps {_count(cost.state, 'vector')} per token"
    return [
        _model(config.model, config.task),
        *([] if isinstance(config.task, Text) else [config.task.describe()]),
        f"{depth} {units}, {residual.name}: {structure(residual, depth)}",
        f"the connection has {size}",
        *([] if config.flow == FlowConfig() else [_flow(config.flow, config.model)]),
        *_groups(config.optimizer, residual, config.flow),
        _updates(config.train, config.model),
        _learning_rate(config.schedule, config.optimizer, config.train),
    ]


@functools.singledispatch
def structure(residual: Residual, depth: int) -> str:
    """What a connection makes of ``depth`` units."""
    return residual.equation


@structure.register
def _(residual: AttentionResiduals, depth: int) -> str:
    if residual.block == 1:
        return f"each reads the embedding and all outputs before it; the readout {depth + 1} entries"
    whole, rest = divmod(depth, residual.block)
    if rest and not whole:
        return f"1 depth block of {rest}, shorter than residual.block={residual.block}"
    count = whole + bool(rest)
    return f"{count} depth block{'s' * (count > 1)} of {residual.block}" + (
        f", the last has {rest}" if rest else ""
    )


@structure.register
def _(residual: DenseFormer, depth: int) -> str:
    averaged = [i for i in range(1, depth + 1) if i % residual.period == 0]
    if not averaged:
        return (
            f"no average, the plain residual: residual.period={residual.period} is more than {depth} blocks"
        )
    text = f"averages after {len(averaged)} of {depth} blocks ({_some(averaged)})"
    if residual.dilation > 1:
        text += f", over every {_nth(residual.dilation)} output back (block {averaged[-1]}: "
        text += f"{_some(residual.sources(averaged[-1]))})"
    if depth % residual.period:
        text += (
            f"; the last period has {depth % residual.period} of {residual.period} blocks, read as they are"
        )
    return text


@structure.register
def _(residual: MUDDFormer, depth: int) -> str:
    weights = "weights that depend on the token" if residual.dynamic == "token" else "fixed weights"
    inputs = "query, key, value and residual apart" if residual.ways == (4,) else "one input"
    return f"each block reads the embedding and all blocks before it, {inputs}, {weights}"


@structure.register
def _(residual: DeepCrossAttention, depth: int) -> str:
    return f"each reads the embedding and all outputs before it, {_inputs(residual.ways)}"


@structure.register
def _(residual: RecentDeepCrossAttention, depth: int) -> str:
    kept = f"the embedding, the last {residual.last} outputs and the sum of those between"
    return f"each reads {kept}, {_inputs(residual.ways)}"


@structure.register
def _(residual: DeltaAttentionResiduals, depth: int) -> str:
    sources = "outputs" if residual.block == 1 else f"depth blocks of {residual.block}"
    return f"the residual stream, and beside it what attention finds among the embedding and the {sources} before"


@structure.register
def _(residual: ValueResidual, depth: int) -> str:
    return f"the residual stream; attention uses the first block's values too ({residual.mode} weights)"


@structure.register
def _(residual: LIMe, depth: int) -> str:
    return "the residual stream; attention mixes the keys and values of all heads of all blocks up to its own"


@structure.register
def _(residual: DynamicLIMe, depth: int) -> str:
    return f"each reads a mix of the residual stream at all depths before it, {_inputs(residual.ways)}"


def _inputs(ways: tuple[int, ...]) -> str:
    return "one input each" if ways == (1,) else f"{' and '.join(map(str, ways))} inputs in turn"


@structure.register
def _(residual: HyperConnections, depth: int) -> str:
    return f"{residual.streams} streams, {_weights(residual)}; {_first_reads(residual.streams, depth)}"


@structure.register
def _(residual: FracConnections, depth: int) -> str:
    return f"the state in {residual.fractions} fractions that are mixed, {_weights(residual)}"


@structure.register
def _(residual: GeneralizedHyperConnections, depth: int) -> str:
    n, m = residual.streams, residual.fractions
    return f"{n} slots of 1/{m} of the width, of which {m} mixes make up an input, {_weights(residual)}"


@structure.register
def _(residual: MHC, depth: int) -> str:
    mixed = {
        "sinkhorn": f"mixed doubly stochastically ({residual.iters} Sinkhorn iterations)",
        "permutations": "mixed by convex combinations of all permutations",
        "kronecker": "mixed by Kronecker products of 2 x 2 doubly stochastic matrices",
        "circulant": "mixed by convex combinations of cyclic shifts",
        "identity": "not mixed",
    }[residual.constraint]
    if residual.reads == "previous":
        return f"{residual.streams} streams, {mixed}; reads, and the readout, by the weights of the sub-layer before"
    return (
        f"{residual.streams} streams, {mixed}, readout {residual.readout}; "
        f"{_first_reads(residual.streams, depth)}"
    )


@structure.register
def _(residual: PerStreamMHC, depth: int) -> str:
    return (
        f"{residual.streams} streams, mixed by {residual.iters} Sinkhorn iterations as in the hyper-connections "
        f"package, not as published; {_first_reads(residual.streams, depth)}"
    )


@structure.register
def _(residual: GatedResidual, depth: int) -> str:
    return f"{residual.streams} streams, never mixed, read through a gate on every channel in place of all other norms"


@structure.register
def _(residual: MultiGateResiduals, depth: int) -> str:
    gated = max(0, depth + 1 - residual.slots)
    if not gated:
        return f"each reads the embedding and all outputs before it, in {depth + 1} slots; none is overwritten"
    return f"{residual.slots} slots, into which the last {gated} of {depth} outputs are blended by gates"


def _weights(residual: HyperConnections | FracConnections | GeneralizedHyperConnections) -> str:
    return "weights that depend on the streams" if residual.dynamic else "fixed weights"


@structure.register
def _(residual: ReZero, depth: int) -> str:
    norms = "branches without norms" if residual.norm == "none" else "pre-norm branches"
    return f"{norms}, each output times a learned number that starts at 0"


@structure.register
def _(residual: LayerScale, depth: int) -> str:
    return f"every channel of an output times a learned number that starts at {residual.start_at(depth):g}"


@structure.register
def _(residual: DeepNorm, depth: int) -> str:
    inner = "" if residual.norm == "none" else " of a pre-norm branch"
    return f"the norm of {residual.alpha:g} times what is carried plus the output{inner}"


@structure.register
def _(residual: LAuReL, depth: int) -> str:
    weights = {
        "none": "no weights",
        "unit": "two learned weights that start at 1",
        "softmax": "two learned weights that sum to 1",
        "gemma": "Gemma 3n's fixed weights",
    }[residual.weights]
    low_rank = f", a low-rank map of rank {residual.rank}" if residual.rank else ""
    return weights + low_rank + (f" over the last {residual.previous} states" if residual.previous else "")


@structure.register
def _(residual: ResidualMatrix, depth: int) -> str:
    ways = ", ".join(str(w) for w in residual.ways)
    return f"a matrix with keys of {residual.keys} numbers; sub-layers take {ways} inputs each, over and over"


def _first_reads(streams: int, depth: int) -> str:
    if streams == 1:
        return "every sub-layer reads the one stream"
    if depth < streams:
        return (
            f"at the start sub-layer l favours stream l; {streams - depth} of {streams} are favoured by none"
        )
    rest = depth % streams
    return f"at the start sub-layer l favours stream l mod {streams}" + (
        f", the last round has {rest}" if rest else ""
    )


def _model(model: ModelConfig, task: Task) -> str:
    whose = "tokenizer" if isinstance(task, Text) else "task"
    vocabulary = f"the {whose}'s" if model.vocab_size is None else model.vocab_size
    shared = "" if model.kv == model.heads else f" sharing {model.kv} key/value heads"
    return (
        f"{model.blocks} blocks of attention and MLP = {2 * model.blocks} sub-layers of width {model.width}; "
        f"{model.heads} heads of {model.head_size}{shared}; {model.mlp} of {model.hidden}; "
        f"vocabulary {vocabulary}; context {model.context}"
    )


def _flow(flow: FlowConfig, model: ModelConfig) -> str:
    facts = flow_facts(flow, model.blocks, model.context)
    return (
        f"attention reads {facts.geometry}, {facts.reads}: {facts.keys_per_query:.4g} keys per query; run "
        f"{facts.schedule}, {_count(facts.steps, 'step')} one after the other for {model.context} tokens"
    )


def _groups(optimizer: OptimizerConfig, residual: Residual, flow: FlowConfig) -> list[str]:
    exempt = "all" if residual.no_decay == ("*",) else ", ".join(residual.no_decay)
    lines = [
        f"weight decay {optimizer.weight_decay:g} on matrices and embeddings; exempt: the norms' gains,"
        f"{'' if flow.is_standard else ' the parameters of the flow,'} and of the connection's parameters {exempt}"
    ]
    if optimizer.kind == "muon":
        lines.append("Muon updates the branches' matrices, AdamW all the rest")
    lines += [
        f"learning rate of the connection's {key}: x {m:g}" for key, m in residual.lr_multipliers.items()
    ]
    return lines


def _updates(train: TrainConfig, model: ModelConfig) -> str:
    tokens = train.batch_size * model.context
    micro = f" in {train.accumulate} micro-batches of {train.batch_size // train.accumulate}"
    return (
        f"{train.steps} updates of {train.batch_size} sequences{micro if train.accumulate > 1 else ''} "
        f"of {model.context} tokens: {tokens} tokens per update, {tokens * train.steps} in all"
    )


def _learning_rate(schedule: ScheduleConfig, optimizer: OptimizerConfig, train: TrainConfig) -> str:
    peak, warmup = optimizer.learning_rate, schedule.warmup_updates(train.steps)
    end = f"to {peak * schedule.final:g} at update {train.steps}"
    after = {
        "cosine": f"a cosine {end}",
        "linear": f"a line {end}",
        "constant": "constant",
        "wsd": f"constant, and over the last {schedule.decay_updates(train.steps)} a line {end}",
    }[schedule.kind]
    return f"learning rate: {warmup} updates of warm-up to {peak:g}, then {after}"


def _count(n: float, what: str) -> str:
    return f"{n:.10g} {what}{'' if n == 1 else 's'}"


def _some(numbers: list[int]) -> str:
    few = numbers if len(numbers) <= 8 else [*numbers[:4], "...", *numbers[-2:]]
    return ", ".join(str(n) for n in few)


def _nth(n: int) -> str:
    return f"{n}{'nd' if n == 2 else 'rd' if n == 3 else 'th'}"
