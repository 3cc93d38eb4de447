"""Random texts: rules that are right as they are drawn, over records of two kinds and every collection.

A text is drawn as lines of source. Whoever draws it says how: `below(n)` is a number of `range(n)`, of Hypothesis or of
`random`. So that it can run plainly, every loop ends, every number that is kept is from 0 to 1023, and None is asked for
nothing.
"""

# ruff: noqa: E501  (texts, a line each)

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

RECORDS, PLACES, WIDTH, FREE = 101, 120, 3, 128
"""Records of a table, places of an array, elements of a line, ids of a free list."""

STATE = '''"""A random text."""
from __future__ import annotations
from reference.language import Array, Column, FreeList, Heap, Line, Part, Record, Ring, Settings, Table
from reference.language import Text, choice, clause, seldom

SEVEN = 7


class Item(Record):
    rank: int
    mark: int
    other: Item
    thing: Thing
    line: Line[int]
    near: Line[Item]


class Thing(Record):
    rank: int
    item: Item


class Op(Record):
    code: int
    a: int
    b: int
    first: int
    second: int


class Least(Heap[Item]):
    def before(self, one: Item, other: Item) -> bool:
        return one.rank < other.rank or (one.rank == other.rank and one.mark < other.mark)


class Config(Settings):
    few: int
    many: int


class Cache(Part):
    items: Table[Item]
    things: Table[Thing]
    ops: Table[Op]
    numbers: Array[int]
    places: Array[Item]
    count: Column[Item, int]
    friend: Column[Item, Item]
    free: FreeList
    heap: Least
    ring: Ring[Item]
    listed: Column[Item, int]
    config: Config
    x: int
    y: int
    top: Item
    done: int
'''

SCALARS, FIELDS = ("c.x", "c.y"), ("rank", "mark")
OUTSIDE = "a rule that changes the cache is called inside an expression"
"""The one reason for which a text that is drawn here may be refused."""


@dataclasses.dataclass
class Rule:
    """A rule that was drawn: its parameters' kinds, what it returns, whether it writes."""

    name: str
    takes: list[tuple[str, str, str]]
    gives: str
    writes: bool = False


