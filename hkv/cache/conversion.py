"""Conversion between the cache of single operations and that of whole steps. On the host, in time of the pool's size.

Requests arrive, look their prefixes up and adopt them in the one (`hkv.dialects.vllm.machine`); between arrivals whole
steps run in the other (`hkv.cache.step`). Row r of a step is request slot r of the other cache. Free queue, references,
keys and their order come over exactly; what a lookup found, and why absent keys are absent, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hkv.cache.state import (
    StepCounter,
    StepRequest,
    StepRow,
    StepState,
    checkpoint_groups,
    draft_states,
    init,
    row_fields,
)
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules.export import WINDOW
from hkv.dialects.vllm.rules.parameters import GroupField, of_config
from hkv.errors import ConfigError, OperationError
from hkv.keys import fingerprint
from hkv.state.key_table import PARTS, SHARED
from hkv.state.state import GROUP_WORDS, REQUEST_WORDS, Buckets, Counter, Request, Row, State, empty

WAITING, RUNNING = 1, 2
"""Values of `Request.LIVE`."""

PAIRS = ((Row.LENGTH, StepRow.LENGTH), (Row.FIRST, StepRow.FIRST), (Row.CACHED, StepRow.CACHED))
"""Fields of a row that both caches have: (in `Row`, in `StepRow`)."""

DRAFT_PAIRS = (*PAIRS, (Row.GROWN, StepRow.GROWN))
"""The same where groups have states for drafts."""

EXPORT_PAIRS = (*DRAFT_PAIRS, (Row.EXPORT, StepRow.EXPORT), (Row.EXPORT_ENTRY, StepRow.EXPORT_ENTRY))
"""The same where chunks leave states behind inside them."""

REQUEST_PAIRS = ((Request.PROMPT, StepRequest.PROMPT), (Request.SHARED_PREFIX, StepRequest.SHARED_PREFIX))
"""Fields of a request that both caches have."""


def to_steps(
    config: VllmConfig,
    state: State,
    keys: np.ndarray,
    tails: Sequence[Sequence[int]],
    roots: Sequence[Sequence[int]] | None = None,
) -> StepState:
    """The state of whole steps that holds what a sequential cache holds.

    Args:
      config: the cache's configuration.
      state: not batched. Its prefix keys number fingerprints (`hkv.keys.fingerprint.keys`).
      keys: uint32[K, 4], the fingerprint that each prefix key stands for.
      tails: for each request slot, its computed tokens after the last whole hash block; anything for empty slots.
      roots: for each request slot, what stood for the key before its first; `ROOT` by default.

    Returns:
      The state as NumPy arrays, of the same sizes: R request slots, W entries a row, C prefix keys.

    Raises:
      ConfigError: a configuration that whole steps cannot express, hits inside blocks, or keys that look ahead.
      OperationError: a block with a key that ends inside it, a prefix key without fingerprint, or a tail of another
        length than the request's computed tokens leave.
    """
    _require_whole_blocks(config)
    buckets = state.buckets
    source = {name: np.asarray(value) for name, value in vars(state).items()}
    _, made = init(config, rows=buckets.requests, row=buckets.row, blocks=buckets.blocks, chain=buckets.chain)
    target: dict[str, Any] = dict(vars(made))
    head, tail = source["counters"][Counter.HEAD], source["counters"][Counter.TAIL]
    # The sequential ring has empty places (0) where hits took blocks out; a step's queue has none.
    places = source["queue"][np.arange(head, tail) & (buckets.queue - 1)]
    free = places[places != 0]
    target["queue"][:] = 0
    target["queue"][: len(free)] = free
    # Below 0 is minus the count of references; above 0 a place in the queue.
    target["refs"][:] = 2 * np.maximum(-source["blocks"][: buckets.blocks], 0)
    target["counters"][:] = 0
    target["counters"][StepCounter.TAIL] = len(free)
    target["counters"][StepCounter.EVICTIONS] = source["counters"][Counter.EVICTIONS]
    members = np.asarray(of_config(config, buckets.groups).groups)[:, GroupField.MEMBER]
    order = 0
    for entry, block in _registered(source, buckets):
        number, column = divmod(entry, buckets.groups)
        target["keys"][block] = (*_key_of(keys, number), members[column], order)
        target["refs"][block] += 1
        target["log"][order] = block
        order += 1
    target["counters"][StepCounter.REGISTERED] = order
    for slot in range(buckets.requests):
        if source["requests"][slot, Request.LIVE]:
            root = fingerprint.ROOT if roots is None else roots[slot]
            _request_to_row(config, source, target, slot, keys, tails[slot], root)
    return StepState(**target)


def to_operations(config: VllmConfig, state: StepState, buckets: Buckets, number: Callable[[bytes], int]) -> State:
    """The sequential state that holds what a cache of whole steps holds.

    Args:
      config: the cache's configuration.
      state: of whole steps.
      buckets: static sizes; as many request slots as rows, and entries a row.
      number: the prefix key of a fingerprint, given as the 16 bytes of its words in little-endian order; below
        `buckets.keys`.

    Returns:
      The state as NumPy arrays. Every request's computed tokens are all that it has; a new scheduling step has begun.

    Raises:
      ConfigError: hits inside blocks, or keys that look ahead.
      OperationError: sizes that do not fit, or a prefix key outside its bucket.
    """
    _require_whole_blocks(config)
    source = {name: np.asarray(value) for name, value in vars(state).items()}
    rows, _, width = source["rows"].shape
    if (buckets.requests, buckets.row) != (rows, width):
        raise OperationError("buckets", (buckets.requests, buckets.row), f"{rows} requests and rows of {width} blocks")
    if buckets.chain < source["chains"].shape[1] and buckets.chain < _longest(config, source):
        raise OperationError("buckets.chain", buckets.chain, f"at least {_longest(config, source)} prefix keys")

    def numbered(words: np.ndarray) -> int:
        key = number(np.asarray(words, "<u4").tobytes())
        if not 0 <= key < buckets.keys:
            raise OperationError("number", key, f"a prefix key from 0 up to {buckets.keys}")
        return key

    target: dict[str, Any] = dict(vars(empty(buckets, config.num_blocks)))
    head, tail = source["counters"][StepCounter.HEAD], source["counters"][StepCounter.TAIL]
    free = source["queue"][np.arange(head, tail) & (len(source["queue"]) - 1)]
    target["queue"][:] = 0
    target["queue"][: len(free)] = free
    target["blocks"][: config.num_blocks] = -(source["refs"][: config.num_blocks] // 2)
    target["blocks"][free] = np.arange(1, len(free) + 1)
    columns = np.asarray(of_config(config, buckets.groups).groups)[:, GroupField.COLUMN]
    _register(source, target, buckets, columns, numbered)
    running = 0
    for row in range(rows):
        if source["requests"][row, StepRequest.LIVE]:
            running += _row_to_request(config, source, target, row, numbered)
    counted = {
        Counter.TAIL: len(free),
        Counter.FREE: len(free),
        Counter.EVICTIONS: source["counters"][StepCounter.EVICTIONS],
        Counter.RUNNING: running,
    }
    for counter, value in counted.items():
        target["counters"][counter] = value
    return State(**target)


def _pairs(config: VllmConfig) -> list[tuple[int, int]]:
    """Fields of a row that both caches have: where each begins in a request of the one, and its turn in the other."""
    pairs = EXPORT_PAIRS if checkpoint_groups(config) else DRAFT_PAIRS if draft_states(config) else PAIRS
    order = row_fields(len(pairs) + (pairs == EXPORT_PAIRS))
    return [(int(old), order.index(new)) for old, new in pairs]


def _require_whole_blocks(config: VllmConfig) -> None:
    if config.partial_hits:
        raise ConfigError("partial_hits", True, "False: blocks with one key each, and no copies")
    if config.hash_lookahead:
        raise ConfigError("hash_lookahead", config.hash_lookahead, "0: keys of whole blocks alone")


def _registered(source: dict[str, np.ndarray], buckets: Buckets) -> list[tuple[int, int]]:
    """Every entry of the table and block under it; blocks of one entry in the order of their registration."""
    if np.any(source["keys"][:, 0] & PARTS):
        raise OperationError("state", "a key that ends inside a block", "blocks with one key each")
    found = []
    table = source["table"][:-1].copy()
    # The last column holds steps, not blocks.
    table[:, -1] = 0
    for entry in np.flatnonzero(table.ravel() > 0).tolist():
        value = int(table.ravel()[entry])
        first = block = value >> 3
        found.append((entry, block))
        while value & 1 and (block := int(source["links"][block, 0])) != first:
            found.append((entry, block))
    return found


def _register(
    source: dict[str, np.ndarray],
    target: dict[str, Any],
    buckets: Buckets,
    columns: np.ndarray,
    numbered: Callable[[np.ndarray], int],
) -> None:
    blocks = np.flatnonzero(source["refs"] % 2)
    age = (source["counters"][StepCounter.REGISTERED] - source["keys"][blocks, 5].astype(np.int64)) % (1 << 32)
    under: dict[int, list[int]] = {}
    for block in blocks[np.argsort(-age, kind="stable")].tolist():
        entry = numbered(source["keys"][block, :4]) * buckets.groups + int(columns[source["keys"][block, 4]])
        under.setdefault(entry, []).append(block)
    for entry, ring in under.items():
        several = len(ring) > 1
        target["table"].reshape(-1)[entry] = ring[0] * 8 + several
        for place, block in enumerate(ring):
            target["keys"][block, 0] = (entry + 1) * 4 + (SHARED if several else 0)
            target["links"][block, :2] = ring[(place + 1) % len(ring)], ring[place - 1]


def _request_to_row(
    config: VllmConfig,
    source: dict[str, np.ndarray],
    target: dict[str, Any],
    slot: int,
    keys: np.ndarray,
    tail: Sequence[int],
    root: Sequence[int],
) -> None:
    request, groups = source["requests"][slot], target["rows"].shape[1]
    computed, size = int(request[Request.COMPUTED]), config.hash_block_size
    if len(tail) != computed % size:
        raise OperationError(f"tails[{slot}]", len(tail), f"{computed % size} tokens, of {computed} computed ones")
    target["requests"][slot, StepRequest.LIVE] = 1
    target["requests"][slot, StepRequest.COMPUTED] = computed
    for old, new in REQUEST_PAIRS:
        target["requests"][slot, new] = request[old]
    if checkpoint_groups(config):
        # The last field of all: what a request came with, where single operations know what tokens it has.
        came = request[Request.TOKENS] - 1
        target["requests"][slot, -groups:] = came * (came > max(request[Request.PROMPT], computed))
    for group in range(groups if request[Request.LIVE] == RUNNING else 0):
        at = REQUEST_WORDS + GROUP_WORDS * group
        for old, column in _pairs(config):
            target["requests"][slot, len(StepRequest) + column * groups + group] = request[at + old]
        fields = target["requests"][slot, len(StepRequest) :].reshape(-1, groups)[:, group]
        if len(fields) > len(PAIRS) and not config.topology.specs[group].scratch_blocks:
            fields[StepRow.GROWN] = 1
        if checkpoint_groups(config):
            _settle_export(fields, int(request[at + Row.STANDING]))
        first, length = int(request[at + Row.FIRST]), int(request[at + Row.LENGTH])
        first = 0 if config.topology.specs[group].sinks else first
        target["rows"][slot, group, first:length] = source["rows"][slot, group, first:length]
    chain = source["chains"][slot, : computed // size]
    words = np.array([_key_of(keys, int(number)) for number in chain], np.uint32).reshape(-1, 4)
    target["chains"][slot, : len(words)] = words
    last = words[-1] if len(words) else np.array(root, np.uint32)
    target["hashing"][slot] = np.concatenate([last, *_hashing(tail, size)])


def _settle_export(fields: np.ndarray, standing: int) -> None:
    """States inside a row's chunks, as whole steps have them: no entry up to them is looked at again.

    Args:
      fields: the row's fields, where whole steps keep them.
      standing: `Row.STANDING` of single operations.
    """
    place = {field: index for index, field in enumerate(row_fields(len(fields)))}
    looked_at = int(fields[place[StepRow.CACHED]])
    for entry in range(looked_at, looked_at + WINDOW):
        if standing >> entry % WINDOW & 1:
            fields[place[StepRow.CACHED]] = entry + 1
    if fields[place[StepRow.EXPORT]]:
        past = fields[place[StepRow.EXPORT_ENTRY]] + 1
        fields[place[StepRow.CACHED]] = max(fields[place[StepRow.CACHED]], past)
    else:
        fields[place[StepRow.EXPORT_ENTRY]] = 0


def _hashing(tail: Sequence[int], size: int) -> tuple[np.ndarray, np.ndarray]:
    """The digest of a hash block of `size` tokens after the first ones, and those not yet in it, uint32[4] each."""
    digest, words = np.full(4, size, np.uint32), np.zeros(4, np.uint32)
    for place, token in enumerate(tail):
        if place % 4 == 0:
            words = np.zeros(4, np.uint32)
        words[place % 4] = np.int64(token) & 0xFFFFFFFF
        if place % 4 == 3:
            digest = np.asarray(fingerprint.absorb(digest, words))  # type: ignore[arg-type]
    return digest, words


def _row_to_request(
    config: VllmConfig,
    source: dict[str, np.ndarray],
    target: dict[str, Any],
    row: int,
    numbered: Callable[[np.ndarray], int],
) -> bool:
    """Fills a request slot. Returns whether it holds blocks."""
    request, groups = target["requests"][row], source["rows"].shape[1]
    computed = int(source["requests"][row, StepRequest.COMPUTED])
    hashed = computed // config.hash_block_size
    running = computed > 0
    known = 0
    for group in range(groups):
        at = REQUEST_WORDS + GROUP_WORDS * group
        for old, column in _pairs(config):
            request[at + old] = source["requests"][row, len(StepRequest) + column * groups + group]
        if not config.topology.specs[group].scratch_blocks:
            request[at + Row.GROWN] = 0  # single operations say it only of rows with states for drafts
        known |= int(request[at + Row.CACHED] > 0)
    values = {
        Request.LIVE: RUNNING if running else WAITING,
        Request.COMPUTED: computed,
        Request.TOKENS: computed,
        Request.KEYS: hashed,
        Request.HIT: -1,
        Request.KNOWN: known,
        Request.GRANTED: computed,
    }
    for field, value in values.items():
        request[field] = value
    for old, new in REQUEST_PAIRS:
        request[old] = source["requests"][row, new]
    target["rows"][row, :groups] = source["rows"][row]
    target["chains"][row, :hashed] = [numbered(words) for words in source["chains"][row, :hashed]]
    return running


def _longest(config: VllmConfig, source: dict[str, np.ndarray]) -> int:
    return int(source["requests"][:, StepRequest.COMPUTED].max(initial=0)) // config.hash_block_size


def _key_of(keys: np.ndarray, number: int) -> tuple[int, ...]:
    if not 0 <= number < len(keys):
        raise OperationError("keys", len(keys), f"a fingerprint for prefix key {number}")
    return tuple(int(word) for word in keys[number])
