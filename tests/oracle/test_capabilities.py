"""Engines that lack something, and engines and logs that no other engine stands beside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hkv.contract import registry
from hkv.contract.log import Log
from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import CacheEvent, CacheState, Header
from hkv.errors import ConfigError, UnsupportedConfigError
from hkv.oracle.broken_invariant import Watching
from hkv.oracle.check import check_log, judge_log
from hkv.oracle.comparison import Comparison
from hkv.oracle.record import Only, draw

OTHER = {
    "events": lambda engine: {"events": list},
    "keys": lambda engine: {
        "state": lambda: _other_keys(engine.state()),
        "events": lambda: [_other_key(event) for event in engine.events()],
    },
    "no keys": lambda engine: {
        "state": lambda: _renamed(engine.state(), lambda block, entry: ""),
        "events": lambda: [msgspec.structs.replace(event, keys=None, parent=None) for event in engine.events()],
    },
    "keys of blocks": lambda engine: {
        "state": lambda: _renamed(engine.state(), lambda block, entry: block),
        "events": lambda: [msgspec.structs.replace(event, keys=None, parent=None) for event in engine.events()],
    },
    "order": lambda engine: {"state": lambda: _sorted_queue(engine.state())},
    "references": lambda engine: {"state": lambda: msgspec.structs.replace(engine.state(), refs={})},
    "state": lambda engine: {"state": lambda: CacheState([], {}, {}, {})},
}
"""Answers of an engine that lacks something, in place of the reference's."""


def _other_keys(state: CacheState) -> CacheState:
    return _renamed(state, lambda block, entry: entry[2][::-1])


def _renamed(state: CacheState, key: Callable[[str, tuple[int, int, str]], str]) -> CacheState:
    cached = {block: (*entry[:2], key(block, entry)) for block, entry in state.cached.items()}
    return msgspec.structs.replace(state, cached=cached)


def _other_key(event: CacheEvent) -> CacheEvent:
    keys = event.keys and [key[::-1] for key in event.keys]
    return msgspec.structs.replace(event, keys=keys, parent=event.parent and event.parent[::-1])


def _sorted_queue(state: CacheState) -> CacheState:
    return msgspec.structs.replace(state, free=sorted(state.free))


def lack(what: str) -> str:
    """The capability that an engine lacks."""
    return "keys" if "keys" in what else what


class Lacking:
    """The reference, but for one thing; it says so if `honest`."""

    def __init__(self, header: Header, what: str, honest: bool) -> None:
        self._engine = NumpyEngine(header)
        self.lacks = (lack(what),) if honest else ()
        self._other: dict[str, Any] = OTHER[what](self._engine)

    def __getattr__(self, name: str) -> Any:
        return self._other.get(name) or getattr(self._engine, name)


def log_of(version: int = 2) -> Log:
    """A log of the reference with the state after each operation."""
    header, choices = draw("core", 5, version, Only())
    engine, operations = NumpyEngine(header), list[Any]()

    def perform(operation: Any) -> Any:
        answer = apply(engine, operation)
        answered = "want" in type(operation).__struct_fields__
        operations.append(msgspec.structs.replace(operation, want=answer) if answered else operation)
        if not isinstance(operation, oplog.StateOp):
            operations.append(oplog.StateOp(want=engine.state()))
        return answer

    registry.dialect_of(header.dialect).drive(header, choices, perform, 12)
    return Log("a.jsonl", header, tuple(operations))


@pytest.mark.parametrize("what", OTHER)
def test_only_what_an_engine_has_is_compared(what: str) -> None:
    for honest in (True, False):
        comparison = Comparison((lambda header, honest=honest: Lacking(header, what, honest), "numpy"), Only(), 2)
        comparison.require(["core"])
        parted = any(comparison.seed("core", seed) for seed in range(3))
        assert parted == (not honest)
        assert set(comparison.so_far(()).not_compared) == ({lack(what)} if honest else set())


