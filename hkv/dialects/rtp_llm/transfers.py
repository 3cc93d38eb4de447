"""Blocks that are transferred between prefill and decode servers and to other tiers, and their keys. Host-only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hkv.dialects.rtp_llm.config import CpSlotMapper
from hkv.dialects.rtp_llm.planning import PoolGroup, RtpOptions
from hkv.errors import ConfigError, LayoutError, PlanError
from hkv.model.group_policy import CpMapping, CpSlice, GroupPolicy
from hkv.spec.dtypes import item_bytes


class StoredBlock(NamedTuple):
    """One block to store.

    Attributes:
      key: index of its key among all keys of the sequence.
      slot: index of its slot in this rank's list.
    """

    key: int
    slot: int


def store_plan(
    policy: GroupPolicy, mapper: CpSlotMapper, total: int, *, reused: int = 0, hybrid: bool = True
) -> list[StoredBlock]:
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
        return [StoredBlock(min((slot + 1) * mapper.size - 1, total - 1), slot) for slot in range(start, slots)]
    start = reused
    if hybrid:
        start = max(total - tail, 0) if policy.active_tail_blocks else 0
    if mapping is CpMapping.NONE:
        return [StoredBlock(position, position) for position in range(start, total)]
    owners = ((position, *mapper.owner(position)) for position in range(start, total))
    return [StoredBlock(position, slot) for position, rank, slot in owners if rank == mapper.rank]


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


# Pieces of a block by what they hold, whatever rank they are on: what ranks of unlike shapes exchange. Host-only.


class Segment(NamedTuple):
    """Bytes of a block that are either on a rank as a whole or not at all.

    Attributes:
      content: name of what they hold, the same on every rank of every server of the model.
      scale: they lie in the region of scales, else in that of keys and values.
      offset: first byte, from the block's own.
      size: bytes.
    """

    content: tuple[str | int, ...]
    scale: bool
    offset: int
    size: int


def heads_of(group: PoolGroup, tensor_parallel: int, rank: int) -> range:
    """Heads of a group's layers on a rank, counted over all ranks.

    Ranks that do not divide the heads hold `heads / gcd` each, several ranks in a row the same (RTP-LLM).

    Raises:
      PlanError: no such rank.
    """
    if not 0 <= rank < tensor_parallel:
        raise PlanError("rank", rank, f"a rank from 0 to {tensor_parallel - 1}")
    local = group.block.local_heads
    replicas = tensor_parallel // (group.block.heads // local)
    first = rank // replicas * local
    return range(first, first + local)


def segments(group: PoolGroup, options: RtpOptions, rank: int) -> Iterator[Segment]:
    """The segments of one block of one layer on a rank, in the order of memory.

    Keys, values and their scales are cut by heads, in every kernel block; a recurrent state by value heads, and its
    convolution's inputs by heads of queries, keys and values; a ring or window that prefill ranks hold slices of, by
    those; everything else is one segment.

    Args:
      group: the group, of the target or a draft module.
      options: settings of the server.
      rank: the rank, of those that split heads or that deal blocks out.

    Raises:
      PlanError: no such rank.
      LayoutError: slices that the ranks do not divide.
    """
    kind = group.block.kind
    ranks = options.slicing_ranks
    if kind in ("mha", "linear"):
        # Ranks that deal blocks out hold all heads.
        heads = heads_of(group, options.tensor_parallel, rank if options.ranks == 1 else 0)
        yield from _keys_and_values(group, heads) if kind == "mha" else _recurrent(group, heads)
    elif ranks > 1 and group.policy.cp_slice is not CpSlice.NONE and options.role == "prefill":
        payload = group.policy.cp_slice is CpSlice.PAYLOAD_BYTES
        yield Segment(("slice", rank), False, 0, group.block.payload if payload else group.stride)
    elif ranks > 1 and group.policy.cp_slice is not CpSlice.NONE:
        for peer in range(ranks):
            part = slice_for_peer(group.policy.cp_slice, group.stride, group.block.payload, ranks, peer)
            yield Segment(("slice", peer), False, *part)
    else:
        yield Segment(("whole",), False, 0, group.stride)
        if group.block.scale:
            yield Segment(("whole", "scale"), True, 0, group.scale_stride)


def _keys_and_values(group: PoolGroup, heads: range) -> Iterator[Segment]:
    block, pieces = group.block, group.kernel_blocks
    tokens = block.seq_size // pieces
    size = block.k_elems // (block.local_heads * block.seq_size) * item_bytes(block.dtype)
    regions = [(False, tokens * size)] + [(True, tokens * 4)] * bool(block.scale)
    for scale, run in regions:
        offset = 0
        for piece in range(pieces):
            for side in ("key", "value"):
                for head in heads:
                    yield Segment((side, head, piece), scale, offset, run)
                    offset += run


def _recurrent(group: PoolGroup, heads: range) -> Iterator[Segment]:
    block = group.block
    ((_, size, _), state_dtype), ((taps, row), conv_dtype) = block.spec.state_tensors
    run = size * size * item_bytes(state_dtype)
    for place, head in enumerate(heads):
        yield Segment(("state", head), False, place * run, run)
    offset, item = len(heads) * run, item_bytes(conv_dtype)
    local_keys = (row // size - len(heads)) // 2
    first_key = heads.start * local_keys // len(heads)
    for tap in range(taps):
        for name, first, count in (
            ("query", first_key, local_keys),
            ("key", first_key, local_keys),
            ("value", heads.start, len(heads)),
        ):
            for head in range(first, first + count):
                yield Segment((name, head, tap), False, offset, size * item)
                offset += size * item
