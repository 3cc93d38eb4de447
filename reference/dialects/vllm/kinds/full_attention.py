"""Full attention: the hit grows from the first block on; nothing retires."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from hkv.dialects.vllm.config import VllmConfig
from hkv.spec import LayerSpec
from reference.dialects.vllm.kinds.kind import Demand, Kind, ceil_div
from reference.dialects.vllm.registration import register_partial
from reference.dialects.vllm.request import Request
from reference.keys.views import Chain, block_keys
from reference.state.pool import Pool


class FullAttentionKind(Kind):
    """vLLM 0.33 `FullAttentionManager`.

    Attributes:
      written: of blocks registered in this step, tokens that each held when it began. A block's other tokens are
        written only when the step has run.
    """

    fine_grained: ClassVar[bool] = True

    def __init__(self, group: int, spec: LayerSpec, config: VllmConfig, pool: Pool) -> None:
        super().__init__(group, spec, config, pool)
        self.written: dict[int, int] = {}

    def find(
        self, keys: Sequence[Chain], max_length: int, groups: Sequence[int], drop: bool, alignment: int
    ) -> tuple[list[list[int]], int]:
        """Every block from the first on, then as many tokens of the next as are known, then drop, then align down."""
        size = self.block_size
        lists: list[list[int]] = [[] for _ in groups]
        whole = block_keys(keys, self.hash_block_size, size)
        for column in range(min(max_length // size, len(whole))):
            found = self.pool.find(whole[column], groups)
            if found is None:
                break
            _append(lists, found)
        hit = len(lists[0]) * size
        if alignment < size and size % alignment == 0:
            hit = self._look_inside(keys, max_length, groups, alignment, lists)
        if drop and hit > 0:
            hit -= min(alignment, size)
        hit -= hit % alignment
        for blocks in lists:
            del blocks[ceil_div(hit, size) :]
        return lists, hit

    def _look_inside(
        self, keys: Sequence[Chain], max_length: int, groups: Sequence[int], alignment: int, lists: list[list[int]]
    ) -> int:
        """The length that a partly filled block after the whole ones of `lists` extends the hit to; adds that block."""
        whole = len(lists[0])
        parts = self.block_size // alignment
        first = whole * parts
        for part in range(min(first + parts - 1, max_length // alignment, len(keys)) - 1, first - 1, -1):
            found = self.pool.find(keys[part], groups)
            if found is not None:
                _append(lists, found)
                return (part + 1) * alignment
        return whole * self.block_size

    def waits(self, hit: Sequence[int], demand: Demand) -> bool:
        """True if a hit ends inside a block, beyond what is written of it.

        The block will be copied before the step runs. vLLM 0.33 copies what is not there (defect
        copied-before-written).
        """
        if not hit or "copied-before-written" in self.config.bugs:
            return False
        inside = demand.local % self.block_size
        return inside > self.written.get(hit[-1], inside)

    def register(self, request: Request, tokens: int) -> range:
        """Full blocks, and then the prompt's tail: the last hash block of the prompt that a repeat could resume from.

        The request goes on writing behind that tail; what stands before it does not change.
        """
        span = super().register(request, tokens)
        self._note_written(request, span)
        if self.block_size == self.hash_block_size:
            return span
        size = self.hash_block_size
        limit = request.num_prompt if self.eagle else request.num_prompt - 1
        tail = min(limit // size, request.num_keys) * size
        blocks = self.row(request.id).blocks
        column = tail // self.block_size
        if (
            tail <= 0
            or tail > min(tokens, len(request.keys) * size)
            or tail % self.block_size == 0
            or column >= len(blocks)
        ):
            return span
        register_partial(self.pool, request, self.group, blocks[column], tail, size)
        self._note_written(request, (column,))
        return span

    def _note_written(self, request: Request, columns: Iterable[int]) -> None:
        """Notes of columns that were registered, those of a hit left out, what they held when the step began."""
        if request.grant is None:
            return
        written, joined = request.grant
        blocks, size = self.row(request.id).blocks, self.block_size
        for column in columns:
            if column >= written // size:
                self.written[blocks[column]] = 0 if joined else max(0, written - column * size)

    def new_step(self) -> None:
        self.written.clear()


def _append(lists: list[list[int]], found: Sequence[int]) -> None:
    for blocks, block in zip(lists, found, strict=True):
        blocks.append(block)
