"""Texts that cannot be lowered are refused, with its file and line; nothing is silently wrong."""

from __future__ import annotations

import re

import pytest

from hkv.lowering import TextError, lowered
from reference.language import Layout
from tests.lowering import harness, small

REFUSED = {
    # After the rule's head: the lines of its body, the line that is named, and what is said.
    "a number where a record is wanted": ("c.top = 3", 1, "expected a Item or None, got a?.*3"),
    "a record where a number is wanted": ("c.x = c.top", 1, "expected a number, got a record of items"),
    "a record of another table": ("c.top = c.things[1]", 1, "expected a Item or None, got a record of things"),
    "a record and a number": ("c.x = c.top == 3", 1, "expected two numbers"),
    "records in order": ("c.x = c.top < c.top", 1, "expected two numbers"),
    "records of two tables": ("c.x = c.top is c.things[n]", 1, "a record of items and one of things"),
    "an unknown field": ("c.x = c.top.rang", 1, "a record of items has no field rang"),
    "a field of None": (
        "a = None\nc.x = a.rank",
        2,
        "None has no field rank: an annotation of the local says of which table it is",
    ),
    "an unknown part": ("c.x = c.middle.count", 1, "Cache has no middle"),
    "an attribute of a number": ("c.x = n.bits", 1, "a number has no bits"),
    "a setting is written": ("c.config.few = 1", 1, "config.few is a setting"),
    "a part is assigned": ("c.left = c.right", 1, "left is no place of a value"),
    "a table is indexed by a record": ("c.top = c.items[c.top]", 1, "items: expected a number as a place"),
    "a column is indexed by a number": ("c.x = c.place[n]", 1, "place: expected a record of items as a place"),
    "a place below 0": ("c.x = c.numbers[-1]", 1, "expected a place that is not below 0"),
    "a place of a number": ("c.x = n[0]", 1, "a number has no places"),
    "division of numbers below 0": ("c.x = -3 // 2", 1, "not below 0"),
    "a literal that is no int32": ("c.x = 2147483648", 1, "2147483648 is no int32"),
    "a sum that is no int32": ("c.x = 2147483647 + 1", 1, "2147483648 is no int32"),
    "a power": ("c.x = n ** 2", 1, "an expression that cannot be lowered"),
    "true division": ("c.x = n / 2", 1, "an expression that cannot be lowered"),
    "a list": ("c.x = [n][0]", 1, "an expression that cannot be lowered"),
    "a string": ("a = 'b'", 1, "an expression that cannot be lowered"),
    "a lambda": ("c.x = (lambda: 3)()", 1, "an expression that cannot be lowered"),
    "a float": ("c.x = 1.5", 1, "an expression that cannot be lowered"),
    "with": ("with c:\n    pass", 1, "a statement that cannot be lowered"),
    "try": ("try:\n    pass\nexcept ValueError:\n    pass", 1, "a statement that cannot be lowered"),
    "a loop with else": ("while n:\n    break\nelse:\n    c.x = 1", 1, "a statement that cannot be lowered"),
    "two targets": ("a = b = n", 1, "a statement that cannot be lowered"),
    "a starred target": ("a, *b = n, n", 1, "expected 2 values|a target that cannot be lowered"),
    "another number of values": ("a, b = n, n, n", 1, "expected 2 values, got"),
    "a loop over a table": ("for item in c.items:\n    c.x = 1", 1, "a loop over neither a range nor a tuple"),
    "a range by two": ("for k in range(0, n, 2):\n    c.x = k", 1, "a range that counts up or down by 1"),
    "assignment to the loop's variable": ("for k in range(n):\n    k = 3", 1, "k is the loop's own variable"),
    "the loop's variable after it": ("for k in range(n):\n    c.x = k\nc.x = k", 3, "a loop's own variable"),
    "a local of a loop after it": ("for k in range(n):\n    a = k\nc.x = a", 3, "not assigned before"),
    "a local that nobody assigned": ("if n > 3:\n    c.x = a\na = 1", 2, "not assigned before"),
    "a local of two kinds": ("a = n\nif n > 3:\n    a = c.top\nc.x = a", 4, "not alike"),
    "two kinds in two branches": ("if n > 3:\n    a = c.top\nelse:\n    a = 1\nc.x = a", 5, "not alike"),
    "another kind after a trip": ("a = c.left\nwhile n > c.x:\n    c.x += 1\n    a = c.right", 2, "not alike"),
    "a part that changes": ("a = c.left\nif n > 3:\n    a = c.right\nc.x = a.count", 4, "not alike"),
    "either of two parts": ("c.x = (c.left if n > 3 else c.right).count", 1, "not alike"),
    "the truth of a part": ("if c.left:\n    c.x = 1", 1, "left has no truth"),
    "a call of no rule": ("c.x = abs(n)", 1, "a name that the text does not have"),
    "a call of a function of no text": ("c.x = Text(n)", 1, "a call of what is no rule"),
    "too few arguments": ("c.x = helper(c)", 1, "missing a required argument"),
    "an unknown keyword": ("c.x = helper(c, m=1, k=2)", 1, "unexpected keyword"),
    "starred arguments": ("c.x = helper(c, *(n,))", 1, "arguments that cannot be lowered"),
    "recursion": ("c.x = again(c, n)", -1, "a rule that calls itself"),
    "a value on some paths": ("c.x = partly(c, n)", -2, "partly returns 1 on some paths only"),
    "a value of two kinds": ("c.x = mixed(c, n)", -3, "not alike"),
    "in a part": ("c.x = n in c.numbers", 1, "expected a tuple"),
}
HELPERS = """
def helper(c: Cache, m: int) -> int:
    return m
def again(c: Cache, m: int) -> int:
    return 0 if m == 0 else again(c, m - 1)
def partly(c: Cache, m: int) -> int:
    if m > 3:
        return 1
def mixed(c: Cache, m: int):
    if m > 3:
        return 1
    return c.top
"""
LINE_OF = {-1: "return 0 if m == 0 else again(c, m - 1)", -2: "if m > 3:", -3: "    return c.top"}


