"""Random traffic over a manager under RTP-LLM's rules, and what must hold after every operation."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

from hkv.dialects.rtp_llm.config import NULL, RtpConfig
from hkv.errors import OperationError
from hkv.group_policy import CpMapping, EvictPolicy, GroupPolicy, GroupType
from hkv.keys.rolling import first_keys
from hkv.topology import Group, Topology
from reference.dialects.rtp_llm.export import HeldBlocks, free_cached, hold, pop_from_cache
from reference.dialects.rtp_llm.manager import Manager
from reference.dialects.rtp_llm.pool import CACHE, CONNECTOR, REQUEST, ROLES
from reference.dialects.rtp_llm.resource import BatchResource
from tests.rtp_llm.build import FULL, LINEAR, SWA, group


def draw_config(rng: random.Random, *, roomy: bool = False) -> RtpConfig:
    """One, two or three groups over one pool or several; `roomy` for large pools, one rank, and no tail checked."""
    shape = rng.choice(["single", "hybrid", "pools", "pools"])
    size, ranks = rng.choice([1, 2, 4]), 1 if roomy else rng.choice([1, 1, 1, 2])
    types = [FULL] if shape == "single" else [FULL, *rng.choices([LINEAR, SWA, FULL], k=rng.randint(1, 2))]
    rng.shuffle(types)
    if shape == "single":
        ranks = 1
    groups = tuple(_group(rng, f"g{i}", kind, size, ranks) for i, kind in enumerate(types))
    topology = Topology(groups, pools="independent" if shape == "pools" else "shared")
    if roomy:
        relaxed = (dataclasses.replace(each, policy=_relaxed(each.policy)) for each in groups)
        topology = Topology(tuple(relaxed), pools=topology.pools)
    counts = tuple(400 if roomy else rng.randint(4, 24) for _ in range(topology.num_pools))
    return RtpConfig(
        topology=topology,
        num_blocks=counts,
        block_size=size,
        linear_step=rng.randint(0, 3),
        reserve_blocks=0 if roomy else rng.choice([0, 0, 1, 3]),
        prefix_tree=rng.random() < 0.5,
        independent_eviction=rng.random() < 0.5,
        cp_size=ranks,
        cp_rank=rng.randrange(ranks),
    )


def _relaxed(policy: GroupPolicy) -> GroupPolicy:
    return dataclasses.replace(policy, validate_tail_blocks=False)


def _group(rng: random.Random, tag: str, kind: GroupType, size: int, ranks: int) -> Group:
    policy: dict[str, Any] = {"evict_policy": rng.choice(list(EvictPolicy)[:2])}
    if kind is not FULL:
        policy["active_tail_blocks"] = rng.randint(0, 3)
    if kind is SWA:
        policy["enable_prefix_reuse"] = rng.random() < 0.7
        policy["validate_tail_blocks"] = rng.random() < 0.3
        if rng.random() < 0.5:
            policy["cp_mapping"] = CpMapping.NONE
    compact = kind is SWA and "cp_mapping" not in policy
    return group(tag, kind, size * (ranks if compact else 1), **policy)


class Traffic:
    """Requests that come, grow, fork, are cached, exported and end; `step` does one thing and checks everything."""

    def __init__(self, rng: random.Random, config: RtpConfig | None = None) -> None:
        self.rng = rng
        self.manager = Manager(draw_config(rng) if config is None else config)
        self.held: list[HeldBlocks] = []
        self.popped: list[BatchResource] = []
        self.count = 0
        self.granted = self.hits = self.forks = 0

    def step(self) -> None:
        operations = [self.arrive] * 3 + [self.grow, self.insert] * 2 + [self.free, self.fork, self.hold, self.pop]
        self.rng.choice(operations)()
        self.check()

    def arrive(self) -> None:
        manager, rng = self.manager, self.rng
        if len(manager.requests) > 4:
            return
        self.count += 1
        id = f"r{self.count}"
        tokens = [rng.choice([1, 1, 2])] * rng.randint(1, 20)
        tokens[rng.randrange(len(tokens))] = rng.choice([1, 1, 1, 2])
        manager.request(id, tokens, rng.choice([1, 1, 1, 2, 3]), rng.choice([0, 0, 0, 1, 3]))
        reuse, device = rng.random() < 0.8, rng.random() < 0.9
        self._malloc(id, reuse=reuse, device_cache=device)

    def _malloc(self, id: str, **flags: bool) -> None:
        manager = self.manager
        new = not manager.requests[id].resource.current_blocks
        lists, requests = manager.rows(id), self._request_refs()
        best = self._longest(id) if new and flags.get("device_cache", True) else 0
        try:
            result = manager.malloc(id, **flags)
        except OperationError:
            granted = False
        else:
            granted = result.success
            if granted and new:
                assert result.reused == best, "the hit is the longest by definition"
                assert result.reused < manager.requests[id].lengths.seq, "a last token is always computed"
                self.hits += result.reused > 0
        self.granted += granted
        if not granted:
            assert manager.rows(id) == lists, "a refused request keeps its lists"
            assert self._request_refs() == requests, "a refused request keeps its references"

    def _longest(self, id: str) -> int:
        """Tokens of the longest prefix that every group can go on from, every length tried."""
        config, cache = self.manager.config, self.manager.allocator.cache
        request = self.manager.requests[id]
        keys = list(first_keys(request.tokens[0], config.block_size).keys)
        keys = keys[config.cp_size - 1 :: config.cp_size][:-1]

        def has(group: int, key: int) -> bool:
            item = cache.peek(key)
            return item is not None and item.has(group) and item.matchable[group]

        def resumes(group: int, length: int) -> bool:
            policy = config.policies[group]
            if policy.group_type is GroupType.FULL:
                return all(has(group, key) for key in keys[:length])
            if policy.group_type is GroupType.SWA and not policy.enable_prefix_reuse:
                return True
            return has(group, keys[length - 1])

        groups = range(len(config.policies))
        lengths = [n for n in range(1, len(keys) + 1) if all(resumes(group, n) for group in groups)]
        return max(lengths, default=0) * config.block_size * config.cp_size

    def _some(self) -> str | None:
        ids = sorted(self.manager.requests)
        return self.rng.choice(ids) if ids else None

    def grow(self) -> None:
        id = self._some()
        if id is None:
            return
        request = self.manager.requests[id]
        count = self.rng.randint(1, 3)
        more = [[self.rng.choice([1, 1, 2])] * count for _ in request.tokens]
        if not request.resource.current_blocks:
            self._malloc(id)
            return
        self.manager.append(id, more)
        self._malloc(id, reuse=self.rng.random() < 0.8)

    def insert(self) -> None:
        id = self._some()
        if id is not None and self.manager.requests[id].resource.current_blocks:
            before = {key: list(item.blocks) for key, item in self._items()}
            self.manager.insert(id, resident=self.rng.random() < 0.05)
            for key, item in self._items():
                for old, new in zip(before.get(key, []), item.blocks, strict=False):
                    assert old in (NULL, new), "a filled slot keeps its block"
            self.check_complete(id)

    def free(self) -> None:
        id = self._some()
        if id is not None:
            self.manager.free(id)
            if self.rng.random() < 0.8:
                self.manager.drop(id)

    def fork(self) -> None:
        id = self._some()
        if id is None:
            return
        request = self.manager.requests[id]
        width = request.resource.batch
        sources = [self.rng.randrange(width) for _ in range(self.rng.randint(1, width + 1))]
        rows, requests = self.manager.rows(id), self._request_refs()
        copy = self.rng.random() < 0.7
        pairs = self.manager.fork(id, sources, copy_last=copy)
        if pairs is None:
            if len(self.manager.allocator.kinds) > 1:
                assert self.manager.rows(id) == rows, "a refused fork changes nothing"
                assert self._request_refs() == requests, "a refused fork changes nothing"
            else:
                self.manager.free(id)
            return
        self.forks += 1
        after = self.manager.rows(id)
        for position, source in enumerate(sources):
            if source not in sources[position + 1 :]:
                assert after[position] == rows[source], "the last duplicate keeps the originals"
            elif copy:
                for mine, theirs in zip(after[position], rows[source], strict=True):
                    assert mine[:-1] == theirs[:-1], "an earlier one shares all but the last block"
                    assert not mine or mine[-1] not in theirs, "and has a last block of its own"
        if copy:
            targets = [(pair.tag, pair.target) for pair in pairs]
            assert len(set(targets)) == len(targets), "no block is copied into twice"

    def hold(self) -> None:
        if self.held and self.rng.random() < 0.5:
            self.held.pop(self.rng.randrange(len(self.held))).release()
            return
        id = self._some()
        if id is not None:
            row = self.rng.choice(self.manager.requests[id].resource.rows)
            found = hold(self.manager.allocator, row, row.keys, connector=True)
            if found is not None:
                self.held.append(found)

    def pop(self) -> None:
        if self.popped and self.rng.random() < 0.6:
            free_cached(self.manager.allocator, self.popped.pop())
            return
        found = pop_from_cache(self.manager.allocator, self.rng.randint(0, 3))
        if found is not None:
            self.popped.append(found)

    # What must hold.

    def _items(self):
        cache = self.manager.allocator.cache
        return [(key, cache.peek(key)) for key in list(cache.items)]

    def _request_refs(self) -> list[list[int]]:
        return [list(pool.refs.counts[REQUEST]) for pool in self.manager.allocator.pools]

    def check(self) -> None:
        self.check_references()
        self.check_pools()
        self.check_lists()
        self.check_tree()

    def check_complete(self, id: str) -> None:
        """After an insertion every whole block of a group with reuse is cached: it, or one that was there before."""
        config, cache = self.manager.config, self.manager.allocator.cache
        if config.cp_size > 1:
            return
        rows = self.manager.requests[id].resource.rows
        for row in rows if len(config.policies) > 1 else rows[:1]:
            for index, (policy, ids) in enumerate(zip(config.policies, row.groups, strict=True)):
                for key, block in zip(row.keys, ids.blocks, strict=False):
                    if policy.enable_prefix_reuse and block != NULL:
                        item = cache.peek(key)
                        assert item is not None, "every whole block's key is cached"
                        assert item.has(index), "in every group that has a block"

    def check_references(self) -> None:
        """Every reference is somebody's: a list's, a connector's or the cache's, and the other way round."""
        allocator = self.manager.allocator
        wanted = {role: Counter() for role in ROLES}

        def count(role: str, index: int, blocks: list[int]) -> None:
            pool = allocator.pools.index(allocator.kinds[index].pool)
            wanted[role].update((pool, block) for block in blocks if block != NULL)

        for request in self.manager.requests.values():
            for row in request.resource.rows:
                for index, ids in enumerate(row.groups):
                    count(REQUEST, index, ids.blocks)
        for held in self.held:
            for index, ids in enumerate(held.resource.groups):
                count(CONNECTOR, index, [block for block in ids.blocks if block > 0])
        for _, item in self._items():
            for index, block in enumerate(item.blocks):
                count(CACHE, index, [block])
        for popped in self.popped:
            for index, ids in enumerate(popped.rows[0].groups):
                count(CACHE, index, ids.blocks)
        for role in ROLES:
            found = Counter(
                {
                    (place, block): number
                    for place, pool in enumerate(allocator.pools)
                    for block, number in enumerate(pool.refs.counts[role])
                    if number
                }
            )
            assert found == wanted[role], f"{role} references are held by somebody"

    def check_pools(self) -> None:
        for pool in self.manager.allocator.pools:
            held = {b for b in range(pool.num_blocks) if pool.refs.total(b, ROLES)}
            assert held | set(pool.unheld) == set(range(1, pool.num_blocks)), "every block is free or held"
            assert not held & set(pool.unheld), "and never both"
            used = {b for b in held if pool.refs.total(b, (REQUEST, CONNECTOR))}
            assert pool.available == pool.total - len(used), "cached blocks are available"
            expected = [b for b in range(1, pool.num_blocks) if b not in held][:2]
            if len(expected) == 2:
                got = pool.malloc(2)
                pool.release(got)
                assert got == expected, "the smallest ids come first"

    def check_lists(self) -> None:
        for request in self.manager.requests.values():
            for row in request.resource.rows:
                for kind, ids in zip(self.manager.allocator.kinds, row.groups, strict=True):
                    assert len(ids.kernel) == len(ids) * ids.ratio, "kernel blocks follow"
                    assert kind.sparse or NULL not in ids.blocks, "a full list has no holes"
                    assert len(ids.real) == len(set(ids.real)), "a list has no block twice"
            blocks, _ = request.resource.tables(64)
            assert (blocks[:, :, 63] == 0).all(), "tables end in zeros"

    def check_tree(self) -> None:
        """Under a tree without independent eviction, what a cached key builds on is cached, several groups given."""
        allocator = self.manager.allocator
        if allocator.cache.tree is None or allocator.config.cp_size > 1 or allocator.config.independent_groups:
            return
        for key, item in self._items():
            if item.dependency.parent is not None:
                assert item.dependency.parent in allocator.cache.items, "nothing is evicted from under a cached key"
            assert (item.namespace, key) in allocator.cache.tree.nodes, "every key has its name in the tree"
