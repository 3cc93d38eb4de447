"""Comparison of two answers of vLLM's logs: events in order, except those of keys that leave together."""

from __future__ import annotations

import collections
from typing import Any

from hkv.dialects.vllm.log.structs import EVENT_FIELDS, Answer, CacheEvent
from hkv.oracle import compare as oracle
from hkv.oracle.compare import Mismatch, first_difference
from hkv.oracle.engine import Failure


def compare(want: Answer | Failure, got: Answer | Failure, version: int = 2) -> Mismatch | None:
    """The first difference between two answers, or None when they agree.

    Stored and cleared events are compared in order, removed ones as a multiset, because one block's keys leave the
    cache in no particular order. The fields of an event that may be left out are compared where `want` has them.

    Args:
      want: the answer to be met.
      got: the other one; either may be a Failure, and two of them agree.
      version: of the log format; version 1 knows no cleared events.
    """

    def answers(want: Answer, got: Answer) -> Mismatch | None:
        if _is_events(want) or _is_events(got):
            return _compare_events(_events(want), _events(got), version)
        return first_difference(want, got)

    return oracle.compare(want, got, answers)


def _is_events(answer: Answer) -> bool:
    return isinstance(answer, list) and bool(answer) and isinstance(answer[0], CacheEvent)


def _events(answer: Any) -> list[CacheEvent]:
    return list(answer or ())


def _compare_events(want: list[CacheEvent], got: list[CacheEvent], version: int) -> Mismatch | None:
    if version == 1:
        got = [event for event in got if event.type != "cleared"]
    ordered = [[event for event in events if event.type != "removed"] for events in (want, got)]
    for index, (wanted, found) in enumerate(zip(*ordered, strict=False)):
        if mismatch := first_difference(_event(wanted, wanted), _event(found, wanted), f"{wanted.type}[{index}]"):
            return mismatch
    if len(ordered[0]) != len(ordered[1]):
        return Mismatch("number of stored events", len(ordered[0]), len(ordered[1]))
    removed = [event for event in want if event.type == "removed"]
    pattern = removed[0] if removed else None
    counts = collections.Counter(_frozen(event, pattern) for event in removed)
    found_counts = collections.Counter(_frozen(event, pattern) for event in got if event.type == "removed")
    if counts != found_counts:
        return Mismatch(
            "removed", sorted((counts - found_counts).elements()), sorted((found_counts - counts).elements())
        )
    return None


def _event(event: CacheEvent, pattern: CacheEvent | None) -> dict[str, Any]:
    fields = {"type": event.type, "group": event.group, "num_blocks": event.num_blocks, "block_size": event.block_size}
    fields["tokens"] = event.tokens
    for name in EVENT_FIELDS:
        if pattern is None or getattr(pattern, name) is not None:
            fields[name] = getattr(event, name)
    return fields


def _frozen(event: CacheEvent, pattern: CacheEvent | None) -> tuple[int | str | tuple[str, ...], ...]:
    keys = event.keys if pattern is None or pattern.keys is not None else None
    medium = event.medium if pattern is None or pattern.medium is not None else None
    return event.group, event.num_blocks, tuple(keys or ()), *((medium,) if medium is not None else ())
