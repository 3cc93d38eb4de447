"""Blocks that are transferred between prefill and decode servers and to other tiers, and their keys. Host-only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hkv.dialects.rtp_llm.config import NULL, CpSlotMapper
from hkv.errors import ConfigError, LayoutError
from hkv.model.group_policy import CpMapping, CpSlice, GroupPolicy


class Stored(NamedTuple):
    """One block to store.

    Attributes:
      key: index of its key among all keys of the sequence.
      slot: index of its slot in this rank's list.
    """

    key: int
    slot: int


def store_plan(
    policy: GroupPolicy, mapper: CpSlotMapper, total: int, *, reused: int = 0, hybrid: bool = True
) -> list[Stored]:
    """Blocks of one group that a rank stores, with the indices of their keys (RTP-LLM `buildCacheStorePlan`).

    Args:
      policy: the group's policy.
      mapper: rank and ranks.
      total: keys of the sequence.
      reused: blocks that need not be stored again; counts without hybrid groups only.
      hybrid: several groups; those with an active tail then store the tail alone, the others everything.
    """
    tail = max(1, policy.active_tail_blocks)
    mapping = mapper.mapping(policy)
    if mapping is CpMapping.COMPACT_LAST_RANK:
        slots = -(-total // mapper.size)
        start = max(slots - tail, 0) if hybrid else min(reused, slots)
        return [Stored(min((slot + 1) * mapper.size - 1, total - 1), slot) for slot in range(start, slots)]
    start = reused
    if hybrid:
        start = max(total - tail, 0) if policy.active_tail_blocks else 0
    if mapping is CpMapping.NONE:
        return [Stored(position, position) for position in range(start, total)]
    owners = ((position, *mapper.owner(position)) for position in range(start, total))
    return [Stored(position, slot) for position, rank, slot in owners if rank == mapper.rank]


def slice_for_peer(mode: CpSlice, block_bytes: int, payload_bytes: int, ranks: int, peer: int) -> tuple[int, int]:
    """`(offset, bytes)` of the part of a block that goes to one rank (RTP-LLM `sliceBlockForPeer`).

    Args:
      mode: equal parts of the block, or of its payload; all of it for NONE.
      block_bytes: bytes of the block.
      payload_bytes: of those, bytes that carry data.
      ranks: parts.
      peer: index of the part.

    Raises:
      LayoutError: no such part, bytes that the ranks do not divide, or a part beyond the block.
    """
    if mode is CpSlice.NONE:
        return 0, block_bytes
    if ranks < 1 or not 0 <= peer < ranks:
        raise LayoutError("peer", peer, f"a rank from 0 to {ranks - 1}")
    whole = block_bytes if mode is CpSlice.EQUAL_BYTES else payload_bytes
    if whole % ranks:
        raise LayoutError("bytes", whole, f"a multiple of {ranks} ranks")
    part = whole // ranks
    if part * (peer + 1) > block_bytes:
        raise LayoutError("peer", peer, f"a part within the block's {block_bytes} bytes")
    return part * peer, part


def positions_to_transfer(
    count: int, *, reused: int = 0, hybrid: bool = True, tail: int = 0, full_from_begin: bool = False
) -> range:
    """Positions of the blocks that go to a decode server (RTP-LLM `KVCacheTransferPlanner`).

    Args:
      count: blocks of the sequence.
      reused: blocks that the other side has already.
      hybrid: several groups.
      tail: blocks at the end that the group needs, 0 for a group that needs all.
      full_from_begin: with several groups, send reused blocks of groups that need all, too.
    """
    if hybrid and tail and count > 0:
        return range(max(count - tail, 0), count)
    return range(0 if hybrid and full_from_begin else reused, count)


def transfer_key(request: int | str, layer: int, tag: str = "") -> str:
    """Name of one layer's blocks of a request while they are transferred; a group's tag is part of it."""
    suffix = "" if tag in ("", "default") else f"-tag-{tag}"
    return f"{request}-{layer}{suffix}"


def peer_buffers(blocks: Sequence[int], mapper: CpSlotMapper) -> list[tuple[int, int]]:
    """`(key index, block)` of a rank's local blocks, holes left out: what peers ask each other for."""
    return [(mapper.rank + slot * mapper.size, block) for slot, block in enumerate(blocks) if block != NULL]


class Peer(NamedTuple):
    """One decode server that a prefill rank sends to.

    Attributes:
      server: index of the server.
      local: `(count, index)`: into how many parts this rank cuts its heads, and which it sends.
      remote: `(count, index)`: into how many parts the server's heads are filled, and which this is.
    """

    server: int
    local: tuple[int, int]
    remote: tuple[int, int]


def tensor_parallel_peers(prefill: int, decode: int, rank: int) -> list[Peer]:
    """The decode servers of one prefill rank when both sides split heads differently.

    Args:
      prefill: ranks on the prefill side.
      decode: servers on the decode side.
      rank: this prefill rank.

    Returns:
      Nothing when neither number divides the other (RTP-LLM).

    Raises:
      ConfigError: no such rank.
    """
    if not 0 <= rank < prefill or decode < 1:
        raise ConfigError("rank", rank, f"a rank from 0 to {prefill - 1}, and at least one server")
    if prefill > decode:
        count = prefill // decode
        return [] if prefill % decode else [Peer(rank // count, (1, 0), (count, rank % count))]
    count = decode // prefill
    return [] if decode % prefill else [Peer(rank * count + i, (count, i), (1, 0)) for i in range(count)]
