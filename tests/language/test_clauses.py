"""Clauses and choices: what a plain run tells, and where they stand."""

from __future__ import annotations

import pytest

from reference.language import Text, choice, clause, recording, seldom
from reference.language.clauses import choosing
from tests.lowering import harness, small

RULES = """
def helper(c: Cache) -> int:
    clause("help", "Engine.help")
    return choice("which", 3)
def rule(c: Cache):
    clause("begin")
    if c.x > 3:
        clause("large", "Engine.large")
        c.y = helper(c)
"""


def test_a_plain_run_tells_its_clauses_while_somebody_asks():
    module = small.text(RULES)
    cache = small.Layout(module.Cache).make(small.SIZES)
    told = []
    with recording(told.append):
        module.rule(cache)
        cache.x = 4
        module.rule(cache)
    module.rule(cache)
    assert told == ["begin", "begin", "large", "help"]


def test_a_choice_is_the_texts_or_the_engines():
    module = small.text(RULES)
    cache = small.Layout(module.Cache).make(small.SIZES)
    cache.x = 4
    with choosing(lambda name, value: {"which": value + 5}[name]):
        module.rule(cache)
    assert cache.y == 8
    module.rule(cache)
    assert cache.y == 3


def test_clauses_have_a_place_and_one_name():
    module = small.text(RULES)
    found = module.TEXT.clauses["large"]
    assert (found.symbol, found.rule, found.line) == ("Engine.large", "rule", small.LINES + 8)
    assert list(module.TEXT.clauses) == ["help", "begin", "large"]
    with pytest.raises(ValueError, match=r":39: a clause is named 'begin' already"):
        _ = small.text(RULES + '    clause("begin")\n').TEXT.clauses


def test_marks_are_nothing_by_themselves():
    clause("a")
    assert (choice("a", 3), seldom(True)) == (3, True)


def test_rules_of_classes_have_qualified_names():
    module = harness.module_of(
        small.HEAD + "class Pool(FreeList):\n    def size(self) -> int:\n        return self.count\n"
    )
    assert isinstance(module.TEXT, Text)
    assert set(module.TEXT.rules) == {"Pool.size"}
