"""Number of blocks that a request will hold at most until it ends."""

from __future__ import annotations

from tests.rtp_llm.witness.allocator import Allocator
from tests.rtp_llm.witness.resource import BatchResource


def batch_peak(
    allocator: Allocator,
    resource: BatchResource,
    *,
    seq: int,
    common: int,
    remaining: int,
    reserve: int = 0,
    reuse: bool = False,
    target: int = 0,
) -> int:
    """Blocks beyond those it has that a request holds at its peak (RTP-LLM `estimateBatchPeakNeedBlocks`).

    Args:
      allocator: the groups.
      resource: blocks of the request; none, for a new one.
      seq: tokens of each sequence now.
      common: tokens they share; counts for a new request.
      remaining: tokens to come.
      reserve: tokens to come in a step beyond the next one's.
      reuse: states on the grid are kept.
      target: sequences it will have; fewer than now count as now.

    Returns:
      An upper bound for a new request, for every group is taken at its own peak. A request that is to be forked is
      counted one block a new sequence when its last block is partly filled, however many groups there are.
    """
    width = max(resource.batch, target)
    if resource.current_blocks == 0:
        shared = min(max(common, 0), seq)
        return sum(kind.first_peak(seq, shared, remaining, reserve, reuse, width) for kind in allocator.kinds)
    lists = resource.rows[0].groups
    each = sum(
        kind.peak(seq, blocks, remaining, reserve, reuse) for kind, blocks in zip(allocator.kinds, lists, strict=True)
    )
    partial = seq % allocator.config.block_size != 0
    return width * each + (width - resource.batch if partial else 0)
