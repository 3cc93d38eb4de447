"""Pages without a browser: what they hold is what engines say, and nothing of a log becomes markup."""

from __future__ import annotations

import base64
import hashlib
import itertools
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hkv.contract import registry
from hkv.contract.log import Log
from hkv.contract.snapshot import Snapshot
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.errors import OperationError
from hkv.oracle import log_file
from hkv.oracle.check import check_log
from hkv.oracle.engine import answers
from hkv.oracle.engines import engine_factory
from hkv.oracle.history import history
from hkv.oracle.log_file import read_log
from hkv.oracle.side import CACHED, FREE, HELD, Drawn, EngineSide
from hkv.oracle.verbs import record
from hkv.page import _column, packed, page
from reference.dialects.vllm.manager import Manager
from tests.cli.commands import perform
from tests.page.reading import Markup, cells_of, data_in, data_of

LOGS = (
    ("vllm-0.33", "partial"),
    ("rtp-llm/hybrid-pool", "connector"),
    ("rtp-llm/hybrid", "fork"),
    ("sglang-0.5.23", "window"),
    ("sglang-0.5.23", "states"),
)

NUMPY = (("numpy", engine_factory("numpy")),)


def expected(seen: Snapshot) -> dict[int, tuple[Any, ...]]:
    """Every block of a snapshot that is not simply free, as `cells_of` gives it."""
    found, start = {}, 0
    for number, pool in enumerate(seen.pools):
        for block in pool.ids:
            at = number, block
            held, entry = sorted(seen.holders.get(at, ())), seen.entries.get(at)
            references = seen.references.get(at, len(held))
            status = FREE * (block in pool.free) | HELD * bool(held or references) | CACHED * (entry is not None)
            if status != FREE:
                tokens, key = (entry[1], entry[2]) if entry else (-1, "")
                found[start + block - pool.ids.start] = (status, references, tokens, held, key)
        start += len(pool.ids)
    return found


@pytest.mark.parametrize(("name", "feature"), LOGS)
def test_every_moment_is_what_the_engine_says(name: str, feature: str) -> None:
    seen_states: set[int] = set()
    for seed in (5, 6):
        seen_states |= shown_as_the_engine_says(record(feature, seed, "numpy", dialect=name).log)
    assert HELD in seen_states
    assert any(status & CACHED for status in seen_states)


def shown_as_the_engine_says(log: Log) -> set[int]:
    """Every moment of a log's page, held against the engine's state; what blocks were in any of them."""
    dialect = registry.dialect_of(log.header.dialect)
    data = data_of(page("x", history("x", log.header, log.operations, NUMPY, explained=False)))
    (side,) = data["sides"]
    engine = NUMPY[0][1](log.header)
    seen_states = set()
    for at in range(len(log.operations) + 1):
        if at:
            dialect.perform(engine, log.operations[at - 1])
        state = dialect.perform(engine, dialect.log.operations["state"]())
        cells = {block: cell for block, cell in cells_of(side, at).items() if cell[0] != FREE}
        assert cells == expected(dialect.snapshot(log.header, state)), at
        seen_states |= {cell[0] for cell in cells.values()}
    return seen_states


def test_a_recorded_log_is_a_side_of_its_own_where_it_has_states() -> None:
    log = record("core", 1, "numpy", dialect="rtp-llm/hybrid").log
    data = data_of(page("x", history("x", log.header, log.operations, NUMPY, recorded="log")))
    recorded, engine = data["sides"]
    states = [at for at, each in enumerate(log.operations, 1) if type(each).__struct_config__.tag == "state"]
    assert list(recorded["looks"]) == states != []
    for at in states:
        assert cells_of(recorded, at) == cells_of(engine, at)
    assert list(data["differing"]) == []
    assert any("lacks" in group for told in data["explanations"].values() for group in told["groups"])


def test_what_is_forgotten_leaves_the_last_look_at_its_own_time() -> None:
    log = record("core", 1, "numpy", dialect="rtp-llm/hybrid").log
    side = EngineSide(registry.dialect_of("rtp-llm/hybrid"), log.header, "log", None)
    for index, operation in enumerate(log.operations):
        side.is_told(index, operation, getattr(operation, "want", None))
    first, second = next(each for each in itertools.pairwise(side.looks) if each[1] - each[0] > 2)
    at_first = cells_of(data_of(page("x", side.record(len(log.operations)))), first)
    side.forget(first + 1)
    assert side.looks[:2] == [-1, second - first - 1]
    side.forget(1)
    assert side.looks[:2] == [-2, second - first - 2]
    shown = data_of(page("x", side.record(len(log.operations) - first - 2)))
    assert list(shown["looks"][:2]) == side.looks[:2]
    assert {block: cell for block, cell in at_first.items() if cell[0] != FREE} == cells_of(shown, 0)


