"""SWA: the last blocks of a sequence, and blocks on a grid if the policy allows reuse."""

from __future__ import annotations

from hkv.dialects.rtp_llm.config import NULL
from hkv.errors import OperationError
from tests.rtp_llm.witness.block_ids import BlockIds
from tests.rtp_llm.witness.kinds.kind import Kind, Need


class SwaKind(Kind):
    """RTP-LLM `SWAKVCacheGroup`. A reserve is in tokens, as for full groups."""

    @property
    def tail(self) -> int:
        """Blocks at the end that must be there."""
        return max(1, self.policy.active_tail_blocks)

    def need(self, seq: int, current: int, reserve: int) -> int:
        return max(self.slots(seq + reserve) - current, 0)

    def on_grid(self, position: int, reuse: bool) -> bool:
        """True if a block is kept for requests that reuse it."""
        return reuse and self.policy.enable_prefix_reuse and (position + 1) % self.step == 0

    def allocated(self, position: int, seq: int, reserve: int, reuse: bool) -> bool:
        """True if an appended slot gets a block."""
        slots = self.slots(seq)
        reserved = reserve > 0 and position >= slots
        return reserved or max(slots - self.tail, 0) <= position < slots or self.on_grid(position, reuse)

    def first_need(self, common: int, seq: int, reserve: int, reused: int, reuse: bool) -> Need:
        """Blocks of the tail and of the reserve, all of them each sequence's own."""
        slots = self.slots(seq)
        tail = sum(self.allocated(p, seq, 0, reuse) for p in range(max(reused, 0), slots))
        return Need(0, tail + max(self.slots(seq + reserve) - max(slots, reused), 0))

    def peak(self, seq: int, current: BlockIds, remaining: int, reserve: int, reuse: bool) -> int:
        return max(self.need(seq + remaining, 0, reserve) - len(current.real), 0)

    def malloc(self, blocks: BlockIds, seq: int, reuse: bool, reserve: int = 0) -> list[int] | None:
        """Appends only; holes stay.

        Raises:
          OperationError: the last blocks would be holes; nothing was changed.
        """
        start = len(blocks)
        total = start + self.need(seq, start, reserve)
        wanted = [p for p in range(start, total) if self.allocated(p, seq, reserve, reuse)]
        fresh = self.take(len(wanted))
        if fresh is None:
            return None
        blocks.resize(total)
        for position, block in zip(wanted, fresh, strict=True):
            blocks.set_at(position, block)
        try:
            self.check_tail(blocks)
        except OperationError:
            self.undo(blocks, start, ())
            raise
        return []

    def cleanup(self, blocks: BlockIds, reuse: bool, reserve: int = 0) -> None:
        for position in range(len(blocks) - self.tail - 1 - reserve, -1, -1):
            if not self.on_grid(position, reuse):
                self.free([blocks.blocks[position]])
                blocks.set_at(position, NULL)
        self.check_tail(blocks)

    def check_tail(self, blocks: BlockIds) -> None:
        """Make sure that the last block is there, and the one before it where two are needed.

        Raises:
          OperationError: it is not, and the policy wants it checked.
        """
        if not self.policy.validate_tail_blocks:
            return
        if NULL in blocks.blocks[-min(self.tail, 2) :]:
            raise OperationError("blocks", blocks.blocks[-2:], "the last blocks of a window to be there")
