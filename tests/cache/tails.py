"""Traffic whose chunks end where states are kept: at a prompt's last hash block, and where others branch off."""

from __future__ import annotations

from typing import Any

from hkv.contract.traffic import Choices
from hkv.dialects.vllm.log.structs import Header
from hkv.dialects.vllm.traffic.traffic import Perform, Traffic


class Tails(Traffic):
    """Ends most chunks as vLLM 0.33's `Scheduler._mamba_block_aligned_split` would: blocks are kept partly filled."""

    _end = 0

    def _next_tokens(self, request: Any, start: int, drafts: bool = True) -> int:
        unit = self._header.hash_block_size
        last = (request.prompt if self._header.eagle else request.prompt - 1) // unit * unit
        last -= unit * self._header.eagle
        tail = start < last and self._choices.chance(60)
        new = last - start if tail else super()._next_tokens(request, start, drafts)
        self._end = start + new
        return new

    def _draw_boundary(self, request: Any, found: int) -> int:
        return self._end if self._choices.chance(30) else super()._draw_boundary(request, found)


def drive_tails(header: Header, choices: Choices, perform: Perform, steps: int) -> None:
    """As `hkv.dialects.vllm.traffic.live.drive`."""
    traffic = Tails(header, choices, perform)
    for _ in range(steps):
        traffic.step()
    traffic.drain()
