"""Parts of vLLM 0.33's answers that another engine may lack, and answers without them."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import msgspec

from hkv.dialects.vllm.log.structs import Allocation, CacheEvent, CacheState, Digest, Hit, Rows

CAPABILITIES: Mapping[str, str] = types.MappingProxyType(
    {
        "events": "KV events",
        "keys": "keys that are vLLM's chained hashes: events and states are compared but for keys",
        "order": "the order in which free blocks are handed out: blocks are counted, not named",
        "references": "reference counts in states",
        "state": "states",
    }
)
"""Capabilities that an engine may lack, with their meanings."""


def without(answer: Any, lacks: frozenset[str]) -> Any:
    """An answer but for what belongs to these capabilities."""
    if isinstance(answer, list) and answer and isinstance(answer[0], CacheEvent):
        return [] if "events" in lacks else [_event(event, lacks) for event in answer]
    if isinstance(answer, list) and answer and "order" in lacks:
        return [(0, 0)] * len(answer)
    if isinstance(answer, dict) and "order" in lacks:
        return {id: [(group, 0, tokens) for group, _, tokens in offers] for id, offers in answer.items()}
    if isinstance(answer, Hit) and "order" in lacks:
        return msgspec.structs.replace(answer, blocks=_counted(answer.blocks))
    if isinstance(answer, Allocation) and answer.blocks is not None and "order" in lacks:
        return Allocation(_counted(answer.blocks))
    if isinstance(answer, CacheState | Digest) and "state" in lacks:
        return None
    if isinstance(answer, Digest) and lacks & {"keys", "order", "references"}:
        return Digest("")
    return _state(answer, lacks) if isinstance(answer, CacheState) else answer


def _event(event: CacheEvent, lacks: frozenset[str]) -> CacheEvent:
    return msgspec.structs.replace(event, keys=None, parent=None) if "keys" in lacks else event


def _state(state: CacheState, lacks: frozenset[str]) -> CacheState:
    free, refs, rows, cached = state.free, state.refs, state.rows, state.cached
    if "references" in lacks:
        refs = {}
    if "keys" in lacks:
        cached = {block: (group, tokens, "") for block, (group, tokens, _) in cached.items()}
    if "order" in lacks:
        free = [0] * len(free)
        refs = {str(index): count for index, count in enumerate(sorted(refs.values()))}
        rows = {id: _counted(row) for id, row in rows.items()}
        cached = {str(index): entry for index, entry in enumerate(sorted(cached.values()))}
    return CacheState(free, refs, rows, cached)


def _counted(rows: Rows) -> Rows:
    """Every block a 1, every column without one still a 0."""
    return [[int(block != 0) for block in row] for row in rows]
