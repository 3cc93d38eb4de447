"""Tokens that a running request can grow by before the cache has anything to do for it."""

from __future__ import annotations

from typing import Any

from hkv.dialects.vllm.rules import calm
from hkv.dialects.vllm.rules.parameters import View
from hkv.replay.schedule_state import Number, Seat, Trace
from hkv.state.loops import Scalar, peek
from hkv.state.state import Request


def note(work: Any, view: View, trace: Trace, slot: Scalar, enabled: Scalar) -> Any:
    """Notes up to how many tokens an allocation for a request would take, register and give back nothing.

    What is noted may be too little, never too much: an allocation that changes nothing is no mistake.

    Args:
      work: a `ScheduleWorkspace`; needs `requests` and `seats` to write.
      view: the configuration.
      trace: the schedule's numbers.
      slot: a request that was just granted blocks.
      enabled: whether to do it.
    """
    work = calm.note(work, view, slot, enabled)
    work, (quiet,) = peek(enabled, lambda w: w.get(slot, Request.CALM), work, reads=("requests",), default=(0,))
    quiet = quiet - trace.number(Number.LOOKAHEAD)
    return work.write_if(enabled, "seats", quiet, work.seat(slot, Seat.CALM))
