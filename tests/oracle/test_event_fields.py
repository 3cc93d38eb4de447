"""Fields of events that version 3 adds, in both engines."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from hkv.contract.registry import dialect_of
from hkv.dialects.vllm.engines.jax import JaxEngine
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.renaming import compare
from hkv.dialects.vllm.log.structs import EVENT_FIELDS, CacheEvent, ExtraKeys
from tests.oracle.test_live_logs import allocate, header, perform

VLLM = dialect_of("vllm-0.33")
BOTH = pytest.mark.parametrize("make", [NumpyEngine, JaxEngine])
WINDOW = {"kind": "sliding_window", "block_size": 2, "window": 3}


def stored(make: Any, arrival: oplog.RequestOp, **changes: Any) -> list[CacheEvent]:
    """Events of a request whose whole prompt is computed."""
    engine = make(header(**changes))
    perform(engine, arrival, allocate(arrival.id, len(arrival.tokens)))
    return engine.events()


@BOTH
def test_an_event_names_its_group_and_where_the_blocks_lie(make: Any) -> None:
    groups = [{"kind": "full_attention", "block_size": 2}, WINDOW]
    found = stored(make, oplog.RequestOp(id="a", tokens=[1, 2, 3, 4]), groups=groups)
    assert [(e.medium, e.spec_kind, e.window) for e in found] == [
        ("GPU", "full_attention", 0),
        ("GPU", "sliding_window", 3),
    ]
    assert [(e.lora_name, e.session, e.extra_keys, e.lookahead) for e in found] == [("", "", [None, None], [])] * 2


@BOTH
def test_extra_keys_are_those_of_each_block(make: Any) -> None:
    extra = ExtraKeys(lora=["a", "/a"], multimodal=[("image", 1, 2)], salt="s")
    (event,) = stored(make, oplog.RequestOp(id="a", tokens=[1, 2, 3, 4, 5, 6], extra=extra, session="x"))
    assert (event.lora_name, event.session) == ("a", "x")
    assert msgspec.to_builtins(event.extra_keys) == [["a", ("image", 1), "s"], ["a", ("image", -1)], ["a"]]
    (event,) = stored(make, oplog.RequestOp(id="a", tokens=[1, 2], extra=ExtraKeys(embeds=["00", "ff"])))
    assert event.extra_keys == [[hashlib.sha256(b"\x00\xff").hexdigest()]]


@BOTH
def test_tokens_after_a_block_that_its_key_covers(make: Any) -> None:
    (event,) = stored(make, oplog.RequestOp(id="a", tokens=[1, 2, 3, 4, 5]), hash_lookahead=1)
    assert event.lookahead == [[3], [5]]


def test_a_removed_event_names_the_medium() -> None:
    engine = NumpyEngine(header())
    perform(engine, oplog.RequestOp(id="a", tokens=[1, 2]), allocate("a", 2), oplog.EvictOp(blocks=[1]))
    assert [event.medium for event in engine.events()] == ["GPU", "GPU"]


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
