"""All groups of a cache together: the seven rules, each over a `Coordinator`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from hkv.dialects.vllm.config import VllmConfig
from hkv.errors import ConfigError
from hkv.spec import LayerSpec
from reference.dialects.vllm.hits import Found, find_alone, find_together, spec_groups
from reference.dialects.vllm.kinds.kind import Demand, Kind
from reference.dialects.vllm.request import Request
from reference.state.pool import Pool


class Refusal(NamedTuple):
    """Reason why `admit` refused.

    Attributes:
      needs: of each group, the blocks that were asked for; 0 where it waits.
      free: blocks in the free queue.
      usable: number of those that the request could count on.
      whole: the question was whether the whole request fits.
      waits: groups that need what this very step writes.
    """

    needs: tuple[int, ...]
    free: int
    usable: int
    whole: bool
    waits: tuple[int, ...]


class Coordinator:
    """The groups of one cache over one pool. vLLM 0.33 `KVCacheCoordinator` and its three subclasses.

    Attributes:
      config: the cache's configuration.
      pool: the pool all groups draw from.
      kinds: rules for each group, in group order.
      members: the groups that are looked up together; empty without caching.
      alone: whether there is one group only.
      exact: whether every group's estimate is always what it takes.
      refusal: reason why `admit` last refused; for diagnosis.
    """

    def __init__(self, config: VllmConfig, kind_of: Callable[[LayerSpec], type[Kind]]) -> None:
        self.config = config
        self.pool = Pool(config.num_blocks)
        specs = config.topology.specs
        self.kinds = [kind_of(spec)(group, spec, config, self.pool) for group, spec in enumerate(specs)]
        self.members = spec_groups(self.kinds, config.eagle_group_ids) if config.caching else []
        self.alone = len(self.kinds) == 1
        self.exact = all(kind.exact for kind in self.kinds)
        self.refusal: Refusal | None = None
        if config.caching and not self.alone and not self.members:
            raise ConfigError("groups", len(self.kinds), "one kind at least that can be cached, or caching off")
        for member in self.members:
            for kind in member.kinds:
                kind.eagle = member.eagle
                kind.check(self.alone)


def longest_hit(cache: Coordinator, request: Request, limit: int | None = None) -> Found:
    """The longest prefix of a request that every group can resume from. Its last token is always computed again.

    Nothing changes. Without prefix caching nothing is ever found.

    Args:
      cache: the cache.
      request: the request.
      limit: tokens that it may have; None for all but the last (vLLM 0.33 `max_cache_hit_length`).
    """
    max_length = request.num_tokens - 1 if limit is None else limit
    if not cache.members:
        return Found(0, [[] for _ in cache.kinds], 0)
    if cache.alone:
        return find_alone(cache.kinds[0], request.keys, max_length, cache.members[0].eagle)
    return find_together(cache.members, request.keys, max_length, len(cache.kinds), cache.config.partial_hits)


def admit(cache: Coordinator, id: str, hit: Sequence[Sequence[int]], demand: Demand, free: int) -> bool:
    """True if `demand` fits into `free` blocks, and into the pool.

    The engine's estimate decides, and where that is too small, also the number of blocks that would really be taken:
    without that the allocation would fail halfway. A hit that needs what this very step writes is never granted.

    Args:
      cache: the cache.
      id: the request.
      hit: for each group, the blocks it is about to adopt.
      demand: lengths up to which it asks for slots.
      free: blocks it may count on: those free, less what is reserved.
    """
    groups = list(zip(cache.kinds, hit, strict=True))
    waits = tuple(kind.group for kind, blocks in groups if kind.waits(blocks, demand))
    demands = [kind.concerning(demand) for kind in cache.kinds]
    asked = list(zip(groups, demands, strict=True))
    estimates = [0 if kind.group in waits else kind.estimate(id, blocks, own) for (kind, blocks), own in asked]
    needs, usable = estimates, free
    fits = not waits and sum(estimates) <= free
    if fits and not demand.whole and not cache.exact:
        costs = zip(asked, estimates, strict=True)
        needs = [kind.taken(id, blocks, own, cost) for ((kind, blocks), own), cost in costs]
        usable = len(cache.pool.free)
        fits = sum(needs) <= usable
    if not fits:
        cache.refusal = Refusal(tuple(needs), len(cache.pool.free), usable, demand.whole, waits)
    if not fits and not demand.whole:
        for kind in cache.kinds:
            kind.refuse(id)
    return fits


def allocate(
    cache: Coordinator, id: str, hit: Sequence[Sequence[int]], demand: Demand, loaded: Sequence[int] = ()
) -> list[list[int]]:
    """Give a request its blocks: first every group adopts its hit, then takes blocks for external tokens, then grows.

    In this order no group's fresh block can be another group's hit.

    Args:
      cache: the cache.
      id: the request.
      hit: for each group, blocks to adopt.
      demand: the lengths that were admitted; those of the hit, and of tokens from elsewhere, among them.
      loaded: groups whose blocks for external tokens are written by a load, and not to be zeroed.

    Returns:
      For each group, the blocks that are new in the row.
    """
    local, external = demand.local, demand.total - demand.local
    adopting = any(hit) or external > 0
    if adopting and not any(kind.admitted(id) for kind in cache.kinds):
        for kind, blocks in zip(cache.kinds, hit, strict=True):
            kind.adopt(id, blocks, local, external)
        if external > 0:
            for kind in cache.kinds:
                kind.adopt_external(id, local, external, kind.group in loaded)
    demands = [kind.concerning(demand) for kind in cache.kinds]
    return [kind.allocate(id, own.slots, own.main) for kind, own in zip(cache.kinds, demands, strict=True)]


def register(cache: Coordinator, request: Request, tokens: int) -> None:
    """Enter what the first `tokens` tokens of a request filled into the prefix cache, group by group."""
    for kind in cache.kinds if cache.config.caching else ():
        kind.register(request, cacheable_tokens(cache, tokens, kind))


def cacheable_tokens(cache: Coordinator, tokens: int, kind: Kind) -> int:
    """Number of the first `tokens` tokens that one group may register (vLLM 0.33 `get_num_cacheable_tokens`).

    Several groups register up to a whole scheduler block only, for no hit can end elsewhere, unless sub-block hits
    are on; a group under the EAGLE drop one block more, the one that a hit gives up. Tokens that a draft may prefill
    again are left out, for a group alone and for EAGLE groups.
    """
    config = cache.config
    settled = max(0, tokens - max(0, config.prefill_lookahead - 1))
    if cache.alone:
        return settled
    unit = 1 if config.partial_hits else config.scheduler_block_size
    aligned = tokens - tokens % unit
    if kind.eagle and aligned > 0:
        return min(settled, settled - settled % unit + kind.block_size)
    return aligned


def retire(cache: Coordinator, id: str, processed: int) -> None:
    """Give back blocks that no token from `processed` on reads, group by group."""
    for kind in cache.kinds:
        kind.retire(id, processed)


def free(cache: Coordinator, id: str) -> None:
    """Give back all that a request holds, group by group, last block first."""
    for kind in cache.kinds:
        kind.free(id)


def evict(cache: Coordinator, blocks: Iterable[int]) -> None:
    """Take all keys away from blocks; references and places in the queue stay."""
    cache.pool.evict(blocks)
