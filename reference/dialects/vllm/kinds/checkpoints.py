"""Position in a prefill chunk at which a recurrent state is kept, so that the prompt can be resumed near its end."""

from __future__ import annotations

from reference.dialects.vllm.kinds.kind import ceil_div


def checkpoint_position(tokens: int, granularity: int, drop: bool, hash_lookahead: int) -> int:
    """The last length, in tokens, below `tokens` at which a repeated prompt could find a state; 0 for none.

    A hit never covers the last token, nor one whose key needs tokens that do not exist. With the EAGLE drop the hit
    loses one more unit. vLLM 0.33 `get_mamba_prefill_checkpoint_position`.

    Args:
      tokens: length of the prompt, or end of a chunk.
      granularity: tokens to which the position is aligned.
      drop: whether the EAGLE drop is on.
      hash_lookahead: tokens after a hash block that its key covers as well.
    """
    if drop:
        return max(0, tokens // granularity * granularity - granularity)
    return max(0, (tokens - max(1, hash_lookahead)) // granularity * granularity)


def checkpoint_possible(
    start: int, end: int, position: int, hash_block_size: int, block_size: int, alignment: int | None
) -> bool:
    """True if a chunk `[start, end)` can export the state at `position` (vLLM `is_mamba_prefill_checkpoint_valid`).

    The chunk starts on a hash block, spans at least two column ends, and reaches `position` after at least one hash
    block, a multiple of `alignment` from its start. Without an `alignment` no kernel can export states.
    """
    return (
        alignment is not None
        and start % hash_block_size == 0
        and ceil_div(end, block_size) - 2 > (start - 1) // block_size
        and start + hash_block_size <= position < end
        and (position - start) % alignment == 0
    )
