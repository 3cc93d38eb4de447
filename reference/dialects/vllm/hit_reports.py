"""Hits published as events, for requests that ask for it (vLLM 0.33 `kv_cache_report_mode` `full`)."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.errors import EngineFailure
from reference.dialects.vllm.coordinator import Coordinator
from reference.dialects.vllm.hits import Found
from reference.dialects.vllm.kinds.kind import Kind
from reference.dialects.vllm.registration import stored_event
from reference.dialects.vllm.request import Request
from reference.keys.views import block_keys
from reference.state.pool import NULL

BUG = "hit-reported-by-columns"


def report_hit(cache: Coordinator, request: Request, found: Found) -> None:
    """Adds a stored event for each group that has blocks of a hit, as if the request had stored them.

    It names the blocks that are there, under the keys of whole blocks; a block that the hit ends inside gets an event
    of its own, as its registration did (vLLM 0.33 `KVCacheCoordinator.emit_cached_block_events`, but for its defect).

    Raises:
      EngineFailure: the defect, asked for by name, made the engine fail.
    """
    if not (request.reports and found.hit and cache.pool.records):
        return
    for kind, row in zip(cache.kinds, found.blocks, strict=True):
        if row and BUG in cache.config.bugs:
            _report_columns(cache, request, kind, len(row))
        elif row:
            _report_blocks(cache, request, kind, row, found.hit)


def _report_blocks(cache: Coordinator, request: Request, kind: Kind, row: Sequence[int], hit: int) -> None:
    size, part = kind.block_size, kind.hash_block_size
    whole = hit // size
    keys = block_keys(request.keys, part, size)
    there = [column for column in range(whole) if row[column] != NULL]
    if there:
        ends = [(column + 1) * size for column in there]
        event = stored_event(
            request, kind.group, [keys[column] for column in there], ends, size, request.tokens[: whole * size], None
        )
        cache.pool.events.append(event)
    if hit % size and row[whole] != NULL:
        last = hit // part - 1
        parent = request.keys[last - 1] if last else None
        event = stored_event(
            request, kind.group, [request.keys[last]], [hit], part, request.tokens[hit - part : hit], parent
        )
        cache.pool.events.append(event)


def _report_columns(cache: Coordinator, request: Request, kind: Kind, columns: int) -> None:
    """As vLLM reports: every column by the key of a whole block of one rank, null or not."""
    size = kind.spec.block_size
    if size % kind.hash_block_size:
        raise EngineFailure("block_size", size, f"a multiple of hash blocks of {kind.hash_block_size} tokens")
    keys = block_keys(request.keys, kind.hash_block_size, size)
    if columns * size > len(request.keys) * kind.hash_block_size:
        raise EngineFailure("keys", len(keys), f"a key for each of {columns} columns")
    ends = [(column + 1) * size for column in range(columns)]
    event = stored_event(request, kind.group, list(keys[:columns]), ends, size, request.tokens[: columns * size], None)
    cache.pool.events.append(event)
