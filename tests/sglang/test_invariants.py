"""Invariants of SGLang's cache: each fault of a kind is told by the invariant that names it, and nothing is excused."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from hkv.contract import registry
from hkv.contract.invariant import InvariantError
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import BUGS, DECODE_LOSES_PAGE
from hkv.dialects.sglang.engines.numpy import SGLangNumpyEngine
from hkv.oracle.record import Only, record
from tests.sglang import planted
from tests.sglang.test_dialect import entered, header

DIALECT = registry.dialect_of(structs.NAME)
DEFECTS = planted.defects()


class Opaque(SGLangNumpyEngine):
    """The reference as SGLang's Rust tree is: it does not show its nodes."""

    lacks = ("tree",)

    def perform(self, operation: structs.Operation) -> Any:
        return DIALECT.without(super().perform(operation), frozenset(self.lacks))


def broken(engine: Any, *operations: structs.Operation) -> str:
    """The first invariant that is broken, in words; "" if none is."""
    watch = DIALECT.watch(engine, engine.header)
    try:
        for operation in operations:
            watch.perform(operation)
    except InvariantError as error:
        return str(error)
    return ""


def test_no_defect_that_is_named_excuses_a_leak_of_another_kind() -> None:
    """Every drawn header names `decode-loses-page`: a page that a request leaks is no page that a decode lost."""
    leaks = DEFECTS["finished-request-leaks"].engine()
    operations = structs.AdmitOp(id="a", tokens=[1, 2]), structs.ExtendOp(id="a", length=2), structs.AbortOp(id="a")
    for given in (header(), header(window=2), header(size=2), header(window=2, size=2)):
        given.bugs = sorted(BUGS)
        assert broken(SGLangNumpyEngine(given), *operations) == ""
        assert "of pool 0 are nowhere" in broken(leaks(given), *operations)


def refused_decode(engine: Any) -> str:
    """Two requests fill the window's pool; the first one's next token finds a full page and no window page."""
    tokens = [0, 1]
    return broken(
        engine,
        *(structs.AdmitOp(id="a", tokens=tokens), structs.ExtendOp(id="a", length=2)),
        *(structs.AdmitOp(id="b", tokens=[2, 3]), structs.ExtendOp(id="b", length=2)),
        structs.DecodeOp(id="a", token=5),
    )


def test_a_refused_decode_loses_one_page_where_the_other_pool_has_none() -> None:
    given = header(4, window=2, size=2, bugs=[DECODE_LOSES_PAGE])
    given.num_blocks = [4, 2]
    assert refused_decode(SGLangNumpyEngine(given)) == ""
    assert refused_decode(Opaque(given)) == ""

    class Tells(SGLangNumpyEngine):
        """Says of itself that it lost another page."""

        def perform(self, operation: structs.Operation) -> Any:
            answer = super().perform(operation)
            if isinstance(answer, structs.State) and len(answer.pools[0].free) == 1:
                answer.pools[0].free.clear()
            return answer

    assert "pages [3, 4] of pool 0 are nowhere" in refused_decode(Tells(given))


def test_a_tree_that_is_not_shown_is_judged_by_its_ledgers() -> None:
    """As SGLang's scheduler does, which then says "pool memory leak detected"."""
    assert broken(Opaque(header()), *entered("a", [1, 2])) == ""
    with_leak = type("Leaks", (Opaque, DEFECTS["finished-request-leaks"].engine()), {})
    operations = structs.AdmitOp(id="a", tokens=[1, 2]), structs.ExtendOp(id="a", length=2), structs.AbortOp(id="a")
    said = broken(with_leak(header()), *operations)
    assert said.startswith("ledgers fill the pool: after abort a: full_attention has 8: 6 free, 0 evictable")


@pytest.mark.parametrize("feature", DIALECT.features(structs.NAME))
@pytest.mark.parametrize("bugs", [(), tuple(sorted(BUGS))])
def test_the_reference_breaks_none(feature: str, bugs: tuple[str, ...]) -> None:
    def watched(given: structs.Header) -> Any:
        given.bugs = list(bugs)
        return DIALECT.watch(SGLangNumpyEngine(given), given)

    for seed in range(12):
        record(watched, feature, seed, 2, 12, Only(dialect=structs.NAME))


NAMED = (
    *("resumes-without-a-state", "match-ends-at-a-tombstone", "split-forgets-window-locks", "duplicates-kept"),
    *("branch-forgotten", "partial-pages-entered", "newest-leaf-leaves", "recency-without-the-page"),
    *("ledger-takes-held-states-for-idle", "pages-to-the-end", "deepest-state-thinned", "held-window-leaves"),
)
"""Defects of each kind; tests/slow/sglang/test_planted.py has them all."""


@pytest.mark.parametrize("name", NAMED)
def test_the_first_line_names_the_cause(name: str) -> None:
    line = planted.first_line(DEFECTS[name])
    assert planted.names(DEFECTS[name], line), line


def test_every_defect_fits_and_stands_on_the_page() -> None:
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "tables" / "planted-in-sglang.md").read_text("utf-8")
    for name, defect in DEFECTS.items():
        assert defect.engine()
        assert f"\n| `{name}` | {defect.wrong} | " in page
    assert page.count("\n| `") == len(DEFECTS)
