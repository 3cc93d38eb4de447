"""Mistakes that a lowering makes if nobody thinks of them: each is a text of a few lines, run plainly and lowered."""

# ruff: noqa: E501  (texts, a line each)

from __future__ import annotations

import ast
import pathlib
import sys
import types

import jax.numpy as jnp
import pytest

from hkv.lowering import TextError, lowered
from hkv.lowering.code import Code, Loop
from hkv.lowering.emission import Emission
from hkv.lowering.values import Num
from reference.language import Layout
from tests.lowering import harness, small

RIGHT = {
    "a loop of one trip": "for k in range(c.config.few - 1):\n    c.numbers[k] = c.numbers[k + 1] + n",
    "a loop of no trip": "for k in range(3, 3):\n    c.numbers[k] = 1\nfor k in range(0, 1, -1):\n    c.x = 1",
    "a condition that stays": (
        "on = n > 3\nfor k in range(20):\n    if on:\n        c.numbers[c.numbers[k]] = c.numbers[k + 1]"
    ),
    "break": "for k in range(20):\n    if c.numbers[k] == 9:\n        break\n    c.numbers[k + 1] += 1\nc.x += c.numbers[4]",
    "continue": "for k in range(20):\n    if c.numbers[k] > 5:\n        continue\n    c.numbers[k + 1] = k\n    c.x += 1",
    "break of an inner loop": (
        "for k in range(9):\n    for m in range(9):\n        if c.numbers[m] > k:\n            break\n"
        "        c.numbers[m + k] = m\n    c.x += c.numbers[k]"
    ),
    "continue and break of a while": (
        "while True:\n    c.x += 1\n    if c.numbers[c.x] % 2 == 1:\n        continue\n    c.y += c.x\n"
        "    c.numbers[c.y % 99] = c.x\n    if c.x > 30:\n        break"
    ),
    "break of a loop over a tuple": (
        "for k, item in ((1, c.top), (n, c.items[4]), (3, c.items[5])):\n    c.numbers[k] = c.numbers[k + 1] + 1\n"
        "    if c.numbers[c.numbers[k] % 9] > 6:\n        break\n    item.rank += c.numbers[k]"
    ),
    "return inside loops": "c.x = found(c, n)\nc.y = found(c, 99)",
    "a count down": "for k in range(9, -1, -1):\n    c.numbers[k + 1] = c.numbers[k]\nfor k in range(n, 0, -1):\n    c.x += k",
    "a read behind a write": "c.numbers[n] = 7\nc.x = c.numbers[5]\nc.numbers[5] = c.x + 1\nc.y = c.numbers[n]",
    "a write behind a read in an expression": "c.x = c.numbers[3] + bumped(c, 3) * 100 + c.numbers[3] + c.y",
    "a swap": "a, b = c.numbers[n], c.numbers[7]\nc.numbers[n], c.numbers[7] = b, a\nc.x, c.y = c.y, c.x",
    "the right side of and": "for k in range(12):\n    if k % 3 == 1 and bumped(c, k) > 4:\n        c.x += 1",
    "the right side of or": "c.x = n > 3 or bumped(c, 3)\nc.y = n < 3 or bumped(c, 4) > 100",
    "one side of a choice": "c.x = bumped(c, 3) if n > 7 else bumped(c, 4) if n > 3 else bumped(c, 5)",
    "operands of and, or": "c.x = n and c.numbers[3]\nc.y = (n - n) or 9\nc.top = c.top.other and c.top or c.items[3]",
    "None of and, or": "a = c.items[0] or c.items[7]\nc.x = (a is not None and a.rank) + 0\nc.top = c.items[0] and a",
    "a chain of comparisons": "c.x = 3 < n <= 5 < 9\nc.y = n in (3, 5) and n not in (1, c.x)",
    "a place that is changed once": "c.numbers[bumped(c, 3) % 50] += 1\nc.items[bumped(c, 4)].line[1] ^= 3",
    "keywords and defaults": "c.x = given(c, 3)\nc.y = given(c, m=4, item=c.top)\nc.top = c.items[given(c, k=2, m=1)]",
    "a static enumeration": "c.x = Kind.TWO + (n == Kind.ONE)",
    "a part as an argument": "fill(c.left, n)\nfill(c.right, 3)\nc.x = c.left.count",
    "parts of a tuple": "for part in (c.left, c.right):\n    part.count += n\n    part.numbers[n] = part.numbers[2] + 1",
    "a line as a local": "line = c.top.line\nline[1] = line[0] + n\nfor k in range(n):\n    line[0] += line[1] + k",
    "a local of one branch": "if n > 3:\n    a = c.numbers[1]\n    c.x = a\nelse:\n    a = c.top\n    c.top = a.other",
    "None before a record": "best: Item = None\nfor k in range(1, 20):\n    if best is None or c.items[k].rank > best.rank:\n        best = c.items[k]\nc.top = best",
    "None of a tuple": "best = (0, None)\nfor k in range(1, 20):\n    if c.items[k].rank == 5:\n        best = (k, c.items[k])\nc.x, c.top = best",
    "a tuple is returned": "c.x, c.top = pair(c, n)\nfor k in range(4):\n    a, b = pair(c, k)\n    c.numbers[a] = b.rank",
    "a truth is kept": "a = n > 3\nfor k in range(n):\n    a = a and k < 3\n    c.numbers[k] = a\nc.x = int(a) + bool(n)",
    "a seldom branch": "for k in range(30):\n    if seldom(c.numbers[k] == 10):\n        c.numbers[k + 1] = c.numbers[k + 2]\n    c.x += c.numbers[k + 1]",
    "a choice": 'c.x = choice("some", n + 1)',
    "a test that writes": "while bumped(c, 3) < 40:\n    c.x += 1\n    c.numbers[3] += c.x",
    "a test that writes a scalar": "while counted(c) < 40:\n    c.x += 3",
    "a test that reads what is written": "while c.numbers[c.x] < 10:\n    c.numbers[c.x] += 2\n    c.x = (c.x + 1) % 9",
    "a scalar and a local of one name": "x = 3\nfor k in range(n):\n    x += 1\n    c.x = c.x + x\nc.y = x",
    "both branches return": "c.x = sign(c, n)\nc.y = sign(c, 0)",
    "nothing is returned": "early(c, n)\nearly(c, 2)",
    "a write that must not happen": "for k in range(120):\n    if c.numbers[k] > 99:\n        c.numbers[0] = 7\n        c.items[1].rank = 99",
    "the rest behind a return in a loop": "c.x = found(c, 5)\nfor k in range(3):\n    c.y += found(c, k)",
    "many writes": "for m in range(5):\n    if m > 2:\n"
    + "".join(f"        c.numbers[{k}] = m + {k}\n" for k in range(15)),
}
RULES = """
def bumped(c: Cache, k: int) -> int:
    c.numbers[k] += 5
    c.y += 1
    return c.numbers[k]
def counted(c: Cache) -> int:
    c.y += 1
    return c.x + c.y
def found(c: Cache, m: int) -> int:
    for k in range(10):
        for j in range(10):
            if c.numbers[k] + j == m:
                return k
            c.numbers[j + 20] += 1
        c.y += 1
    return 77
def given(c: Cache, m: int, k: int = 3, item: Item = None) -> int:
    if item is None:
        return m + k
    return item.rank + m * k
def fill(side: Side, count: int) -> None:
    for k in range(count):
        side.numbers[k] = side.numbers[k + 1] * 2
        side.count += k
def pair(c: Cache, m: int) -> tuple[int, Item]:
    if m > 2:
        return m, c.items[m]
    return 3, c.top
def sign(c: Cache, m: int) -> int:
    if m > 0:
        return 1
    elif m == 0:
        return 0
    else:
        return 2
def early(c: Cache, m: int) -> None:
    if m > 3:
        return
    c.x = 55
"""


