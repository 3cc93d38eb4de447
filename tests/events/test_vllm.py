"""vLLM's own publisher is followed: its bytes are understood, and the index is that of its cache."""

from __future__ import annotations

import dataclasses
import socket

import pytest

from hkv.contract.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KeyIndex,
    Place,
    decode_batch,
    encode_batch,
)
from hkv.oracle.events import Gap, Message, Subscription

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # what vLLM and torch say when they are imported
]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_fields_and_their_order() -> None:
    from vllm.distributed import kv_events

    for cls in (BlockStored, BlockRemoved, AllBlocksCleared):
        theirs = getattr(kv_events, cls.__name__)
        assert cls.__struct_fields__ == theirs.__struct_fields__
        assert cls.__struct_defaults__ == theirs.__struct_defaults__
        assert cls.__struct_config__.tag == theirs.__struct_config__.tag
        assert cls.__struct_config__.array_like == theirs.__struct_config__.array_like


def test_bytes_are_equal() -> None:
    import msgspec
    from vllm.distributed import kv_events

    fields = {
        "block_hashes": [b"x" * 32, 5],
        "parent_block_hash": b"y" * 32,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
    }
    fields |= {"lora_id": None, "medium": "GPU", "lora_name": "a", "group_idx": 1, "lookahead_token_ids": [[1], [2]]}
    theirs = kv_events.KVEventBatch(ts=1.5, events=[kv_events.BlockStored(**fields), kv_events.AllBlocksCleared()])
    ours = EventBatch(1.5, (BlockStored(**fields), AllBlocksCleared()))
    assert encode_batch(ours) == msgspec.msgpack.encode(theirs)
    theirs.data_parallel_rank = 2
    assert encode_batch(dataclasses.replace(ours, data_parallel_rank=2)) == msgspec.msgpack.encode(theirs)
    assert decode_batch(msgspec.msgpack.encode(theirs)).events == ours.events


def traffic(feature: str) -> tuple:
    """An engine of vLLM's after traffic in which much was stored, and what it said at the end of each step."""
    from hkv.dialects.vllm.engines.engine import apply
    from hkv.dialects.vllm.engines.installed import InstalledVllmEngine
    from hkv.dialects.vllm.log.structs import EventsOp
    from hkv.dialects.vllm.traffic.live import drive
    from hkv.oracle.record import draw

    for seed in range(50):
        header, choices = draw(feature, seed, 2)
        engine = InstalledVllmEngine(header)
        batches: list[list] = []

        def perform(operation, engine=engine, batches=batches):
            if not isinstance(operation, EventsOp):
                return apply(engine, operation)
            batches.append(engine._manager.take_events())
            return []

        drive(header, choices, perform, 12)
        if sum(len(events) for events in batches) > 20:
            return header, engine, batches
    raise AssertionError("no traffic in which anything is stored")


@pytest.mark.parametrize("feature", ["core", "eagle", "retention", "partial"])
def test_its_publisher_is_followed(feature: str) -> None:
    from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

    header, engine, batches = traffic(feature)
    endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    publisher = ZmqEventPublisher(0, endpoint.replace("127.0.0.1", "*"), replay)
    index, problems, numbers = KeyIndex(), [], []
    try:
        # The first half is published before anybody follows: it has to be asked for.
        half = len(batches) // 2
        for events in batches[:half]:
            publisher.publish(KVEventBatch(ts=0.0, events=events))
        with Subscription(endpoint, replay, seconds=30) as items:
            rest = iter(batches[half:])
            while not items._socket.poll(200):  # a subscription takes a moment to arrive
                publisher.publish(KVEventBatch(ts=0.0, events=next(rest, [])))
            for events in rest:
                publisher.publish(KVEventBatch(ts=0.0, events=events))
            publisher.publish(KVEventBatch(ts=99.0, events=[]))
            for item in items:
                assert not isinstance(item, Gap)
                assert isinstance(item, Message)
                numbers.append(item.seq)
                batch = decode_batch(item.payload)
                problems += index.apply(item.seq, batch)
                if batch.ts == 99.0:
                    break
    finally:
        publisher.shutdown()
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > len(batches)
    cached = engine.state().cached.values()
    for group in range(len(header.groups)):
        keys = {key[:8].hex() for key in index.keys(Place(group, "GPU"))}
        primary = {key for owner, _, key in cached if owner == group}
        assert keys == primary if feature != "partial" else keys >= primary
    assert {problem.name for problem in problems} <= ({"parent unknown"} if feature == "partial" else set())
    assert sum(index.stored.values()) > 5
