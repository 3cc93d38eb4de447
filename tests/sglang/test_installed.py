"""The reference against SGLang 0.5.23's own cache, its tree in Python and in Rust."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from hkv.contract import registry
from hkv.contract.events import KeyIndex, decode_batch
from hkv.contract.traffic import RandomChoices
from hkv.dialects.sglang.config import BUGS
from hkv.dialects.sglang.log import NAME, AdmitOp, EventsOp, EvictOp, FinishOp, MatchOp, RoomOp, StateOp
from hkv.dialects.sglang.traffic import FEATURES
from hkv.oracle.check import check_log
from hkv.oracle.comparison import Comparison
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import find_logs, read_log
from hkv.oracle.record import Only, record
from tests.sglang.test_dialect import ROOMS, SLRU, entered, header, replayed, rooms, twice_used_leave_last

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.sglang

DIALECT = registry.dialect_of(NAME)


@pytest.mark.parametrize("engine", ["sglang", "sglang-rust"])
@pytest.mark.parametrize("feature", FEATURES)
def test_reference_agrees_with_sglang(engine: str, feature: str) -> None:
    compared = Comparison((engine, "numpy"), Only(dialect=NAME))
    assert not any(compared.seed(feature, seed) for seed in range(12))


def test_sglang_still_answers_what_was_recorded() -> None:
    for path in find_logs([ROOT / "tests" / "data" / "sglang"]):
        difference = check_log(read_log(path), engine_factory("sglang"))
        assert difference is None, difference.describe()


@pytest.mark.parametrize("name", BUGS)
def test_sglang_has_the_defects_that_are_named(name: str) -> None:
    log = read_log(ROOT / "docs" / "upstream-bugs" / f"{name}.jsonl")
    found = check_log(log, engine_factory("sglang"), list(BUGS))
    assert found is not None
    assert found.line == len(log.operations) + 1
    alike = check_log(log, engine_factory("numpy"), list(BUGS))
    assert alike is not None
    assert alike.got == found.got


def told(engine: Any) -> int:
    """Keys that a router believes in, once it was told of everything."""
    index = KeyIndex()
    assert not index.apply(0, decode_batch(engine.published()))
    return sum(entry.count for keys in index.places.values() for entry in keys.values())


@pytest.mark.parametrize("engine", ["sglang", "sglang-rust"])
@pytest.mark.parametrize("feature", FEATURES)
def test_routers_are_told_of_every_page_of_full_attention(engine: str, feature: str) -> None:
    for seed in range(6):
        recording = record(engine_factory("numpy"), feature, seed, 2, 16, Only(dialect=NAME))
        driven, follower = (engine_factory(each)(recording.header) for each in (engine, "numpy"))
        for operation in recording.operations:
            if not isinstance(operation, EventsOp):  # which takes what a publisher has not sent yet
                driven.perform(operation)
                follower.perform(operation)
        nodes = follower.perform(StateOp()).nodes
        assert told(driven) == sum(len(node.slots) for node in nodes) // recording.header.groups[0]["block_size"]


@pytest.mark.parametrize("feature", FEATURES)
def test_events_and_room_are_those_of_sglang(feature: str) -> None:
    for seed in range(6):
        recording = record(engine_factory("numpy"), feature, seed, 2, 16, Only(dialect=NAME))
        engines = [engine_factory(each)(recording.header) for each in ("numpy", "sglang", "sglang-rust")]
        for operation in recording.operations:
            told = []
            for engine in engines:
                engine.perform(operation)
                told.append((engine.perform(EventsOp()), engine.perform(RoomOp(tokens=0))))
            assert told[0] == told[1] == told[2], operation


@pytest.mark.parametrize("engine", ["sglang", "sglang-rust"])
def test_routers_are_not_told_that_a_prefix_lost_its_window(engine: str) -> None:
    driven = engine_factory(engine)(header(8, window=2, bugs=sorted(BUGS)))
    for operation in (*entered("a", [0, 1, 2, 3, 4, 5]), AdmitOp(id="b", tokens=[0, 1, 2, 3, 4, 5, 6])):
        driven.perform(operation)
    driven.perform(EvictOp(tokens=[0, 4]))
    assert driven.perform(MatchOp(tokens=[0, 1, 2, 3])).hit == 0
    assert told(driven) == 6


def test_what_a_pass_computed_beyond_a_request_s_end_is_not_entered() -> None:
    """A request that ends one token before its last may have kept a state of that; the one before it is entered."""
    ended = 0
    for seed in range(40):
        choices = RandomChoices(seed)
        given = DIALECT.draw_header(choices, "states", 2, NAME)
        reference, installed = (engine_factory(each)(given) for each in ("numpy", "sglang"))

        def perform(operation: Any, reference: Any = reference, installed: Any = installed) -> Any:
            nonlocal ended
            if isinstance(operation, FinishOp):
                request = reference.request(operation.id)
                operation.length = max(request.length - 1, request.protected * reference.config.page_size, 1)
                ended += request.tracked == request.length and request.tracked_before > 0
            want, got = reference.perform(operation), installed.perform(operation)
            assert DIALECT.compare(want, got, 2) is None, operation
            return want

        DIALECT.drive(given, choices, perform, 12)
    assert ended > 3


def test_what_leaves_is_as_in_sglang() -> None:
    installed = engine_factory("sglang")
    assert twice_used_leave_last(installed(header(20, policy="slru", bugs=sorted(BUGS)))) == SLRU
    assert rooms(installed) == rooms(engine_factory("sglang-rust")) == ROOMS


def test_a_replay_is_that_of_the_engine_request_by_request() -> None:
    for engine in ("sglang", "sglang-rust"):
        for column, found in replayed(600, engine).requests.items():
            assert list(found) == list(replayed(600).requests[column]), column
