"""Rules that a log may exercise, as far as its operations and the recorded answers show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hkv.contract.log import Log
from hkv.dialects.sglang.log import (
    FULL_ATTENTION,
    SLIDING_WINDOW,
    STATES,
    AbortOp,
    AdmitOp,
    CheckpointOp,
    DecodeOp,
    EventsOp,
    EvictOp,
    ExtendOp,
    FinishOp,
    Found,
    Freed,
    MatchOp,
    Operation,
    ReleaseWindowOp,
    RoomOp,
    Row,
    SlideOp,
    Slots,
    State,
    StateOp,
)

RULES: Mapping[str, str] = MappingProxyType(
    {
        "hit/none": "a request finds nothing",
        "hit/full": "a request takes all that full attention has cached",
        "hit/window": "a request takes less than full attention has cached, for want of a window or a state",
        "extend/granted": "a chunk gets slots",
        "extend/refused": "a chunk finds no room",
        "decode/granted": "a token gets a slot",
        "decode/refused": "a token finds no room",
        "enter/chunk": "a running request enters what it has computed",
        "enter/rewritten": "the tree's slots take the place of a request's own",
        "enter/whole": "a request ends and enters all",
        "enter/nothing": "a request ends and enters nothing",
        "window/slid": "a request frees slots behind its window",
        "window/released": "a request gives back the lock on a prefix's window",
        "window/tombstone": "a node is cached without its window slots",
        "evict/full": "leaves are evicted as asked for",
        "evict/window": "window slots are evicted as asked for",
        "state/kept": "a pass keeps a state",
        "state/branch": "a pass keeps a state where the tree's prefix goes on without one",
        "enter/shorter": "a request ends before the last pass that it was in",
        "room/made": "room is made in every pool, and said what is left",
        "events/told": "those who follow the cache's events are told what came and left",
        "evict/states": "states are evicted as asked for",
        "key/namespace": "tokens are cached apart under an adapter or a salt",
    }
)
"""The rules."""


def exercised(log: Log) -> dict[str, int]:
    """Times that a log exercised each of `RULES`; those that it did not are left out."""
    counts = dict.fromkeys(RULES, 0)
    rows: dict[str, Sequence[int]] = {}
    named = {FULL_ATTENTION: "full", SLIDING_WINDOW: "window", STATES: "states"}
    names = [named[group["kind"]] for group in log.header.groups]
    size = log.header.groups[0]["block_size"]
    for operation in log.operations:
        for rule in _shown(operation, rows, names, size):
            counts[rule] += 1
    return {rule: count for rule, count in counts.items() if count}


def _shown(operation: Operation, rows: dict[str, Sequence[int]], names: Sequence[str], size: int) -> list[str]:
    """Rules that one operation shows.

    Args:
      operation: the operation.
      rows: slots of each running request, as far as answers tell them.
      names: of the pools.
      size: tokens of a page.
    """
    match operation:
        case MatchOp(want=Found() as found) | AdmitOp(want=Found() as found):
            if isinstance(operation, AdmitOp):
                rows[operation.id] = found.slots
            hit = "hit/none" if not found.full else "hit/window" if found.hit < found.full else "hit/full"
            return [hit] + ["key/namespace"] * (operation.namespace != (None, None))
        case ExtendOp(want=Slots(slots)) | DecodeOp(want=Slots(slots)):
            rows[operation.id] = [*rows.get(operation.id, ()), *(slots or ())]
            name = "extend" if isinstance(operation, ExtendOp) else "decode"
            kept = ["state/kept"] * (slots is not None and bool(operation.track))
            if kept and isinstance(operation, ExtendOp) and operation.length - operation.track >= size:
                kept.append("state/branch")
            return [f"{name}/{'refused' if slots is None else 'granted'}", *kept]
        case CheckpointOp(want=Row(slots)):
            rewritten = slots != rows.get(operation.id)
            rows[operation.id] = slots
            return ["enter/chunk"] + ["enter/rewritten"] * rewritten
        case SlideOp():
            return ["window/slid"]
        case ReleaseWindowOp():
            return ["window/released"]
        case FinishOp(length=length):
            return ["enter/shorter" if length else "enter/whole"]
        case RoomOp():
            return ["room/made"]
        case EventsOp():
            return ["events/told"]
        case AbortOp():
            return ["enter/nothing"]
        case EvictOp(want=Freed(tokens)):
            return [f"evict/{name}" for name, freed in zip(names, tokens, strict=True) if freed]
        case StateOp(want=State(nodes=list(nodes))) if "window" in names:
            return ["window/tombstone"] * any(node.window is None for node in nodes)
    return []
