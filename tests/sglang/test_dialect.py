"""SGLang's dialect through the commands: watched, explored, explained, and its defects found and made small."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from hkv.contract import registry
from hkv.contract.explore_command import Space
from hkv.contract.log import Log
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import BUGS
from hkv.dialects.sglang.engines.numpy import SGLangNumpyEngine
from hkv.errors import ConfigError, HKVError, OperationError
from hkv.oracle.comparison import diff
from hkv.oracle.exploration import BreadthFirst, PlainWorld
from hkv.oracle.record import Only, differ, record
from hkv.oracle.shrink import Shrinker
from hkv.oracle.verbs import explain
from hkv.replay.result import ReplayResult
from hkv.replay.verb import replay_trace
from hkv.spec import FullAttention, SlidingWindow
from reference.dialects.sglang import radix
from reference.dialects.sglang.records import Cache, Node, Request

DIALECT = registry.dialect_of(structs.NAME)


def header(pages: int = 8, window: int | None = None, size: int = 1, **options: Any) -> structs.Header:
    groups: list[dict[str, Any]] = [{"kind": "full_attention", "block_size": size}]
    if window is not None:
        groups.append({"kind": "sliding_window", "block_size": size, "window": window})
    return structs.Header(
        dialect=structs.NAME, feature="hand", num_blocks=[pages] * len(groups), groups=groups, **options
    )


def performed(engine: SGLangNumpyEngine, *operations: structs.Operation) -> list[Any]:
    return [engine.perform(operation) for operation in operations]


def entered(id: str, tokens: list[int]) -> list[structs.Operation]:
    """A request that comes, computes its prompt, and ends."""
    extend = structs.ExtendOp(id=id, length=len(tokens))
    return [structs.AdmitOp(id=id, tokens=tokens), extend, structs.FinishOp(id=id)]


def test_every_invariant_holds_in_every_state_of_a_small_cache() -> None:
    for window in (None, 1):
        given = header(3, window)
        search = BreadthFirst(given, PlainWorld(DIALECT, given, Space(requests=1, prompt=1, max_model_len=2)))
        search.run()
        assert search.report.exhausted, search.report.counterexample
        assert min(search.report.states - 40, search.report.evictions) > 0


def test_an_exploration_has_the_states_that_its_requests_hold() -> None:
    given = msgspec.structs.replace(header(2), num_blocks=[2, 2])
    given.groups.append({"kind": "mamba", "block_size": 1})
    space = Space(requests=1, prompt=1, max_model_len=1)
    with pytest.raises(ConfigError, match=r"3 at least, for the states of 1 request$"):
        BreadthFirst(given, PlainWorld(DIALECT, given, space)).run()
    enough = msgspec.structs.replace(given, num_blocks=[2, 3])
    search = BreadthFirst(enough, PlainWorld(DIALECT, enough, space))
    search.run()
    assert search.report.exhausted, search.report.counterexample


def test_random_traffic_breaks_no_invariant() -> None:
    for feature in DIALECT.features(structs.NAME):
        for seed in range(4):
            record(_watched, feature, seed, 2, 12, Only(dialect=structs.NAME))


def test_random_traffic_is_about_every_rule() -> None:
    """The named clauses of the text, known defects among them: a refused decode that loses a page is rare."""
    rules = set[str]()
    for feature in DIALECT.features(structs.NAME):
        for seed in range(40 if feature in ("states", "window") else 6):
            recording = record(SGLangNumpyEngine, feature, seed, 2, 16, Only(dialect=structs.NAME))
            rules |= DIALECT.exercised(_log(recording.header, recording.operations)).keys()
    assert rules == DIALECT.coverage.keys()


def test_a_log_without_ledgers_is_compared_by_the_rest() -> None:
    engine = SGLangNumpyEngine(header())
    performed(engine, *entered("a", [1, 2]))
    state = engine.perform(structs.StateOp())
    assert state.ledgers == [structs.Ledger(evictable=2, protected=0)]
    before = msgspec.structs.replace(state, ledgers=None)
    wrong = msgspec.structs.replace(state, ledgers=[structs.Ledger(evictable=1, protected=0)])
    assert DIALECT.compare(before, wrong, 2) is None
    difference = DIALECT.compare(state, wrong, 2)
    assert difference is not None
    assert difference.field == "ledgers[0].evictable"


def _watched(given: structs.Header) -> Any:
    return DIALECT.watch(SGLangNumpyEngine(given), given)


def test_a_window_needs_what_is_behind_it() -> None:
    """Once a prefix has lost its window, the next request finds nothing of it, but gives it one: a third finds it."""
    engine = SGLangNumpyEngine(header(40, window=2))
    performed(engine, *entered("a", list(range(8))), structs.EvictOp(tokens=[0, 4]))
    second = [0, 1, 2, 3, 9]
    found, _, row = performed(
        engine,
        structs.AdmitOp(id="b", tokens=second),
        structs.ExtendOp(id="b", length=5),
        structs.CheckpointOp(id="b"),
    )
    assert (found.hit, found.full) == (0, 4)
    assert row.protected == 4
    assert performed(engine, structs.AdmitOp(id="c", tokens=[0, 1, 2, 3, 8]))[0].hit == 4


def twice_used_leave_last(engine: Any) -> list[list[int]]:
    """First tokens of the prompts that are left, evicted one by one under `slru`: of three that were entered three,
    two times and once, in this order."""
    left = []
    for name, times in (("a", 3), ("b", 2), ("c", 1)):
        prompt = [ord(name), 1, 2, 3]
        for _ in range(times):
            performed(engine, *entered(name, prompt))
    for _ in range(3):
        performed(engine, structs.EvictOp(tokens=[4]))
        left.append([node.tokens[0] for node in engine.perform(structs.StateOp()).nodes if node.parent == -1])
    return left


SLRU = [[97, 98], [98], []]
"""The one that was entered once leaves first, though it was used last; then the others, by their use alone."""


def test_a_node_is_kept_from_its_second_use_on() -> None:
    assert twice_used_leave_last(SGLangNumpyEngine(header(20, policy="slru", bugs=sorted(BUGS)))) == SLRU


def rooms(make: Any) -> list[list[int]]:
    """Tokens, and states, of each pool that are free once room for so many was made."""
    found = []
    for window, states, tokens in ((None, 0, 4), (2, 0, 2), (2, 0, 4), (None, 5, 4)):
        given = header(8, window=window, bugs=sorted(BUGS))
        given.num_blocks[0] = 20 if window else 8
        if states:
            given.groups.append({"kind": "mamba", "block_size": 1})
            given.num_blocks.append(states)
        engine = make(given)
        performed(engine, *entered("a", [1, 2, 3, 4]), *entered("b", [5, 6, 7, 8]))
        found.append(engine.perform(structs.RoomOp(tokens=tokens)).available)
    return found


ROOMS = [[4], [12, 2], [14, 4], [4, 4]]
"""As many as were asked for in the pool that lacked them, and not a node more."""


def test_room_is_made_for_what_is_asked_and_no_more() -> None:
    assert rooms(SGLangNumpyEngine) == ROOMS


def test_an_explanation_names_what_each_group_lacks() -> None:
    operations = [
        *entered("a", [0, 1, 2, 3]),
        structs.EvictOp(tokens=[0, 3]),
        structs.AdmitOp(id="b", tokens=[0, 1, 2, 3, 4]),
    ]
    given = header(8, window=2, bugs=sorted(BUGS))
    told = explain(_log(given, operations), len(operations) + 1)
    assert [(group.kind, group.largest) for group in told.groups] == [("full_attention", 2), ("sliding_window", 0)]
    assert told.hit == 0


def _log(given: structs.Header, operations: list[structs.Operation]) -> Log:
    engine = SGLangNumpyEngine(given)
    answered = []
    for operation in operations:
        answer = engine.perform(operation)
        answered.append(msgspec.structs.replace(operation, want=answer) if hasattr(operation, "want") else operation)
    return Log("hand", given, tuple(answered))


def _keep_all_recent(cache: Cache, node: Node) -> None:
    while node is not cache.root:
        if node.live:
            cache.recent.remove(node)
            cache.recent.put(node)
        node = node.parent


def _split_shares_no_lock(cache: Cache, node: Node, at: int, request: Request) -> Node:
    upper = _SPLIT(cache, node, at, request)
    upper.full_locks = 0
    return upper


_SPLIT = radix.split


@pytest.mark.parametrize(
    ("rule", "planted"),
    [
        ("refresh", _keep_all_recent),
        ("split", _split_shares_no_lock),
        ("recover", lambda cache, node, request, start, end: end),
    ],
)
def test_a_planted_defect_is_found_and_made_small(rule: str, planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(SGLangNumpyEngine):
        def perform(self, operation: structs.Operation) -> Any:
            with monkeypatch.context() as patched:
                patched.setattr(radix, rule, planted)
                return super().perform(operation)

    only = Only(dialect=structs.NAME)
    runs = (differ(Wrong, SGLangNumpyEngine, "window", seed, 2, 12, only=only) for seed in range(60))
    case = next(recording.case(parted) for recording, parted in runs if parted is not None)
    assert len(Shrinker(Wrong, SGLangNumpyEngine).shrink(case).operations) <= 12


def test_an_operation_at_which_both_engines_fail_is_no_difference() -> None:
    class Failing(SGLangNumpyEngine):
        def perform(self, operation: structs.Operation) -> Any:
            if isinstance(operation, structs.DecodeOp):
                raise OperationError("token", operation.token, "another")
            return super().perform(operation)

    alike = diff(Failing, Failing, dialect=structs.NAME, features=["full", "window"], seeds=4)
    assert alike.agrees
    assert alike.failed > 0
    assert "expected another" in alike.failure
    parted = diff(Failing, "numpy", dialect=structs.NAME, features=["full"], seeds=4, shrink=False)
    assert not parted.agrees
    assert not parted.failed


@pytest.mark.parametrize("windowed", [False, True])
def test_a_case_with_states_is_made_small(windowed: bool) -> None:
    """A window and states are left out, each by itself."""

    class Wrong(SGLangNumpyEngine):
        def perform(self, operation: structs.Operation) -> Any:
            answer = super().perform(operation)
            return structs.Slots(None) if isinstance(operation, structs.DecodeOp) else answer

    only = Only(
        dialect=structs.NAME, kinds=frozenset(structs.KINDS if windowed else (structs.KINDS[0], structs.STATES))
    )
    runs = (differ(Wrong, SGLangNumpyEngine, "states", seed, 2, 12, only=only) for seed in range(20))
    cases = [recording.case(parted) for recording, parted in runs if parted is not None]
    case = next(case for case in cases if len(case.header.groups) == 2 + windowed)
    small = Shrinker(Wrong, SGLangNumpyEngine).shrink(case)
    assert [group["kind"] for group in small.header.groups] == ["full_attention"]
    assert len(small.operations) == 3


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"policy": "random"}, "policy"),
        ({"num_blocks": [4, 4]}, "num_blocks"),
        ({"groups": [{"kind": "mla", "block_size": 1}]}, "groups"),
        ({"bugs": ["unknown"]}, "bugs"),
        ({"oplog": 1}, "oplog"),
    ],
)
def test_a_cache_that_sglang_does_not_have_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        SGLangNumpyEngine(msgspec.structs.replace(header(), **changes))
    assert error.value.argument == field


def test_operations_that_cannot_come_are_refused_and_change_nothing() -> None:
    engine = SGLangNumpyEngine(header())
    performed(engine, structs.AdmitOp(id="a", tokens=[1, 2]))
    before = engine.perform(structs.StateOp())
    for operation in (
        structs.AdmitOp(id="a", tokens=[1]),
        structs.AdmitOp(id="b", tokens=[]),
        structs.ExtendOp(id="a", length=3),
        structs.DecodeOp(id="a", token=1),
        structs.FinishOp(id="b"),
    ):
        with pytest.raises(OperationError):
            engine.perform(operation)
        with pytest.raises(HKVError):
            _followed(operation)
    assert engine.perform(structs.StateOp()) == before


def _followed(operation: structs.Operation) -> None:
    lifecycle = DIALECT.lifecycle(header())
    first = structs.AdmitOp(id="a", tokens=[1, 2])
    lifecycle.follow(first)
    lifecycle.answered(first, structs.Found(0, 0, []))
    lifecycle.follow(operation)


CHATS = pathlib.Path(__file__).resolve().parents[2] / "examples" / "data" / "chat.jsonl"
SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": "bfloat16"}
CACHE = [FullAttention(**SHAPE), SlidingWindow(**SHAPE, window=64)]


def replayed(blocks: int | Sequence[int], engine: str = "numpy", **options: object) -> ReplayResult:
    given = {"dialect": structs.NAME, "dialect_options": options, "engine": engine}
    return replay_trace(CHATS, CACHE, blocks, limit=15, **given)


def test_a_trace_is_replayed_and_a_window_s_share_decides_hits() -> None:
    much, quarter, half = replayed(100_000), replayed(600, swa_full_tokens_ratio=0.25), replayed(600)
    assert much.totals["preemptions"] == 0
    assert much.totals["hit_tokens"] > max(quarter.totals["hit_tokens"], half.totals["hit_tokens"])
    assert quarter.totals["hit_tokens"] != half.totals["hit_tokens"]
    assert replayed([480, 120]).totals["hit_tokens"] == quarter.totals["hit_tokens"]


def test_a_preempted_request_is_computed_again_in_chunks() -> None:
    given = {"dialect": structs.NAME, "engine": "numpy", "step_tokens": 300}
    options = {"schedule_policy": "replay"}
    found = replay_trace(CHATS, CACHE, 240, limit=15, dialect_options=options, **given)
    assert found.totals["preemptions"] > 0
    fits = (
        found.requests["prompt"] + found.requests["output"] <= 2100
    )  # tokens that the full pool has slots for, roughly
    assert fits.sum() > 10
    assert set(found.requests["outcome"][fits]) == {"finished"}
    assert found.requests["recomputed"][fits].sum() > 0