@pytest.mark.parametrize("name", REFUSED)
def test_a_text_that_cannot_be_lowered_is_refused(name):
    body, line, message = REFUSED[name]
    head = HELPERS + "def rule(c: Cache, n: int):\n"
    module = small.text(head + "".join(f"    {each}\n" for each in body.split("\n")))
    layout = Layout(module.Cache)
    start = harness.device(layout.arrays_of(layout.make(small.SIZES)), {})
    with pytest.raises(TextError, match=message) as error:
        lowered(layout, module.rule)(start, 5)
    if line > 0:
        expected = small.LINES + head.count("\n") + line
        assert str(error.value).startswith(f"{module.__file__}:{expected}: "), str(error.value)
    else:
        lines = module.SOURCE.split("\n")
        at = int(re.match(r".*?\.py:(\d+): ", str(error.value)).group(1))
        assert LINE_OF[line].strip() in lines[at - 1], str(error.value)


def test_a_function_of_another_module_is_no_rule():
    module = small.text("def rule(c: Cache, n: int):\n    c.x = helper(n)\n")
    module.helper = small.run
    layout = Layout(module.Cache)
    with pytest.raises(TextError, match=r"tests\.lowering\.small\.run stands in no text"):
        lowered(layout, module.rule)(harness.device(layout.arrays_of(layout.make(small.SIZES)), {}), 5)


def test_a_state_that_is_not_the_layouts_is_refused():
    module = small.text("def rule(c: Cache):\n    c.x = 1\n")
    layout = Layout(module.Cache)
    start = harness.device(layout.arrays_of(layout.make(small.SIZES)), {})
    rule = lowered(layout, module.rule)
    with pytest.raises(ValueError, match=r"missing \['x'\], unknown \['z'\]"):
        rule({("z" if n == "x" else n): v for n, v in start.items()})
    with pytest.raises(ValueError, match=r"state\['x'\]: expected int32, got float32"):
        rule(start | {"x": start["x"].astype("float32")})
    with pytest.raises(ValueError, match=r"state\['numbers'\]: expected 1 axis"):
        rule(start | {"numbers": start["numbers"].reshape(11, 11)})
