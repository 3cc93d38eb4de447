"""KV events as routers read them: vLLM 0.33's wire form, and an index of keys rebuilt from a stream of them.

A batch is a msgpack array `[ts, events, data_parallel_rank]`, the rank null when it is none. In vLLM 0.33 every event
in it is a map: `type` (`BlockStored`, `BlockRemoved`, `AllBlocksCleared`) and the fields below by name, defaults left
out. Earlier releases wrote an event as an array, its type first and the fields in the same order. Both are read; the
map is written (vLLM 0.33 `vllm.distributed.kv_events`). SGLang 0.5.23 writes the same, without groups. A message has
three frames: topic, sequence number (8 bytes, big-endian), batch. Host only; needs neither ZMQ nor JAX.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import msgspec

from hkv.errors import HKVError

Hash: TypeAlias = bytes | int
"""A block's key: the whole chain hash, or (by default in vLLM 0.33) its last 8 bytes as an integer."""

DEVICE = "GPU"
"""The medium that vLLM 0.33 names for blocks of its own pool."""

SPARSE_KINDS = frozenset(
    ("chunked_local_attention", "cross_attention", "mamba", "sliding_window", "sliding_window_mla")
)
"""Kinds (vLLM 0.33 `KVCacheSpecKind`) that leave blocks out, so that a parent need not have been stored."""

REMEMBERED = 1_000_000
"""Removed keys of which is remembered that they were stored once."""


