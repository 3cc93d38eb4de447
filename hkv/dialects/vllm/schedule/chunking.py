"""End of a request's tokens in one step: at its last token, at the step's budget, or where a state must be kept."""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

from hkv.dialects.vllm.config import VllmConfig


class Progress(Protocol):
    """Fields of a request that chunking reads: `hkv.replay.schedule.LiveRequest` has them."""

    tokens: int
    junction: int

    @property
    def arrival(self) -> HasPrompt: ...


class HasPrompt(Protocol):
    """Something with a prompt of so many tokens."""

    @property
    def prompt(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Chunking:
    """Cuts a request's tokens into chunks, one a step (vLLM 0.33 `Scheduler._mamba_block_aligned_split`).

    Attributes:
      step_tokens: most tokens of one step.
      block_size: tokens between two states that recurrent groups can keep, or 0 when there are none to keep.
      eagle: whether the EAGLE drop rule is on: the last block after a hit cannot be trusted.
      hash_block_size: with sub-block hits, tokens between two boundaries where a prompt's last state is kept; else 0.
    """

    step_tokens: int
    block_size: int = 0
    eagle: bool = False
    hash_block_size: int = 0

    @classmethod
    def of(cls, config: VllmConfig, step_tokens: int) -> Chunking:
        """The chunking that a configuration asks for."""
        recurrent = [spec.block_size for spec in config.topology.specs if spec.snapshot]
        keep = math.lcm(*recurrent) if recurrent and config.caching else 0
        fine = config.hash_block_size if config.partial_hits else 0
        return cls(step_tokens, keep, config.uses_eagle, fine)

    def tokens(self, request: Progress, start: int, budget: int) -> int:
        """Tokens to compute next, from `start` on, at most `budget`. 0 when the budget does not reach the next stop."""
        end = min(request.tokens, start + budget)
        if self.block_size and start < max(request.arrival.prompt, request.tokens - 1):
            end = self._last_stop(request, start, end)
        return max(end - start, 0)

    def _last_stop(self, request: Progress, start: int, end: int) -> int:
        """States are kept where chunks end: chunks end on block boundaries, and never run past one that is needed."""
        size = self.block_size
        if end < max(request.arrival.prompt, request.tokens - 1):
            aligned = end // size * size
            if aligned > start or size <= self.step_tokens:
                end = aligned
        last = self._last_kept(request.tokens, size)
        stops = [last]
        if start % size:
            stops.append((start // size + 1) * size)
        if start < request.junction < end:
            stops.append(start + (request.junction - start) // size * size)
        if self.hash_block_size:
            tail = self._last_kept(request.arrival.prompt, self.hash_block_size)
            if last < tail < request.arrival.prompt:
                stops.append(tail)
        return min((stop for stop in stops if start < stop < end), default=end)

    def _last_kept(self, tokens: int, size: int) -> int:
        """The last multiple of `size` whose state a later request with these tokens can resume from."""
        return max(0, tokens // size * size - size if self.eagle else (tokens - 1) // size * size)
