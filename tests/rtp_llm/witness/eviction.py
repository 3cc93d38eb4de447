"""Order of eviction: chains of the prefix tree from its oldest leaves, or single keys in order of use."""

from __future__ import annotations

import dataclasses

from hkv.dialects.rtp_llm.config import NULL
from tests.rtp_llm.witness.prefix_tree import Name, PrefixTree
from tests.rtp_llm.witness.resource import Dependency
from tests.rtp_llm.witness.shared_cache import Item, SharedBlockCache


@dataclasses.dataclass(frozen=True)
class Evicted:
    """One key that lost blocks.

    Attributes:
      key: the key.
      blocks: for each group, the block that left, or `NULL`; each still has its cache reference.
      namespace: the namespace of `dependency`.
      dependency: the key that it built on.
    """

    key: int
    blocks: tuple[int, ...]
    namespace: int
    dependency: Dependency

    @property
    def count(self) -> int:
        """Blocks over all groups."""
        return sum(block != NULL for block in self.blocks)


def select(cache: SharedBlockCache, least: int) -> list[Evicted]:
    """Take out keys until `least` blocks are out; more, for chains and keys leave whole (RTP-LLM `selectAndEvict`).

    Returns:
      What left, in the order in which it left; of a chain, the root's end first.
    """
    evicted: list[Evicted] = []
    if least <= 0:
        return evicted
    if cache.tree is not None and cache.tree.leaves():
        while sum(each.count for each in evicted) < least and (leaves := cache.tree.leaves()):
            evicted += _take_chain(cache, cache.tree.chain(leaves[0]))
        return evicted
    for key in list(cache.items):
        if sum(each.count for each in evicted) >= least:
            break
        if not _item(cache, key).resident:
            evicted.append(_take(cache, key))
    return evicted


def select_for_group(cache: SharedBlockCache, group: int, least: int) -> list[Evicted]:
    """Take out keys until `least` blocks of one group are out (RTP-LLM `selectAndEvictForGroup`).

    A group that may lose blocks alone does so first, and then nothing else leaves.
    """
    if least <= 0:
        return []
    if cache.tree is None or not cache.tree.leaves():
        return _by_use(cache, group, least)
    if group in cache.independent and (alone := _alone(cache, cache.tree, group, least)):
        return alone
    return _by_chain(cache, cache.tree, group, least)


def evict_and_free(cache: SharedBlockCache, least: int) -> int:
    """Evict at least `least` blocks and give their references back; how many blocks left."""
    evicted = select(cache, least)
    for each in evicted:
        cache.release(each.blocks)
    return sum(each.count for each in evicted)


def evict_and_free_for_group(cache: SharedBlockCache, group: int, least: int) -> int:
    """Evict for one group and give the references of all groups back; how many of this group's blocks left."""
    evicted = select_for_group(cache, group, least)
    for each in evicted:
        cache.release(each.blocks)
    return _of_group(evicted, group)


def _by_use(cache: SharedBlockCache, group: int, least: int) -> list[Evicted]:
    """Keys that have the group, in order of use; each brings one of its blocks."""
    chosen: list[int] = []
    for key in cache.items:
        if len(chosen) == least:
            break
        item = _item(cache, key)
        if not item.resident and item.has(group):
            chosen.append(key)
    return [_take(cache, key) for key in chosen]


def _by_chain(cache: SharedBlockCache, tree: PrefixTree, group: int, least: int) -> list[Evicted]:
    """Chains that have the group, and chains that stand in the way of an ancestor that has it, pass by pass."""
    evicted: list[Evicted] = []
    progress = True
    while progress and _of_group(evicted, group) < least:
        progress = False
        for leaf in tree.leaves():
            if not tree.is_leaf(leaf):
                continue
            chain = tree.chain(leaf)
            if any(_item(cache, key).has(group) for _, key in chain) or _in_the_way(cache, tree, chain, group):
                evicted += _take_chain(cache, chain)
                progress = True
            if _of_group(evicted, group) >= least:
                break
    return evicted


def _in_the_way(cache: SharedBlockCache, tree: PrefixTree, chain: list[Name], group: int) -> bool:
    return any(_item(cache, name[1]).has(group) and tree.subtree_evictable(name) for name in tree.ancestors(chain[-1]))


def _alone(cache: SharedBlockCache, tree: PrefixTree, group: int, least: int) -> list[Evicted]:
    """One block of the group from each chain, nearest to its leaf but never the leaf's."""
    evicted: list[Evicted] = []
    for leaf in tree.leaves():
        if len(evicted) >= least:
            break
        if not tree.is_leaf(leaf):
            continue
        for _, key in tree.chain(leaf)[1:]:
            # Looked up as a hit is: a key that is passed over becomes the most recently used, too.
            item = cache.items.get(key)
            assert item is not None
            if item.has(group):
                evicted.append(_take_slot(cache, item, group))
                break
    return evicted


def _take_slot(cache: SharedBlockCache, item: Item, group: int) -> Evicted:
    blocks = tuple(block if index == group else NULL for index, block in enumerate(item.blocks))
    item.blocks[group] = NULL
    item.matchable[group] = False
    cache.evictions += 1
    cache.version += 1
    if item.count == 0:
        cache.remove(item.key)
    return Evicted(item.key, blocks, item.namespace, item.dependency)


def _take_chain(cache: SharedBlockCache, chain: list[Name]) -> list[Evicted]:
    keys = dict.fromkeys(key for _, key in reversed(chain))
    return [_take(cache, key) for key in keys]


def _take(cache: SharedBlockCache, key: int) -> Evicted:
    item = cache.remove(key)
    cache.evictions += item.count
    return Evicted(key, tuple(item.blocks), item.namespace, item.dependency)


def _item(cache: SharedBlockCache, key: int) -> Item:
    item = cache.items.peek(key)
    assert item is not None
    return item


def _of_group(evicted: list[Evicted], group: int) -> int:
    return sum(each.blocks[group] != NULL for each in evicted)
