"""The compiled cache with its prefix tree against the reference's, key by key."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rtp_llm.compiled_cache import KEYS, CompiledCache
from tests.rtp_llm.witness.eviction import evict_and_free_for_group, select
from tests.rtp_llm.witness.pool import BlockPool
from tests.rtp_llm.witness.prefix_tree import GPU_CP_CANONICAL, GPU_LOGICAL, Name
from tests.rtp_llm.witness.resource import Dependency
from tests.rtp_llm.witness.shared_cache import SharedBlockCache


class Cache:
    """The witness of a cache whose blocks nobody else holds."""

    def __init__(self, groups: int = 1, tree: bool = True, independent: frozenset[int] = frozenset()) -> None:
        self.pools = [BlockPool(100) for _ in range(groups)]
        self.shared = SharedBlockCache(self.pools, tree=tree, independent=independent)

    def put(self, key: int, parent: int | None = None, groups: tuple[int, ...] = (0,), **options) -> None:
        blocks = [-1] * len(self.pools)
        for group in groups:
            (blocks[group],) = self.pools[group].malloc(1)
        dependency = options.pop("dependency", Dependency(0 if parent is None else 1, parent))
        self.shared.put(key, blocks, dependency=dependency, **options)
        for group in groups:
            self.pools[group].release([blocks[group]])


def names_of(cache: Cache) -> list[Name]:
    assert cache.shared.tree is not None
    return cache.shared.tree.leaves()


def both(rng: random.Random, steps: int) -> Counter[str]:
    """Random keys, each with a parent of its own in each namespace, put, looked for and evicted in both forms."""
    groups = rng.randint(1, 4)
    independent = frozenset(group for group in range(groups) if rng.random() < 0.4)
    plain, compiled = Cache(groups, independent=independent), CompiledCache(groups, independent)
    parents = {
        (namespace, key): rng.randrange(key) if key and rng.random() < 0.85 else None
        for namespace in (GPU_LOGICAL, GPU_CP_CANONICAL)
        for key in range(KEYS)
    }
    seen: Counter[str] = Counter()
    residents = rng.random() < 0.5
    for _ in range(steps):
        choice, key, group = rng.random(), rng.randrange(KEYS), rng.randrange(groups)
        if choice < 0.55:
            name = rng.choice([GPU_LOGICAL, GPU_LOGICAL, GPU_CP_CANONICAL]), key
            resident = residents and rng.random() < 0.1
            chosen = tuple(each for each in range(groups) if each == group or rng.random() < 0.5)
            parent = parents[name]
            dependency = Dependency(0 if parent is None else 1, parent)
            for cache in (plain, compiled):
                cache.put(key, None, chosen, namespace=name[0], resident=resident, dependency=dependency)
            seen["put"] += 1
        elif choice < 0.75:
            want = plain.shared.match_group(key, group)
            assert compiled.find(key, group) == max(want, 0)
            seen["found" if want > 0 else "missed"] += 1
        elif choice < 0.85:
            least = rng.randint(1, 4)
            evicted = select(plain.shared, least)
            assert compiled.evict(least) == [each.key for each in evicted]
            for each in evicted:
                plain.shared.release(each.blocks)
            seen["a longer chain" if len(evicted) > 1 else "evicted"] += 1
        else:
            least, before = rng.randint(1, 3), len(plain.shared.items)
            want = evict_and_free_for_group(plain.shared, group, least)
            assert compiled.evict_group(group, least) == want
            left = before - len(plain.shared.items)
            seen["alone" if want > left else "for a group" if want else "none"] += 1
        cached = [(key, item) for key in plain.shared.items if (item := plain.shared.items.peek(key))]
        assert compiled.items() == [(key, item.blocks, item.resident) for key, item in cached]
        assert all(compiled.namespace(key) == item.namespace for key, item in cached)
        assert compiled.leaves() == names_of(plain)
        assert compiled.free() == [pool.free for pool in plain.pools]
    return seen


@settings(max_examples=15)
@given(rng=st.randoms(use_true_random=False))
def test_keys_leave_as_in_the_reference(rng: random.Random) -> None:
    both(rng, 60)


def test_the_traffic_meets_every_way_to_evict() -> None:
    """Long runs, in which the places in order of use are used up."""
    seen: Counter[str] = Counter()
    for seed in range(8):
        seen += both(random.Random(seed), 150)
    assert set(seen) >= {"found", "missed", "evicted", "a longer chain", "for a group", "alone", "none"}, seen


def test_leaves_that_come_in_a_pass_wait_for_the_next() -> None:
    """Key 2 leaves as a virtual block's and takes its other name along: key 1 is a leaf then, and older than key 9."""
    plain, compiled = Cache(), CompiledCache()
    for cache in (plain, compiled):
        cache.put(2, 1, namespace=GPU_LOGICAL)
        cache.put(2, namespace=GPU_CP_CANONICAL)
        cache.put(1, namespace=GPU_LOGICAL)
        cache.put(9, namespace=GPU_LOGICAL)
    assert evict_and_free_for_group(plain.shared, 0, 2) == compiled.evict_group(0, 2) == 2
    assert list(plain.shared.items) == [key for key, *_ in compiled.items()] == [1]
