"""Pieces of a block by what they hold, whatever rank they are on: what ranks of unlike shapes exchange. Host-only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hkv.dialects.rtp_llm.planning import PoolGroup, RtpOptions
from hkv.dialects.rtp_llm.transfers import slice_for_peer
from hkv.errors import PlanError
from hkv.model.group_policy import CpSlice
from hkv.spec.dtypes import item_bytes


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
