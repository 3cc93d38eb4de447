"""Fields of KV events that say whose blocks they are and where they lie, as version 3 of the log writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.log.structs import CacheEvent
from hkv.keys.chained import PrefixIdentity, extra_keys
from hkv.oracle.events.wire import DEVICE

UNKNOWN = "unknown"
"""Kind of a spec that vLLM 0.33 `get_kv_cache_spec_kind` has no name for."""


def describe_stored(
    event: CacheEvent,
    config: VllmConfig,
    identity: PrefixIdentity,
    session: str,
    ends: Sequence[int],
    ahead: Sequence[Sequence[int]],
) -> CacheEvent:
    """A stored event with the fields of version 3 (vLLM 0.33 `BlockPool._build_block_stored_event`, `take_events`).

    Args:
      event: the event; it is changed.
      config: configuration of the cache.
      identity: what besides its tokens identifies the prefix of the request that stored the blocks.
      session: its session, "" for none.
      ends: of each key, the length of the prefix that it names, in tokens.
      ahead: of each key, the tokens after its block that it covers; looked at only under a hash lookahead.
    """
    spec, reach = config.topology.specs[event.group], config.hash_lookahead
    event.medium, event.spec_kind = DEVICE, spec.event_kind or UNKNOWN
    event.window = getattr(spec, "window", 0)
    event.lora_name = "" if identity.lora is None else identity.lora[0]
    event.session = session
    event.extra_keys = [untagged(extra_keys(identity, end - event.block_size, end + reach)) for end in ends]
    event.lookahead = [list(tokens) for tokens in ahead] if reach else []
    return event


def describe_removed(event: CacheEvent) -> CacheEvent:
    """A removed event with the field of version 3."""
    event.medium = DEVICE
    return event


def untagged(keys: tuple[Any, ...] | None) -> list[str | tuple[str, int]] | None:
    """Extra keys of one block as events publish them (vLLM 0.33 `to_event_extra_keys`).

    An adapter's name, `(identifier, offset)` of an item, the salt, the digest of embeddings, in hex.
    """
    if keys is None:
        return None
    return [key[1:] if key[0] == "mm" else text_of(key[1]) for key in keys]


def text_of(key: str | bytes) -> str:
    """An extra key as a log writes it: bytes in hex."""
    return key.hex() if isinstance(key, bytes) else key
