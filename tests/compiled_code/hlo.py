"""Launches and bytes of an optimised HLO module: what each kernel reads from memory and writes to it.

The CPU's optimised HLO does not serve: there a scatter is a loop over its indices that nothing is fused into, and a
bitcast to another width copies. So this reads what XLA makes for a GPU, which JAX's CUDA plugin compiles without one.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "token": 0}
FREE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "opt-barrier", "after-all", "partition-id",
    "replica-id", "iota",
}  # fmt: skip
"""Instructions that are no launch; a constant or an iota on its own is never of a pool's size here."""

IN_PLACE = {"scatter": 2, "dynamic-update-slice": 1}
"""Instructions that change their first operand, and which operand holds what they write."""

PARTIAL = {"gather", "dynamic-slice", "slice"}
"""Instructions that read as much of their first operand as they return."""

HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
MOVED = re.compile(r"(move|zero)_runs_of_(\d+)_bytes(?:_from_(\d+))?")
TABLE = re.compile(r"s32\[|f32\[\d*\]$")
"""Starts of runs, and reciprocals of their scales."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation; `shape` is the text of its type."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def nbytes(self) -> int:
        """Bytes of its result, all elements of a tuple together."""
        return bytes_of(self.shape)


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in order; the root is the last to be named `root`."""

    instructions: dict[str, Instruction]
    root: str

    def users(self, name: str) -> Iterator[Instruction]:
        """Instructions that take the named one as an operand."""
        return (found for found in self.instructions.values() if name in found.operands)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel, copy or library call of the entry computation, by opcode or target, and the bytes that it moves."""

    kind: str
    read: int
    written: int


def bytes_of(shape: str) -> int:
    """Bytes of all arrays in the text of a type."""
    total = 0
    for dtype, extents in ARRAY.findall(shape):
        digits = re.search(r"\d+", dtype)
        bits = BITS[dtype] if dtype in BITS else int(digits[0]) if digits else 8
        total += math.prod(int(n) for n in extents.split(",") if n) * bits // 8
    return total


def _balanced(text: str) -> int:
    """Position at which the bracket that `text` begins with is closed."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return position
    raise ValueError(f"no closing bracket: {text[:80]}")


def _instruction(name: str, text: str) -> Instruction:
    end = _balanced(text) + 1 if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].strip()
    opcode, rest = rest[: rest.index("(")], rest[rest.index("(") :]
    close = _balanced(rest)
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[:close]))
    return Instruction(name, re.sub(r"\{[^}]*\}|/\*.*?\*/", "", shape), opcode, operands, rest[close + 1 :])


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Computations by name, and which is the entry."""
    found: dict[str, Computation] = {}
    entry, current, instructions, root = "", "", {}, ""
    for line in text.splitlines():
        if header := HEADER.match(line):
            current, instructions, root = header[2], {}, ""
            entry = current if header[1] else entry
        elif line.startswith("}") and current:
            found[current] = Computation(instructions, root)
            current = ""
        elif current and (match := INSTRUCTION.match(line)):
            instructions[match[2]] = _instruction(match[2], match[3])
            root = match[2] if match[1] else root
    return found, entry


def launches(text: str) -> list[Launch]:
    """Every launch of the entry computation, in order; control flow, whose trips this does not count, is not
    implemented.
    """
    computations, entry = parse(text)
    found = []
    for instruction in computations[entry].instructions.values():
        if instruction.opcode in FREE:
            continue
        if instruction.opcode in ("while", "conditional", "call"):
            raise NotImplementedError(f"{instruction.opcode}: trips are not counted")
        found.append(_launch(instruction, computations, computations[entry]))
    return found


def _launch(instruction: Instruction, computations: dict[str, Computation], entry: Computation) -> Launch:
    if instruction.opcode == "fusion":
        called = re.search(r"calls=%?([\w.\-]+)", instruction.attributes)
        assert called is not None, instruction
        return Launch("fusion", *_fusion(computations[called[1]]))
    sizes = [entry.instructions[name].nbytes for name in instruction.operands]
    if instruction.opcode == "custom-call":
        tables = sum(
            size
            for name, size in zip(instruction.operands, sizes, strict=True)
            if TABLE.match(entry.instructions[name].shape)
        )
        return _custom_call(instruction, sizes, tables)
    if instruction.opcode in IN_PLACE:
        changed = sizes[IN_PLACE[instruction.opcode]]
        return Launch(instruction.opcode, sum(sizes[1:]), changed)
    if instruction.opcode in PARTIAL:
        return Launch(instruction.opcode, instruction.nbytes + sum(sizes[1:]), instruction.nbytes)
    return Launch(instruction.opcode, sum(sizes), instruction.nbytes)


def _custom_call(instruction: Instruction, sizes: list[int], tables: int) -> Launch:
    """A kernel of ours: it says how much it moves where its operands do not, and reads its table of starts beside."""
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    assert target is not None, instruction
    if moved := MOVED.search(instruction.attributes):
        return Launch(target[1], tables + (int(moved[3] or moved[2]) if moved[1] == "move" else 0), int(moved[2]))
    aliases = re.search(r"output_to_operand_aliasing=\{((?:[^{}]|\{[^{}]*\})*)\}", instruction.attributes)
    in_place = {int(n) for n in re.findall(r": \((\d+), ", aliases[1])} if aliases else set()
    if in_place:  # a scatter: the values, which are not the pool, are read and written
        given = [size for index, size in enumerate(sizes) if index not in in_place]
        return Launch(target[1], sum(given), sum(given[1:]))
    return Launch(target[1], sizes[0] + instruction.nbytes, instruction.nbytes)


def _fusion(body: Computation) -> tuple[int, int]:
    parameters = [found for found in body.instructions.values() if found.opcode == "parameter"]
    return sum(_read(body, parameter) for parameter in parameters), _written(body, body.instructions[body.root])


def _read(body: Computation, found: Instruction) -> int:
    """Bytes that a fusion reads of a parameter, or of a bitcast of one: all, or what its users take of it."""
    total = 0
    for user in body.users(found.name):
        if user.opcode == "bitcast":
            total += _read(body, user)
        elif user.opcode in PARTIAL and user.operands[0] == found.name:
            total += user.nbytes
        elif user.opcode in IN_PLACE and user.operands[0] == found.name:
            continue
        else:
            return found.nbytes
    return min(total, max(found.nbytes, total if _gathered(body, found) else 0))


def _gathered(body: Computation, found: Instruction) -> bool:
    """True if rows may be read twice, so that more may be read than there is."""
    return any(user.opcode == "gather" for user in body.users(found.name))


def _written(body: Computation, root: Instruction) -> int:
    if root.opcode == "tuple":
        return sum(_written(body, body.instructions[name]) for name in root.operands)
    if root.opcode == "bitcast":
        return _written(body, body.instructions[root.operands[0]])
    if root.opcode in IN_PLACE:
        return body.instructions[root.operands[IN_PLACE[root.opcode]]].nbytes
    return root.nbytes


def whole_copies(text: str, nbytes: int) -> list[str]:
    """Copies of at least so many bytes, in any computation, as text."""
    computations, _ = parse(text)
    return [
        f"{found.opcode} {found.shape}"
        for computation in computations.values()
        for found in computation.instructions.values()
        if found.opcode in ("copy", "copy-start") and found.nbytes >= nbytes
    ]