class Drawing:
    """A text in the making.

    Kinds: `n` a number from 0 to 1023, `b` a condition, `r` an item, `m` an item or None, `t` a number and such an item.
    """

    def __init__(self, below: Callable[[int], int], size: int) -> None:
        self.below, self.size = below, size
        self.lines = list[str]()
        self.indent, self.depth, self.loops, self.serial, self.left = 1, 0, 0, 0, 0
        self.names: dict[str, str] = {}
        self.fixed = set[str]()
        self.rules = list[Rule]()
        self.rule = Rule("", [], "")
        self.breakable: list[bool] = []

    def pick(self, among: list[T] | tuple[T, ...]) -> T:
        return among[self.below(len(among))]

    def often(self, percent: int) -> bool:
        return self.below(100) >= 100 - percent

    def put(self, line: str) -> None:
        self.lines.append("    " * self.indent + line)

    def text(self, rules: int) -> str:
        for number in range(rules):
            self.define(number)
        calls = []
        for number, rule in enumerate(self.rules):
            given = [{"n": "op.b", "m": "c.items[op.b % 102]"}[kind] for _, kind, _ in rule.takes]
            call = f"{rule.name}({', '.join(['c', 'c.items[1 + op.a % 101]', *given])})"
            calls.append(f"    {'el' if number else ''}if op.code % {rules} == {number}:\n{self.kept(rule, call)}")
        body = "\n".join(["", "", "def perform(c: Cache, op: Op):", *calls])
        every = "def perform_all(c: Cache, count: int):\n    for n in range(1, count + 1):\n"
        every += "        perform(c, c.ops[n])\n        c.done += 1\n"
        return f"{STATE}\n\nTEXT = Text(__name__, SOURCE)\n\n\n" + "\n".join(self.lines) + f"{body}\n\n\n{every}"

    def kept(self, rule: Rule, call: str) -> str:
        if rule.gives == "none":
            return f"        {call}"
        if rule.gives == "t":
            return f"        op.first, found = {call}\n        op.second = found is not None and found.rank"
        if rule.gives == "m":
            return f"        found = {call}\n        if found is not None:\n            op.first = found.mark + 1"
        return f"        op.first = {call}"

    def define(self, number: int) -> None:
        takes = [(f"p{k}", self.pick("nm"), self.pick(("", "", "=None"))) for k in range(self.below(3))]
        takes = [(n, k, d if k == "m" else d and "=5") for n, k, d in takes]
        takes.sort(key=lambda each: each[2] != "")
        self.rule = Rule(f"rule{number}", takes, self.pick(("n", "m", "t", "b", "none", "n")))
        given = "".join(f", {n}: {'int' if k == 'n' else 'Item'}{d}" for n, k, d in takes)
        annotated = {"n": "int", "m": "Item", "t": "tuple[int, Item]", "b": "bool", "none": "None"}[self.rule.gives]
        self.lines += ["", "", f"def {self.rule.name}(c: Cache, item: Item{given}) -> {annotated}:"]
        self.names, self.fixed = {"item": "r", **{n: k for n, k, _ in takes}}, {"item"}
        self.left, self.breakable = self.size, []
        if self.often(20):
            self.put(f'"""Rule {number}."""')
        self.block(2 + self.below(5))
        if self.rule.gives != "none":
            self.put(f"return {self.returned()}")
        self.rules.append(self.rule)

    def returned(self) -> str:
        if self.rule.gives == "t":
            return f"{self.number()}, {self.maybe()}"
        return {"n": self.number, "m": self.maybe, "b": self.condition}[self.rule.gives]()

    # Statements.

    def block(self, count: int) -> None:
        names, fixed = dict(self.names), set(self.fixed)
        for _ in range(count):
            self.statement()
        self.names, self.fixed = names, fixed

    @contextmanager
    def deeper(self) -> Iterator[None]:
        names, fixed = dict(self.names), set(self.fixed)
        self.indent, self.depth = self.indent + 1, self.depth + 1
        yield
        self.indent, self.depth = self.indent - 1, self.depth - 1
        self.names, self.fixed = names, fixed

    def statement(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.put(self.pick(("pass", 'clause("c")', "assert c.x >= 0")) if self.left == -1 else "c.y ^= 1")
            self.writing()
            return
        choices: list[Callable[[], None]] = [self.local, self.local, self.write, self.write, self.write, self.augmented]
        choices += [self.called, self.collection]
        if self.depth < 4:
            choices += [self.condition_block, self.condition_block, self.guarded]
        if self.loops < 2 and self.depth < 4:
            choices += [self.while_loop, self.range_loop, self.tuple_loop]
        if self.breakable or self.depth:
            choices += [self.leave]
        self.pick(choices)()

    def writing(self) -> None:
        self.rule.writes = True

    def local(self) -> None:
        kind = self.pick("nnrmtb")
        taken = [n for n, k in self.names.items() if k == kind and n not in self.fixed]
        name = self.pick(taken) if taken and self.often(60) else f"{kind}{self.below(3)}"
        if self.names.get(name, kind) != kind or name in self.fixed:
            return self.write()
        if kind == "t" and self.often(50):
            number, record = f"n{self.below(3)}", f"m{self.below(3)}"
            if not {number, record} & self.fixed:
                self.put(f"{number}, {record} = {self.value('t')}")
                self.names |= {number: "n", record: "m"}
                return None
        value = self.value(kind)
        self.put(f"{name}: Item = {value}" if kind == "m" and value == "None" else f"{name} = {value}")
        self.names[name] = kind
        return None

    def write(self) -> None:
        self.writing()
        way = self.below(9)
        if way == 0:
            self.put(f"{self.pick(SCALARS)} = {self.number()}")
        elif way == 1:
            self.put(f"{self.record()}.{self.pick(FIELDS)} = {self.number()}")
        elif way == 2:
            self.put(f"{self.record()}.line[{self.number()} % {WIDTH}] = {self.number()}")
        elif way == 3:
            self.put(f"{self.record()}.near[{self.number()} % {WIDTH}] = {self.maybe()}")
        elif way == 4:
            self.put(f"c.numbers[{self.number()} % {PLACES}] = {self.number()}")
        elif way == 5:
            self.put(f"c.places[{self.number()} % {PLACES}] = {self.maybe()}")
        elif way == 6:
            self.put(f"c.count[{self.record()}] = {self.number()}")
        elif way == 7:
            self.put(f"{self.record()}.other, c.top = {self.maybe()}, {self.maybe()}")
        else:
            self.put(f"c.friend[{self.record()}] = {self.maybe()}")

    def augmented(self) -> None:
        self.writing()
        numbers = [n for n, k in self.names.items() if k == "n" and n not in self.fixed]
        targets = ["c.x", f"{self.record()}.rank", f"c.numbers[{self.number()} % {PLACES}]", *numbers]
        how, value = self.pick((("^=", self.number()), ("|=", self.number()), ("//=", "2"), ("%=", "50"), (">>=", "1")))
        self.put(f"{self.pick(targets)} {how} {value}")

    def called(self) -> None:
        if not self.rules:
            return self.write()
        rule = self.pick(self.rules)
        call = self.call(rule)
        if rule.gives == "t" and self.often(70):
            number, record = f"n{self.below(3)}", f"m{self.below(3)}"
            if not {number, record} & self.fixed:
                self.put(f"{number}, {record} = {call}")
                self.names |= {number: "n", record: "m"}
                return None
        if rule.gives in "nm":
            name = f"{rule.gives}{self.below(3)}"
            if name not in self.fixed:
                self.put(f"{name} = {call}")
                self.names[name] = rule.gives
                return None
        if rule.gives == "b" and self.depth < 4:
            self.put(f"if {self.pick(('', 'not '))}{call}:")
            with self.deeper():
                self.block(1 + self.below(2))
            return None
        self.put(call)
        return None

    def call(self, rule: Rule) -> str:
        self.rule.writes |= rule.writes
        given, named = [self.record()], False
        for name, kind, default in rule.takes:
            if default and self.often(40):
                named = True
                continue
            named = named or self.often(30)
            given.append(f"{name}={self.value(kind)}" if named else self.value(kind))
        return f"{rule.name}(c, {', '.join(given)})"

    def collection(self) -> None:
        self.writing()
        way, item = self.below(5), "item"
        known = [n for n, k in self.names.items() if k == "r"]
        item = self.pick(known)
        if way == 0:
            self.put("if c.free.count > 0:")
            self.put(f"    {item}.mark = c.free.take()")
        elif way == 1:
            self.put(f"if c.free.count < {FREE - 2}:")
            self.put(f"    c.free.put(c.free.reserve(1, {self.number()} % 2), {self.number()})")
        elif way == 2:
            self.put(f"if c.heap.place[{item}] == 0:")
            self.put(f"    c.heap.add({item})")
            self.put("elif c.heap.count > 1:")
            self.put(f"    c.heap.remove({self.pick((item, 'c.heap.first()'))})")
        elif way == 3:
            self.put(f"if c.listed[{item}]:")
            self.put(f"    c.ring.remove({item})")
            self.put("else:")
            self.put(f"    c.ring.put({item})")
            self.put(f"c.listed[{item}] ^= 1")
        else:
            self.put(f"if c.heap.place[{item}] > 0:")
            self.put(f"    c.heap.settle({item}, c.heap.place[{item}])")

    def condition_block(self) -> None:
        condition = self.condition()
        if self.often(20):
            condition = f"seldom({condition})"
        elif self.rules and self.often(25):
            rule = self.pick(self.rules)
            if rule.gives in "nm":
                condition = f"{self.call(rule)} {'> 5' if rule.gives == 'n' else 'is None'}"
        self.put(f"if {condition}:")
        with self.deeper():
            self.block(1 + self.below(3))
        if self.often(40):
            self.put(f"elif {self.condition()}:" if self.often(30) else "else:")
            with self.deeper():
                self.block(1 + self.below(3))

    def guarded(self) -> None:
        """A block in which an item that may be None is one."""
        name = self.pick([n for n, k in self.names.items() if k == "m"] or ["item"])
        self.put(f"if {name} is not None:" if self.often(80) else f"if {name}:")
        with self.deeper():
            self.names[name] = "r"
            self.fixed.add(name)
            self.block(1 + self.below(3))

    def leave(self) -> None:
        ways = ["return"] * bool(self.depth) + ["break", "continue"] * bool(self.breakable)
        way = self.pick(ways)
        if way == "return" and self.rule.gives != "none":
            way = f"return {self.returned()}"
        if self.often(75):
            self.put(f"if {self.condition()}:")
            self.put(f"    {way}")
        else:
            self.put(way)

    def looped(self, *first: str) -> None:
        self.loops += 1
        with self.deeper():
            for line in first:
                self.put(line)
            self.breakable.append(True)
            self.block(1 + self.below(4))
            self.breakable.pop()
        self.loops -= 1

    def while_loop(self) -> None:
        self.serial += 1
        counter = f"k{self.serial}"
        self.names[counter] = "n"
        self.fixed.add(counter)
        more = "" if self.often(40) else f" and {self.condition()}"
        if self.rules and self.often(20):
            rules = [rule for rule in self.rules if rule.gives == "b"]
            more = f" and {self.call(self.pick(rules))}" if rules else more
        self.put(f"{counter} = 0")
        self.put(f"while {counter} < {self.number()} % 5{more}:")
        self.looped(f"{counter} += 1")

    def range_loop(self) -> None:
        self.serial += 1
        index = f"k{self.serial}"
        start, end = self.number(), f"{self.number()} % 4"
        over = self.pick(
            (f"range({self.below(4)})", f"range({end})", f"range({start}, {start} + {end})", f"range({end}, -1, -1)")
        )
        self.put(f"for {index} in {over}:")
        if over != f"range({start}, {start} + {end})":  # which may go beyond 1023
            self.names[index] = "n"
        self.fixed.add(index)
        self.looped()
        self.names.pop(index, None)

    def tuple_loop(self) -> None:
        self.serial += 1
        kind, count = self.pick("nrmt"), 1 + self.below(3)
        target = {"n": f"n{self.serial + 3}", "r": f"r{self.serial + 3}", "m": f"m{self.serial + 3}"}.get(kind, "")
        if kind == "t":
            target = f"n{self.serial + 3}, m{self.serial + 3}"
        over = ", ".join(f"({self.value(kind)})" for _ in range(count))
        self.put(f"for {target} in ({over},):")
        added = {name: name[0] for name in target.split(", ")}
        self.names |= added
        self.fixed |= set(added)
        self.looped()
        for name in added:
            self.names.pop(name)

    # Expressions.

    def value(self, kind: str) -> str:
        if kind == "t":
            tuples = [n for n, k in self.names.items() if k == "t"]
            return self.pick(tuples) if tuples and self.often(50) else f"({self.number()}, {self.maybe()})"
        return {"n": self.number, "r": self.record, "m": self.maybe, "b": self.condition}[kind]()

    def number(self, depth: int = 0) -> str:
        known = [n for n, k in self.names.items() if k == "n"]
        way = self.below(12 if depth < 2 else 6)
        if way == 0 or (way < 3 and not known):
            return str(self.pick((0, 1, 2, 3, 7, 100, 1023)))
        if way < 3:
            return self.pick(known)
        if way == 3:
            return self.pick((*SCALARS, "c.config.few", "c.config.many", "SEVEN"))
        if way < 6:
            record = self.record(depth + 1)
            places = [f"{record}.rank", f"{record}.mark", f"c.count[{record}]", f"{record}.line[1]"]
            return self.pick([*places, f"c.numbers[{self.number(2)} % {PLACES}]"])
        one, other = self.number(depth + 1), self.number(depth + 1)
        if way == 6:
            return f"({one} + {other}) % 1024"
        if way == 7:
            return self.pick((f"min({one}, {other})", f"max({one}, {other}, 3)", f"max({one} - {other}, 0)"))
        if way == 8:
            return f"({one} {self.pick(('|', '&', '^'))} {other})"
        if way == 9:
            return f"({one} if {self.condition(depth + 1)} else {other})"
        if way == 10:
            return self.pick((f"({one} * 3 // 4)", f"({one} >> 1)", f"int({one})", f'choice("some", {one})'))
        maybe = [n for n, k in self.names.items() if k == "m"]
        if maybe and self.often(50):
            name = self.pick(maybe)
            return f"({name}.rank if {name} is not None else {one})"
        return self.pick((f"({one} or {other})", f"({one} and {other})"))

    def condition(self, depth: int = 0) -> str:
        way = self.below(9 if depth < 2 else 4)
        if way < 3:
            how = self.pick(("<", "<=", ">", ">=", "==", "!="))
            return f"{self.number(depth + 1)} {how} {self.number(depth + 1)}"
        if way == 3:
            return f"{self.maybe(depth + 1)} {self.pick(('is', 'is not'))} {self.pick(('None', self.maybe(depth + 1)))}"
        if way == 4:
            return f"not ({self.condition(depth + 1)})"
        if way == 5:
            return f"{self.number(depth + 1)} in (1, {self.number(depth + 1)}, 7)"
        if way == 6:
            conditions = [n for n, k in self.names.items() if k == "b"]
            return self.pick(conditions) if conditions else f"{self.number(2)} < {self.number(2)} < 900"
        maybe = [n for n, k in self.names.items() if k == "m"]
        if way == 7 and maybe:
            name = self.pick(maybe)
            return f"({name} is not None and {name}.mark > {self.number(2)})"
        return f"({self.condition(depth + 1)} {self.pick(('and', 'or'))} {self.condition(depth + 1)})"

    def record(self, depth: int = 0) -> str:
        known = [n for n, k in self.names.items() if k == "r"]
        way = self.below(5 if depth < 2 else 2)
        if way < 2:
            return self.pick(known)
        if way == 2:
            return f"c.items[1 + {self.number(depth + 1)} % {RECORDS}]"
        if way == 3:
            return f"({self.record(depth + 1)} if {self.condition(2)} else {self.record(depth + 1)})"
        return f"({self.maybe(depth + 1)} or {self.pick(known)})"

    def maybe(self, depth: int = 0) -> str:
        known = [n for n, k in self.names.items() if k in "rm"]
        way = self.below(9 if depth < 2 else 3)
        if way < 2:
            return self.pick(known)
        if way == 2:
            return "c.top"
        if way == 3:
            return f"{self.record(depth + 1)}.other"
        if way == 4:
            return f"c.places[{self.number(2)} % {PLACES}]"
        if way == 5:
            return f"{self.record(depth + 1)}.near[{self.number(2)} % {WIDTH}]"
        if way == 6:
            return f"c.friend[{self.record(depth + 1)}]"
        if way == 7:
            return f"(None if {self.condition(2)} else {self.maybe(depth + 1)})"
        rules = [rule for rule in self.rules if rule.gives == "m" and not rule.writes]
        return self.call(self.pick(rules)) if rules else f"c.items[{self.number(2)} % {RECORDS + 1}]"


def draw(below: Callable[[int], int], *, rules: int = 3, size: int = 14) -> str:
    """The source of a random text: the last of its rules is `perform_all(c, count)`."""
    return Drawing(below, size).text(rules)
