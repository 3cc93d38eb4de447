"""RTP-LLM's text over plain objects: an empty cache, room for more, and its state in the words of logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import HYBRID_POOL, NULL, SINGLE, RtpConfig
from hkv.model.group_policy import CpMapping, GroupType
from hkv.version import check_reference

check_reference()  # before the first import of it

from reference.dialects.rtp_llm.records import Cache, Key, Pool, Request, Role  # noqa: E402
from reference.language import Layout  # noqa: E402

LAYOUT = Layout(Cache)
"""Names and places of the state of RTP-LLM's cache."""

ALL_BLOCKS = 1 << 28
"""More than any list has."""


def settings(config: RtpConfig) -> dict[str, int]:
    """The configuration of the text, by names of its scalars."""
    single, full = config.name == SINGLE, config.full_groups
    defects = (name for name in LAYOUT.settings if name.startswith("defects."))
    found = {
        "config.groups": len(config.policies),
        "config.block": config.block_size,
        "config.step": max(1, config.linear_step),
        "config.reserve": config.reserve_blocks,
        "config.ranks": 1 if single else config.cp_size,
        "config.single": single,
        "config.apart": config.name == HYBRID_POOL,
        "config.reused": _group(config, full[0])["logical"] if full else config.block_size,
        "config.adopts": config.prefill_cp_size == 1,
        "config.tree": config.prefix_tree,
        **{name: name.removeprefix("defects.").replace("_", "-") in config.bugs for name in defects},
    }
    return {name: int(value) for name, value in found.items()}


def _group(config: RtpConfig, group: int) -> dict[str, int]:
    """Fields of a group, but for its pool."""
    policy, spec, single = config.policies[group], config.topology.groups[group].spec, config.name == SINGLE
    full, linear, swa = (policy.group_type is kind for kind in (GroupType.FULL, GroupType.LINEAR, GroupType.SWA))
    mapping = CpMapping.NONE if single else config.mapper.mapping(policy)
    tail = ALL_BLOCKS if full else max(1, policy.active_tail_blocks)
    reuses = policy.enable_prefix_reuse
    found = {
        "at": group,
        "kind": policy.group_type,
        "block": spec.block_size,
        "tail": tail,
        # Two states at least: the one that is read and the one that is written.
        "kept": max(2, tail) if linear else tail,
        "checked": min(tail, 2) if swa and policy.validate_tail_blocks else 0,
        "grid": linear or (swa and reuses),
        "reuse": reuses,
        "votes": linear or (swa and reuses),
        "alone": group in config.independent_groups,
        "explicit": policy.explicit_block_num != 0,
        "dealt": mapping is CpMapping.BLOCK_ROUND_ROBIN,
        "canonical": mapping is not CpMapping.NONE,
        "compact": swa and mapping is CpMapping.COMPACT_LAST_RANK,
        "logical": config.mapper.logical_block_size(mapping, spec.block_size),
    }
    return {name: int(value) for name, value in found.items()}


def empty(config: RtpConfig, **sizes: int) -> Cache:
    """An empty cache; sizes as `empty_arrays` takes them."""
    return LAYOUT.restored(empty_arrays(config, **sizes))


