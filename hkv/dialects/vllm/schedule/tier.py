"""A second tier as a replay has it: its configuration, and how fast bytes move."""

from __future__ import annotations

import dataclasses

from hkv.dialects.vllm.offload.config import OffloadConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tier:
    """A second tier, and how fast it is.

    Attributes:
      config: the tier next to its cache.
      chunk_bytes: bytes of a chunk on one worker; 0 where a replay knows none.
      copies: workers whose blocks a chunk holds; fewer than all where they hold the same.
      step_bytes: bytes that a worker moves in a step, in each direction; None for any number.
      setup_bytes: bytes that a worker would move in the time that each transfer takes besides its own.
      step_tokens: prompt tokens that would be computed in a step, of a GPU at work; None where nobody says.
    """

    config: OffloadConfig
    chunk_bytes: int = 0
    copies: int = 1
    step_bytes: int | None = None
    setup_bytes: int = 0
    step_tokens: float | None = None

    def moved(self, chunks: int, transfers: int = 1) -> int:
        """Bytes that a worker could move while it moves so many chunks in so many transfers."""
        return transfers * self.setup_bytes + chunks * self.chunk_bytes

    def saved(self, tokens: int, chunks: int, loads: int) -> float:
        """Steps in which so many loaded tokens would have been computed, less those in which chunks were moved."""
        assert self.step_bytes
        assert self.step_tokens
        return tokens / self.step_tokens - self.moved(chunks, loads) / self.step_bytes


class Link:
    """Transfers in one direction, one after the other."""

    def __init__(self, step_bytes: int | None) -> None:
        self._rate, self._free = step_bytes, 0

    def end(self, step: int, size: int) -> int:
        """The step at whose end a transfer is done that may begin with `step`."""
        if self._rate is None:
            return step
        self._free = max(self._free, step * self._rate) + size
        return max(step, -(-self._free // self._rate) - 1)