HOSTILE = """</script><script>alert(1)</script><img src=x onerror=alert(1)>'"&@DATA@@SCRIPT@"""


def test_names_of_strangers_stay_text_and_the_policy_names_what_runs() -> None:
    log = record("core", 1, "numpy").log
    data = history(HOSTILE, log.header, log.operations[:3], NUMPY, explained=False)
    text = page(HOSTILE, {"title": HOSTILE, "cases": [data]}).decode()
    markup = Markup(text)
    scripts = [attributes for tag, attributes in markup.elements if tag == "script"]
    assert scripts == [{"type": "text/plain", "id": "data"}, {}]
    assert not any(tag == "img" for tag, _ in markup.elements)
    assert markup.texts["title"] == HOSTILE
    (policy,) = (each["content"] for _, each in markup.elements if each.get("http-equiv") == "Content-Security-Policy")
    digest = {
        kind: base64.b64encode(hashlib.sha256(markup.texts[kind].encode()).digest()).decode()
        for kind in ("script", "style")
    }
    assert policy == f"default-src 'none'; script-src 'sha256-{digest['script']}'; style-src 'sha256-{digest['style']}'"
    assert not re.search(r"https?://", markup.texts["script"])
    assert data_of(text.encode())["cases"][0]["name"] == HOSTILE


def test_a_page_is_small_and_the_same_each_time() -> None:
    log = record("core", 1, "numpy").log
    first, second = (page("x", history("x", log.header, log.operations, NUMPY, recorded="log")) for _ in range(2))
    assert first == second
    assert len(page("", {})) < 300_000


@pytest.mark.parametrize(
    "values",
    [[], [5], [0, 9_000_000_000_000], [2**31 - 1, 2**31], [-(2**31), 2**31], [-(2**40), 3], [2**52, 2**53 - 1], [7, 3]],
)
def test_a_column_holds_any_integer_that_javascript_has(values: list[int]) -> None:
    """Timestamps in milliseconds are beyond int32; sums of differences are no wider than int32 on a page."""
    column = data_in(packed({"column": np.array(values, np.int64)}))["column"]
    assert column.tolist() == values
    kind, _ = _column(np.array(values, np.int64))
    assert not kind.endswith("+") or values[-1] < 2**31


