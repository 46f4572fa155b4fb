"""What a compiled step holds in memory beside its arguments, and what it moves to and from that memory."""

import dataclasses

from lmres.plan.hlo import Computation, Instruction, Module, Shape

# These give another name to memory that is there already, or none at all.
_NO_BUFFER = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "constant",
    "optimization-barrier", "dynamic-update-slice", "async-start", "async-update", "async-done", "copy-done",
    "all-gather-done", "all-reduce-done", "collective-permute-done", "after-all", "partition-id", "iota",
}  # fmt: skip
_NOT_MOVED = _NO_BUFFER - {"dynamic-update-slice"} | {"copy-start", "broadcast"}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Arrays of one place in the code.

    bytes: of one of them, as it lies in memory. count: how many such values the step defines; they need not be alive
    at the same time. shape: in words. source: ``file:line``. op_name: jax's path.
    """

    bytes: int
    count: int
    shape: str
    source: str
    op_name: str


def biggest_buffers(module: Module, limit: int = 12) -> list[Buffer]:
    """The largest values of a step that are not arguments, with the code that makes them, largest first."""
    loops = _carried(module)
    groups: dict[tuple, list[int]] = {}
    for computation, instruction, _ in module.running():
        if instruction.opcode in _NO_BUFFER or _in_place(module, computation, instruction):
            continue
        says = loops.get((computation.name, instruction.name), instruction)
        place = (module.source(says) or module.source(instruction), _short_name(says.op_name or instruction.op_name))
        for shape in _allocated(instruction):
            groups.setdefault((str(shape), *place), []).append(shape.padded_bytes)
    rows = [Buffer(max(sizes), len(sizes), *key) for key, sizes in groups.items()]
    return sorted(rows, key=lambda row: (-row.bytes, row.shape, row.source, row.op_name))[:limit]


def kept_for_backward(module: Module) -> int:
    """Bytes of what the forward pass makes and the backward pass reads, as it lies in memory.

    Told apart by jax's names: what is made under ``jvp(...)`` and used under ``transpose(jvp(...))`` of the same
    computation. Weights that are cast once for both are among it. Zero where nothing is differentiated.
    """
    most = 0
    for name in module.runs:
        if name not in module.inside:
            most = max(most, _kept(module, module.computations[name]))
    return most


def _kept(module: Module, computation: Computation) -> int:
    made: dict[str, Instruction] = {}
    held: dict[str, int] = {}
    for instruction in computation.instructions.values():
        passes = instruction.opcode in ("get-tuple-element", "bitcast", "tuple", "copy", "copy-start", "copy-done")
        if passes:
            continue
        if "transpose(" in instruction.op_name:
            for source in _behind(computation, instruction):
                if source.name in made or _element_of(source, made):
                    held[source.name] = sum(s.padded_bytes for s in source.shapes if s.in_memory)
        elif "jvp(" in instruction.op_name:
            made[instruction.name] = instruction
    # What a loop only hands on (the weights it reads) is no result of it.
    return sum(size for name, size in held.items() if not _handed_on(module, computation, name))


def _behind(computation: Computation, instruction: Instruction) -> list[Instruction]:
    """The values that an instruction reads, through what only renames or copies them; elements of a loop's result as
    ``get-tuple-element``."""
    found, waiting, seen = [], list(instruction.operands), set()
    while waiting:
        name = waiting.pop()
        source = computation.instructions.get(name)
        if source is None or name in seen:
            continue
        seen.add(name)
        if source.opcode in ("bitcast", "tuple", "copy", "copy-start", "copy-done"):
            waiting += source.operands
        else:
            found.append(source)
    return found


def _element_of(source: Instruction, made: dict[str, Instruction]) -> bool:
    return source.opcode == "get-tuple-element" and source.operands[0] in made


def _handed_on(module: Module, computation: Computation, name: str) -> bool:
    element = computation.instructions[name]
    loop = computation.operand(element, 0) if element.opcode == "get-tuple-element" else None
    if loop is None or loop.opcode != "while":
        return False
    at = element.index
    body = module.computations[loop.attribute("body")]
    inner = body.operand(body.root, at)
    return inner is not None and inner.opcode == "get-tuple-element" and inner.index == at


def _carried(module: Module) -> dict[tuple[str, str], Instruction]:
    """By (computation, name) of a value that enters a loop: the instruction that fills it there, which has a name in
    the code where the empty buffer may have none."""
    found = {}
    for computation, loop, _ in module.running():
        start = computation.operand(loop, 0) if loop.opcode == "while" else None
        if start is None or start.opcode != "tuple":
            continue
        body = module.computations[loop.attribute("body")]
        for at, name in enumerate(start.operands):
            inner = body.operand(body.root, at)
            if inner is not None and inner.op_name:
                found[computation.name, name] = inner
    return found


def _allocated(instruction: Instruction) -> list[Shape]:
    """The arrays of main memory that an instruction fills. What is copied asynchronously is named twice."""
    shapes = instruction.shapes[:1] if instruction.opcode.endswith("-start") else instruction.shapes
    return [shape for shape in shapes if shape.in_memory and shape.bytes]


def _fused(module: Module, instruction: Instruction) -> Computation | None:
    return module.computations.get(instruction.attribute("calls") or "") if instruction.opcode == "fusion" else None


def _in_place(module: Module, computation: Computation, instruction: Instruction) -> bool:
    """Whether a fusion writes into one of its operands, as an update of a slice does."""
    if "output_to_operand_aliasing" in instruction.rest:
        return True
    fused = _fused(module, instruction)
    return fused is not None and _update_bytes(module, fused, fused.root) is not None


def _update_bytes(module: Module, fused: Computation, value: Instruction | None) -> float | None:
    """The bytes of the slice, where a value of a fusion is an array of which only a slice is new; else None."""
    while value is not None and value.opcode in ("bitcast", "convert", "copy"):
        value = fused.operand(value, 0)
    inner = None if value is None else _fused(module, value)
    if inner is not None:  # a fusion in a fusion
        return _update_bytes(module, inner, inner.root)
    if value is None or value.opcode != "dynamic-update-slice":
        return None
    update = fused.operand(value, 1)
    return float(sum(shape.bytes for shape in update.shapes)) if update else None


def bytes_moved(module: Module) -> float:
    """Bytes read from and written to main memory in a step, per device, loops as often as they run.

    Of every instruction that is not fused into another, its results and its operands; of an operand that is only
    sliced, and of a result that is only updated, the slice. Caches are not thought of, so it is an estimate: a value
    that two instructions read counts twice.
    """
    total = 0.0
    for computation, instruction, times in module.running():
        if instruction.opcode in _NOT_MOVED or instruction.opcode.endswith("-done"):
            continue
        total += times * (_written(module, instruction) + _read(module, computation, instruction))
    return total


def _written(module: Module, instruction: Instruction) -> float:
    if instruction.opcode == "dynamic-update-slice":
        return 0.0  # the slice is among what is read, and counted twice there
    fused = _fused(module, instruction)
    if fused is None:
        return float(sum(shape.bytes for shape in _allocated(instruction)))
    several = fused.root.opcode == "tuple" and len(fused.root.operands) == len(instruction.shapes)
    values = [fused.operand(fused.root, at) for at in range(len(instruction.shapes))] if several else [fused.root]
    total = 0.0
    for value, shapes in zip(values, [[shape] for shape in instruction.shapes] if several else [instruction.shapes]):
        update = _update_bytes(module, fused, value)
        total += sum(shape.bytes for shape in shapes if shape.in_memory) if update is None else update
    return total


def _read(module: Module, computation: Computation, instruction: Instruction) -> float:
    fused = _fused(module, instruction)
    total = 0.0
    for at in range(len(instruction.operands)):
        operand = computation.operand(instruction, at)
        if operand is None or not all(shape.in_memory for shape in operand.shapes):
            continue
        whole = float(sum(shape.bytes for shape in operand.shapes))
        if instruction.opcode == "dynamic-update-slice":
            total += 2 * whole if at == 1 else 0.0
        elif instruction.opcode in ("dynamic-slice", "gather"):
            total += float(sum(shape.bytes for shape in instruction.shapes)) if at == 0 else whole
        else:
            total += whole if fused is None else min(whole, _read_by_fusion(module, fused, at, whole))
    return total


def _read_by_fusion(module: Module, fused: Computation, at: int, whole: float) -> float:
    """Bytes of a fusion's operand that it reads: slices, where it only takes those, also in a fusion inside it."""
    parameter = next(
        (i for i in fused.instructions.values() if i.opcode == "parameter" and i.arguments == str(at)), None
    )
    return whole if parameter is None else _read_of(module, fused, parameter.name, whole)


def _read_of(module: Module, fused: Computation, name: str, whole: float) -> float:
    if name == fused.root.name:
        return whole
    total = 0.0
    for user in fused.instructions.values():
        if name not in user.operands:
            continue
        inner = _fused(module, user)
        if inner is not None:
            places = [at for at, operand in enumerate(user.operands) if operand == name]
            total += sum(_read_by_fusion(module, inner, at, whole) for at in places)
        elif user.opcode == "bitcast":
            total += _read_of(module, fused, user.name, whole)
        elif user.opcode in ("dynamic-slice", "slice") and user.operands[0] == name:
            total += sum(shape.bytes for shape in user.shapes)
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
            return whole
    return total


def _short_name(op_name: str) -> str:
    """A path of jax's names without what all of them have."""
    parts = [p for p in op_name.split("/") if p not in ("jit(step)", "while", "body", "closed_call", "checkpoint")]
    return "/".join(parts)
