"""The wire form of KV events, and the index that is rebuilt from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from hkv.contract.events import (
    DEVICE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    EventError,
    Hash,
    KeyIndex,
    Place,
    decode_batch,
    encode_batch,
)
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.numpy import NumpyEngine, key_text
from hkv.dialects.vllm.log.structs import Answer, CacheEvent, EventsOp, Header, Operation
from hkv.dialects.vllm.traffic.live import drive
from hkv.dialects.vllm.traffic.traffic import FEATURES
from hkv.errors import ConfigError
from hkv.oracle.record import draw
from hkv.spec import spec_from_log


def wire_events(events: Sequence[CacheEvent], header: Header) -> list[Event]:
    """An engine's events as vLLM 0.33 publishes them; of keys, a log has the first 8 bytes, from version 2 on."""
    return [_wire(event, header.groups) for event in events]


def _wire(event: CacheEvent, groups: Sequence[dict[str, Any]]) -> Event:
    if event.type == "cleared":
        return AllBlocksCleared()
    if event.keys is None:
        raise ConfigError("events", event.type, "events with keys: version 2 of the log format")
    hashes: list[Hash] = [bytes.fromhex(key) for key in event.keys]
    if event.type == "removed":
        return BlockRemoved(hashes, DEVICE, group_idx=event.group)
    group = groups[event.group]
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=bytes.fromhex(event.parent) if event.parent else None,
        token_ids=list(event.tokens or ()),
        block_size=event.block_size,
        lora_id=None,
        medium=DEVICE,
        lora_name=None,
        group_idx=event.group,
        kv_cache_spec_kind=kinds.layer(spec_from_log(group)).event_kind,
        kv_cache_spec_sliding_window=group.get("window"),
    )


def stored(
    hashes: list, parent=None, tokens=None, size: int = 2, group: int = 0, kind: str = "full_attention", **more
) -> BlockStored:
    tokens = list(range(size * len(hashes))) if tokens is None else tokens
    return BlockStored(
        hashes, parent, tokens, size, None, "GPU", None, group_idx=group, kv_cache_spec_kind=kind, **more
    )


def removed(*hashes, group: int = 0, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved(list(hashes), medium, group_idx=group)


def test_bytes_on_the_wire() -> None:
    batch = EventBatch(1.5, (stored([b"a" * 32, 7], tokens=[1, 2, 3, 4]), removed(7), AllBlocksCleared()), 3)
    found = msgspec.msgpack.decode(encode_batch(batch))
    assert found == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [b"a" * 32, 7],
                "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            },
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ],
        3,
    ]
    assert decode_batch(encode_batch(batch)) == batch
    assert msgspec.msgpack.decode(encode_batch(EventBatch(0.0, ()))) == [0.0, [], None]


def test_arrays_of_earlier_releases() -> None:
    events = [
        ["BlockStored", [1, 2], None, [5, 6, 7, 8], 2, None, "GPU"],
        ["BlockRemoved", [1], "GPU"],
        ["AllBlocksCleared"],
    ]
    with pytest.raises(EventError, match="lora_name"):
        decode_batch(msgspec.msgpack.encode([0.5, events]))
    events[0].append(None)
    batch = decode_batch(msgspec.msgpack.encode([0.5, events, 0]))
    assert batch.events[0] == BlockStored([1, 2], None, [5, 6, 7, 8], 2, None, "GPU", None)
    assert batch.events[1:] == (BlockRemoved([1], "GPU"), AllBlocksCleared())


@pytest.mark.parametrize(
    "found",
    [
        b"\xc1",
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode(["now", []]),
        msgspec.msgpack.encode([1.0, [17]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}]]),
        msgspec.msgpack.encode([1.0, [["BlockRemoved", "x", "GPU"]]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": []}]]),
    ],
)
def test_what_is_no_batch(found: bytes) -> None:
    with pytest.raises(EventError):
        decode_batch(found)


def problems(*events) -> list[str]:
    index = KeyIndex()
    return [problem.name for seq, event in enumerate(events) for problem in index.apply(seq, EventBatch(0.0, (event,)))]


