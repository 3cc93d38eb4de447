"""A pool of blocks, and three ways to hold one: for a request, for a connector, for the cache."""

from __future__ import annotations

from collections.abc import Iterable

from hkv.errors import OperationError
from tests.rtp_llm.witness.id_bitmap import IdBitmap
from tests.rtp_llm.witness.reference_counts import ReferenceCounts

REQUEST, CONNECTOR, CACHE = ROLES = ("request", "connector", "cache")


class BlockPool:
    """RTP-LLM `BlockPool`. A block is free when nobody holds it; ids are given out smallest first.

    Args:
      num_blocks: blocks, the reserved block 0 included.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.unheld = IdBitmap(num_blocks, reserved=1)
        self.refs = ReferenceCounts(num_blocks, ROLES)

    @property
    def total(self) -> int:
        """Blocks that can be handed out at all."""
        return self.num_blocks - 1

    @property
    def free(self) -> int:
        """Blocks without references."""
        return len(self.unheld)

    @property
    def available(self) -> int:
        """Blocks that no request and no connector holds: free ones, and those that eviction would give."""
        return self.total - self.refs.busy((REQUEST, CONNECTOR))

    @property
    def not_in_use(self) -> int:
        """Blocks that no request and no cache holds; those of connectors alone count as such."""
        return self.total - self.refs.busy((REQUEST, CACHE))

    def busy(self, role: str) -> int:
        """Blocks held in one role."""
        return self.refs.busy((role,))

    def malloc(self, count: int) -> list[int]:
        """The `count` smallest free ids, ascending, each with a request reference; none at all if too few are free."""
        if count <= 0 or count > self.free:
            return []
        blocks = self.unheld.smallest(count)
        self.reference(blocks)
        return blocks

    def reference(self, blocks: Iterable[int], role: str = REQUEST) -> None:
        """One more reference to each block."""
        for block in blocks:
            self._check(block)
            self.refs.add(role, block)
            self.unheld.discard(block)

    def release(self, blocks: Iterable[int], role: str = REQUEST) -> None:
        """One reference less to each block; those that nobody holds any more are free.

        Raises:
          OperationError: a block without such a reference, or no block of this pool. Those before it are released.
        """
        for block in blocks:
            self._check(block)
            self.refs.drop(role, block)
            if self.refs.total(block, ROLES) == 0:
                self.unheld.add(block)

    def _check(self, block: int) -> None:
        if not 1 <= block < self.num_blocks:
            raise OperationError("block", block, f"a block from 1 to {self.num_blocks - 1}")
