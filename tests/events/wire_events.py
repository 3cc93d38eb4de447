"""An engine's KV events in the wire form, so that what routers read can be made from any engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hkv.contract.events import DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, Event, Hash
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.log.structs import CacheEvent, Header
from hkv.errors import ConfigError
from hkv.spec import spec_from_log


def wire_events(events: Sequence[CacheEvent], header: Header) -> list[Event]:
    """Events of a log of version 2 as vLLM 0.33 publishes them; of keys, a log has the first 8 bytes.

    Args:
      events: an engine's answer to `events`.
      header: its configuration, for kinds and windows.

    Raises:
      ConfigError: events without keys, as version 1 has them.
    """
    return [_wire(event, header.groups) for event in events]


def _wire(event: CacheEvent, groups: Sequence[dict[str, Any]]) -> Event:
    if event.type == "cleared":
        return AllBlocksCleared()
    if event.keys is None:
        raise ConfigError("events", event.type, "events with keys: version 2 of the log format")
    hashes: list[Hash] = [bytes.fromhex(key) for key in event.keys]
    if event.type == "removed":
        return BlockRemoved(hashes, DEVICE, group_idx=event.group)
    group = groups[event.group]
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=bytes.fromhex(event.parent) if event.parent else None,
        token_ids=list(event.tokens or ()),
        block_size=event.block_size,
        lora_id=None,
        medium=DEVICE,
        lora_name=None,
        group_idx=event.group,
        kv_cache_spec_kind=kinds.layer(spec_from_log(group)).event_kind,
        kv_cache_spec_sliding_window=group.get("window"),
    )