def empty_arrays(
    config: RtpConfig,
    *,
    keys: int,
    slots: int,
    batch: int,
    row: int,
    operations: int = 1,
    payload: int = 0,
    told: int = 0,
    groups: int = 0,
    blocks: int = 0,
) -> dict[str, Any]:
    """The arrays and scalars of an empty cache.

    Args:
      config: the configuration.
      keys: names of blocks that there is room for.
      slots: requests at the same time.
      batch: sequences of one.
      row: slots of a sequence in a group, and its keys.
      operations: operations that there is room for.
      payload: keys and numbers of theirs.
      told: numbers of their answers.
      groups: groups that there is room for at least, so that caches of several configurations are alike.
      blocks: blocks of each pool, likewise.
    """
    counts, groups = config.num_blocks, max(groups, len(config.policies))
    size, pools = max(blocks, *counts), max(groups, len(counts)) if blocks else len(counts)
    sequences, leaf = slots * batch + batch + 1, 0
    while 16 * (15 * leaf + 1) < size:  # a level of words holds 16 times as many as the one above it
        leaf = 16 * leaf + 1
    arrays: dict[str, Any] = LAYOUT.blank(
        {
            **{"pools": pools, "blocks": pools * size, "groups": groups, "requests": slots, "sequences": sequences},
            **{"block_ids": sequences * groups, "keys": keys + 1, "nodes": 2 * (keys + 1)},
            **{"operations": operations, "results": operations, "payload": payload, "numbers": payload},
            **{"told": told, "told_keys": told},
            **{"pools.bits": leaf + -(-size // 16), "block_ids.blocks": row, "block_ids.fresh": row},
            **{"sequences.groups": groups, "sequences.keys": row, "requests.rows": batch, "requests.made": batch},
            **{"keys.blocks": groups, "keys.names": 2},
        }
    )
    given = {**settings(config), "config.slots": slots, "config.batch": batch, "config.row": row, "room": told}
    # The first two records of sequences: one for a fork's targets, and the first vacant one.
    given |= {"version": -1, "recent.ends": 1, "leaves.ends": 1, "targets": 1, "vacant": 2}
    arrays |= {name: np.int32(value) for name, value in given.items()}
    for ring in ("recent", "leaves"):
        arrays[f"{ring}.newer"][1] = arrays[f"{ring}.older"][1] = 1
    numbers = np.arange(1, pools * size + 1, size)[: len(counts)]
    arrays["pools.first"][1 : len(counts) + 1] = numbers
    for name in ("total", "free"):
        arrays[f"pools.{name}"][1 : len(counts) + 1] = np.array(counts) - 1
    arrays["pools.leaf"][1 : len(counts) + 1] = leaf
    bits = arrays["pools.bits"].reshape(pools + 1, -1)
    for number, count in enumerate(counts, 1):
        _set_bits(bits[number], leaf, count)
    for number, group in enumerate(config.topology.groups):
        arrays["groups.pool"][number + 1] = config.topology.pool_of(group.tag) + 1
        for name, value in _group(config, number).items():
            arrays[f"groups.{name}"][number + 1] = value
    arrays["keys.names"][2:] = np.arange(1, 2 * keys + 3)
    arrays["nodes.key"][1:], arrays["nodes.canonical"][1:] = (
        np.arange(2, 2 * keys + 4) // 2,
        np.arange(2 * keys + 2) % 2,
    )
    arrays["sequences.next"][1:-1] = np.arange(2, sequences + 1)
    arrays["sequences.groups"][groups:] = np.arange(1, sequences * groups + 1)
    return arrays


def _set_bits(bits: np.ndarray, leaf: int, count: int) -> None:
    """All blocks but the first are free."""
    level = np.arange(16 * (len(bits) - leaf))
    words = ((level > 0) & (level < count)).reshape(-1, 16)
    place = leaf
    while True:
        bits[place : place + len(words)] = words @ (1 << np.arange(16))
        if place == 0:
            return
        place = (place - 1) // 16
        above = np.zeros(-(-len(words) // 16) * 16, bool)
        above[: len(words)] = words.any(axis=1)
        words = above.reshape(-1, 16)


def _name(cache: Cache, first: int) -> None:
    """Gives keys from a record on their nodes."""
    for number in range(first, len(cache.keys)):
        for canonical in range(2):
            node = cache.nodes[2 * number - 1 + canonical]
            node.key, node.canonical, cache.keys[number].names[canonical] = cache.keys[number], canonical, node


def _join(cache: Cache, first: int, ids: int) -> None:
    """Gives sequences from a record on their lists, from `ids` on, and makes them vacant."""
    for row in reversed(cache.sequences[first:]):
        row.next, cache.vacant = cache.vacant, row
    for row in cache.sequences[first:]:
        for group in range(len(cache.groups) - 1):
            ids += 1
            row.groups[group] = cache.block_ids[ids]


def grow_keys(cache: Cache, count: int) -> None:
    """Makes room for so many more keys."""
    first = len(cache.keys)
    LAYOUT.grow(cache, "keys", count)
    LAYOUT.grow(cache, "nodes", 2 * count)
    _name(cache, first)


def grow_slots(cache: Cache, count: int) -> None:
    """Makes room for so many more requests."""
    first, ids = len(cache.sequences), len(cache.block_ids) - 1
    LAYOUT.grow(cache, "requests", count)
    LAYOUT.grow(cache, "sequences", count * cache.config.batch)
    LAYOUT.grow(cache, "block_ids", count * cache.config.batch * (len(cache.groups) - 1))
    _join(cache, first, ids)
    cache.config.slots += count


def grow_batch(cache: Cache, count: int) -> None:
    """Makes room for so many more sequences of a request."""
    LAYOUT.lengthen(cache, "requests", count)
    cache.config.batch += count
    first, ids, more = len(cache.sequences), len(cache.block_ids) - 1, count * (cache.config.slots + 1)
    LAYOUT.grow(cache, "sequences", more)
    LAYOUT.grow(cache, "block_ids", more * (len(cache.groups) - 1))
    _join(cache, first, ids)


def grow_row(cache: Cache, count: int) -> None:
    """Makes room for so many more slots and keys of a sequence."""
    LAYOUT.lengthen(cache, "block_ids", count)
    for row in cache.sequences[1:]:
        row.keys += [None] * count  # type: ignore[list-item]
    cache.config.row += count


# The state in the words of logs.


def lists(cache: Cache, request: Request) -> structs.Lists:
    """Blocks of each sequence of a request and each group, holes included."""
    return [
        [holes(ids.blocks[: ids.length]) for ids in row.groups[: cache.config.groups]]
        for row in request.rows[: request.batch]
    ]


def holes(blocks: Sequence[int]) -> list[int]:
    """Blocks as a log has them."""
    return [block or NULL for block in blocks]


def cached(cache: Cache) -> Iterator[Key]:
    """Cached keys, least recently used first."""
    key = cache.recent.oldest()
    while key is not cache.recent.ends:
        yield key
        key = cache.recent.newer[key]


def free_blocks(cache: Cache, pool: Pool) -> list[int]:
    """Ids that nobody holds, ascending."""
    return [block for block in range(1, pool.total + 1) if pool.bits[pool.leaf + block // 16] >> block % 16 & 1]


def state(cache: Cache, requests: Mapping[str, Request], key_of: Mapping[Key, int]) -> structs.RtpState:
    """State of the cache, as far as engines are compared; `key_of`: what its keys stand for."""
    found = {id: lists(cache, request) for id, request in requests.items()}
    return structs.RtpState(
        pools=[_pool(cache, pool) for pool in cache.pools[1:] if pool.total],
        lists={id: rows for id, rows in found.items() if any(blocks for row in rows for blocks in row)},
        cached=[(key_of[key], holes(key.blocks[: cache.config.groups])) for key in cached(cache)],
        version=cache.version,
    )


def _pool(cache: Cache, pool: Pool) -> structs.PoolState:
    blocks = list(enumerate(cache.blocks[pool.first : pool.first + pool.total + 1]))
    counts = {
        role.name.lower(): {str(n): count for n, each in blocks if (count := getattr(each, role.name.lower()))}
        for role in Role
    }
    return structs.PoolState(free=free_blocks(cache, pool), **counts)