def body(name: str) -> str:
    return RULES + "def rule(c: Cache, n: int):\n" + "".join(f"    {each}\n" for each in RIGHT[name].split("\n"))


@pytest.mark.parametrize("name", RIGHT)
def test_a_trap(name):
    small.run(body(name), 5)


@pytest.mark.parametrize("name", ["a loop of one trip", "a condition that stays", "break", "many writes"])
def test_a_trap_where_more_is_known(name):
    small.run(body(name), 5, static={"config.few": 2})


def test_a_refused_write_leaves_live_places_alone():
    """In lanes, the spare element of one cache stands before the first place of the next."""
    module = small.text(
        "def rule(c: Cache, n: int):\n    if n > 3:\n        c.numbers[n] = 9\n        c.top.rank = 8\n"
    )
    layout = Layout(module.Cache)
    start = layout.arrays_of(layout.make(small.SIZES))
    lanes = {name: jnp.stack([jnp.asarray(each)] * 3) for name, each in start.items()}
    program = harness.compiled(layout, module.rule, lanes, jnp.arange(3), lanes=True)
    got = program({name: jnp.array(each) for name, each in lanes.items()}, jnp.arange(3))
    assert not harness.differing(layout, got, lanes)


def test_what_runs_is_what_was_imported(tmp_path):
    """An edit of the file after import changes neither form."""
    file = tmp_path / "edited_text.py"
    source = "from __future__ import annotations\nfrom reference.language import *\n" + (
        "TEXT = Text(__name__)\nclass Cache(Part):\n    x: int\n\ndef rule(c: Cache):\n    c.x = 3\n"
    )
    file.write_text(source)
    module = types.ModuleType("edited_text")
    module.__file__ = str(file)
    sys.modules["edited_text"] = module
    exec(compile(source, str(file), "exec"), module.__dict__)
    pathlib.Path(file).write_text(source.replace("c.x = 3", "c.x = 4"))
    layout = Layout(module.Cache)
    got = lowered(layout, module.rule)({"x": jnp.int32(0)})
    assert int(got["x"]) == 3


def test_a_rule_that_was_replaced_is_refused():
    """Whoever puts another function in a rule's place does not get the rule."""
    module = small.text("def helper(c: Cache) -> int:\n    return 1\ndef rule(c: Cache):\n    c.x = helper(c)\n")
    other = types.FunctionType((lambda c: 2).__code__, module.__dict__, "helper")
    module.helper = other
    layout = Layout(module.Cache)
    with pytest.raises(TextError, match="stands in no text"):
        lowered(layout, module.rule)(harness.device(layout.arrays_of(layout.make(small.SIZES)), {}))


def test_a_number_of_a_loop_does_not_leave_it():
    """JAX makes a tracer that leaks one more input; here there is no way to one."""
    code = Code(Layout(small.text("").Cache), {}, {})
    with code.inside() as body:
        leaked = code.op(ast.Add, inner := Num(), 1)
    code.block.put(Loop(True, body, True, [(inner, 0, leaked, Num())], [], None, (Num(), 0, 3, 1)))
    kept = [code.op(ast.Add, leaked, 1)]
    with pytest.raises(KeyError):
        Emission(code.layout, {}, True).emit(code.block, {}, kept)