@pytest.mark.parametrize("what", OTHER)
def test_logs_are_compared_by_what_an_engine_has(what: str) -> None:
    log = log_of()
    assert check_log(log, lambda header: Lacking(header, what, True)) is None
    assert check_log(log, lambda header: Lacking(header, what, False)) is not None


@pytest.mark.parametrize("what", [name for name in OTHER if name != "state"])
def test_only_what_an_engine_has_is_judged(what: str) -> None:
    watching = Watching(lambda header: Lacking(header, what, True), Only(), 2)
    for feature in ("core", "eagle", "sharing") if lack(what) == "keys" else ("core",):
        assert [watching.seed(feature, seed) for seed in range(3)] == [None] * 3
    assert set(watching.lacks) == {lack(what)}
    assert watching.not_asked


def test_an_engine_without_a_state_cannot_be_judged() -> None:
    with pytest.raises(UnsupportedConfigError, match="without a state"):
        Watching(lambda header: Lacking(header, "state", True), Only(), 2).seed("core", 0)


def test_a_lack_that_there_is_not() -> None:
    class Odd(NumpyEngine):
        lacks = ("colour",)

    with pytest.raises(ConfigError, match="colour"):
        check_log(log_of(), Odd)


def test_a_recorded_log_breaks_no_invariant() -> None:
    difference, asked = judge_log(log_of())
    assert difference is None
    assert {"conservation", "soundness", "maximality", "registration", "eviction order", "room"} <= asked


def test_without_states_in_between_less_is_asked() -> None:
    log = log_of()
    bare = dataclasses.replace(log, operations=tuple(each for each in log.operations if not _is_state(each)))
    sparse = tuple(each for index, each in enumerate(log.operations) if index % 10 < 2 or not _is_state(each))
    (_, everything), (_, nothing) = judge_log(log), judge_log(bare)
    difference, some = judge_log(dataclasses.replace(log, operations=sparse))
    assert difference is None
    assert nothing < some < everything
    assert "conservation" in some


def _is_state(operation: Any) -> bool:
    return isinstance(operation, oplog.StateOp)


def _longer_hit(operation: Any) -> Any:
    if not isinstance(operation, oplog.LookupOp) or operation.want.hit:
        return None
    return msgspec.structs.replace(operation, want=oplog.Hit(1000, [[1] for _ in operation.want.blocks], 0))


def _leaked(operation: Any) -> Any:
    if not isinstance(operation, oplog.StateOp) or len(operation.want.free) < 3:
        return None
    return oplog.StateOp(want=msgspec.structs.replace(operation.want, free=operation.want.free[1:]))


def _queued_twice(operation: Any) -> Any:
    if not isinstance(operation, oplog.StateOp) or not operation.want.refs:
        return None
    free = [*operation.want.free, int(next(iter(operation.want.refs)))]
    return oplog.StateOp(want=msgspec.structs.replace(operation.want, free=free))


@pytest.mark.parametrize(
    ("damage", "invariants"),
    [
        (_longer_hit, {"form", "consistency", "soundness"}),
        (_leaked, {"conservation", "eviction order"}),
        (_queued_twice, {"conservation", "eviction order"}),
    ],
)
def test_a_damaged_log_breaks_one(damage: Any, invariants: set[str]) -> None:
    log = log_of()
    place, changed = next((i, new) for i, each in enumerate(log.operations) if i > 20 and (new := damage(each)))
    damaged = dataclasses.replace(log, operations=(*log.operations[:place], changed, *log.operations[place + 1 :]))
    difference, _ = judge_log(damaged)
    assert difference is not None
    assert difference.field.removeprefix("invariant ") in invariants
    assert place + 1 <= difference.line <= place + 2


def test_logs_of_other_rules_are_refused_by_name() -> None:
    header, _ = draw("core", 0, 2, Only(dialect="rtp-llm/single"))
    with pytest.raises(UnsupportedConfigError, match="invariants of logs"):
        judge_log(Log("a.jsonl", header, ()))


def test_an_engine_that_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match="takes this header"):
        Watching(lambda header: header.no_such_field, Only(), 2).seed("core", 0)
