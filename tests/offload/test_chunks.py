"""The tier of replays against the reference's pool: equal answers, and equal orders of eviction."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hkv.dialects.vllm.offload.chunks import Chunks
from reference.dialects.vllm.offload.pool import ChunkPool, Context


class Both:
    """A fast pool and the reference's, asked the same; answers that differ fail."""

    def __init__(self, *arguments: Any) -> None:
        self.pools: tuple[Any, Any] = (Chunks(*arguments), ChunkPool(*arguments))

    def __getattr__(self, name: str) -> Any:
        def asked(*arguments: Any, requests: tuple[Context, Context] | None = None) -> Any:
            each = requests or (None, None)
            mine, other = (
                getattr(pool, name)(*arguments, *([] if request is None else [request]))
                for pool, request in zip(self.pools, each, strict=True)
            )
            assert mine == other, (name, arguments)
            return mine

        return asked


def played(seed: int, policy: str) -> Chunks:
    """Random stores and loads of requests that share prefixes, transfers that end late, and requests that end."""
    draw = random.Random(seed)
    both = Both(draw.choice((3, 8, 20)), policy, draw.choice((0, 0, 2, 3)), draw.choice((5, 64_000)))
    live: list[tuple[list[tuple[int, int]], tuple[Context, Context]]] = []
    writing: list[list[tuple[int, int]]] = []
    reading: list[list[tuple[int, int]]] = []
    for _ in range(draw.choice((60, 200))):
        if len(live) < 3:
            branch, length = draw.randrange(4), draw.randrange(1, 9)
            keys = [(100 * (branch if at > 2 else 0) + at, group) for group in range(2) for at in range(length)]
            where = {key: key[0] % 100 + 1 for key in keys}
            live.append((keys, (Context(dict(where)), Context(dict(where)))))
        keys, requests = draw.choice(live)
        match draw.randrange(8):
            case 7:
                both.use(keys[: draw.randrange(1, 5)], requests=requests)
            case 0 | 1 | 2:
                first = draw.randrange(len(keys))
                stored = both.store(keys[first : first + draw.randrange(1, 9)], requests=requests)
                writing += [stored.keys] if stored is not None and stored.keys else []
            case 3 if writing:
                both.complete_store(writing.pop(draw.randrange(len(writing))))
            case 4:
                ready = [key for key in keys if both.lookup(key)]
                if ready:
                    both.load(ready, requests=requests)
                    reading.append(ready)
            case 5 if reading:
                both.complete_load(reading.pop(draw.randrange(len(reading))))
            case 6:
                both.end(requests=requests)
                live = [each for each in live if each[1] is not requests]
    for each in writing:
        both.complete_store(each)
    for each in reading:
        both.complete_load(each)
    fast, reference = both.pools
    assert {key: chunk.id for key, chunk in fast.chunks.items()} == {
        key: chunk.id for key in fast.chunks if (chunk := reference.policy.get(key)) is not None
    }
    last = tuple(Context({(9_000 + at, 0): at + 1 for at in range(fast.capacity)}) for _ in range(2))
    for at in range(fast.capacity):  # what is left leaves in the same order
        for _ in range(3):
            both.store([(9_000 + at, 0)], requests=last)
    return fast


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_tier_of_replays_is_the_reference(policy: str) -> None:
    found = [played(seed, policy) for seed in range(300)]
    assert sum(each.counts.evicted for each in found) > 1_000
    assert sum(each.counts.refused for each in found) > 100
    assert sum(each.counts.read for each in found) > 500


def test_a_pool_counts_what_it_did() -> None:
    chunks, request = Chunks(2, "lru", 0), Context({(at, 0): at + 1 for at in range(4)})
    assert chunks.store([(0, 0), (1, 0), (2, 0)], request) is None
    assert chunks.counts.refused == 1
    for at in range(3):
        stored = chunks.store([(at, 0)], request)
        assert stored is not None
        chunks.complete_store(stored.keys)
    assert set(chunks.chunks) == {(0, 0), (2, 0)}, "of one request the last position leaves first"
    chunks.load([(0, 0)], request)
    assert (chunks.counts.stored, chunks.counts.read, chunks.counts.loaded, chunks.counts.peak) == (3, 1, 1, 2)
    seldom = Chunks(2, "lru", 2)
    assert seldom.store([(0, 0)], request) == ([], [], [])
