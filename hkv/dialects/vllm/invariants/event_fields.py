"""KV events say whose blocks they are: kinds of groups, adapters, extra keys."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.dialects.vllm.engines.engine import UNKNOWN, untagged
from hkv.dialects.vllm.engines.numpy import identity_of
from hkv.dialects.vllm.invariants.moment import Moment, invariant
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import CacheEvent
from hkv.dialects.vllm.traffic.ledger import RequestRecord
from hkv.keys.chained import extra_keys


@invariant("event fields", "B-I34", after=(oplog.EventsOp,), needs=("events",))
def event_fields(moment: Moment) -> Iterator[str]:
    """A stored event names its group's kind and window, and of each key the adapter, extra keys and tokens it covers.

    Holds after `events`, of the fields that events have: logs before version 3 have none of these. Exceptions: keys
    that no request present has by its tokens, for instance of a request that was dropped before the drain.
    """
    assert isinstance(moment.answer, list)
    for event in moment.answer:
        assert isinstance(event, CacheEvent)
        if event.type == "stored":
            yield from _group(moment, event)
            for place, key in enumerate(event.keys or ()):
                yield from _key(moment, event, place, key)


def _group(moment: Moment, event: CacheEvent) -> Iterator[str]:
    spec = moment.config.topology.specs[event.group]
    kind, window = spec.event_kind or UNKNOWN, getattr(spec, "window", 0)
    if event.spec_kind not in (None, kind) or event.window not in (None, window):
        yield f"blocks of group {event.group}, {kind} with window {window}, are {event.spec_kind} with {event.window}"
    reach = moment.config.hash_lookahead
    for name, entries in (("extra_keys", event.extra_keys), ("lookahead", event.lookahead)):
        wanted = len(event.keys or ()) if name == "extra_keys" or reach else 0
        if entries is not None and event.keys is not None and len(entries) != wanted:
            yield f"{len(event.keys)} keys are stored with {len(entries)} entries of {name}"


def _key(moment: Moment, event: CacheEvent, place: int, key: str) -> Iterator[str]:
    found = _owner(moment, key)
    if found is None:
        return
    record, end = found
    adapter = record.extra.lora[0] if record.extra.lora else ""
    if event.lora_name not in (None, adapter):
        yield f"key {key} is of adapter {adapter!r}, and is stored under {event.lora_name!r}"
    reach = moment.config.hash_lookahead
    covered = untagged(extra_keys(identity_of(record.extra), end - event.block_size, end + reach))
    if event.extra_keys is not None and _plain(event.extra_keys[place]) != _plain(covered):
        mine, theirs = (_plain(entry) or [] for entry in (covered, event.extra_keys[place]))
        lacks = [_component(record, part) for part in mine if part not in theirs]
        has = [_component(record, part) for part in theirs if part not in mine]
        wrong = [f"without {', '.join(lacks)}"] * bool(lacks) + [f"with {', '.join(has)}"] * bool(has)
        said = " and ".join(wrong) or f"in the order {theirs}, not {mine}"
        yield f"the first {end} tokens of {record.id} are stored {said}, other than what their key {key} covers"
    ahead = record.tokens[end : end + reach]
    if reach and event.lookahead is not None and event.lookahead[place] != ahead:
        yield f"key {key} covers the tokens {ahead} after its block, and is stored with {event.lookahead[place]}"


def _owner(moment: Moment, key: str) -> tuple[RequestRecord, int] | None:
    """A request whose prefix a key names, and the length of that prefix; none where keys are given, not computed."""
    for prefix in moment.book.prefixes.get(key, ()):
        end = moment.ledger.length(prefix)
        for record in moment.ledger.requests.values():
            if record.keys is None and moment.ledger.prefix(record.id, end) == prefix:
                return record, end
    return None


def _component(record: RequestRecord, part: str | list[str | int]) -> str:
    """Component of a key besides tokens, in words."""
    if isinstance(part, list):
        return f"the multimodal item {part[0]!r} at {part[1]} of its block"
    if record.extra.lora is not None and part in record.extra.lora:
        return f"the adapter {part!r}"
    return f"the cache salt {part!r}" if part == record.extra.salt else f"the prompt embeddings {part!r}"


def _plain(entry: list[str | tuple[str, int]] | None) -> list[str | list[str | int]] | None:
    return None if entry is None else [each if isinstance(each, str) else list(each) for each in entry]
