"""Transfer of a request's cache from prefill to decode servers of any shape: which bytes go where, and what arrived.

A prefill server stores what `store_plan` names: of full groups every block, of others the tail, under the keys of its
tokens. A decode server has a slot for each key, or for each virtual block of the prefill ranks behind it. Between the
two, blocks are cut into segments that both name alike.

RTP-LLM pairs tensor-parallel ranks of which one number divides the other (`tensor_parallel_peers`); the moves here are
those pairs', and go on where ranks do not divide each other, where ranks hold the same heads, and where kernel blocks
alternate K and V.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hkv.dialects.rtp_llm.addresses import Home
from hkv.dialects.rtp_llm.config import NULL, CpSlotMapper
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning import PoolGroup, RtpOptions
from hkv.dialects.rtp_llm.transfers import Segment, segments, store_plan
from hkv.errors import PlanError
from hkv.model.group_policy import CpMapping, GroupType

Lists = Mapping[str, Sequence[int]]
"""Blocks of a request on one rank, by the groups' tags; -1 for holes."""


@dataclasses.dataclass(frozen=True)
class Server:
    """A server of one model: all its ranks, which are alike.

    Attributes:
      cache: one rank's cache.
      options: settings that it was planned with.
    """

    cache: PlannedCache
    options: RtpOptions

    @property
    def ranks(self) -> int:
        """Ranks of the server, which either split heads or deal blocks out."""
        return max(self.options.tensor_parallel, self.options.ranks)

    @property
    def groups(self) -> list[PoolGroup]:
        """Groups with layers, the target's and then the draft modules'."""
        plan = self.cache.plan
        return [group for groups in (plan.groups, *plan.modules) for group in groups if group.layers]

    @property
    def block_size(self) -> int:
        """Tokens between two keys: those of a block that holds one rank's tokens."""
        for group in self.groups:
            if group.policy.cp_mapping is not CpMapping.COMPACT_LAST_RANK:
                return group.block.seq_size
        return self.groups[0].block.seq_size // self.options.slicing_ranks

    def mapper(self, rank: int) -> CpSlotMapper:
        """Mapper from logical blocks to a rank's slots."""
        sharded = self.options.ranks > 1
        return CpSlotMapper(rank if sharded else 0, self.options.ranks, self.block_size)


class Move(NamedTuple):
    """Bytes that go from a rank of one server to a rank of another.

    Attributes:
      layer: global index of the layer.
      tag: the group's tag.
      key: index of the logical block's key in the sequence.
      source: rank, pool, first byte.
      target: rank, pool, first byte.
      size: bytes.
    """

    layer: int
    tag: str
    key: int
    source: tuple[int, int, int]
    target: tuple[int, int, int]
    size: int


