"""Whether two answers to one operation agree, and if not, where."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from hkv.dialects.rtp_llm.log.structs import RtpAnswer
from hkv.dialects.vllm.log.structs import Answer, CacheEvent
from hkv.oracle.engine import Failure

AnyAnswer: TypeAlias = Answer | RtpAnswer | Failure
"""What an engine answers to an operation of any log, or the error in its place."""


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """The first place where two answers differ.

    Attributes:
      field: the path to it within the answer, e.g. `blocks[1]`.
      want: what one has there; `got`: what the other has.
    """

    field: str
    want: Any
    got: Any


def compare(want: AnyAnswer, got: AnyAnswer, version: int = 2) -> Mismatch | None:
    """The first difference between two answers, or None when they agree.

    Stored and cleared events are compared in order, removed ones as a multiset, because one block's keys leave the
    cache in no particular order. Keys and parents of events are compared where `want` has them.

    Args:
      want: the answer to be met.
      got: the other one.
      version: of the log format; version 1 knows no cleared events.
    """
    if isinstance(want, Failure) or isinstance(got, Failure):
        if isinstance(want, Failure) and isinstance(got, Failure):
            return None
        return Mismatch("error", _shown(want), _shown(got))
    if _is_events(want) or _is_events(got):
        return _compare_events(_events(want), _events(got), version)
    return _first("", msgspec.to_builtins(want), msgspec.to_builtins(got))


def _shown(answer: AnyAnswer) -> Any:
    return answer.message if isinstance(answer, Failure) else "no error"


def _is_events(answer: AnyAnswer) -> bool:
    return isinstance(answer, list) and bool(answer) and isinstance(answer[0], CacheEvent)


def _events(answer: Any) -> list[CacheEvent]:
    return list(answer or ())


def _compare_events(want: list[CacheEvent], got: list[CacheEvent], version: int) -> Mismatch | None:
    if version == 1:
        got = [event for event in got if event.type != "cleared"]
    ordered = [[event for event in events if event.type != "removed"] for events in (want, got)]
    for index, (wanted, found) in enumerate(zip(*ordered, strict=False)):
        if mismatch := _first(f"{wanted.type}[{index}]", _event(wanted, wanted), _event(found, wanted)):
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
    for name in ("keys", "parent"):
        if pattern is None or getattr(pattern, name) is not None:
            fields[name] = getattr(event, name)
    return fields


def _frozen(event: CacheEvent, pattern: CacheEvent | None) -> tuple[int, int, tuple[str, ...]]:
    keys = event.keys if pattern is None or pattern.keys is not None else None
    return event.group, event.num_blocks, tuple(keys or ())


def _first(path: str, want: Any, got: Any) -> Mismatch | None:
    if isinstance(want, dict) and isinstance(got, dict):
        for key in [*want, *(key for key in got if key not in want)]:
            inner = f"{path}.{key}" if path else str(key)
            if key not in want or key not in got:
                return Mismatch(inner, want.get(key, "absent"), got.get(key, "absent"))
            if mismatch := _first(inner, want[key], got[key]):
                return mismatch
        return None
    if _is_list(want) and _is_list(got):
        if len(want) == len(got) and any(_is_list(item) or isinstance(item, dict) for item in want):
            for index, pair in enumerate(zip(want, got, strict=True)):
                if mismatch := _first(f"{path}[{index}]", *pair):
                    return mismatch
            return None
        want, got = list(want), list(got)
    return None if want == got else Mismatch(path or "answer", want, got)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
