"""Figures that operators of RTP-LLM watch: its pools, its cached keys, and hits among recent keys. Pure functions."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from hkv.dialects.rtp_llm.config import HYBRID_POOL, RtpConfig
from hkv.dialects.rtp_llm.log import RtpState
from hkv.errors import ConfigError
from hkv.model.group_policy import GroupType

WINDOW_MS = 30 * 60 * 1000
"""Milliseconds for which a key counts as recent unless told otherwise (RTP-LLM `RecentCacheKeyWindow`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSnapshot:
    """Blocks of one pool (RTP-LLM `BlockPool`'s counters, as its metrics report them).

    Attributes:
      tags: groups that draw from it.
      total: blocks, the reserved block 0 not counted.
      free: blocks without references.
      available: blocks that no request and no connector holds: the free ones, and those that the cache would give up.
      not_in_use: blocks that neither a request nor the cache holds.
      request, connector, cached: blocks that such a role holds.
      reserved: blocks that a first allocation leaves available: of several pools, each one's part of the reserve by the
        blocks available now, rounded down; those of a fixed size have none.
    """

    tags: tuple[str, ...]
    total: int
    free: int
    available: int
    not_in_use: int
    request: int
    connector: int
    cached: int
    reserved: int

    @property
    def used_percent(self) -> float:
        """Share of the blocks that are not available; 0 of an empty pool."""
        return 100 * (self.total - self.available) / self.total if self.total else 0.0


def pool_snapshots(config: RtpConfig, state: RtpState) -> tuple[PoolSnapshot, ...]:
    """The pools of a cache: one, or one a group.

    Args:
      config: the cache.
      state: its whole state, as the operation `state` answers.
    """
    pools = [_snapshot(config, state, index) for index in range(len(config.num_blocks))]
    if config.name != HYBRID_POOL:
        return tuple(pools)
    sizes = [
        0 if policy.explicit_block_num else pool.available for policy, pool in zip(config.policies, pools, strict=True)
    ]
    shares = (config.reserve_blocks * size // max(1, sum(sizes)) for size in sizes)
    return tuple(dataclasses.replace(pool, reserved=share) for pool, share in zip(pools, shares, strict=True))


def _snapshot(config: RtpConfig, state: RtpState, index: int) -> PoolSnapshot:
    pool, total = state.pools[index], config.num_blocks[index] - 1
    tags = config.topology.tags if config.name != HYBRID_POOL else (config.topology.tags[index],)
    roles = pool.request, pool.connector, pool.cache
    request, connector, cached = ({block for block, n in role.items() if n} for role in roles)
    return PoolSnapshot(
        tags=tags,
        total=total,
        free=len(pool.free),
        available=total - len(request | connector),
        not_in_use=total - len(request | cached),
        request=len(request),
        connector=len(connector),
        cached=len(cached),
        reserved=config.reserve_blocks,
    )


@dataclasses.dataclass(frozen=True)
class CacheInfo:
    """Cached keys and capacity of a server, for routers (RTP-LLM `KVCacheInfo`).

    Attributes:
      cached_keys: keys that are cached on the device or in host memory, in rising order.
      version: changes to the device's cache, less one.
      block_size: tokens of a key, of all ranks together.
      total_tokens: tokens that all blocks hold.
      available_tokens: tokens that the available ones hold.
    """

    cached_keys: tuple[int, ...]
    version: int
    block_size: int
    total_tokens: int
    available_tokens: int


def cache_info(config: RtpConfig, state: RtpState, memory_keys: Iterable[int] = ()) -> CacheInfo:
    """A server's cached keys, of all tiers together, and its capacity in tokens.

    Over one pool, a block counts as many tokens as a key, those of all ranks. With a pool a group, tokens are those of
    the scarcest pool, rings and windows too, and a rank's own (RTP-LLM `buildKVCacheInfo`).

    Args:
      config: the cache.
      state: its whole state, as the operation `state` answers.
      memory_keys: keys that a memory tier holds.
    """
    keys = {key for key, _ in state.cached} | set(memory_keys)
    pools = pool_snapshots(config, state)
    tokens = [token_capacity(config, [getattr(pool, name) for pool in pools]) for name in ("total", "available")]
    return CacheInfo(tuple(sorted(keys)), state.version, config.mapper.virtual_block_size, *tokens)


def monitored(config: RtpConfig, state: RtpState, requests: Iterable[tuple[float, Sequence[int]]]) -> dict[str, Any]:
    """Pools, cached keys and recent keys of a server after some requests, as plain values.

    Args:
      config: the cache.
      state: its whole state then.
      requests: time of arrival in milliseconds and keys of whole blocks of each, in order.
    """
    info, recent = cache_info(config, state), recent_hits(requests)
    return {
        "pools": [
            dataclasses.asdict(pool) | {"used_percent": pool.used_percent} for pool in pool_snapshots(config, state)
        ],
        "cache": dataclasses.asdict(info) | {"cached_keys": len(info.cached_keys)},
        "recent_keys": dataclasses.asdict(recent) | {"hit_ratio": recent.hit_ratio},
    }


@dataclasses.dataclass(frozen=True)
class RecentHits:
    """Keys of requests against those of earlier ones: what a cache without end would have hit.

    Attributes:
      keys: keys that the requests brought, each as often as it came.
      hits: those that an earlier, recent request brought too.
      retained: keys kept after the last one, each as often as it came.
      retained_unique: different ones among them.
    """

    keys: int
    hits: int
    retained: int
    retained_unique: int

    @property
    def hit_ratio(self) -> float:
        """Share of the keys that hit; 0 of none."""
        return self.hits / self.keys if self.keys else 0.0


def recent_hits(requests: Iterable[tuple[float, Sequence[int]]], window_ms: int = WINDOW_MS) -> RecentHits:
    """Hits among the keys that requests brought lately (RTP-LLM `RecentCacheKeyWindow`).

    Args:
      requests: time of arrival in milliseconds and keys of whole blocks of each, in order of time.
      window_ms: milliseconds for which a request's keys are kept.

    Raises:
      ConfigError: no such window, or time runs backwards.
    """
    if type(window_ms) is not int or window_ms < 1:
        raise ConfigError("window_ms", window_ms, "a positive number of milliseconds")
    entries: deque[tuple[float, Sequence[int]]] = deque()
    counts: Counter[int] = Counter()
    total = hits = 0
    for now, keys in requests:
        if entries and now < entries[-1][0]:
            raise ConfigError("requests", now, f"at least {entries[-1][0]}, the time of the one before")
        while entries and entries[0][0] <= now - window_ms:
            counts.subtract(old := entries.popleft()[1])
            for key in old:
                if not counts[key]:
                    del counts[key]
        total, hits = total + len(keys), hits + sum(key in counts for key in keys)
        if len(keys):
            entries.append((now, keys))
            counts.update(keys)
    return RecentHits(total, hits, counts.total(), len(counts))


# Tokens that pools hold, as RTP-LLM's scheduler asks for them. Host-only.


def tokens_of(config: RtpConfig, blocks: Sequence[int]) -> int:
    """Tokens that so many blocks hold, all ranks together (RTP-LLM `availableTokensNum` and its siblings).

    Over one pool, those of the first group's slots; with a pool a group, what every full group has room for, or every
    group if none is full.

    Args:
      config: the cache.
      blocks: a number of blocks for each pool, such as those that are free.

    Raises:
      ConfigError: not one number a pool.
    """
    if len(blocks) != len(config.num_blocks):
        raise ConfigError("blocks", list(blocks), f"one number for each of {len(config.num_blocks)} pools")
    if config.name != HYBRID_POOL:
        return sum(blocks) * _logical(config, 0)
    groups = range(len(config.policies))
    full = [group for group in groups if config.policies[group].group_type is GroupType.FULL]
    return min(blocks[group] * _logical(config, group) for group in full or groups)


def token_capacity(config: RtpConfig, blocks: Sequence[int]) -> int:
    """Tokens that so many blocks of each pool hold, as routers are told (RTP-LLM `tokenCapacity`)."""
    if config.name != HYBRID_POOL:
        return sum(blocks) * config.mapper.virtual_block_size
    sizes = (group.spec.block_size for group in config.topology.groups)
    return min(count * size for count, size in zip(blocks, sizes, strict=True))


def _logical(config: RtpConfig, group: int) -> int:
    """Tokens of the sequence that one slot of a group stands for."""
    mapping = config.mapper.mapping(config.policies[group])
    return config.mapper.logical_block_size(mapping, config.topology.groups[group].spec.block_size)
