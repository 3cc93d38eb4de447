"""Sliding window: a hit needs only the blocks of the last window; what is behind the window retires."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.spec import SlidingWindow
from reference.dialects.vllm.kinds.kind import Kind, ceil_div
from reference.dialects.vllm.retention import tail_mask
from reference.keys.views import Chain, block_keys
from reference.state.pool import NULL


def window_blocks(window: int, block_size: int, drop: bool) -> int:
    """Blocks that must stand before a length for a window to resume there; one more, to be dropped, under EAGLE.

    The window counts the query's own token, so `window - 1` earlier ones are read.
    """
    return ceil_div(window - 1, block_size) + (1 if drop else 0)


class SlidingWindowKind(Kind):
    """vLLM 0.33 `SlidingWindowManager`."""

    spec: SlidingWindow

    @property
    def contract_of_one(self) -> bool:
        """A window of one token reads no earlier one: nothing need be cached, any length can be resumed from."""
        return self.spec.window == 1 and "window-one-never-hits" not in self.config.bugs

    def skipped_tokens(self, n: int) -> int:
        return max(0, n - self.spec.window + 1 - self.spec.extra_retained_tokens)

    def admission_cap(self) -> int | None:
        held = self.spec.window - 1 + self.spec.extra_retained_tokens + self.config.in_flight_limit
        return ceil_div(min(held, self.config.max_model_len), self.spec.block_size) + 1

    def mask(self, span: range, boundaries: Sequence[int]) -> list[bool] | None:
        if self.alignment % self.block_size:
            return None
        interval = self.config.retention_interval
        need = window_blocks(self.spec.window, self.block_size, self.eagle)
        segment = self.alignment if interval is None else interval or None
        return tail_mask(span, segment, need, int(self.eagle), boundaries, self.block_size, self.alignment)

    def find(
        self, keys: Sequence[Chain], max_length: int, groups: Sequence[int], drop: bool, alignment: int
    ) -> tuple[list[list[int]], int]:
        """The last run of enough blocks, ending where a hit may end; or a shorter run that starts at the first block.

        Looks from the end. Columns left of the run are null. A run is as long as the window needs, and one block longer
        under the drop, which then gives the last one up.
        """
        size = self.block_size
        whole = block_keys(keys, self.hash_block_size, size)
        need = window_blocks(self.spec.window, size, drop)
        anywhere = need == 0 and self.contract_of_one
        limit = max_length // size
        if anywhere or "finder-index-error" not in self.config.bugs:
            limit = min(limit, len(whole))
        lists = [[NULL] * limit for _ in groups]
        if anywhere:
            length = _aligned(limit, size, alignment)
        else:
            length = self._last_run(whole, limit, groups, need, drop, alignment, lists)
        if drop and length:
            length = _aligned(length - 1, size, alignment)
        for blocks in lists:
            del blocks[length:]
        return lists, length * size

    def _last_run(
        self,
        keys: Sequence[Chain],
        limit: int,
        groups: Sequence[int],
        need: int,
        drop: bool,
        alignment: int,
        lists: list[list[int]],
    ) -> int:
        """Enters the run into `lists` and returns the number of columns up to its end."""
        size = self.block_size
        run = 0
        for column in range(limit - 1, -1, -1):
            found = self.pool.find(keys[column], groups)
            if found is None:
                run = 0
                continue
            end = column if drop else column + 1
            if run == 0 and end * size % alignment:
                continue
            for blocks, block in zip(lists, found, strict=True):
                blocks[column] = block
            run += 1
            if run >= need:
                return column + run
        return _aligned(run, size, alignment)


def _aligned(columns: int, block_size: int, alignment: int) -> int:
    """The most columns, at most `columns`, whose tokens are a multiple of `alignment`."""
    while columns * block_size % alignment:
        columns -= 1
    return columns
