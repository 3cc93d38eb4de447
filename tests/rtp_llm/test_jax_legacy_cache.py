"""RTP-LLM's older cache compiled, beside the reference."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.dialects.rtp_llm.rules import legacy_cache
from hkv.errors import ConfigError
from reference.dialects.rtp_llm.legacy_cache import BlockCache

KEYS, GROUPS, ROOM = 128, 3, 64


class Compiled:
    """The compiled cache with the reference's methods."""

    def __init__(self) -> None:
        self.state = legacy_cache.init(KEYS, GROUPS)

    def put(self, key: int, group: int, block: int, resident: bool = False) -> bool:
        self.state, entered = legacy_cache.put(self.state, key, group, block, resident)
        return bool(entered)

    def match(self, key: int, group: int = 0) -> int:
        self.state, block = legacy_cache.match(self.state, key, group)
        return int(block)

    def pop(self, count: int) -> list[int]:
        self.state, blocks, taken = legacy_cache.pop(self.state, count, room=ROOM)
        return blocks[: int(taken)].tolist()

    def select_and_evict(self, least: int) -> dict[int, list[int]]:
        self.state, pairs, taken = legacy_cache.select_and_evict(self.state, least, room=ROOM)
        evicted: dict[int, list[int]] = {}
        for key, block in pairs[: int(taken)].reshape(-1, 2).tolist():
            evicted.setdefault(key, []).append(block)
        return evicted


def both(rng: random.Random, steps: int) -> Counter[str]:
    """Random operations on both forms; a key's blocks are compared as a set: they leave together."""
    compiled, reference = Compiled(), BlockCache()
    seen: Counter[str] = Counter()
    for block in range(1, steps + 1):
        key, group = rng.randrange(8), rng.randrange(GROUPS)
        match rng.choice(("put", "put", "put", "match", "pop", "evict")):
            case "put":
                resident = rng.random() < 0.1
                entered = compiled.put(key, group, block, resident)
                assert entered == reference.put(key, group, block, resident)
                seen[f"put {entered}"] += 1
            case "match":
                found = compiled.match(key, group)
                assert found == reference.match(key, group)
                seen[f"match {found > 0}"] += 1
            case "pop":
                count = rng.randint(0, 3)
                taken = compiled.pop(count)
                assert taken == reference.pop(count)
                seen["pop"] += len(taken)
            case "evict":
                least = rng.randint(0, 4)
                mine, theirs = compiled.select_and_evict(least), reference.select_and_evict(least)
                assert list(mine) == list(theirs), "keys in order of use"
                assert {key: set(blocks) for key, blocks in mine.items()} == {
                    key: set(blocks) for key, blocks in theirs.items()
                }
                seen["evict"] += len(mine)
                seen["evict several"] += any(len(blocks) > 1 for blocks in mine.values())
    assert compiled.pop(ROOM) == reference.pop(ROOM)
    assert all(compiled.match(key, group) == reference.match(key, group) for key in range(8) for group in range(GROUPS))
    return seen


@settings(max_examples=30)
@given(rng=st.randoms(use_true_random=False))
def test_the_forms_agree(rng: random.Random) -> None:
    both(rng, 30)


def test_the_traffic_meets_every_answer() -> None:
    seen = both(random.Random(1), 400)
    names = ("put True", "put False", "match True", "match False", "pop", "evict", "evict several")
    assert all(seen[name] for name in names), seen


@pytest.mark.parametrize(("keys", "groups"), [(0, 1), (1, 0), (1 << 28, 4)])
def test_impossible_sizes_are_refused(keys: int, groups: int) -> None:
    with pytest.raises(ConfigError, match=r"keys|groups"):
        legacy_cache.init(keys, groups)