class EventError(HKVError):
    """A message that is no batch of KV events."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """Blocks of one group entered a cache. Fields and their order as vLLM 0.33 has them.

    Attributes:
      block_hashes: key of each block that was stored; blocks that were skipped are left out, so there may be none.
      parent_block_hash: key of the block before the span, stored or not; None at the start of a prompt.
      token_ids: tokens of the whole span, those of skipped blocks included; pairs of them where SGLang's keys are
        bigrams.
      block_size: tokens in a block; 0, with no tokens, where keys come alone, as by default from vLLM 0.33's CPU tier.
      lora_id: the adapter's number; deprecated in favour of its name.
      medium: medium of the blocks, `GPU` for the engine's own pool.
      lora_name: the adapter's name.
      extra_keys: extra keys of each block, which its key covers besides its tokens, or None.
      group_idx: the KV cache group.
      kv_cache_spec_kind: the group's kind.
      kv_cache_spec_sliding_window: its window in tokens.
      locality: `LOCAL` or `REMOTE`, as seen from the publisher.
      ownership: the tier that holds the block.
      session_id: the session that caused the event.
      lookahead_token_ids: for each block the tokens after it that its key covers.
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int | tuple[int, int]]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    """Keys of one group left a cache; attributes as of `BlockStored`."""

    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag="AllBlocksCleared"):
    """The prefix cache was reset."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared

_TYPES: dict[str, type[Event]] = {cls.__name__: cls for cls in (BlockStored, BlockRemoved, AllBlocksCleared)}


@dataclasses.dataclass(frozen=True)
class EventBatch:
    """Content of one message.

    Attributes:
      ts: seconds, of the publisher's clock.
      events: in order.
      data_parallel_rank: of the publisher, or None.
    """

    ts: float
    events: tuple[Event, ...]
    data_parallel_rank: int | None = None


def encode_batch(batch: EventBatch) -> bytes:
    """The batch as vLLM 0.33 writes it."""
    return msgspec.msgpack.encode([batch.ts, batch.events, batch.data_parallel_rank])


def decode_batch(payload: bytes) -> EventBatch:
    """The batch that a message carries; events as maps or as arrays.

    Raises:
      EventError: it carries none; names the event and the field.
    """
    try:
        found = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EventError("batch", payload[:40], f"msgpack ({error})") from error
    if not isinstance(found, list) or len(found) < 2 or not isinstance(found[1], list):
        raise EventError("batch", found, "an array of a time, an array of events and perhaps a rank")
    ts, events, rank = found[0], found[1], found[2] if len(found) > 2 else None
    if not isinstance(ts, int | float) or not isinstance(rank, int | None):
        raise EventError("batch", [ts, "...", rank], "a number for the time, and an integer or nothing for the rank")
    return EventBatch(float(ts), tuple(_event(index, event) for index, event in enumerate(events)), rank)


def _event(index: int, found: Any) -> Event:
    fields: dict[Any, Any] = {}
    if isinstance(found, dict):
        # vLLM writes these two whatever they are; SGLang leaves out what is nothing.
        name, fields = found.get("type"), {"medium": None, "lora_name": None, **found}
    elif isinstance(found, list) and found:
        name = found[0]
        names = _TYPES[name].__struct_fields__ if isinstance(name, str) and name in _TYPES else ()
        fields = {"type": name, **dict(zip(names, found[1:], strict=False))}
    else:
        raise EventError(f"events[{index}]", found, "a map with its type, or an array that begins with it")
    if not isinstance(name, str) or name not in _TYPES:
        raise EventError(f"events[{index}].type", name, f"one of {', '.join(_TYPES)}")
    try:
        return msgspec.convert(fields, _TYPES[name])
    except msgspec.ValidationError as error:
        raise EventError(f"events[{index}]", name, str(error).replace("`", "")) from error


@dataclasses.dataclass(frozen=True)
class Place:
    """Group and medium in which a key can be cached; an index has a set of keys for each.

    Attributes:
      group: the KV cache group, or None where events name none.
      medium: such as `GPU`.
    """

    group: int | None
    medium: str | None

    def __str__(self) -> str:
        group = "no group" if self.group is None else f"group {self.group}"
        return f"{group} on {self.medium or 'no medium'}"


@dataclasses.dataclass(frozen=True)
class Problem:
    """A promise of KV events that a stream breaks (invariant B-I34).

    Attributes:
      seq: sequence number of the batch.
      name: `removed unknown`, `parent unknown`, `two contents`, `tokens missing`, `block size`; of streams, `gap`.
      text: the problem, in words.
    """

    seq: int
    name: str
    text: str


@dataclasses.dataclass
class IndexEntry:
    """A key in the index.

    Attributes:
      count: blocks that have it: an engine that computes a prefix twice at once stores it twice, and removes it twice.
      content: key before it and tokens, where the event tells them apart; None where not.
    """

    count: int
    content: tuple[Hash | None, tuple[Any, ...]] | None


class KeyIndex:
    """Index of cached keys by place, rebuilt from a stream of events: a router's view of a cache.

    Attributes:
      places: for each place, its keys.
      stored: events of each place that stored something; `removed`: that removed something.
      duplicates: keys stored where they were already.
      bare: keys stored that came without tokens.
      sizes: sizes of the blocks that were stored, in tokens: several where vLLM 0.33 stores parts of blocks, too.
      whole: True if the stream was followed from its beginning, or from a reset of the cache, without a gap; only
        then can an unknown key be held against the publisher.
    """

    def __init__(self) -> None:
        self.places: dict[Place, dict[Hash, IndexEntry]] = collections.defaultdict(dict)
        self.stored: collections.Counter[Place] = collections.Counter()
        self.removed: collections.Counter[Place] = collections.Counter()
        self.duplicates: collections.Counter[Place] = collections.Counter()
        self.bare: collections.Counter[Place] = collections.Counter()
        self.sizes: dict[Place, set[int]] = collections.defaultdict(set)
        self.whole = True
        self._past: dict[Place, collections.OrderedDict[Hash, None]] = collections.defaultdict(collections.OrderedDict)

    def apply(self, seq: int, batch: EventBatch) -> list[Problem]:
        """Takes note of a batch and returns what is wrong with it."""
        return [problem for event in batch.events for problem in self._apply(seq, event)]

    def forget(self) -> None:
        """Something was missed: what is known stays known, but absence proves nothing until the cache is cleared."""
        self.whole = False

    def keys(self, place: Place) -> frozenset[Hash]:
        """The keys at a place."""
        return frozenset(self.places.get(place, ()))

    def _apply(self, seq: int, event: Event) -> Iterator[Problem]:
        match event:
            case AllBlocksCleared():
                self.places.clear()
                self._past.clear()
                self.whole = True
            case BlockRemoved():
                yield from self._remove(seq, event)
            case BlockStored():
                yield from self._store(seq, event)

    def _remove(self, seq: int, event: BlockRemoved) -> Iterator[Problem]:
        place = Place(event.group_idx, event.medium)
        known = self.places[place]
        self.removed[place] += 1
        for key in event.block_hashes:
            entry = known.get(key)
            if entry is None:
                if self.whole:
                    state = "was removed before" if key in self._past[place] else "was never stored"
                    yield Problem(seq, "removed unknown", f"{_text(key)} leaves {place}, where it {state}")
                continue
            entry.count -= 1
            if entry.count == 0:
                del known[key]
                self._remember(place, key)

    def _store(self, seq: int, event: BlockStored) -> Iterator[Problem]:
        place = Place(event.group_idx, event.medium)
        known = self.places[place]
        self.stored[place] += 1
        size = event.block_size
        if size == 0 and not event.token_ids:
            self.bare[place] += len(event.block_hashes)
        elif size < 1:
            yield Problem(seq, "block size", f"blocks of {size} tokens in {place}")
        else:
            self.sizes[place].add(size)
        if len(event.token_ids) < len(event.block_hashes) * event.block_size:
            count = f"{len(event.block_hashes)} blocks of {event.block_size} tokens"
            yield Problem(seq, "tokens missing", f"{count} come with {len(event.token_ids)} tokens to {place}")
        parent = event.parent_block_hash
        dense = event.kv_cache_spec_kind not in SPARSE_KINDS
        if dense and self.whole and parent is not None and parent not in known and parent not in self._past[place]:
            text = f"a block of {place} follows {_text(parent)}, which was never stored there"
            yield Problem(seq, "parent unknown", text)
        contents = _contents(event)
        for key, content in zip(event.block_hashes, contents, strict=True):
            entry = known.get(key)
            if entry is None:
                known[key] = IndexEntry(1, content)
                continue
            entry.count += 1
            self.duplicates[place] += 1
            if None not in (entry.content, content) and entry.content != content:
                yield Problem(seq, "two contents", f"{_text(key)} of {place} stands for two different prefixes")

    def _remember(self, place: Place, key: Hash) -> None:
        past = self._past[place]
        past[key] = None
        past.move_to_end(key)
        if len(past) > REMEMBERED:
            past.popitem(last=False)


def _contents(event: BlockStored) -> Sequence[tuple[Hash | None, tuple[Any, ...]] | None]:
    """Content that each key stands for: the key before it and its tokens; unknown where blocks were skipped."""
    size, hashes = event.block_size, event.block_hashes
    if size < 1 or len(event.token_ids) != len(hashes) * size:
        return [None] * len(hashes)
    parents = [event.parent_block_hash, *hashes[:-1]]
    return [
        (parent, tuple(event.token_ids[index * size : (index + 1) * size])) for index, parent in enumerate(parents)
    ][: len(hashes)]


def _text(key: Hash) -> str:
    return f"key {key[:8].hex()}" if isinstance(key, bytes) else f"key {key:016x}"
