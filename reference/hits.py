"""The longest cache hit by its definition: try every length a hit may have, ask every group whether it can resume.

Engines find hits by scanning backwards and reconciling groups in a fixed-point iteration. This file shares no rule with
them: it knows what a query reads (`LayerSpec.reads`) and what stands in the cache. `docs/hits.md` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hkv.dialects.vllm.config import VllmConfig

HasEntry = Callable[[int, int], bool]
"""`has_entry(group, end)`: does the cache hold an entry of `group` under the key of the request's first `end` tokens?

Such an entry is one block. Of an attention kind it holds the values of the tokens from its block's start to `end`; of a
snapshot kind it holds the state after exactly `end` tokens. False wherever the request has no key.
"""


def longest_hit_by_definition(config: VllmConfig, has_entry: HasEntry, num_tokens: int) -> int:
    """The largest length at which every group can resume, in tokens, at least 0.

    A hit is a multiple of `hit_alignment(config)` and leaves at least the last token to compute.

    Args:
      config: the groups and their rules.
      has_entry: predicate: the cache holds an entry of this request's prefixes.
      num_tokens: tokens the request has.
    """
    lengths = range(0, num_tokens, hit_alignment(config)) if config.caching else range(1)
    return max((length for length in lengths if can_resume(config, has_entry, length)), default=0)


class ConnectorDefinition(NamedTuple):
    """Hit that a KV connector gets, by its definition; lengths in tokens.

    Attributes:
      hit: the local hit.
      own: of each group, the largest length at which it and those of equal spec can resume; 0 where never cached.
      lagging: groups whose own is shorter than `hit`: a load has to supply what they read at the end of the whole.
    """

    hit: int
    own: tuple[int, ...]
    lagging: tuple[int, ...]


def connector_hit_by_definition(config: VllmConfig, has_entry: HasEntry, num_tokens: int) -> ConnectorDefinition:
    """The hit of a request whose groups a connector may complete (vLLM 0.33 `get_computed_blocks_for_connector`).

    Beside recurrent states it is the largest length at which full attention alone can resume, unless another group
    alone can resume later, which shows that values of full attention were lost. Then, and in every other cache, it is
    the common hit, and no group lags.

    Args:
      config: the groups and their rules.
      has_entry: predicate: the cache holds an entry of this request's prefixes.
      num_tokens: tokens the request has.
    """
    specs = config.topology.specs
    lengths = range(0, num_tokens, hit_alignment(config)) if config.caching else range(1)
    twins = [[twin for twin, other in enumerate(specs) if spec.prefix_cacheable and other == spec] for spec in specs]
    able = [
        [
            n
            for n in lengths
            if twins[group] and all(can_resume_alone(config, has_entry, each, n) for each in twins[group])
        ]
        for group in range(len(specs))
    ]
    own = tuple(max(found, default=0) for found in able)
    full = config.completed_group
    if full is None or max(own) > own[full]:
        return ConnectorDefinition(longest_hit_by_definition(config, has_entry, num_tokens), own, ())
    behind = (group for group, spec in enumerate(specs) if spec.prefix_cacheable and own[group] < own[full])
    return ConnectorDefinition(own[full], own, tuple(behind))


def hit_alignment(config: VllmConfig) -> int:
    """Tokens of which every hit is a multiple.

    The group's block when there is one group; else `scheduler_block_size`, or `hash_block_size` when hits may end
    inside a block (vLLM 0.33 `HybridKVCacheCoordinator`).
    """
    if len(config.topology.groups) == 1:
        return config.block_size(0)
    return config.hash_block_size if config.partial_hits else config.scheduler_block_size


def can_resume(config: VllmConfig, has_entry: HasEntry, length: int) -> bool:
    """True if every group can resume at `length`, drafts included. A group that caches no prefixes has no say."""
    specs = config.topology.specs
    return all(
        can_resume_alone(config, has_entry, group, length) for group, spec in enumerate(specs) if spec.prefix_cacheable
    )


def can_resume_alone(config: VllmConfig, has_entry: HasEntry, group: int, length: int) -> bool:
    """True if one group, which caches prefixes, can resume at `length`, a draft's value included."""
    return can_read(config, has_entry, group, length) and can_draft(config, has_entry, group, length)


def can_read(config: VllmConfig, has_entry: HasEntry, group: int, length: int) -> bool:
    """True if the query at `length` finds everything it reads in this group.

    A snapshot kind needs the state after exactly `length` tokens. Any other kind needs all positions that are readable.
    """
    spec = config.topology.groups[group].spec
    ranges = spec.reads(length)
    if spec.snapshot:
        return all(has_entry(group, position + 1) for positions in ranges for position in positions)
    return all(holds(config, has_entry, group, positions) for positions in ranges)


def can_draft(config: VllmConfig, has_entry: HasEntry, group: int, length: int) -> bool:
    """True if a group of a draft module knows more than `length` tokens, so that its last value can be trusted.

    A draft (EAGLE or MTP) layer computes its value at position p from token p + 1. The key of the first `length` tokens
    does not say which token comes next, so the value at `length - 1` may belong to another continuation. An entry that
    goes on after `length` settles it: the group must hold the unit of tokens after `length` as well, one block or,
    where hits end inside blocks, one hash block. That unit is then computed again. vLLM 0.33 calls this dropping the
    last block. A snapshot holds no value that depends on a later token, and nothing is dropped.
    """
    spec = config.topology.groups[group].spec
    if length == 0 or group not in config.eagle_group_ids or spec.snapshot:
        return True
    unit = min(config.block_size(group), hit_alignment(config))
    return holds(config, has_entry, group, range(length, length + unit))


def holds(config: VllmConfig, has_entry: HasEntry, group: int, positions: range) -> bool:
    """True if, block by block, one entry covers all of `positions` that lie in the block."""
    size = config.block_size(group)
    for block in sorted({position // size for position in positions}):
        last = min((block + 1) * size, positions.stop)
        if not any(has_entry(group, end) for end in range(last, (block + 1) * size + 1)):
            return False
    return True
