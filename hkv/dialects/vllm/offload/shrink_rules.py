"""Shrinking of logs of the second tier: what is smaller than a configuration or an operation, what repairs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from hkv.contract.case import LifecycleRepair, ShrinkRules
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.lifecycle import SchedulerLifecycle, lifecycle

change = msgspec.structs.replace


def _repair(header: structs.Header) -> LifecycleRepair:
    """Leaves out keys that cannot be read any more, and reports of jobs that there are not."""
    following = lifecycle(header)

    def fit(operation: Any) -> Any | None:
        if hasattr(operation, "want"):
            operation = change(operation, want=None)
        if isinstance(following, SchedulerLifecycle):
            if isinstance(operation, structs.StepOp):
                left, kept = Counter(following.jobs), []
                for job in operation.reports:
                    if left[job] > 0:
                        left[job] -= 1
                        kept.append(job)
                operation = change(operation, reports=kept)
        elif isinstance(operation, structs.LoadOp):
            operation = change(operation, keys=[key for key in operation.keys if key[:2] in following.ready])
        return operation

    return LifecycleRepair(following, fit)


def _simpler_operations(operation: Any) -> Iterator[Any]:
    """One key less, or half of them; fewer tokens, or all alike; no limit; one report less, or none."""
    match operation:
        case structs.StoreOp(keys=keys) | structs.LoadOp(keys=keys):
            yield from (change(operation, keys=fewer) for fewer in _fewer(keys) if fewer)
        case structs.DoneOp(failed=True):
            yield change(operation, failed=False)
        case structs.RequestOp(tokens=tokens, output=output):
            for length in sorted({1, len(tokens) // 2, len(tokens) - 4, len(tokens) - 1}):
                if 1 <= length < len(tokens):
                    yield change(operation, tokens=tokens[:length])
            if any(tokens):
                yield change(operation, tokens=[0] * len(tokens))
            if output > 1:
                yield change(operation, output=1)
            for name in ("load_limit", "store_limit"):
                if getattr(operation, name) is not None:
                    yield change(operation, **{name: None})
        case structs.StepOp(reports=reports, at_once=at_once):
            yield from (change(operation, reports=fewer) for fewer in ([], *_fewer(reports)) if reports)
            if at_once:
                yield change(operation, at_once=False)
        case structs.ResetOp(preempt=True, tier=True):
            yield change(operation, preempt=False)
        case _:
            pass


def _fewer(items: list[Any]) -> Iterator[list[Any]]:
    if len(items) > 2:
        yield items[: len(items) // 2]
        yield items[len(items) // 2 :]
    yield from (items[:place] + items[place + 1 :] for place in range(len(items)))


PLAIN: dict[str, Any] = {
    **{"policy": "lru", "threshold": 0, "tracked": 64_000, "blocks_per_chunk": 1, "prompt_only": True},
    **{"lazy": False, "workers": 1, "sync_tokens": 0, "step_tokens": 64, "most_running": 8, "retention_interval": 0},
}
"""Options at their plainest."""


def _smaller_headers(header: structs.Header) -> Iterator[structs.Header]:
    """A group less; a smaller window; fewer blocks and chunks; an option at its plainest."""
    for place in range(len(header.groups) if len(header.groups) > 1 else 0):
        groups = header.groups[:place] + header.groups[place + 1 :]
        eagle = [group - (group > place) for group in header.eagle if group != place]
        yield change(header, groups=groups, eagle=eagle)
    for place, group in enumerate(header.groups):
        for less in sorted({2, group.get("window", 0) // 2, group.get("window", 0) - 1}):
            if 2 <= less < group.get("window", 0):
                groups = [*header.groups[:place], {**group, "window": less}, *header.groups[place + 1 :]]
                yield change(header, groups=groups)
    for place, count in enumerate(header.num_blocks):
        for less in sorted({1, count // 2, count - 1}):
            if 1 <= less < count:
                yield change(header, num_blocks=[*header.num_blocks[:place], less, *header.num_blocks[place + 1 :]])
    for name, value in PLAIN.items():
        if getattr(header, name) != value:
            yield change(header, **{name: value})


SHRINK_RULES = ShrinkRules(
    _repair,
    headers=_smaller_headers,
    check=structs.to_config,
    operations=_simpler_operations,
    questions=lambda operation: iter((structs.StateOp(),)),
)
"""Rules by which cases of the tier are made smaller."""
