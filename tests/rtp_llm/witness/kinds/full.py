"""FULL: every block of a sequence is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hkv.dialects.rtp_llm.config import NULL
from hkv.errors import OperationError
from tests.rtp_llm.witness.block_ids import BlockIds
from tests.rtp_llm.witness.kinds.kind import Kind, Need


class FullKind(Kind):
    """RTP-LLM `FullKVCacheGroup`. Its lists have no holes."""

    sparse = False
    by_prefix = True

    @property
    def votes(self) -> bool:
        return False

    def need(self, seq: int, current: int, reserve: int) -> int:
        return max(self.slots(seq + reserve) - current, 0)

    def first_need(self, common: int, seq: int, reserve: int, reused: int, reuse: bool) -> Need:
        shared = self.slots(common)
        credit = min(max(reused, 0), shared) if reuse else 0
        return Need(shared - credit, max(self.slots(seq + reserve) - shared, 0))

    def peak(self, seq: int, current: BlockIds, remaining: int, reserve: int, reuse: bool) -> int:
        return self.need(seq + remaining, len(current), reserve)

    def malloc(self, blocks: BlockIds, seq: int, reuse: bool, reserve: int = 0) -> list[int] | None:
        fresh = self.take(self.need(seq, len(blocks), reserve))
        if fresh is None:
            return None
        blocks.add(fresh)
        return []

    def cleanup(self, blocks: BlockIds, reuse: bool, reserve: int = 0) -> None:
        """Keeps every block: all are read on."""

    def match(self, key: int) -> int:
        raise OperationError("key", key, "a prefix: a full group is matched from the first key on")

    def match_prefix(self, keys: Sequence[int]) -> list[int]:
        found: list[int] = []
        for key in keys if self.cache is not None else ():
            block = super().match(key)
            if block == NULL:
                break
            found.append(block)
        return found

    def free(self, blocks: Iterable[int]) -> None:
        self.pool.release(blocks)
