"""Version 3 of vLLM's log: what a live scheduler does, in both engines, under every invariant."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import pytest

from hkv.contract.log import Log, later_fields
from hkv.contract.registry import dialect_of
from hkv.dialects.vllm.engines.jax import JaxEngine
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.lifecycle import Lifecycle
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import ExtraKeys, Header
from hkv.dialects.vllm.traffic.headers import FEATURES
from hkv.errors import ConfigError, OperationError
from hkv.oracle.check import check_log
from hkv.oracle.engine import attempt
from hkv.oracle.log_file import log_bytes, parse_log
from hkv.oracle.record import Only, differ, draw, record
from hkv.testing.planting import Patch, applied
from tests.oracle import sample

VLLM = dialect_of("vllm-0.33")


def header(**changes: Any) -> Header:
    return sample.header(**({"oplog": 3, "num_blocks": 10} | changes))


def allocate(id: str, new: int, hit: int = 0, **fields: Any) -> oplog.AllocateOp:
    plain: dict[str, Any] = {"lookahead": 0, "external": 0, "delay": False, "must_fit": False, "reserved": 0}
    return oplog.AllocateOp(id=id, new=new, hit=hit, **{**plain, "in_flight": 0, **fields})


def perform(engine: Any, *operations: Any) -> list[Any]:
    return [VLLM.perform(engine, operation) for operation in operations]


BOTH = pytest.mark.parametrize("make", [NumpyEngine, JaxEngine])


def test_traffic_draws_every_operation() -> None:
    seen: collections.Counter[str] = collections.Counter()
    fields: set[str] = set()
    later = {name for each in oplog.OPERATIONS for name, since in later_fields(each) if since == 3}
    for seed in range(12):
        for feature in FEATURES:
            for operation in record(NumpyEngine, feature, seed, 3, 8).operations:
                seen[type(operation).__name__] += 1
                fields |= {name for name in later if getattr(operation, name, None)}
    encoded = record(NumpyEngine, "core", 0, 3, 8, Only(frozenset({"cross_attention", "full_attention"}))).operations
    fields |= {"encoder" for operation in encoded if getattr(operation, "encoder", None)}
    wanted = {operation.__name__ for operation in oplog.OPERATIONS if operation.since == 3} - {"EndOp", "HoldOp"}
    assert wanted <= seen.keys()
    assert fields == later


@pytest.mark.parametrize("feature", FEATURES)
def test_every_invariant_holds(feature: str) -> None:
    for seed in range(12):
        drawn, choices = draw(feature, seed, 3, Only())
        if not drawn.bugs:
            watch = VLLM.watch(NumpyEngine(drawn), drawn)
            VLLM.drive(drawn, choices, watch.perform, 12)


@pytest.mark.parametrize("feature", FEATURES)
def test_jax_agrees(feature: str) -> None:
    _, parted = differ(JaxEngine, NumpyEngine, feature, 5, 3, 6)
    assert parted is None, parted


@BOTH
def test_more_blocks_are_released_than_a_row_has(make: Any) -> None:
    """A compiled row has 512 entries; the rows of all groups of a popped request may be more."""
    engine = make(header(groups=[{"kind": "full_attention", "block_size": 2}] * 4, num_blocks=130, caching=False))
    perform(engine, oplog.RequestOp(id="a", tokens=[1] * 64), allocate("a", 64), oplog.PopOp(id="a"))
    blocks = list(range(128, 0, -1))
    perform(engine, oplog.HoldOp(blocks=5 * blocks), oplog.ReleaseOp(blocks=5 * blocks))
    assert engine.state().refs == dict.fromkeys(map(str, range(1, 129)), 1)
    perform(engine, oplog.ReleaseOp(blocks=blocks))
    assert engine.state().free == [*blocks, 129]


@BOTH
def test_no_more_references_are_released_than_there_are(make: Any) -> None:
    engine = make(header())
    failure = attempt(VLLM, engine, oplog.ReleaseOp(blocks=[3]))
    assert "blocks" in failure.message or "OUT_OF_RANGE" in failure.message


@BOTH
def test_computed_tokens_go_back_and_beyond_those_that_are_there(make: Any) -> None:
    engine = make(header(groups=[{"kind": "sliding_window", "block_size": 2, "window": 3}]))
    perform(engine, oplog.RequestOp(id="a", tokens=[1, 2, 3, 4]), allocate("a", 4))
    perform(
        engine, oplog.ComputedOp(id="a", tokens=4), allocate("a", 3, in_flight=4), oplog.ComputedOp(id="a", tokens=7)
    )
    assert engine.state().rows == {"a": [[1, 2, 3, 4]]}
    perform(engine, oplog.ComputedOp(id="a", tokens=5), oplog.AppendOp(id="a", tokens=[5, 6]))
    perform(engine, allocate("a", 1, in_flight=0))
    assert engine.state().rows == {"a": [[0, 2, 3, 4]]}
    perform(engine, oplog.RetireOp(id="a", tokens=6))
    assert engine.state().rows == {"a": [[0, 0, 3, 4]]}


@BOTH
def test_a_hit_is_cut_by_a_limit_or_given(make: Any) -> None:
    engine = make(header())
    tokens = [1, 2, 3, 4, 5, 6]
    perform(engine, oplog.RequestOp(id="a", tokens=tokens), allocate("a", 6), oplog.FreeOp(id="a"))
    perform(engine, oplog.RequestOp(id="b", tokens=tokens))
    assert VLLM.perform(engine, oplog.LookupOp(id="b", limit=3)) == oplog.Hit(2, [[1]], 0)
    assert VLLM.perform(engine, oplog.LookupOp(id="b")) == oplog.Hit(4, [[1, 2]], 0)
    assert VLLM.perform(engine, allocate("b", 4, hit=2, rows=[[1]])).blocks == [[4, 5]]
    assert engine.state().rows == {"b": [[1, 4, 5]]}


@BOTH
def test_the_watermark_is_for_requests_that_wait_even_those_that_hold_blocks(make: Any) -> None:
    engine = make(header(num_blocks=5, watermark=0.5))
    perform(engine, oplog.RequestOp(id="a", tokens=[1, 2, 3, 4, 5, 6]), allocate("a", 2))
    perform(engine, oplog.ComputedOp(id="a", tokens=2))
    assert VLLM.perform(engine, allocate("a", 4, waiting=True, scheduled=True)).blocks is None
    assert VLLM.perform(engine, allocate("a", 4, waiting=True, scheduled=False)).blocks == [[2, 3]]


@BOTH
def test_keys_are_given(make: Any) -> None:
    engine = make(header(hash="given"))
    perform(engine, oplog.RequestOp(id="a", tokens=[-1, -2], keys=["aa" * 16]), allocate("a", 2), oplog.FreeOp(id="a"))
    assert engine.state().cached == {"1": (0, 2, "aa" * 8)}
    perform(engine, oplog.RequestOp(id="b", tokens=[7, 7], keys=["aa" * 16]), oplog.AppendOp(id="b", tokens=[7]))
    assert VLLM.perform(engine, oplog.LookupOp(id="b")).hit == 2
    with pytest.raises(OperationError, match="hash is not known"):
        perform(engine, oplog.RequestOp(id="c", tokens=[1, 2]))


PLANTED = [
    ("reference.dialects.vllm.live:release", "manager.pool.release(blocks)", "manager.pool.release(blocks[::-1])"),
    ("reference.dialects.vllm.live:retire", "kind.retire(id, processed)", "kind.retire(id, processed + 1)"),
    ("reference.dialects.vllm.live:pop", "kind.forget(id)", "kind.free(id)"),
    ("reference.dialects.vllm.live:computed", "num_computed = tokens", "num_computed = tokens + 1"),
    ("reference.dialects.vllm.coordinator:longest_hit", "else limit", "else request.num_tokens - 1"),
    ("reference.dialects.vllm.manager:Manager._watermark", "if waiting is None else waiting", ""),
]
"""Defects of the operations of version 3: where they are, what is there, what is put in its place."""


@pytest.fixture(scope="module")
def recordings() -> list[Log]:
    found = []
    for seed, feature in itertools.product(range(8), FEATURES):
        drawn = record(NumpyEngine, feature, seed, 3, 16)
        lines = log_bytes(drawn.header, drawn.operations, drawn.answers)
        found.append(parse_log(lines, f"{drawn.header.feature}-{seed}"))
    return found


@pytest.mark.parametrize(("target", "old", "new"), PLANTED)
def test_a_planted_defect_is_seen(target: str, old: str, new: str, recordings: list[Log]) -> None:
    with applied(Patch(target, old, new)):
        assert any(check_log(log, NumpyEngine) is not None for log in recordings)


# Blocks that are to be zeroed, in both engines.

FULL = {"kind": "full_attention", "block_size": 2}
STATES = {"kind": "mamba", "block_size": 2, "num_speculative_blocks": 0}
WINDOW = {"kind": "sliding_window", "block_size": 2, "window": 3}


@BOTH
def test_loaded_blocks_are_listed_unless_a_load_writes_them(make: Any) -> None:
    for loaded, external in (([], [1, 2]), ([0], [])):
        engine = make(header(groups=[FULL, WINDOW], zeroing=True, num_blocks=20))
        perform(engine, oplog.RequestOp(id="a", tokens=[1, 2, 3, 4, 5]))
        perform(engine, allocate("a", 1, external=4, delay=True, loaded=loaded))
        rows = engine.state().rows["a"]
        assert rows == [[1, 2, 4], [0, 3, 5]]
        assert engine.zeros() == [*external, 4, 3, 5]
        perform(engine, oplog.UnwrittenOp(id="a", tokens=2))
        assert engine.zeros() == [2, 4, 3, 5]


@BOTH
def test_what_does_not_apply_is_refused(make: Any) -> None:
    engine = make(header())
    with pytest.raises(OperationError, match="zeroing = False"):
        engine.zeros()
    engine = make(header(zeroing=True))
    perform(engine, oplog.RequestOp(id="a", tokens=[1, 2, 3]))
    with pytest.raises(OperationError, match="a running request"):
        engine.unwritten("a", 0)
    perform(engine, allocate("a", 3))
    with pytest.raises(OperationError, match="tokens = 1: expected a multiple of group 0's block of 2"):
        engine.unwritten("a", 1)


@pytest.mark.parametrize("operation", [oplog.ZerosOp(), oplog.UnwrittenOp(id="a", tokens=0)])
def test_a_header_says_that_blocks_are_zeroed(operation: oplog.Operation) -> None:
    with pytest.raises(OperationError, match="zeroing = False"):
        Lifecycle(header()).follow(operation)


def test_groups_that_a_load_writes_exist() -> None:
    arrived = oplog.RequestOp(id="a", tokens=[1, 2, 3])
    for changes, field in (({}, "zeroing = False"), ({"zeroing": True}, "loaded = 1")):
        lifecycle = Lifecycle(header(**changes))
        lifecycle.follow(arrived)
        with pytest.raises(OperationError, match=field):
            lifecycle.follow(allocate("a", 0, external=2, loaded=[1]))


def test_an_earlier_version_zeroes_nothing() -> None:
    with pytest.raises(ConfigError, match="zeroing = True: expected version 3"):
        NumpyEngine(header(oplog=2, zeroing=True))


# Streaming sessions, whose last sampled token is taken away when they go on, in both engines.


def resume(keep: int, *tokens: int, **fields: Any) -> oplog.ResumeOp:
    return oplog.ResumeOp(id="a", keep=keep, tokens=list(tokens), prompt=keep + len(tokens), **fields)


def session(make: Any, *more: Any, **changes: Any) -> Any:
    """An engine in which a request of five tokens sampled a sixth, and then did more."""
    engine = make(header(**changes))
    perform(engine, oplog.RequestOp(id="a", tokens=[1, 2, 3, 4, 5]), allocate("a", 5))
    perform(engine, oplog.ComputedOp(id="a", tokens=5), oplog.AppendOp(id="a", tokens=[6]), *more)
    return engine


def keys_of(make: Any, tokens: list[int], **changes: Any) -> set[str]:
    """Keys of what a request of these tokens registers."""
    engine = make(header(**changes))
    perform(engine, oplog.RequestOp(id="a", tokens=tokens), allocate("a", len(tokens)))
    return {key for _, _, key in engine.state().cached.values()}


@BOTH
def test_blocks_get_the_keys_of_the_tokens_that_follow(make: Any) -> None:
    engine = session(make, resume(5, 7, 8, 9), allocate("a", 3))
    assert engine.state().rows == {"a": [[1, 2, 3, 4]]}
    assert {key for _, _, key in engine.state().cached.values()} == keys_of(make, [1, 2, 3, 4, 5, 7, 8, 9])


@BOTH
def test_keys_are_given_from_the_block_that_is_cut(make: Any) -> None:
    engine = make(header(hash="given"))
    given = oplog.RequestOp(id="a", tokens=[1, 2, 3, 4], keys=["aa" * 8, "bb" * 8])
    perform(engine, given, resume(3, 5, keys=["cc" * 8]), allocate("a", 4))
    assert {key for _, _, key in engine.state().cached.values()} == {"aa" * 8, "cc" * 8}


@BOTH
def test_items_come_with_the_tokens(make: Any) -> None:
    extra = ExtraKeys(multimodal=[("image", 6, 2)])
    engine = session(make, resume(5, 7, 8, 9, extra=extra), allocate("a", 3))
    plain = session(make, resume(5, 7, 8, 9), allocate("a", 3))
    cached, others = ({tokens: key for _, tokens, key in each.state().cached.values()} for each in (engine, plain))
    assert [cached[tokens] == others[tokens] for tokens in (2, 4, 6, 8)] == [True, True, True, False]


@BOTH
def test_the_prompt_ends_where_the_session_says(make: Any) -> None:
    """Only the last boundary of a prompt is kept: that of the session, not of the request that came."""
    window = {"kind": "sliding_window", "block_size": 2, "window": 2}
    changes = {"groups": [window], "retention_interval": 0}
    kept = []
    for prompt in (9, 5):
        go_on = oplog.ResumeOp(id="a", keep=5, tokens=[7, 8, 9, 10], prompt=prompt)
        engine = session(make, go_on, allocate("a", 4), **changes)
        kept.append(sorted(tokens for _, tokens, _ in engine.state().cached.values()))
    assert kept == [[4, 8], [4]]


@BOTH
@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (resume(7), "keep = 7: expected at most the request's 6 tokens"),
        (oplog.ResumeOp(id="a", keep=5, tokens=[7], prompt=7), "prompt = 7: expected 1 to 6 tokens"),
        (resume(5, *range(200)), "tokens = 205: expected at most max_model_len 64 in all"),
        (resume(5, 7, keys=["00"]), "keys = .*expected none"),
    ],
)
def test_a_session_that_cannot_go_on_is_refused(make: Any, operation: oplog.ResumeOp, expected: str) -> None:
    with pytest.raises(OperationError, match=expected):
        perform(session(make), operation)
    if operation.keys is None:
        lifecycle = Lifecycle(header())
        lifecycle.follow(oplog.RequestOp(id="a", tokens=[1, 2, 3, 4, 5, 6]))
        with pytest.raises(OperationError, match=expected):
            lifecycle.follow(operation)


def test_keys_of_tokens_that_are_gone_would_be_seen() -> None:
    whole = "del self.keys[tokens // hash_block_size :]"
    with applied(Patch("hkv.keys.chained:KeyChain.cut", whole, "del self.keys[tokens // hash_block_size + 1 :]")):
        engine = session(NumpyEngine, resume(5, 7, 8, 9), allocate("a", 3))
        found = {key for _, _, key in engine.state().cached.values()}
    assert found != keys_of(NumpyEngine, [1, 2, 3, 4, 5, 7, 8, 9])
