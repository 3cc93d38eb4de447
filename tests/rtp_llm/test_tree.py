"""The text's cache and prefix tree against their witness, key by key, without requests."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.dialects.rtp_llm.plain import cached, free_blocks, holes
from reference.dialects.rtp_llm.evicting import evict
from reference.dialects.rtp_llm.pools import release
from reference.dialects.rtp_llm.records import Role
from tests.rtp_llm.test_prefix_caches import Cache
from tests.rtp_llm.witness.eviction import evict_and_free_for_group, select
from tests.rtp_llm.witness.pool import BlockPool
from tests.rtp_llm.witness.prefix_tree import GPU_CP_CANONICAL, GPU_LOGICAL, Name
from tests.rtp_llm.witness.resource import Dependency
from tests.rtp_llm.witness.shared_cache import SharedBlockCache

KEYS = range(1, 25)


class Witness:
    """The witness of a cache whose blocks nobody else holds."""

    def __init__(self, groups: int = 1, tree: bool = True, independent: frozenset[int] = frozenset()) -> None:
        self.pools = [BlockPool(100) for _ in range(groups)]
        self.shared = SharedBlockCache(self.pools, tree=tree, independent=independent)

    def put(
        self,
        key: int,
        parent: int | None = None,
        groups: tuple[int, ...] = (0,),
        *,
        canonical: bool = False,
        resident: bool = False,
    ) -> None:
        blocks = [-1] * len(self.pools)
        for group in groups:
            (blocks[group],) = self.pools[group].malloc(1)
        dependency = Dependency(0 if parent is None else 1, parent)
        namespace = GPU_CP_CANONICAL if canonical else GPU_LOGICAL
        self.shared.put(key, blocks, dependency=dependency, namespace=namespace, resident=resident)
        for group in groups:
            self.pools[group].release([blocks[group]])


class Freeing(Cache):
    """The text's cache; what leaves is free."""

    def evict(self, least: int, group: int | None = None) -> list[int]:
        found, c = super().evict(least, group), self.cache
        for place in range(c.said):
            release(c, c.groups[place % c.config.groups + 1].pool, c.told[place], Role.CACHE)
        return found

    def make_room(self, group: int, least: int) -> int:
        """Blocks of a group that left."""
        return evict(self.cache, self.cache.groups[group + 1], least, 0)

    def items(self) -> list[tuple[int, list[int], bool]]:
        """Cached keys in order of use: their blocks, and whether they stay."""
        found = zip(self.keys, cached(self.cache), strict=True)
        return [(number, holes(key.blocks[: self.cache.config.groups]), bool(key.resident)) for number, key in found]

    def leaves(self) -> list[Name]:
        """Names of leaves in order of use."""
        leaves, found = self.cache.leaves, []
        leaf = leaves.oldest()
        while leaf is not leaves.ends:
            namespace = GPU_CP_CANONICAL if leaf.canonical else GPU_LOGICAL
            found.append((namespace, self.cache.keys.index(leaf.key) - 1))
            leaf = leaves.newer[leaf]
        return found


def both(rng: random.Random, steps: int) -> Counter[str]:
    """Random keys, each with a parent of its own in each namespace, put, looked for and evicted in both forms."""
    groups = rng.randint(1, 4)
    independent = frozenset(group for group in range(groups) if rng.random() < 0.4)
    witness, text = Witness(groups, independent=independent), Freeing(groups, independent=independent)
    tree = witness.shared.tree
    assert tree is not None
    parents = {
        (canonical, key): rng.randrange(1, key) if key > 1 and rng.random() < 0.85 else None
        for canonical in (False, True)
        for key in KEYS
    }
    seen: Counter[str] = Counter()
    residents = rng.random() < 0.5
    for _ in range(steps):
        choice, key, group = rng.random(), rng.choice(KEYS), rng.randrange(groups)
        if choice < 0.55:
            canonical = rng.random() < 1 / 3
            resident = residents and rng.random() < 0.1
            chosen = tuple(each for each in range(groups) if each == group or rng.random() < 0.5)
            for cache in (witness, text):
                cache.put(key, parents[canonical, key], chosen, canonical=canonical, resident=resident)
            seen["put"] += 1
        elif choice < 0.75:
            want = witness.shared.match_group(key, group)
            assert text.match(key, group) == want
            seen["found" if want > 0 else "missed"] += 1
        elif choice < 0.85:
            least = rng.randint(1, 4)
            evicted = select(witness.shared, least)
            assert text.evict(least) == [each.key for each in evicted]
            for each in evicted:
                witness.shared.release(each.blocks)
            seen["a longer chain" if len(evicted) > 1 else "evicted"] += 1
        else:
            least, before = rng.randint(1, 3), len(witness.shared.items)
            want = evict_and_free_for_group(witness.shared, group, least)
            assert text.make_room(group, least) == want
            left = before - len(witness.shared.items)
            seen["alone" if want > left else "for a group" if want else "none"] += 1
        items = [(key, item) for key in witness.shared.items if (item := witness.shared.items.peek(key))]
        assert text.items() == [(key, item.blocks, item.resident) for key, item in items]
        assert all(text.key(key).canonical == (item.namespace == GPU_CP_CANONICAL) for key, item in items)
        assert text.leaves() == tree.leaves()
        free = [free_blocks(text.cache, pool) for pool in text.cache.pools[1:]]
        assert free == [list(pool.unheld) for pool in witness.pools]
    return seen


@settings(max_examples=15)
@given(rng=st.randoms(use_true_random=False))
def test_keys_leave_as_in_the_witness(rng: random.Random) -> None:
    both(rng, 60)


def test_the_traffic_meets_every_way_to_evict() -> None:
    seen: Counter[str] = Counter()
    for seed in range(8):
        seen += both(random.Random(seed), 150)
    assert set(seen) >= {"found", "missed", "evicted", "a longer chain", "for a group", "alone", "none"}, seen


def test_leaves_that_come_in_a_pass_wait_for_the_next() -> None:
    """Key 2 leaves as a virtual block's and takes its other name along: key 1 is a leaf then, and older than key 9."""
    witness, text = Witness(), Freeing()
    for cache in (witness, text):
        cache.put(2, 1)
        cache.put(2, canonical=True)
        cache.put(1)
        cache.put(9)
    assert evict_and_free_for_group(witness.shared, 0, 2) == text.make_room(0, 2) == 2
    assert list(witness.shared.items) == text.keys == [1]
