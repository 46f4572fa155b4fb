"""A compiled module's text, read: its computations and instructions, how often each runs, where its code comes from.

Only what plans need: shapes with their layouts, operands, calls, loops and metadata. The text is XLA's own form, of a
module that has been scheduled; computations of fusions are kept apart, since nothing inside one is a buffer.

A loop counts as often as it runs: ``known_trip_count`` where the compiler gives one, else the constant that the loop's
condition compares its counter with (the loops of ``jax.lax.scan`` start at 0 and add 1). Loops whose length is not
found count once, and ``Module.unknown_loops`` says how many there are. Every branch of a conditional counts as run.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_SIZES = {
    "pred": 1, "s2": 0.25, "u2": 0.25, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16, "token": 0, "opaque": 0,
}  # fmt: skip
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<= ]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_NAME = re.compile(r"%([\w.-]+)")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array: its HLO type, sizes, and the layout as it is written."""

    dtype: str
    sizes: tuple[int, ...]
    layout: str = ""

    @property
    def bytes(self) -> int:
        """Without padding."""
        return math.ceil(math.prod(self.sizes) * _SIZES.get(self.dtype, 1))

    @property
    def padded_bytes(self) -> int:
        """As it lies in memory: the minor dimensions rounded up to the layout's first tile."""
        order, _, tiles = self.layout.partition(":")
        tile = re.match(r"T\(([0-9,]+)\)", tiles)
        if not tile or not self.sizes:
            return self.bytes
        minor = [self.sizes[int(axis)] for axis in order.split(",") if axis]
        for at, rows in enumerate(reversed([int(n) for n in tile[1].split(",")])):
            if at < len(minor):
                minor[at] = -(-minor[at] // rows) * rows
        return math.ceil(math.prod(minor) * _SIZES.get(self.dtype, 1))

    @property
    def in_memory(self) -> bool:
        """Whether it lies in the device's main memory, not in one nearer to the cores or on the host."""
        space = re.search(r"S\((\d+)\)", self.layout)
        return space is None or space[1] == "0"

    def __str__(self):
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line. shapes: of the result, several for a tuple. rest: what follows the operands."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    arguments: str
    rest: str
    root: bool = False

    def attribute(self, name: str) -> str | None:
        """The computation that an attribute such as ``body`` names."""
        found = re.search(rf"\b{name}=%?([\w.-]+)", self.rest)
        return found[1] if found else None

    @property
    def op_name(self) -> str:
        """The path of jax's names, such as ``jit(step)/jvp(Transformer)/stack/while``; "" where there is none."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def index(self) -> int:
        """The place in a tuple that a ``get-tuple-element`` takes; -1 for what is none."""
        found = re.search(r"index=(\d+)", self.rest)
        return int(found[1]) if found else -1

    @property
    def called(self) -> list[str]:
        """Names of all computations that it refers to."""
        names = [n for key in ("calls", "to_apply", "body", "condition") if (n := self.attribute(key))]
        for group in re.findall(r"(?:branch_computations|called_computations)=\{([^}]*)\}", self.rest):
            names += _NAME.findall(group)
        return names + re.findall(r"(?:true|false)_computation=%?([\w.-]+)", self.rest)


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order in which they run."""

    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """What it returns."""
        return next(i for i in self.instructions.values() if i.root)

    def operand(self, instruction: Instruction, at: int) -> Instruction | None:
        """The instruction that gives an operand."""
        return self.instructions.get(instruction.operands[at]) if at < len(instruction.operands) else None


class Module:
    """A module's text, parsed.

    Raises ValueError when there is no entry computation in ``text``.
    """

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self._tables = _Frames(text)
        entry = None
        for name, is_entry, lines in _computations(text):
            parsed = [p for p in map(parse_instruction, lines) if p is not None]
            self.computations[name] = Computation(name, {i.name: i for i in parsed})
            entry = name if is_entry else entry
        if entry is None:
            raise ValueError("the compiled text has no entry computation; has XLA changed its form?")
        self.entry = self.computations[entry]
        self.unknown_loops = 0
        self.runs: dict[str, float] = {}  # by computation: how often it runs in one step
        self.inside: set[str] = set()  # computations of fusions and reductions
        self._visit(entry, 1.0, False)

    def _visit(self, name: str, times: float, inside: bool) -> None:
        if name not in self.computations:
            return
        self.runs[name] = self.runs.get(name, 0.0) + times
        if inside:
            self.inside.add(name)
        for instruction in self.computations[name].instructions.values():
            trips = 1
            if instruction.opcode == "while":
                found = self.trip_count(instruction)
                self.unknown_loops += found is None
                trips = 1 if found is None else found
            hidden = inside or instruction.opcode not in ("while", "conditional", "call", "async-start")
            for called in instruction.called:
                self._visit(called, times * trips, hidden)

    def trip_count(self, loop: Instruction) -> int | None:
        """How often a ``while`` runs, None where it cannot be told."""
        known = re.search(r'known_trip_count[^}]*?"?n"?:\s*"?(\d+)', loop.rest)
        if known:
            return int(known[1])
        condition = self.computations.get(loop.attribute("condition") or "")
        if condition is None:
            return None
        names = [condition.name, *(c for i in condition.instructions.values() for c in i.called)]
        bodies = [self.computations[n] for n in names if n in self.computations]
        compares = [i for body in bodies for i in body.instructions.values() if i.opcode == "compare"]
        bounds = {
            int(i.arguments)
            for body in bodies
            for i in body.instructions.values()
            if i.opcode == "constant" and re.fullmatch(r"\d+", i.arguments) and i.shapes[0].dtype[0] in "su"
        }
        if len(compares) != 1 or len(bounds) != 1 or "direction=LT" not in compares[0].rest:
            return None
        return -(-bounds.pop() // self._step(loop, condition))

    def _step(self, loop: Instruction, condition: Computation) -> int:
        """By how much a loop's counter grows; more than 1 where the compiler has unrolled it."""
        body = self.computations.get(loop.attribute("body") or "")
        counters = {i.index for i in condition.instructions.values() if i.opcode == "get-tuple-element"}
        if body is None or len(counters) != 1 or body.root.opcode != "tuple":
            return 1
        at, step = counters.pop(), 0
        value = body.operand(body.root, at)
        while value is not None and value.opcode in ("add", "copy", "bitcast"):
            operands = [body.operand(value, place) for place in range(len(value.operands))]
            constants = [i for i in operands if i is not None and i.opcode == "constant"]
            step += sum(int(i.arguments) for i in constants)
            value = next((i for i in operands if i not in constants), None)
        return step if step and value is not None and value.index == at else 1

    def running(self) -> Iterator[tuple[Computation, Instruction, float]]:
        """(computation, instruction, times it runs) of all that is not inside a fusion."""
        for name, times in self.runs.items():
            if name not in self.inside:
                for instruction in self.computations[name].instructions.values():
                    yield self.computations[name], instruction, times

    def source(self, instruction: Instruction) -> str:
        """``file:line`` of the code that an instruction comes from, "" where it is not known."""
        return self._tables.source(instruction.rest)


class _Frames:
    """The tables of files, places and stack frames at the head of a module."""

    def __init__(self, text: str):
        head = text[: _first_computation(text)]
        table = {}
        for title in ("FileNames", "FileLocations", "StackFrames"):
            found = re.search(rf"^{title}\n((?:\d+ .*\n)*)", head, re.M)
            rows = found[1].splitlines() if found else []
            table[title] = {int(row.split(" ", 1)[0]): row.split(" ", 1)[1] for row in rows}
        self._files = {k: v.strip('"') for k, v in table["FileNames"].items()}
        self._places = {k: _numbers(v) for k, v in table["FileLocations"].items()}
        self._frames = {k: _numbers(v) for k, v in table["StackFrames"].items()}

    def source(self, rest: str) -> str:
        frame = re.search(r"stack_frame_id=(\d+)", rest)
        if frame is None:
            named = re.search(r'source_file="([^"]*)"(?:\s+source_line=(\d+))?', rest)
            return f"{_short(named[1])}:{named[2] or 0}" if named else ""
        at, innermost = int(frame[1]), ""
        seen: set[int] = set()
        while at in self._frames and at not in seen:
            seen.add(at)
            place = self._places.get(self._frames[at].get("file_location_id", 0), {})
            file = self._files.get(place.get("file_name_id", 0), "")
            here = f"{_short(file)}:{place.get('line', 0)}"
            innermost = innermost or here
            if "site-packages" not in file:  # this library's own line says more than optax's
                return here
            at = self._frames[at].get("parent_frame_id", 0) - 1  # written one too high, 1 for none
        return innermost


def _numbers(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}


def _short(path: str) -> str:
    """From the package on."""
    for mark in ("/site-packages/", "/lmres/"):
        if mark in path:
            return path.rsplit(mark, 1)[1] if "site" in mark else "lmres/" + path.rsplit(mark, 1)[1]
    return path.rsplit("/", 1)[-1]


def _first_computation(text: str) -> int:
    found = re.search(r"^(ENTRY )?%[\w.-]+ \(.*\{$", text, re.M)
    return found.start() if found else len(text)


def _computations(text: str) -> Iterator[tuple[str, bool, list[str]]]:
    name, is_entry, lines = None, False, []
    for line in text.splitlines():
        header = _HEADER.match(line) if name is None else None
        if header:
            name, is_entry, lines = header[2], bool(header[1]), []
        elif line.startswith("}"):
            if name is not None:
                yield name, is_entry, lines
            name = None
        elif name is not None:
            lines.append(line)


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """The arrays of a shape as it is written, those of a tuple in order."""
    shapes = []
    for dtype, sizes, layout in _ARRAY.findall(text):
        if dtype in _SIZES or dtype.startswith("f8"):
            shapes.append(Shape(dtype, tuple(int(s.lstrip("<=")) for s in sizes.split(",") if s.strip()), layout))
    return tuple(shapes)


def parse_instruction(line: str) -> Instruction | None:
    """One line of a computation; None for what is not an instruction."""
    found = re.match(r"\s*(ROOT )?%?([\w.-]+) = ", line)
    if not found:
        return None
    start = found.end()
    end = _closing(line, start) + 1 if line[start : start + 1] == "(" else line.find(" ", start)
    call = re.match(r" ?([\w-]+)\(", line[end:])
    if end <= 0 or not call:
        return None
    opening = end + call.end() - 1
    closing = _closing(line, opening)
    arguments = line[opening + 1 : closing]
    return Instruction(
        name=found[2], opcode=call[1], shapes=parse_shapes(line[start:end]), operands=tuple(_NAME.findall(arguments)),
        arguments=arguments, rest=line[closing + 1 :], root=bool(found[1]),
    )  # fmt: skip


def _closing(line: str, opening: int) -> int:
    """Where the bracket that opens at ``opening`` closes."""
    depth = 0
    for at in range(opening, len(line)):
        if line[at] == "(":
            depth += 1
        elif line[at] == ")":
            depth -= 1
            if depth == 0:
                return at
    return len(line)
