"""Fields of events that version 3 adds, in both engines."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from hkv.contract.invariant import InvariantError
from hkv.contract.registry import dialect_of
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.invariants import INVARIANTS, Watch
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.renaming import compare
from hkv.dialects.vllm.log.structs import EVENT_FIELDS, FULL, CacheEvent, ExtraKeys
from hkv.errors import EngineFailure
from tests.oracle.test_live_logs import BOTH, allocate, header, perform

VLLM = dialect_of("vllm-0.33")
WINDOW = {"kind": "sliding_window", "block_size": 2, "window": 3}


def stored(make: Any, arrival: oplog.RequestOp, **changes: Any) -> list[CacheEvent]:
    """Events of a request whose whole prompt is computed."""
    engine = make(header(**changes))
    perform(engine, arrival, allocate(arrival.id, len(arrival.tokens)))
    return engine.events()


@BOTH
def test_extra_keys_are_those_of_each_block(make: Any) -> None:
    extra = ExtraKeys(lora=["a", "/a"], multimodal=[("image", 1, 2)], salt="s")
    (event,) = stored(make, oplog.RequestOp(id="a", tokens=[1, 2, 3, 4, 5, 6], extra=extra, session="x"))
    assert (event.lora_name, event.session) == ("a", "x")
    assert msgspec.to_builtins(event.extra_keys) == [["a", ("image", 1), "s"], ["a", ("image", -1)], ["a"]]
    (event,) = stored(make, oplog.RequestOp(id="a", tokens=[1, 2], extra=ExtraKeys(embeds=["00", "ff"])))
    assert event.extra_keys == [[hashlib.sha256(b"\x00\xff").hexdigest()]]


@pytest.mark.parametrize("name", EVENT_FIELDS)
def test_a_field_is_compared_where_it_is_wanted(name: str) -> None:
    (event,) = stored(NumpyEngine, oplog.RequestOp(id="a", tokens=[1, 2]))
    other = {"keys": ["00"], "extra_keys": [["b"]], "window": 9, "lookahead": [[1]]}.get(name, "other")
    changed = msgspec.structs.replace(event, **{name: other})
    assert compare([event], [changed]) is not None
    assert compare([msgspec.structs.replace(event, **{name: None})], [changed]) is None


def test_a_removed_medium_is_compared_where_it_is_wanted() -> None:
    removed = CacheEvent(type="removed", group=0, num_blocks=1, keys=["00"], medium="GPU")
    elsewhere = msgspec.structs.replace(removed, medium="CPU")
    assert compare([removed], [elsewhere]) is not None
    assert compare([msgspec.structs.replace(removed, medium=None)], [elsewhere]) is None


# Hits published as events, for requests of report mode `full`, in both engines.

BUG = "hit-reported-by-columns"
FULL_GROUP = {"kind": "full_attention", "block_size": 4}
STATES = {"kind": "mamba", "block_size": 4, "num_speculative_blocks": 0}
PARTS = {"groups": [FULL_GROUP, STATES], "hash_block_size": 2, "scheduler_block_size": 4, "partial_hits": True}


def reported(make: Any, tokens: list[int], **changes: Any) -> list[CacheEvent]:
    """Events of the lookup of a request whose tokens, but for the last, another has registered."""
    engine = make(header(num_blocks=20, **changes))
    perform(engine, oplog.RequestOp(id="a", tokens=[*tokens, 9]), allocate("a", len(tokens)), oplog.FreeOp(id="a"))
    perform(engine, oplog.StepOp())
    engine.events()
    perform(engine, oplog.RequestOp(id="b", tokens=[*tokens, 9], report=FULL), oplog.LookupOp(id="b"))
    return engine.events()


@BOTH
def test_a_hit_is_said_of_each_group_that_has_blocks_of_it(make: Any) -> None:
    window = {"kind": "sliding_window", "block_size": 2, "window": 3}
    found = reported(make, [1, 2, 3, 4, 5, 6], groups=[{"kind": "full_attention", "block_size": 2}, window])
    assert [(event.group, event.num_blocks, event.parent, event.tokens) for event in found] == [
        (0, 3, "", [1, 2, 3, 4, 5, 6]),
        (1, 1, "", [1, 2, 3, 4, 5, 6]),
    ]
    assert found[0].keys is not None
    assert found[1].keys == found[0].keys[2:]


@BOTH
def test_a_block_that_the_hit_ends_inside_is_said_by_its_last_hash_block(make: Any) -> None:
    found = reported(make, [1, 2, 3, 4, 5, 6], **PARTS)
    assert [(event.group, event.num_blocks, event.block_size, event.tokens) for event in found] == [
        (0, 1, 4, [1, 2, 3, 4]),
        (0, 1, 2, [5, 6]),
        (1, 1, 2, [5, 6]),
    ]
    assert found[1].parent == (found[0].keys or [])[0]


@BOTH
def test_nothing_is_said_without_a_hit_or_by_requests_that_do_not_report(make: Any) -> None:
    engine = make(header())
    perform(engine, oplog.RequestOp(id="a", tokens=[1, 2, 3], report=FULL), oplog.LookupOp(id="a"))
    assert engine.events() == []
    perform(engine, allocate("a", 3), oplog.RequestOp(id="b", tokens=[1, 2, 3]))
    engine.events()
    perform(engine, oplog.LookupOp(id="b"))
    assert engine.events() == []


@BOTH
def test_vllm_says_whole_blocks_and_fails_where_there_is_no_key(make: Any) -> None:
    with pytest.raises(EngineFailure, match="keys"):
        reported(make, [1, 2, 3, 4, 5, 6], **PARTS, bugs=[BUG])


@BOTH
def test_vllm_says_blocks_of_one_rank(make: Any) -> None:
    group = {"kind": "full_attention", "block_size": 2, "cp_sharded": True}
    changes: dict[str, Any] = {"groups": [group], "context_parallel": 2, "scheduler_block_size": 4}
    with pytest.raises(EngineFailure, match="block_size"):
        reported(make, [1, 2, 3, 4], hash_block_size=4, **changes, bugs=[BUG])
    changes["groups"] = [group, {"kind": "full_attention", "block_size": 2}]
    found = reported(make, [1, 2, 3, 4], hash_block_size=2, **changes, bugs=[BUG])
    assert [(event.num_blocks, event.block_size, event.tokens) for event in found] == [
        (1, 2, [1, 2]),
        (2, 2, [1, 2, 3, 4]),
    ]


class Silent(NumpyEngine):
    """An engine that publishes no hits."""

    def request(self, *arguments: Any, report: str = "", **named: Any) -> None:
        super().request(*arguments, **named)


def test_a_hit_that_is_not_published_breaks_the_event_index() -> None:
    config = header()
    watch = Watch(Silent(config), config, [INVARIANTS["event index"]])
    for operation in (
        oplog.RequestOp(id="a", tokens=[1, 2]),
        allocate("a", 2),
        oplog.EventsOp(),
        oplog.RequestOp(id="b", tokens=[1, 2, 3], report=FULL),
        oplog.LookupOp(id="b"),
    ):
        watch.perform(operation)
    with pytest.raises(InvariantError, match=r"hits in groups \[0\] were to be published"):
        watch.perform(oplog.EventsOp())