def test_promises() -> None:
    assert problems(stored([1, 2]), removed(1), removed(2), stored([1])) == []
    assert problems(removed(1)) == ["removed unknown"]
    assert problems(stored([1]), removed(1), removed(1)) == ["removed unknown"]
    assert problems(stored([1]), removed(1, group=1)) == ["removed unknown"]
    assert problems(stored([1]), removed(1, medium="CPU")) == ["removed unknown"]
    assert problems(stored([1]), AllBlocksCleared(), removed(1)) == ["removed unknown"]
    assert problems(stored([1]), stored([1]), removed(1), removed(1)) == []
    assert problems(stored([2], parent=1)) == ["parent unknown"]
    assert problems(stored([2], parent=1, kind="sliding_window")) == []
    assert problems(stored([1]), stored([2], parent=1)) == []
    assert problems(stored([1]), removed(1), stored([2], parent=1)) == []
    assert problems(stored([1], group=1), stored([2], parent=1)) == ["parent unknown"]
    assert problems(stored([1, 2, 3])) == []
    assert problems(stored([1, 2, 3]), stored([3], parent=1, tokens=[4, 5])) == ["two contents"]
    assert problems(stored([1]), stored([1], tokens=[8, 9])) == ["two contents"]
    assert problems(stored([1, 2], tokens=[1, 2, 3])) == ["tokens missing"]
    assert problems(stored([1], tokens=[3], size=0), removed(1)) == ["block size"]


def test_keys_without_tokens_are_keys() -> None:
    """As vLLM 0.33's tier of host memory announces them by default."""
    index = KeyIndex()
    given = [stored([1], tokens=[], size=0), stored([2], tokens=[], size=0), removed(1), stored([2, 3])]
    assert index.apply(0, EventBatch(0.0, tuple(given))) == []
    assert index.keys(Place(0, DEVICE)) == {2, 3}
    assert index.bare == {Place(0, DEVICE): 2}


def test_after_a_gap_absence_proves_nothing() -> None:
    index = KeyIndex()
    index.forget()
    assert index.apply(5, EventBatch(0.0, (removed(1), stored([2], parent=1)))) == []
    assert index.apply(6, EventBatch(0.0, (AllBlocksCleared(), removed(2)))) != []


@pytest.mark.parametrize("feature", FEATURES)
def test_the_index_is_that_of_the_engine(feature: str) -> None:
    entries = removals = 0
    for seed in range(8):
        header, choices = draw(feature, seed, 2)
        engine, index, seen = NumpyEngine(header), KeyIndex(), []

        def perform(operation: Operation, header: Header = header, engine=engine, index=index, seen=seen) -> Answer:
            answer = apply(engine, operation)
            if isinstance(operation, EventsOp):
                assert isinstance(answer, list)
                batch = EventBatch(0.0, tuple(wire_events(answer, header)))  # type: ignore[arg-type]
                seen += [problem.name for problem in index.apply(len(seen), decode_batch(encode_batch(batch)))]
                for group in range(len(header.groups)):
                    known = {bytes.fromhex(key_text(key[1])) for key in keys_of(engine) if key[0] == group}
                    assert index.keys(Place(group, "GPU")) == known
                    counts = index.places.get(Place(group, "GPU"), {})
                    blocks = sum(key[0] == group for key in keys_of(engine))
                    assert sum(entry.count for entry in counts.values()) == blocks
            return answer

        drive(header, choices, perform, 10)
        entries += sum(index.stored.values())
        removals += sum(index.removed.values())
        # A block that is known by a part of it follows a hash block that never was a block of its own.
        assert set(seen) <= {"parent unknown"}
        assert not seen or any(group["block_size"] > header.hash_block_size for group in header.groups)
    assert entries > 60
    assert removals > 0


def keys_of(engine: NumpyEngine) -> list:
    pool = engine.manager.pool
    return [key for block in range(pool.num_blocks) for key in pool.keys_of(block)]
