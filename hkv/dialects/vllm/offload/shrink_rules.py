"""Shrinking of logs of the second tier: what is smaller than a configuration or an operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hkv.contract.case import LifecycleRepair, ShrinkRules
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.lifecycle import PoolLifecycle


def _repair(header: structs.Header) -> LifecycleRepair:
    """Leaves out keys that cannot be read any more."""
    lifecycle = PoolLifecycle()

    def fit(operation: Any) -> Any | None:
        if hasattr(operation, "want"):
            operation = msgspec.structs.replace(operation, want=None)
        if isinstance(operation, structs.LoadOp):
            keys = [key for key in operation.keys if key[:2] in lifecycle.ready]
            operation = msgspec.structs.replace(operation, keys=keys)
        return operation

    return LifecycleRepair(lifecycle, fit)


def _simpler_operations(operation: Any) -> Iterator[Any]:
    """One key less, or half of them; a job that does not fail."""
    change = msgspec.structs.replace
    if isinstance(operation, structs.StoreOp | structs.LoadOp):
        keys = operation.keys
        halves = (keys[: len(keys) // 2], keys[len(keys) // 2 :]) if len(keys) > 2 else ()
        for fewer in (*halves, *(keys[:place] + keys[place + 1 :] for place in range(len(keys)))):
            if fewer:
                yield change(operation, keys=fewer)
    if isinstance(operation, structs.DoneOp) and operation.failed:
        yield change(operation, failed=False)


def _smaller_headers(header: structs.Header) -> Iterator[structs.Header]:
    """Fewer chunks; an option at its plainest."""
    change = msgspec.structs.replace
    for place, count in enumerate(header.num_blocks):
        for less in sorted({1, count // 2, count - 1}):
            if 1 <= less < count:
                yield change(header, num_blocks=[*header.num_blocks[:place], less, *header.num_blocks[place + 1 :]])
    for name, value in {"policy": "lru", "threshold": 0, "tracked": 64_000}.items():
        if getattr(header, name) != value:
            yield change(header, **{name: value})


SHRINK_RULES = ShrinkRules(_repair, headers=_smaller_headers, check=structs.check, operations=_simpler_operations)
"""Rules by which cases of the tier are made smaller."""
