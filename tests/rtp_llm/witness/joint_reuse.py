"""The longest prefix that every group has in the cache, found by scanning back from the full groups' hit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hkv.dialects.rtp_llm.config import NULL
from hkv.model.group_policy import CpMapping, GroupType
from tests.rtp_llm.witness.allocator import Allocator


class JointReuse(NamedTuple):
    """Cached prefix that a new request takes over.

    Attributes:
      keys: number of keys, counted from the first.
      lists: for each group, the blocks its list begins with, holes included.
    """

    keys: int
    lists: list[list[int]]


def joint_reuse(allocator: Allocator, keys: Sequence[int]) -> JointReuse:
    """The longest prefix of `keys` from which every group can go on.

    Full groups want a block under every key, and vote even if their policy forbids reuse. Of the others only the last
    key counts: LINEAR groups always vote, SWA groups if their policy allows reuse. Looking counts as using.
    """
    hits = {kind.group: kind.match_prefix(keys) for kind in allocator.kinds if kind.by_prefix}
    longest = min([len(keys), *map(len, hits.values())])
    voters = [kind for kind in allocator.kinds if kind.votes]
    if not voters:
        return JointReuse(longest, _lists(allocator, longest, hits, {}))
    for position in range(longest - 1, -1, -1):
        last = {kind.group: kind.match(keys[position]) for kind in voters}
        if NULL not in last.values():
            return JointReuse(position + 1, _lists(allocator, position + 1, hits, last))
    return JointReuse(0, [[] for _ in allocator.kinds])


def reused_tokens(allocator: Allocator, keys: int) -> int:
    """Tokens that `keys` keys cover: whole virtual blocks under context parallelism."""
    for kind in allocator.kinds:
        if kind.policy.group_type is GroupType.FULL:
            return keys * allocator.logical_block_size(kind.group)
    return keys * allocator.config.block_size


def _lists(allocator: Allocator, keys: int, hits: dict[int, list[int]], last: dict[int, int]) -> list[list[int]]:
    """Full groups get their hits; the others holes, and at the end the block under the last key."""
    lists: list[list[int]] = []
    for kind in allocator.kinds:
        if kind.group in hits:
            lists.append(hits[kind.group][:keys])
            continue
        compact = allocator.mapper.mapping(kind.policy) is CpMapping.COMPACT_LAST_RANK
        # States lie at logical slots, whatever their mapping.
        windows = kind.policy.group_type is GroupType.SWA
        slots = keys * (1 if compact and windows else allocator.mapper.size)
        blocks = [NULL] * slots
        if slots and kind.group in last:
            blocks[-1] = last[kind.group]
        lists.append(blocks)
    return lists
