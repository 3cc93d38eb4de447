"""LINEAR: the last states of a sequence, and states on a grid for reuse."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.dialects.rtp_llm.config import NULL
from tests.rtp_llm.witness.block_ids import BlockIds
from tests.rtp_llm.witness.kinds.kind import Kind, Need


class LinearKind(Kind):
    """RTP-LLM `LinearKVCacheGroup`. A reserve is `reserve - 1` more slots, not tokens.

    Whether states on the grid are kept is up to the request alone; the policy is not asked.
    """

    @property
    def votes(self) -> bool:
        return True

    @property
    def tail(self) -> int:
        """States at the end that an allocation materialises."""
        return max(1, self.policy.active_tail_blocks)

    @property
    def kept(self) -> int:
        """States at the end that decoding keeps."""
        return max(2, self.tail)

    def total(self, seq: int, reserve: int) -> int:
        """Slots for `seq` tokens and a reserve."""
        return self.slots(seq) + max(reserve - 1, 0)

    def need(self, seq: int, current: int, reserve: int) -> int:
        return max(self.total(seq, reserve) - current, 0)

    def on_grid(self, position: int, reuse: bool) -> bool:
        """True if a state is kept for requests that reuse it."""
        return reuse and (position + 1) % self.step == 0

    def materialised(self, position: int, seq: int, reserve: int, reuse: bool) -> bool:
        """True if a slot has a block right after an allocation."""
        slots = self.slots(seq)
        reserved = reserve > 0 and slots <= position < self.total(seq, reserve)
        in_tail = max(0, slots - self.tail) <= position < slots
        return reserved or in_tail or self.on_grid(position, reuse)

    def first_need(self, common: int, seq: int, reserve: int, reused: int, reuse: bool) -> Need:
        """Blocks that are materialised, less one if the last reused slot is among them."""
        shared = {p for p in range(self.slots(common)) if self.materialised(p, common, 0, reuse)}
        total = self.total(seq, reserve)
        own = {p for p in range(total) if self.materialised(p, seq, reserve, reuse)} - shared
        if reuse and reused > 0:
            shared.discard(reused - 1)
            own.discard(reused - 1)
        return Need(len(shared), len(own))

    def peak(self, seq: int, current: BlockIds, remaining: int, reserve: int, reuse: bool) -> int:
        if len(current):
            costs = [int(block != NULL) for block in current.blocks]
            held = sum(costs)
        else:
            costs = [int(self.materialised(p, seq, reserve, reuse)) for p in range(self.total(seq, reserve))]
            held = 0
        return max(self._grow(costs, seq + remaining, reserve, reuse, 1) - held, 0)

    def first_peak(self, seq: int, common: int, remaining: int, reserve: int, reuse: bool, batch: int) -> int:
        width = max(batch, 1)
        shared = self.slots(common)
        costs = [int(self.materialised(p, common, 0, reuse)) for p in range(shared)]
        own = range(shared, self.total(seq, reserve))
        costs += [width * int(self.materialised(p, seq, reserve, reuse)) for p in own]
        return self._grow(costs, seq + remaining, reserve, reuse, width)

    def malloc(self, blocks: BlockIds, seq: int, reuse: bool, reserve: int = 0) -> list[int] | None:
        """Holes that the new length materialises are filled first, in order, then slots are appended."""
        total = self.total(seq, reserve)
        wanted = [p for p in range(total) if self.materialised(p, seq, reserve, reuse)]
        holes = [p for p in wanted if p < len(blocks) and blocks.blocks[p] == NULL]
        behind = [p for p in wanted if p >= len(blocks)]
        fresh = self.take(len(holes) + len(behind))
        if fresh is None:
            return None
        blocks.resize(max(total, len(blocks)))
        for position, block in zip([*holes, *behind], fresh, strict=True):
            blocks.set_at(position, block)
        return holes

    def cleanup(self, blocks: BlockIds, reuse: bool, reserve: int = 0) -> None:
        for position in self._skipped(len(blocks), reserve, reuse):
            self.free([blocks.blocks[position]])
            blocks.set_at(position, NULL)

    def _skipped(self, length: int, reserve: int, reuse: bool) -> Sequence[int]:
        """Slots that a list of this length has no use for, last first."""
        return [p for p in range(length - self.kept - 1 - reserve, -1, -1) if not self.on_grid(p, reuse)]

    def _grow(self, costs: list[int], seq: int, reserve: int, reuse: bool, cost: int) -> int:
        """The most that all slots cost while they grow to `seq` tokens, a cleanup after each."""
        most = sum(costs)
        while len(costs) < self.total(seq, reserve):
            costs.append(cost)
            most = max(most, sum(costs))
            for position in self._skipped(len(costs), reserve, reuse):
                costs[position] = 0
        return most
