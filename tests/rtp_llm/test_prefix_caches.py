"""RTP-LLM's conformance vectors for its caches: the text's, key by key, and an older one."""

from __future__ import annotations

import pytest

from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.plain import cached, empty
from hkv.model.group_policy import EvictPolicy
from hkv.model.topology import Topology
from reference.dialects.rtp_llm.cache import match, put
from reference.dialects.rtp_llm.evicting import evict
from reference.dialects.rtp_llm.legacy_cache import BlockCache
from reference.dialects.rtp_llm.pools import refer, release, smallest
from reference.dialects.rtp_llm.records import Key, Role
from tests.rtp_llm.build import FULL, group

N = -1


class Cache:
    """A cache whose blocks nobody else holds; what leaves keeps its references."""

    def __init__(self, groups: int = 1, tree: bool = True, independent: frozenset[int] = frozenset()) -> None:
        policies = [EvictPolicy.INDEPENDENT if n in independent else EvictPolicy.CHAIN for n in range(groups)]
        made = tuple(group(f"g{n}", FULL, 1, evict_policy=policy) for n, policy in enumerate(policies))
        topology = Topology(made, pools="independent")
        config = RtpConfig(
            topology=topology, num_blocks=(100,) * groups, prefix_tree=tree, independent_eviction=bool(independent)
        )
        self.cache = empty(config, keys=200, slots=1, batch=1, row=1, told=400)

    def key(self, key: int) -> Key:
        return self.cache.keys[key + 1]

    def put(
        self,
        key: int,
        parent: int | None = None,
        groups: tuple[int, ...] = (0,),
        *,
        canonical: bool = False,
        resident: bool = False,
    ) -> None:
        c, row = self.cache, self.cache.targets
        for n, ids in enumerate(row.groups):
            pool = c.groups[n + 1].pool
            ids.length, ids.blocks[0] = 1, smallest(pool) if n in groups else 0
            refer(c, pool, ids.blocks[0], Role.REQUEST)
        above = None if parent is None else self.key(parent)
        put(c, row, 0, 0, len(row.groups), self.key(key), above, canonical, resident)  # type: ignore[arg-type]
        for n, ids in enumerate(row.groups):
            release(c, c.groups[n + 1].pool, ids.blocks[0], Role.REQUEST)

    def match(self, key: int, group: int = 0) -> int:
        return match(self.cache, self.key(key), self.cache.groups[group + 1]) or N

    @property
    def keys(self) -> list[int]:
        """Cached keys, least recently used first."""
        return [self.cache.keys.index(key) - 1 for key in cached(self.cache)]

    def evict(self, least: int, group: int | None = None) -> list[int]:
        """Keys that lose blocks, in order."""
        c = self.cache
        c.said = 0
        evict(c, None if group is None else c.groups[group + 1], least, 1)  # type: ignore[arg-type]
        return [c.keys.index(key) - 1 for key in c.told_keys[: c.said : c.config.groups]]

    def evict_group(self, group: int, least: int) -> list[int]:
        return self.evict(least, group)


def test_version_begins_below_zero() -> None:
    cache = Cache()
    assert cache.cache.version == -1
    cache.put(1)
    assert cache.cache.version == 0


def test_leaves_before_what_they_stand_on() -> None:
    cache = Cache()
    cache.put(2, parent=1)
    cache.put(3, parent=1)
    cache.put(1)
    assert cache.evict(1) == [2]
    assert cache.evict(1) == [1, 3]


def test_looking_counts_as_using() -> None:
    cache = Cache()
    cache.put(1)
    cache.put(2, parent=1)
    cache.put(3)
    cache.match(2)
    assert cache.evict(1) == [3]


def test_residence_stays() -> None:
    cache = Cache()
    cache.put(1)
    cache.put(1, groups=(), resident=True)
    cache.put(1, groups=())
    assert cache.evict(1) == []


def test_the_namespace_comes_along() -> None:
    cache = Cache()
    cache.put(1, canonical=True)
    assert cache.evict(1) == [1]
    assert cache.key(1).canonical