def test_a_look_costs_what_is_held_and_looks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that have gone cost no later look anything; of a long log not every operation is followed by a look."""
    log = record("core", 5, "numpy", steps=60).log
    asked: list[str] = []
    rows = Manager.rows
    monkeypatch.setattr(Manager, "rows", lambda manager, id: [asked.append(id), rows(manager, id)][1])
    engine = NUMPY[0][1](log.header)
    dialect = registry.dialect_of("vllm-0.33")
    for operation in log.operations:
        dialect.perform(engine, operation)
    asked.clear()
    state = engine.state()
    assert len(asked) == len(set(asked)) < len(engine.manager.requests)
    assert set(state.rows) <= set(asked)
    monkeypatch.setattr("hkv.oracle.side.LOOKED_AT", 10 * log.header.num_blocks)
    (side,) = history("x", log.header, log.operations, NUMPY, explained=False)["sides"]
    assert len(side["looks"]) <= 12


@pytest.mark.parametrize("name", ["rtp-llm/single", "rtp-llm/hybrid"])
def test_no_block_is_lost_that_an_export_holds(name: str) -> None:
    """An export's references to what has left the cache hold its blocks; the cache's own hold none."""
    exported = False
    for seed in range(4):
        log = record("connector", seed, "numpy", dialect=name).log
        dialect = registry.dialect_of(name)
        engine = NUMPY[0][1](log.header)
        for operation in log.operations:
            dialect.perform(engine, operation)
            state = dialect.perform(engine, dialect.log.operations["state"]())
            seen = dialect.snapshot(log.header, state)
            for number, (pool, counts) in enumerate(zip(seen.pools, state.pools, strict=True)):
                for block in set(pool.ids) - set(pool.free):
                    at, held = (number, block), {**counts.request, **counts.connector}
                    references = seen.references[at]
                    assert references > 0 or at in seen.entries
                    assert references >= (str(block) in held)
                    exported |= at not in seen.entries and str(block) not in held
    assert exported


def test_a_log_alone_is_drawn_without_an_engine() -> None:
    log = record("core", 1, "numpy", dialect="rtp-llm/hybrid").log
    (told,) = history("x", log.header, log.operations, (), recorded="log")["sides"]
    assert len(told["looks"])


@pytest.mark.parametrize("name", ["chunks/arc-8", "offload/window", "offload/states", "offload/simple-30"])
def test_chunks_of_the_second_tier_are_drawn_and_none_is_lost(name: str, tmp_path: pathlib.Path) -> None:
    """After each operation a chunk is free, cached, or held by a transfer; the page has all that the state tells."""
    path = next((pathlib.Path(__file__).parents[1] / "data").glob(f"{name}*.jsonl"))
    log = read_log(path)
    dialect, engine = registry.dialect_of(log.header.dialect), engine_factory("numpy")(log.header)
    cached = 0
    for operation in log.operations:
        dialect.perform(engine, operation)
        found = dialect.snapshot(log.header, dialect.perform(engine, dialect.log.operations["state"]()))
        for number, pool in enumerate(found.pools):
            free = set(pool.free)
            for block in pool.ids:
                held = bool(found.holders.get((number, block)) or found.references.get((number, block), 0) > 0)
                assert not (held and block in free), operation
                assert held or block in free or (number, block) in found.entries, operation
        cached += len(found.entries)
    assert cached
    assert perform(["check", str(path), "--html", str(tmp_path / "page.html")], tmp_path).status == 0
    (case,) = data_of((tmp_path / "page.html").read_bytes())["cases"]
    assert any(len(side["changes"]["at"]) for side in case["sides"])


CORE = pathlib.Path(__file__).parents[1] / "data" / "oplogs" / "core-0.jsonl"


def test_a_log_that_agrees_is_read_once_and_performed_once_for_check_and_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    log, read, performed = read_log(CORE), list[str](), list[Any]()
    parse, dialect = log_file._parse, registry.dialect_of(log.header.dialect)
    once = type(dialect).perform
    monkeypatch.setattr(log_file, "_parse", lambda *given: read.append(given[1]) or parse(*given))
    monkeypatch.setattr(
        type(dialect), "perform", lambda own, engine, each: performed.append(each) or once(own, engine, each)
    )
    assert perform(["check", str(CORE), "--html", str(tmp_path / "page.html")], tmp_path).status == 0
    assert read == [str(CORE)]
    look = dialect.log.operations["state"]()
    assert [each for each in performed if each != look] == list(log.operations)
    assert performed.count(look) == len(log.operations) + 1


@pytest.mark.parametrize("looks", [None, 10])
def test_a_page_drawn_by_the_check_is_the_page_drawn_afterwards(
    looks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, drawn = read_log(CORE), Drawn("numpy")
    if looks:
        monkeypatch.setattr("hkv.oracle.side.LOOKED_AT", looks * log.header.num_blocks)
    assert check_log(log, NUMPY[0][1], (), drawn.performing(log)) is None
    drawn.keep(log, None, ())
    assert drawn.side is not None
    again = history(log.path, log.header, log.operations, NUMPY, log=log)
    assert page("x", history(log.path, log.header, log.operations, NUMPY, log=log, drawn=drawn.side)) == page(
        "x", again
    )
    assert again["every"] == (1 if looks is None else -(-len(log.operations) // looks))


class Batched(NumpyEngine):
    """Takes batches, and fails at operation `FAILS` without saying where."""

    def __init__(self, header: Any) -> None:
        super().__init__(header)
        self.performed = 0

    def run(self, operations: Sequence[Any]) -> list[Any]:
        given = [registry.dialect_of("vllm-0.33").perform(self, each) for each in operations]
        self.performed += len(operations)
        if self.performed > FAILS:
            raise OperationError("batch", "some operations", "others")
        return given


FAILS = 37


def test_a_batch_that_fails_between_two_looks_fails_where_it_does_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    log, drawn = read_log(CORE), Drawn("numpy")
    monkeypatch.setattr("hkv.oracle.side.LOOKED_AT", 10 * log.header.num_blocks)
    difference = check_log(log, Batched)
    assert difference is not None
    assert difference.line == FAILS + 2
    assert check_log(log, Batched, (), drawn.performing(log)) == difference
    drawn.keep(log, difference, ())
    assert drawn.side is None


def test_no_state_is_asked_of_a_strangers_engine_while_it_is_checked() -> None:
    log = read_log(CORE)
    assert Drawn("mine.py:Engine").performing(log) is answers
    assert Drawn("numpy").performing(log) is not answers


def test_a_page_of_standard_input_is_drawn(tmp_path: pathlib.Path) -> None:
    with CORE.open("rb") as file:
        done = subprocess.run(
            [sys.executable, "-m", "hkv", "check", "-", "--html", str(tmp_path / "page.html")], stdin=file, check=False
        )
    assert done.returncode == 0
    (case,) = data_of((tmp_path / "page.html").read_bytes())["cases"]
    assert len(case["subjects"]) == len(read_log(CORE).operations)
