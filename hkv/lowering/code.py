"""A text as it was read: instructions in blocks, each number computed once, and what they do to arrays."""

from __future__ import annotations

import ast
import dataclasses
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MappingProxyType
from typing import Any

from jax import lax

from hkv.lowering.values import MismatchError, Num, Row, is_number, matched, one_table, told
from reference.language import Layout

OPERATIONS: dict[Any, tuple[Any, Any]] = {
    ast.Add: (operator.add, lax.add),
    ast.Sub: (operator.sub, lax.sub),
    ast.Mult: (operator.mul, lax.mul),
    ast.FloorDiv: (operator.floordiv, lax.div),
    ast.Mod: (operator.mod, lax.rem),
    ast.BitAnd: (operator.and_, lax.bitwise_and),
    ast.BitOr: (operator.or_, lax.bitwise_or),
    ast.BitXor: (operator.xor, lax.bitwise_xor),
    ast.LShift: (operator.lshift, lax.shift_left),
    ast.RShift: (operator.rshift, lax.shift_right_arithmetic),
    ast.Eq: (operator.eq, lax.eq),
    ast.NotEq: (operator.ne, lax.ne),
    ast.Is: (operator.eq, lax.eq),
    ast.IsNot: (operator.ne, lax.ne),
    ast.Lt: (operator.lt, lax.lt),
    ast.LtE: (operator.le, lax.le),
    ast.Gt: (operator.gt, lax.gt),
    ast.GtE: (operator.ge, lax.ge),
    min: (min, lax.min),
    max: (max, lax.max),
}
"""Operations as Python computes them where both numbers are known, and as a program does."""

Among = Mapping[str, tuple[int, ...]]
"""Values that elements of arrays have, by array, where a program knows them."""

MOST = 32
"""Values that a number may have, of which a note is kept: the codes of operations, say."""

COMPARISONS = ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.Lt, ast.LtE, ast.Gt, ast.GtE
EQUALITIES = COMPARISONS[:4]
NEUTRAL: dict[Any, int] = {ast.Sub: 0, ast.Mult: 1, ast.FloorDiv: 1}
"""Numbers on the right that change nothing."""


@dataclasses.dataclass
class Effects:
    """Effects of instructions.

    Attributes:
      reads, writes: arrays. weight: writes. loops: a loop writes. straight: nothing is read after it was written, and
      no loop writes, so that one segment can have all reads before all writes.
    """

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    weight: int = 0
    loops: bool = False
    straight: bool = True

    def add(self, other: Effects, before: frozenset[str] | None = None) -> None:
        """Adds what comes next; `before`: what was written before it, where that is not all."""
        self.straight &= other.straight and not other.reads & (self.writes if before is None else before)
        self.reads, self.writes = self.reads | other.reads, self.writes | other.writes
        self.weight, self.loops = self.weight + other.weight, self.loops or other.loops


@dataclasses.dataclass(eq=False)
class Op:
    """A number computed of others."""

    out: Num
    how: Any
    args: tuple[Any, ...]


@dataclasses.dataclass(eq=False)
class Read:
    """An element of an array."""

    out: Num
    array: str
    at: Any


@dataclasses.dataclass(eq=False)
class Write:
    """An element of an array becomes `value`, if `on` holds."""

    array: str
    at: Any
    value: Any
    on: Any


@dataclasses.dataclass(eq=False)
class Branch:
    """Blocks that exclude each other, each under a condition.

    Attributes:
      joins: a number that is another one after each block, and, where neither ran, a third (None if nobody reads it).
      seldom: the program jumps over the blocks.
    """

    arms: list[tuple[Any, Block]]
    joins: list[tuple[Num, list[Any], Any]]
    seldom: bool


@dataclasses.dataclass(eq=False)
class Loop:
    """A block again and again, if `go` holds, and as long as `again` after it, the test and the index before it do.

    Attributes:
      carried: of a number that changes: in the loop, at first, after a trip, after the loop. same: of one that does
      not: in the loop, and outside. index: in the loop, first, end, step.
    """

    go: Any
    body: Block
    again: Any
    carried: list[tuple[Num, Any, Any, Num]]
    same: list[tuple[Num, Any]]
    test: tuple[Block, Any] | None
    index: tuple[Num, Any, Any, int] | None


class Block:
    """Instructions one after the other, and their effects."""

    def __init__(self) -> None:
        self.items, self.effects = list[Any](), Effects()

    def put(self, item: Any) -> None:
        """Appends an instruction."""
        self.items.append(item)
        self.effects.add(effects_of(item))


def effects_of(item: Any) -> Effects:
    """Effects of one instruction."""
    found = Effects()
    if isinstance(item, Read):
        found.reads = frozenset((item.array,))
    elif isinstance(item, Write):
        found.writes, found.weight = frozenset((item.array,)), 1
    elif isinstance(item, Branch):
        for _, block in item.arms:
            found.add(block.effects, frozenset())
        if item.seldom:
            found.straight, found.loops = False, True
    elif isinstance(item, Loop):
        for block in (item.body, *(item.test or ())[:1]):
            found.add(block.effects)
        found.straight, found.loops = not found.writes, bool(found.writes)
    return found