def plan_moves(
    source: Server,
    target: Server,
    tokens: int,
    source_lists: Sequence[Lists],
    target_lists: Sequence[Lists],
    *,
    reused: int = 0,
) -> list[Move]:
    """Every move of a request, ordered by layer, key and target rank.

    Args:
      source: the prefill server.
      target: the decode server; its `prefill_ranks` are the source's ranks.
      tokens: of the request; the last block may be partly filled.
      source_lists: of each source rank, the request's blocks.
      target_lists: the same of each target rank.
      reused: blocks of full groups at the beginning that the target has already.

    Raises:
      PlanError: servers of different models or blocks, or a block that is missing on either side.
    """
    _check(source, target)
    block_size = source.block_size
    keys = -(-tokens // block_size)
    moves: list[Move] = []
    for mine, theirs in zip(source.groups, target.groups, strict=True):
        stored = _stored(source, mine, keys, source_lists)
        for key in sorted(stored):
            if mine.policy.group_type is GroupType.FULL and key < reused:
                continue
            for rank in range(target.ranks):
                block = _block(target_lists[rank], mine.tag, _slot(target, theirs, key))
                moves += _block_moves(source, target, mine, theirs, key, stored[key], rank, block)
    return moves


def _stored(source: Server, group: PoolGroup, keys: int, lists: Sequence[Lists]) -> dict[int, dict[int, int]]:
    """Blocks by key and rank that the source stores of a group."""
    found: dict[int, dict[int, int]] = {}
    for rank in range(source.ranks):
        mapper = source.mapper(rank)
        for stored in store_plan(group.policy, mapper, keys, hybrid=True):
            block = _block(lists[rank], group.tag, stored.slot)
            found.setdefault(stored.key, {})[rank] = block
    return found


def _block(lists: Lists, tag: str, slot: int) -> int:
    blocks = lists.get(tag, ())
    if slot >= len(blocks) or blocks[slot] in (NULL, 0):
        raise PlanError(f"blocks of group {tag}", list(blocks), f"a block at {slot}")
    return blocks[slot]


def _slot(target: Server, group: PoolGroup, key: int) -> int:
    """Slot of a key's block in the target's list; blocks of several ranks' tokens are as many keys long."""
    compact = group.policy.cp_mapping is CpMapping.COMPACT_LAST_RANK
    return key // target.options.prefill_ranks if compact else key


def _block_moves(
    source: Server,
    target: Server,
    mine: PoolGroup,
    theirs: PoolGroup,
    key: int,
    blocks: Mapping[int, int],
    rank: int,
    block: int,
) -> Iterator[Move]:
    """Moves of one block to one target rank, for every layer of the group."""
    held: dict[tuple[object, ...], list[tuple[int, Segment]]] = {}
    for holder in blocks:
        for segment in segments(mine, source.options, holder):
            held.setdefault((segment.content, segment.scale), []).append((holder, segment))
    pairs: list[tuple[int, Segment, Segment]] = []
    for wanted in segments(theirs, target.options, rank):
        holders = held.get((wanted.content, wanted.scale))
        if holders is None or holders[0][1].size != wanted.size:
            raise PlanError(f"group {mine.tag}", wanted.content, "bytes that the source has, of the same size")
        holder, segment = holders[rank * len(holders) // target.ranks]
        pairs.append((holder, segment, wanted))
    for own, other in zip(mine.layers, theirs.layers, strict=True):
        here, there = source.cache.addresses.home(own, mine.tag), target.cache.addresses.home(other, theirs.tag)
        for holder, segment, wanted in _joined(pairs):
            start = (holder, here.pool, _start(here, blocks[holder], segment))
            end = (rank, there.pool, _start(there, block, wanted))
            yield Move(own, mine.tag, key, start, end, segment.size)


def _joined(pairs: Sequence[tuple[int, Segment, Segment]]) -> list[tuple[int, Segment, Segment]]:
    """Pairs of segments, those that adjoin on both sides as one."""
    result: list[tuple[int, Segment, Segment]] = []
    for holder, segment, wanted in pairs:
        if result:
            last, before, target = result[-1]
            adjoin = before.offset + before.size == segment.offset and target.offset + target.size == wanted.offset
            if last == holder and before.scale == segment.scale and adjoin:
                size = before.size + segment.size
                result[-1] = (last, before._replace(size=size), target._replace(size=size))
                continue
        result.append((holder, segment, wanted))
    return result


def _start(home: Home, block: int, segment: Segment) -> int:
    address = home.region.scale_address(home.slot, block) if segment.scale else home.region.kv_address(home.slot, block)
    assert address is not None
    return address + segment.offset


def _check(source: Server, target: Server) -> None:
    if target.options.ranks > 1:
        raise PlanError("target", target.options.ranks, "a decode server, whose ranks deal no blocks out")
    if source.options.slicing_ranks != target.options.slicing_ranks:
        expected = f"{source.options.slicing_ranks}, the ranks of the source among which blocks are dealt out"
        raise PlanError("prefill_ranks of the target", target.options.prefill_ranks, expected)
    shapes = [
        [
            (g.tag, g.policy.group_type, g.layers, g.block.seq_size, g.kernel_blocks, g.block.heads)
            for g in server.groups
        ]
        for server in (source, target)
    ]
    if shapes[0] != shapes[1]:
        raise PlanError("target", shapes[1], f"groups of the source's tags, layers, blocks and heads: {shapes[0]}")


def carry(
    moves: Sequence[Move], source: Sequence[Sequence[np.ndarray]], target: Sequence[Sequence[np.ndarray]]
) -> None:
    """Performs moves, in order.

    Args:
      moves: some or all of a plan's.
      source: of each source rank, its pools, uint8 `[size]` each.
      target: the same of each target rank; written in place.
    """
    for move in moves:
        (rank, pool, start), (peer, place, end) = move.source, move.target
        target[peer][place][end : end + move.size] = source[rank][pool][start : start + move.size]


def arrived_tokens(
    target: Server, tokens: int, moves: Sequence[Move], done: Collection[int], *, reused: int = 0
) -> int:
    """Tokens that the target may go on from when only some moves were performed, as when a source rank is lost.

    A block counts when all of its bytes came, in every layer and on every rank. Windows and states came for the
    request's end alone, so that with any of them missing nothing of the request can be read.

    Args:
      target: the decode server.
      tokens: of the request.
      moves: the plan.
      done: indices of the moves that were performed.
      reused: as in `plan_moves`.

    Returns:
      `tokens` when all came; else the length of the whole blocks of full groups that came without a gap, or 0 where
      other groups exist, whose blocks at that length nobody stored.
    """
    performed = set(done)
    missing = [move for index, move in enumerate(moves) if index not in performed]
    if not missing:
        return tokens
    if any(group.policy.group_type is not GroupType.FULL for group in target.groups):
        return 0
    first = min(move.key for move in missing)
    return max(first, reused) * target.block_size