@pytest.mark.parametrize("tree", [True, False])
def test_a_canonical_dependency_is_not_replaced(tree: bool) -> None:
    cache = Cache(tree=tree)
    cache.put(8, canonical=True)
    cache.put(8, parent=7, groups=())
    assert cache.evict(1) == [8]
    assert (cache.key(8).parent, cache.key(8).canonical) == (None, 1)


def test_a_canonical_chain_leaves_the_logical_one_behind() -> None:
    cache = Cache()
    cache.put(100)
    for key in (101, 102, 103):
        cache.put(key, parent=key - 1)
    cache.put(101, groups=(), canonical=True)
    cache.put(103, parent=101, groups=(), canonical=True)
    assert cache.evict(1) == [101, 103]
    assert sorted(cache.keys) == [100, 102]


def test_chains_without_the_group_stay() -> None:
    cache = Cache(groups=4)
    cache.put(1)
    cache.put(2, parent=1)
    cache.put(10, groups=(3,))
    cache.put(11, parent=10, groups=(3,))
    assert cache.evict_group(3, 1) == [10, 11]


def test_leaves_in_the_way_of_an_ancestor() -> None:
    cache = Cache(groups=2)
    cache.put(1, groups=(1,))
    cache.put(2, parent=1)
    cache.put(3, parent=1)
    assert cache.evict_group(1, 1) == [2, 1, 3]


@pytest.mark.parametrize("below", [False, True])
def test_nothing_leaves_in_vain(below: bool) -> None:
    cache = Cache(groups=2)
    cache.put(1, groups=(1,))
    cache.put(2, parent=1)
    cache.put(3, parent=1, resident=not below)
    if below:
        cache.put(4, parent=3, resident=True)
    assert cache.evict_group(1, 1) == []
    assert len(cache.keys) == 3 + below


def test_the_older_cache_pops_the_least_recently_used() -> None:
    cache = BlockCache()
    for key in range(1, 6):
        assert cache.put(key, 0, key)
    assert not cache.put(5, 0, 9)
    assert cache.pop(2) == [1, 2]
    assert cache.pop(3) == [3, 4, 5]


def test_the_older_cache_evicts_whole_keys() -> None:
    cache = BlockCache()
    cache.put(101, 0, 10)
    cache.put(101, 1, 11)
    cache.put(102, 0, 12)
    assert cache.select_and_evict(2) == {101: [10, 11]}
    assert cache.select_and_evict(0) == {102: [12]}


def test_the_older_cache_keeps_residents() -> None:
    cache = BlockCache()
    cache.put(1, 0, 10, resident=True)
    cache.put(1, 1, 11)
    assert cache.select_and_evict(1) == {}
    assert cache.pop(5) == [11]
    assert (cache.match(1, 0), cache.match(1, 1)) == (10, N)


def test_a_filled_slot_keeps_its_block() -> None:
    cache = Cache(groups=2)
    cache.put(1)
    first = cache.match(1, 0)
    cache.put(1, groups=(0, 1))
    assert cache.match(1, 0) == first
    assert cache.match(1, 1) != N
    assert sum(block.cache for block in cache.cache.blocks[1:101]) == 1


def test_an_independent_group_loses_blocks_before_chains_go() -> None:
    cache = Cache(groups=2, independent=frozenset({1}))
    cache.put(1, groups=(0, 1))
    cache.put(2, parent=1, groups=(0, 1))
    cache.put(3, parent=2, groups=(0, 1))
    assert cache.evict_group(1, 5) == [2]
    assert cache.match(2, 1) == N
    assert cache.match(2, 0) != N
    assert cache.evict_group(1, 1) == [1]
    assert cache.evict_group(1, 1) == [1, 2, 3]


def test_flat_eviction_is_in_order_of_use() -> None:
    cache = Cache(groups=2, tree=False)
    cache.put(1, groups=(0, 1))
    cache.put(2)
    cache.put(3, resident=True)
    cache.put(4)
    cache.match(1)
    assert cache.evict_group(1, 1) == [1]
    assert cache.evict(1) == [2]
    assert cache.evict(9) == [4]
