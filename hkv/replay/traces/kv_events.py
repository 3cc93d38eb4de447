"""Requests as vLLM's KV events show them, from a recording or a publisher, and those of HKV's own operation logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from hkv.contract.events import BlockStored, Hash, decode_batch
from hkv.errors import ConfigError
from hkv.files import lines_of, opened, shown
from hkv.oracle.events import Item, Message, read_recording_lines
from hkv.oracle.log_file import read_log
from hkv.replay.traces.imported import ImportOptions, Remarks
from hkv.replay.traces.reader import NewRequest

SILENCE = 5000
"""Milliseconds after which blocks that go on from a request are another one's: the next turn of a chat."""

UNSEEN = "requests as far as events show them: prompts found whole in the cache are not among them"
MERGED = "requests whose generated tokens count as their prompt's"
ORPHANED = "stored blocks whose parent no event named, left out"
LOST = "gaps in the stream of events"

Chains: TypeAlias = dict[Hash, tuple[Hash | None, list[int]]]
"""Of each block that was stored, by its key: the key of the block before it, and its tokens."""


@dataclasses.dataclass(slots=True)
class _Open:
    """A request that may go on."""

    arrived: float
    end: Hash
    latest: float


def kv_events(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[NewRequest]:
    """Requests of a recording that `hkv check-events --record` wrote."""
    with opened(path) as file:
        yield from requests_of(read_recording_lines(lines_of(file, path), shown(path)), options, remarks)


def requests_of(items: Iterable[Item], options: ImportOptions, remarks: Remarks) -> Iterator[NewRequest]:
    """Requests as the events of one group show them, the group that stores every block."""
    chains: Chains = {}
    ends: dict[Hash, _Open] = {}
    found: list[_Open] = []
    for item in items:
        if not isinstance(item, Message):
            remarks.note(LOST)
            continue
        batch = decode_batch(item.payload)
        for event in batch.events:
            if isinstance(event, BlockStored) and (event.group_idx or 0) == options.group and event.block_hashes:
                _store(event, batch.ts * 1000, chains, ends, found, remarks)
    for number, each in enumerate(found, start=1):
        remarks.note(UNSEEN)
        remarks.note(MERGED)
        tokens = _prefix(chains, each.end)
        yield NewRequest(line=number, timestamp=each.arrived, input_length=len(tokens), output_length=0, tokens=tokens)


def _store(
    event: BlockStored,
    time: float,
    chains: Chains,
    ends: dict[Hash, _Open],
    found: list[_Open],
    remarks: Remarks,
) -> None:
    size, parent = event.block_size, event.parent_block_hash
    if len(event.token_ids) != size * len(event.block_hashes):
        expected = f"a group that stores every block, not {event.kv_cache_spec_kind or 'one that leaves some out'}"
        raise ConfigError("--group", event.group_idx or 0, expected)
    if parent is not None and parent not in chains:
        remarks.note(ORPHANED, len(event.block_hashes))
        return
    before = parent
    for index, key in enumerate(event.block_hashes):
        chains.setdefault(key, (before, event.token_ids[index * size : (index + 1) * size]))
        before = key
    end = event.block_hashes[-1]
    going = None if parent is None else ends.pop(parent, None)
    if going is None or time - going.latest > SILENCE:
        going = _Open(time, end, time)
        found.append(going)
    going.end, going.latest = end, time
    ends[end] = going


def _prefix(chains: Chains, end: Hash | None) -> list[int]:
    """The tokens of a prefix, from its last block back to its first."""
    parts: list[list[int]] = []
    while end is not None:
        end, tokens = chains[end]
        parts.append(tokens)
    return [token for part in reversed(parts) for token in part]


EXTRA = "requests with an adapter, images, a salt or embeddings, left out: tokens alone do not name their prefixes"
SEQUENCES = "requests of several sequences, of which the first is taken"


def operation_log(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[NewRequest]:
    """The requests of a log, whichever dialect it follows; a log without `step` has one request a step."""
    log = read_log(path)
    steps, stepped = 0, any(_name(operation) == "step" for operation in log.operations)
    prompts: dict[str, tuple[int, float, list[int]]] = {}
    said: dict[str, list[int]] = {}
    for line, operation in enumerate(log.operations, start=2):
        name = _name(operation)
        steps += name == "step"
        if name == "request" and getattr(operation, "extra", None):
            remarks.note(EXTRA)
        elif name == "request":
            arrived = steps if stepped else len(prompts)
            prompts[operation.id] = (line, arrived * options.step_ms, _unsigned(operation.tokens))
            said[operation.id] = []
            if getattr(operation, "sequences", 1) > 1:
                remarks.note(SEQUENCES)
        elif name == "append" and operation.id in said:
            appended = operation.tokens
            said[operation.id] += _unsigned(appended[0] if appended and isinstance(appended[0], list) else appended)
    for id, (line, timestamp, tokens) in prompts.items():
        yield NewRequest(
            line=line,
            timestamp=timestamp,
            input_length=len(tokens),
            output_length=len(said[id]),
            tokens=tokens,
            output_tokens=said[id],
        )


def _name(operation: Any) -> str:
    """The operation's name in logs: the tag of its struct."""
    return str(operation.__struct_config__.tag)


def _unsigned(tokens: list[int]) -> list[int]:
    return [token % 2**32 for token in tokens]