class Code:
    """A program while its text is read; what Python can compute leaves no instruction.

    Attributes:
      layout, static, among: of the cache. widths: elements of a record's line, by array. block: where instructions go.
      calls: rules at work, each with the line of its call. sites: of each call that was read, the rules at work, and
      the first and last serial number of what it computes.
    """

    def __init__(
        self,
        layout: Layout,
        static: Mapping[str, int],
        widths: Mapping[str, int],
        among: Among = MappingProxyType({}),
    ) -> None:
        self.layout, self.static, self.widths, self.among = layout, static, widths, among
        self.block, self.calls = Block(), list[FunctionType]()
        self._negated = dict[Num, Any]()
        self.path, self.sites = list[str](), list[tuple[tuple[str, ...], int, int]]()

    @contextmanager
    def inside(self) -> Iterator[Block]:
        """A new block, in which instructions go meanwhile."""
        outer, self.block = self.block, Block()
        try:
            yield self.block
        finally:
            self.block = outer

    @contextmanager
    def at_site(self, rule: FunctionType, line: int) -> Iterator[None]:
        """Notes that a rule is read where it is called."""
        self.calls.append(rule)
        self.path.append(f"{rule.__qualname__}:{line}")
        first = Num().serial
        yield
        self.sites.append((tuple(self.path), first, Num().serial))
        self.path.pop()
        self.calls.pop()

    def op(self, how: Any, *args: Any, boolean: bool = False) -> Num:
        """A number computed of others when the program runs."""
        self.block.put(Op(out := Num(boolean), how, args))
        return out

    def read(self, array: str, at: Any) -> Any:
        """An element of an array."""
        among = self.among.get(array, ())
        if len(among) == 1:
            return among[0]
        self.block.put(Read(out := Num(among=among), array, at))
        return out

    def join(self, how: Any, a: Any, b: Any) -> Any:
        """An operation on two numbers, or `is`, `==` on two records."""
        if isinstance(a, Row) and isinstance(b, Row) and how in EQUALITIES:
            one_table(a, b)
            a, b = a.number, b.number
        if not (is_number(a) and is_number(b)):
            if how in EQUALITIES and not any(isinstance(x, Row | Num | int) for x in (a, b)):
                return OPERATIONS[how][0](a, b)
            raise MismatchError(f"expected two numbers, got {told(a)} and {told(b)}")
        if how in (ast.FloorDiv, ast.Mod) and any(isinstance(x, int) and x < least for x, least in ((a, 0), (b, 1))):
            raise MismatchError("expected // and % of numbers not below 0")
        if isinstance(a, int) and isinstance(b, int):
            return checked(OPERATIONS[how][0](a, b))
        if how in COMPARISONS:
            known = {OPERATIONS[how][0](x, y) for x in among(a) for y in among(b)}
            if len(known) == 1:
                return known.pop()
        if how in (ast.Add, ast.Mult) and any(isinstance(x, int) and x == 0 for x in (a, b)):
            return 0 if how is ast.Mult else b if isinstance(a, int) else a
        if how in NEUTRAL and isinstance(b, int) and b == NEUTRAL[how]:
            return a
        if how is ast.Mod and isinstance(b, int) and b == 1:
            return 0
        return self.op(how, a, b, boolean=how in COMPARISONS)

    def truth(self, v: Any) -> Any:
        """A condition: that a value counts as true."""
        v = v.number if isinstance(v, Row) else v
        if not is_number(v):
            raise MismatchError(f"{told(v)} has no truth of its own")
        return v if is_condition(v) else bool(v) if isinstance(v, int) else self.join(ast.NotEq, v, 0)

    def both(self, a: Any, b: Any) -> Any:
        """A condition: both hold."""
        if isinstance(a, bool) or isinstance(b, bool):
            return (b if a else False) if isinstance(a, bool) else a if b else False
        return a if a is b else self.op("and", a, b, boolean=True)

    def either(self, a: Any, b: Any) -> Any:
        """A condition: one of two holds."""
        if isinstance(a, bool) or isinstance(b, bool):
            return (True if a else b) if isinstance(a, bool) else True if b else a
        return a if a is b else self.op("or", a, b, boolean=True)

    def negation(self, a: Any) -> Any:
        """The opposite of a condition."""
        if isinstance(a, bool):
            return not a
        if a not in self._negated:
            self._negated[found := self.op("not", a, boolean=True)] = a
            return found
        return self._negated[a]

    def select(self, p: Any, a: Any, b: Any) -> Any:
        """`a` where a condition holds, else `b`: values of one kind."""
        return matched(a, b, lambda x, y: self._select(p, x, y))

    def _select(self, p: Any, a: Any, b: Any) -> Any:
        if isinstance(p, bool) or a is b or (isinstance(a, int) and isinstance(b, int) and a == b):
            return a if p is not False else b
        if isinstance(b, bool) and is_condition(a):
            return self.either(self.negation(p), a) if b else self.both(p, a)
        if isinstance(a, bool) and is_condition(b):
            return self.either(p, b) if a else self.both(self.negation(p), b)
        found = self.op("select", p, a, b, boolean=is_condition(a) and is_condition(b))
        found.among = among(a, b)
        return found


def among(*numbers: Any) -> tuple[int, ...]:
    """The values that each of these numbers may have, if they are known and not many; else none."""
    each = [(int(x),) if isinstance(x, int) else x.among for x in numbers]
    found = {value for values in each for value in values}
    return tuple(sorted(found)) if all(each) and len(found) <= MOST else ()


def is_condition(v: Any) -> bool:
    """True of a number that is a condition."""
    return isinstance(v, bool) or (isinstance(v, Num) and v.boolean)


def checked(v: int) -> int:
    """A known number, which has to be an int32."""
    if not -(2**31) < v < 2**31:
        raise MismatchError(f"{v} is no int32")
    return v
