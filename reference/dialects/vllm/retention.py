"""Sparse retention: which prefix boundaries stay worth resuming from when not every block is kept."""

from __future__ import annotations

from collections.abc import Sequence


def replay_boundaries(num_prompt: int, scheduler_block_size: int, drops: bool) -> tuple[int, ...]:
    """Lengths, in tokens, at which a repeated prompt would resume (vLLM 0.33 `replay_boundaries`).

    Its last token is always computed again. With the EAGLE drop a hit loses one more scheduler block, counted from the
    prompt without and with its last token.
    """
    if not drops:
        return (num_prompt - 1,)
    size = scheduler_block_size
    ends = {max((length // size - 1) * size, 0) for length in (num_prompt - 1, num_prompt)}
    return tuple(sorted(ends))


def tail_mask(
    span: range, segment: int | None, need: int, shift: int, boundaries: Sequence[int], block_size: int, alignment: int
) -> list[bool] | None:
    """Mask of the columns of `span` whose blocks are retained: the tails of segments, and those before boundaries.

    vLLM 0.33 `SlidingWindowManager.reachable_block_mask`. A request that resumes at a segment's end needs the
    `need` blocks before it (and, with a shift of 1, one more block after it that the EAGLE drop gives up).

    Args:
      span: columns.
      segment: tokens between lengths that can be resumed at; None when there are no such lengths.
      need: blocks that one resumption reads.
      shift: 1 under the EAGLE drop, else 0.
      boundaries: further lengths to keep, in tokens; each is rounded down to `alignment`.
      block_size: tokens per block.
      alignment: tokens to which hits are aligned, a multiple of `block_size`.

    Returns:
      The mask, or None when every block is kept.
    """
    keep = [False] * len(span)
    if segment is not None:
        period = segment // block_size
        if need >= period:
            return None
        keep = [column >= shift and (column - shift) % period >= period - need for column in span]
    for boundary in boundaries:
        end = boundary // alignment * alignment // block_size + shift
        for column in range(max(span.start, end - need), min(span.stop, end)):
            keep[column - span.start] = True
    return keep


def snapshot_mask(
    span: range, interval: int, boundaries: Sequence[int], block_size: int, alignment: int
) -> list[bool] | None:
    """Mask of the columns of `span` whose states are retained (vLLM 0.33 `MambaManager.reachable_block_mask`).

    A state serves exactly one length, so only the columns that end at a multiple of `interval` or at a boundary count.

    Args:
      span: columns.
      interval: tokens between lengths that can be resumed at; 0 for boundaries only.
      boundaries: further lengths to keep, in tokens; each is rounded down to `alignment`.
      block_size: tokens per block.
      alignment: tokens to which hits are aligned.

    Returns:
      The mask, or None when every state is kept.
    """
    keep = [False] * len(span)
    if interval:
        period = interval // block_size
        if period <= 1:
            return None
        keep = [(column + 1) % period == 0 for column in span]
    for boundary in boundaries:
        column = boundary // alignment * alignment // block_size - 1
        if column in span:
            keep[column - span.start] = True
    return keep
