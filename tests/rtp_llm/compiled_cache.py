"""RTP-LLM's cache and prefix tree compiled, driven key by key, without requests."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.rtp_llm.rules import evict, insert, prefix_tree
from hkv.dialects.rtp_llm.rules.insert import InsertedKey
from hkv.dialects.rtp_llm.rules.parameters import FIELDS, CacheField, GroupField, RtpView
from hkv.state import item_table, role_counts
from hkv.state.loops import loop, read
from hkv.state.nodes import LEAF, Node
from hkv.state.pooled import (
    COUNTER_WORDS,
    ITEM_WORDS,
    POOL_WORDS,
    Item,
    PoolCounter,
    PooledBuckets,
    PooledState,
    Role,
    empty_pooled,
)
from hkv.state.pooled_workspace import ARRAYS, PooledSizes, PooledWorkspace
from tests.rtp_llm.witness.prefix_tree import GPU_CP_CANONICAL, GPU_LOGICAL, Name
from tests.rtp_llm.witness.resource import ROOT, Dependency

GROUPS, KEYS, BLOCKS = 4, 24, 100
BUCKETS = PooledBuckets(
    blocks=BLOCKS, groups=GROUPS, pools=GROUPS, requests=1, sequences=1, row=1, chain=1, keys=KEYS, names=2
)
IDS = 4 * KEYS * (1 + GROUPS)
PUT, FIND, SELECT, FREE, GIVE = range(5)
EVERYTHING = (*ARRAYS, "ids", "num_ids")


@functools.cache
def program() -> Any:
    """Performs one operation on a state: its new state, its answer and its ids."""

    def perform(parameters: Any, state: PooledState, row: jax.Array) -> tuple[Any, ...]:
        arrays = {name: getattr(state, name).reshape(-1) for name in ARRAYS}
        fields: dict[str, Any] = {"lane": jnp.int32(0), "num_ids": jnp.int32(0), "results": jnp.zeros(2, jnp.int32)}
        sizes = PooledSizes(BUCKETS, 1, 1, 1, IDS)
        work = PooledWorkspace(sizes, **arrays, **fields, ids=jnp.zeros(IDS + 1, jnp.int32))
        view = RtpView(parameters[0], parameters[1].reshape(-1), None, GROUPS)
        code, key, namespace, parent, resident, groups, least = (read(row, column) for column in range(7))

        def put(w: PooledWorkspace, _):
            def claim(v, local):
                (group,) = local
                mine = ((groups >> group) & 1) != 0
                v, block = role_counts.claim(v, mine, group)
                v = v.write("rows", block, v.row(0, 0, group))
                return v.write("requests", mine.astype(jnp.int32), v.length(0, 0, group)), (group + 1,)

            def give_back(v, local):
                (group,) = local
                block = v.read("rows", v.row(0, 0, group))
                v = role_counts.release(v, ((groups >> group) & 1) != 0, group, block, jnp.int32(Role.REQUEST))
                return v, (group + 1,)

            w, _ = loop(lambda c: c[0] < GROUPS, claim, w, (0,), writes=("rows", "requests", *role_counts.WRITES))
            zero = jnp.int32(0)
            entry = InsertedKey(
                zero, zero, zero, zero, jnp.int32(GROUPS), key, namespace, (parent != 0) * 1, parent, resident != 0
            )
            w, changed = insert.put(w, view, entry)
            w, _ = loop(lambda c: c[0] < GROUPS, give_back, w, (0,), writes=("requests", "rows", *role_counts.WRITES))
            return w, (False, changed.astype(jnp.int32))

        def find(w: PooledWorkspace, _):
            w, block = prefix_tree.find(w, code == FIND, key, groups)
            return w, (False, block)

        def select(w: PooledWorkspace, _):
            w, blocks, _ = evict.select(w, view, evict.Wanted(groups, least, code == SELECT))
            return w, (False, blocks)

        def give(w: PooledWorkspace, _):
            w = role_counts.release(w, code == GIVE, groups, least, jnp.int32(Role.CACHE))
            return w, (False, jnp.int32(0))

        answer = jnp.int32(0)
        selects = (code == SELECT) | (code == FREE)
        for mine, step in ((code == PUT, put), (code == FIND, find), (selects, select), (code == GIVE, give)):
            work, (_, answer) = loop(lambda c: c[0], step, work, (mine, answer), writes=EVERYTHING)
        new = {name: getattr(work, name).reshape(getattr(state, name).shape) for name in ARRAYS}
        return PooledState(**new), answer, work.ids[:-1], work.num_ids

    return jax.jit(perform)


class CompiledCache:
    """Like `tests.rtp_llm.test_prefix_caches.Cache`, whose blocks nobody else holds; what leaves is given back."""

    def __init__(self, groups: int = 1, independent: frozenset[int] = frozenset()) -> None:
        cache, table = np.zeros(FIELDS, np.int32), np.zeros((GROUPS, FIELDS), np.int32)
        cache[CacheField.GROUPS], cache[CacheField.POOLS] = groups, GROUPS
        cache[CacheField.ALONE] = sum(1 << group for group in independent)
        table[:, GroupField.POOL], table[:, GroupField.REUSE] = range(GROUPS), 1
        self.groups, self.parameters = groups, (cache, table)
        self.state = empty_pooled(BUCKETS, (BLOCKS,) * GROUPS)

    def _do(self, *row: int) -> tuple[int, list[list[int]]]:
        """The answer, and for each key that left itself and its blocks."""
        numbers = np.zeros(7, np.int32)
        numbers[: len(row)] = row
        self.state, answer, ids, count = jax.device_get(program()(self.parameters, self.state, numbers))
        return int(answer), ids[:count].reshape(-1, 1 + self.groups).tolist()

    def put(
        self,
        key: int,
        parent: int | None = None,
        groups: tuple[int, ...] = (0,),
        *,
        namespace: int = 0,
        resident: bool = False,
        dependency: Dependency = ROOT,
    ) -> None:
        parent = dependency.parent if parent is None else parent
        above = 0 if parent is None else parent + 1
        self._do(PUT, key, namespace, above, resident, sum(1 << group for group in groups))

    def find(self, key: int, group: int) -> int:
        return self._do(FIND, key, 0, 0, 0, group)[0]

    def evict(self, least: int) -> list[int]:
        _, evicted = self._do(SELECT, 0, 0, 0, 0, evict.ANY_GROUP, least)
        for _, *blocks in evicted:
            for group, block in enumerate(blocks):
                if block:
                    self._do(GIVE, 0, 0, 0, 0, group, block)
        return [key for key, *_ in evicted]

    def evict_group(self, group: int, least: int) -> int:
        """Blocks of the group that left."""
        return self._do(FREE, 0, 0, 0, 0, group, least)[0]

    def items(self) -> list[tuple[int, list[int], bool]]:
        """Keys in order of use, their blocks, -1 for none, and whether they are resident."""
        items, found = np.asarray(self.state.items), []
        key = int(items[KEYS, Item.NEXT])
        while key != KEYS:
            blocks = items[key, ITEM_WORDS : ITEM_WORDS + self.groups]
            resident = bool(items[key, Item.FLAGS] & item_table.RESIDENT)
            found.append((key, np.where(blocks == 0, -1, blocks).tolist(), resident))
            key = int(items[key, Item.NEXT])
        return found

    def leaves(self) -> list[Name]:
        """Names at which eviction may begin, least recently used first."""
        nodes = np.asarray(self.state.nodes)
        found = sorted(np.flatnonzero(nodes[:, Node.FLAGS] & LEAF), key=lambda node: nodes[node, Node.PLACE])
        return [(int(GPU_CP_CANONICAL if node % 2 else GPU_LOGICAL), int(node // 2)) for node in found]

    def free(self) -> list[int]:
        """Free blocks of each pool."""
        counters = np.asarray(self.state.counters)
        return [int(counters[COUNTER_WORDS + POOL_WORDS * pool + PoolCounter.FREE]) for pool in range(self.groups)]

    def namespace(self, key: int) -> int:
        """The namespace of what a key builds on."""
        return int(np.asarray(self.state.items)[key, Item.FLAGS]) // item_table.NAMESPACE
