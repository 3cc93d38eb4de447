"""The formats that `hkv trace import` reads, by name; here those without texts, those with texts in `chats`.

Prompts are named by ids of blocks (Mooncake, Bailian, vLLM, Dynamo, conversations of agents), by tokens (vLLM's KV
events, from a recording or a publisher, and HKV's own operation logs), or not at all (Azure, BurstGPT, Vidur,
Splitwise).
"""

from __future__ import annotations

import dataclasses
import datetime
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from hkv.contract.events import BlockStored, Hash, decode_batch
from hkv.errors import ConfigError
from hkv.files import lines_of, opened, shown
from hkv.limits import whole_number
from hkv.oracle.events import Item, Message, read_recording_lines
from hkv.oracle.log_file import read_log
from hkv.replay.traces import chats
from hkv.replay.traces.imported import ImportOptions, Remarks, csv_rows, json_entries, json_lines, require
from hkv.replay.traces.reader import MAX_LENGTH, TOKENS_PER_ID, Fields, NewRequest

Reader = Callable[[str, ImportOptions, Remarks], Iterator[NewRequest]]

NO_CONTENT = "requests without ids: only their lengths and times are known"


def in_units(milliseconds: int) -> Reader:
    """Reads lines with ids of blocks whose times are in such units.

    Mooncake's traces (FAST'25) have milliseconds, and an id for 512 tokens; Alibaba's `qwen-bailian-usagetraces-anon`,
    a turn's prompt whole, and timed traces as `vllm bench serve` reads them under its defaults have seconds, and an id
    for 16.
    """

    def read(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[NewRequest]:
        for line in json_lines(path):
            length = line.integer("input_length", least=1)
            yield NewRequest(
                line=line.line,
                timestamp=line.number("timestamp") * milliseconds,
                input_length=length,
                output_length=line.integer("output_length"),
                ids=line.ids("hash_ids", length, options.tokens_per_id or 1),
            )

    return read


def dynamo(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[NewRequest]:
    """Sessions as `python -m dynamo.replay` reads them in a Mooncake trace: a later turn has a delay or a time.

    A turn's prompt is whole. `created_time`, `input_tokens`, `output_tokens` and `delay_ms` are other names that
    Dynamo takes for `timestamp`, `input_length`, `output_length` and `delay`; times are milliseconds.
    """
    for line in json_lines(path):
        length = line.integer("input_length", "input_tokens", least=1)
        ids = None
        if line.values.get("hash_ids") is None:
            remarks.note(NO_CONTENT)
        else:
            ids = line.ids("hash_ids", length, options.tokens_per_id or 1)
        yield NewRequest(
            line=line.line,
            timestamp=_optional(line, "timestamp", "created_time"),
            input_length=length,
            output_length=line.integer("output_length", "output_tokens"),
            ids=ids,
            session=_session(line),
            delay=_optional(line, "delay", "delay_ms"),
        )


def _optional(line: Fields, *names: str) -> float | None:
    return None if line.values.get(line.named(*names)) is None else line.number(*names)


def _session(line: Fields) -> str:
    value = line.values.get("session_id", "")
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise line.error("session_id", value, "a text or an integer")
    return str(value)


BEGUN = "conversations whose beginning is made up: they come at random, --rate a second on the average"
EMPTY = "rows without prompt tokens, left out: requests that failed"


def azure(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[NewRequest]:
    """AzurePublicDataset's LLM inference traces: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`; the first is at 0."""
    first: datetime.datetime | None = None
    for row in csv_rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        time = _time(row)
        first = first or time
        try:
            since = (time - first) / datetime.timedelta(milliseconds=1)
        except TypeError:
            raise row.error("TIMESTAMP", str(time), "a time with a zone on every row, or on none") from None
        length, output = _tokens(row, "ContextTokens"), _tokens(row, "GeneratedTokens")
        if not length:
            remarks.note(EMPTY)
            continue
        yield NewRequest(line=row.line, timestamp=since, input_length=length, output_length=output)


def rows_of(time: str, prompt: str, output: str, *, timed: bool = True) -> Reader:
    """Reads a CSV with columns of these names: seconds of arrival, which may be missing unless `timed`, and tokens.

    BurstGPT's traces, with or without `Session ID`; Vidur's (`TraceReplayRequestGenerator`, and without times
    `TraceRequestLengthGenerator`); those of `splitwise-sim`.
    """

    def read(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[NewRequest]:
        for row in csv_rows(path, (*(time,) * timed, prompt, output)):
            length, answer = _tokens(row, prompt), _tokens(row, output)
            if not length:
                remarks.note(EMPTY)
                continue
            arrival = _seconds(row, time) * 1000 if time in row.values else None
            yield NewRequest(line=row.line, timestamp=arrival, input_length=length, output_length=answer)

    return read


def agentic(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[NewRequest]:
    """Conversations of agents as Weka's `kv-cache-tester` has them, with the requests of subagents among their own.

    Times are seconds from a conversation's start; ids are of `block_size` tokens, and name blocks of their conversation
    alone unless `hash_id_scope` is `global`. Later conversations begin at random, `rate` a second.
    """
    source, start, numbers = random.Random(options.seed), 0.0, dict[tuple[int, int], int]()
    for place, entry in enumerate(json_entries(path)):
        if place:
            start += 1000 * source.expovariate(require(options, "rate", "agentic", "new conversations a second"))
            remarks.note(BEGUN)
        size = entry.integer("block_size", least=1)
        if size != options.tokens_per_id:
            raise entry.error("block_size", size, f"{options.tokens_per_id}, or --tokens-per-id {size}")
        scope = entry.values.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise entry.error("hash_id_scope", scope, "local or global")
        for each in _with_subagents(entry):
            length = each.integer("in", least=1)
            ids = each.ids("hash_ids", length, size)
            named = (place + 1 if scope == "local" else 0 for _ in ids)
            yield NewRequest(
                line=entry.line,
                timestamp=start + each.number("t") * 1000,
                input_length=length,
                output_length=each.integer("out"),
                ids=[numbers.setdefault(pair, len(numbers)) for pair in zip(named, ids, strict=True)],
            )


def _with_subagents(entry: Fields) -> Iterator[Fields]:
    requests = entry.values.get("requests")
    if not isinstance(requests, list):
        raise entry.error("requests", requests, "a list")
    for each in requests:
        fields = Fields(entry.path, entry.line, each)
        yield from _with_subagents(fields) if "requests" in fields.values else (fields,)


def _time(row: Fields) -> datetime.datetime:
    value = row.values.get("TIMESTAMP")
    try:
        return datetime.datetime.fromisoformat(str(value))
    except ValueError:
        raise row.error("TIMESTAMP", value, "a time such as 2023-11-16 18:17:03.9799600") from None


def _tokens(row: Fields, name: str) -> int:
    value = row.values.get(name)
    number = whole_number(value) if isinstance(value, str) else None
    if number is None or number > MAX_LENGTH:
        raise row.error(name, value, f"an integer from 0 to {MAX_LENGTH}")
    return number


def _seconds(row: Fields, name: str) -> float:
    value = row.values.get(name)
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if not 0 <= number <= 2**43:
        raise row.error(name, value, "a number of seconds from 0")
    return number


# Requests as vLLM's KV events show them, and those of operation logs.

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
    before, tokens = parent, [each if isinstance(each, int) else each[0] for each in event.token_ids]
    for index, key in enumerate(event.block_hashes):
        chains.setdefault(key, (before, tokens[index * size : (index + 1) * size]))
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


# The formats.

BAILIAN_TOKENS = 16
"""Tokens of an id in Bailian's traces (their specification), and by default in vLLM's timed traces
(vLLM 0.33 `vllm.benchmarks.datasets.TimedTrace`, `timed_trace_chunk_hash_size`)."""

AGENTIC_TOKENS = 64
"""Tokens of an id in the conversations of agents that `kv-cache-tester` is published with (`block_size`)."""

IDS = ("tokens_per_id",)
TEXTS = ("tokens_per_id", "tokenizer", "template")
UNTIMED = ("rate", "seed")
ANSWERED = ("ms_per_token",)
CHATS = (*TEXTS, *UNTIMED, *ANSWERED, "pause")
MADE_UP = ("synthetic", "prefixes", "prefix_tokens", "tokens_per_id", "seed")


@dataclasses.dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
      options: names of the options that mean something to it, besides those that all have.
      tokens_per_id: tokens that one of its ids stands for unless told otherwise; None where it has no ids.
    """

    read: Reader
    options: tuple[str, ...]
    tokens_per_id: int | None = None


FORMATS = {
    "mooncake": Format(in_units(1), IDS, TOKENS_PER_ID),
    "bailian": Format(in_units(1000), IDS, BAILIAN_TOKENS),
    "timed-trace": Format(in_units(1000), IDS, BAILIAN_TOKENS),
    "dynamo": Format(dynamo, (*IDS, *UNTIMED, *ANSWERED), TOKENS_PER_ID),
    "azure": Format(azure, MADE_UP),
    "burstgpt": Format(rows_of("Timestamp", "Request tokens", "Response tokens"), MADE_UP),
    "vidur": Format(rows_of("arrived_at", "num_prefill_tokens", "num_decode_tokens", timed=False), (*MADE_UP, "rate")),
    "splitwise": Format(rows_of("arrival_timestamp", "prompt_size", "token_size"), MADE_UP),
    "agentic": Format(agentic, (*IDS, *UNTIMED), AGENTIC_TOKENS),
    "sharegpt": Format(chats.conversations("sharegpt", "conversations"), CHATS),
    "lmsys": Format(chats.conversations("lmsys", "conversation"), CHATS),
    "wildchat": Format(chats.conversations("wildchat", "conversation"), CHATS),
    "openai-chat": Format(chats.openai_log, (*TEXTS, *UNTIMED, "output_tokens")),
    "openai-batch": Format(chats.openai_batch, (*TEXTS, *UNTIMED, "output_tokens", "answers")),
    "prompts": Format(chats.prompt_lines, (*TEXTS, *UNTIMED, "output_tokens")),
    "text": Format(chats.plain_text, (*TEXTS, *UNTIMED, "output_tokens")),
    "kv-events": Format(
        kv_events,
        ("tokens_per_id", "group", "endpoint", "replay_endpoint", "topic", "seconds"),
    ),
    "operation-log": Format(operation_log, ("tokens_per_id", "step_ms")),
}
