"""Programs leave out what they have computed, what a loop does not change, what known values decide."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.call_sites import sites
from hkv.lowering import lowered, read
from hkv.lowering.code import Block, Branch, Loop, Op, Read, Write
from reference.language import Layout
from tests.lowering import small


def instructions(rules: str, numbers: int = 0, among: Any = None) -> list[Any]:
    """Those of `rule`, each with how many loops it is in; and the rule plainly and lowered is the same."""
    module = small.text(rules)
    layout = Layout(module.Cache)
    arrays = layout.arrays_of(layout.make(small.SIZES))
    found = list[Any]()

    def walk(block: Block, depth: int) -> None:
        for item in block.items:
            found.append((item, depth))
            for _, arm in item.arms if isinstance(item, Branch) else ():
                walk(arm, depth)
            if isinstance(item, Loop):
                walk(item.body, depth + 1)

    walk(read(layout, module.rule, {}, (), among or {}, arrays, numbers).code.block, 0)
    return found


def reads(found: list[Any]) -> list[tuple[str, int]]:
    """Arrays that are read, each with how many loops the read is in."""
    return [(item.array, depth) for item, depth in found if isinstance(item, Read)]


def test_what_was_read_is_not_read_again_until_it_may_be_written():
    rule = "def rule(c: Cache, n: int):\n    c.x = c.numbers[n] + c.numbers[n]\n"
    assert reads(instructions(rule, 1)) == [("numbers", 0)]
    rule += "    c.numbers[n + 1] = 5\n    c.y = c.numbers[n]\n"
    assert reads(instructions(rule, 1)) == [("numbers", 0), ("numbers", 0)]


def test_what_was_written_is_not_read():
    rule = "def rule(c: Cache, n: int):\n    c.numbers[n] = c.x\n    c.y = c.numbers[n]\n"
    assert reads(instructions(rule, 1)) == []
    rule = "def rule(c: Cache, n: int):\n    if c.x > 3:\n        c.numbers[n] = c.x\n    c.y = c.numbers[n]\n"
    assert reads(instructions(rule, 1)) == [("numbers", 0)]


def test_what_a_loop_does_not_change_leaves_it():
    rule = (
        "def rule(c: Cache, n: int):\n    for i in range(n):\n        for j in range(i):\n"
        "            c.items[j + 1].rank = c.numbers[n] + c.left.numbers[i] + c.right.numbers[j]\n"
    )
    found = instructions(rule, 1)
    assert sorted(reads(found)) == [("left.numbers", 1), ("numbers", 0), ("right.numbers", 2)]
    assert [depth for item, depth in found if isinstance(item, Write)] == [2]
    rule = rule.replace("c.items[j + 1].rank", "c.numbers[j + 1]")
    assert ("numbers", 2) in reads(instructions(rule, 1))


def test_the_same_comes_of_it():
    rule = (
        "def rule(c: Cache, n: int):\n    for i in range(n):\n        if c.numbers[i] > 4:\n"
        "            c.numbers[i + 1] = c.numbers[n] + c.numbers[i]\n        c.x += c.numbers[i] + c.numbers[n - 1]\n"
        "        for j in range(i, n):\n            c.items[j + 1].rank = c.items[i + 1].rank + c.numbers[j]\n"
    )
    small.run(rule, 9)


def test_a_branch_of_reads_is_passed_over():
    body = "".join(f"        s += c.numbers[n + {i}] * c.left.numbers[s % 7]\n" for i in range(9))
    rule = f"def rule(c: Cache, n: int):\n    s = 1\n    if c.x > n:\n{body}    c.y = s\n    c.numbers[s % 5] = s\n"
    for n in (0, 9):
        _, _, program = small.run(rule, n)
        assert program.as_text().count(" conditional(") >= 1


CODES = "def rule(c: Cache, n: int):\n    kind = c.numbers[n]\n    c.x = 5 if kind in (3, 4) else 6\n    if kind > 2:\n"
CODES += "        c.y = 8\n"


def test_known_values_prune():
    assert any(isinstance(item, Op) for item, _ in instructions(CODES, 1))
    for among in ((1, 2), (3, 4, 7), (3,)):
        found = [item for item, _ in instructions(CODES, 1, {"numbers": among}) if isinstance(item, Op | Branch)]
        assert not [item for item in found if isinstance(item, Branch)]
        assert bool(found) is (among == (3, 4, 7))


@pytest.mark.parametrize("value", [1, 2, 3])
def test_programs_of_known_values_do_as_others(value):
    module = small.text(CODES)
    layout = Layout(module.Cache)
    cache = layout.make(small.SIZES)
    cache.numbers[:] = [value] * 120
    arrays = layout.arrays_of(cache)
    module.rule(cache, 4)
    among = (1, 2) if value < 3 else (3,)
    got = jax.jit(lowered(layout, module.rule, among={"numbers": among}))(arrays, np.int32(4))
    assert (int(got["x"]), int(got["y"])) == (cache.x, cache.y)


def test_instructions_are_counted_by_call_site():
    module = small.text(
        "def helper(c: Cache, n: int) -> int:\n    return c.numbers[n] * 3\n"
        "def rule(c: Cache, n: int):\n    c.x = helper(c, n)\n    c.y = helper(c, n + 1)\n"
    )
    layout = Layout(module.Cache)
    found = sites(layout, module.rule, layout.arrays_of(layout.make(small.SIZES)))
    line = small.LINES
    assert found == {("rule:1",): 1, ("rule:1", f"helper:{line + 4}"): 2, ("rule:1", f"helper:{line + 5}"): 2}
