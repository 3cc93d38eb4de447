"""One operation, with the cache before and after it: what every invariant is asked about.

The cache is a `Snapshot`; requests are as the operations alone tell them, in a `Ledger`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Mapping
from types import MappingProxyType

from hkv.contract.invariant import Register
from hkv.dialects.vllm.config import NAME, VllmConfig
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Allocation, Answer, CacheState, ExtraKeys, Hit, Operation, Rows


class Snapshot:
    """A `CacheState` with block ids as numbers.

    Attributes:
      free: the free queue, next to be handed out first.
      refs: reference count of each block that has one.
      rows: block ids per group of each request that has any.
      cached: of each block with a key: `(group, tokens covered, key in hex)`.
      owners: of each block in a row, every `(request, group, column)` that names it.
      entries: every `(group, key in hex)`.
      held: references of blocks that were taken along, by `pop`, `hold` or copies, and are to be given back.
      num_free: number of free blocks as the engine counts them; None where it does not say.
    """

    def __init__(
        self, state: CacheState, held: Mapping[int, int] = MappingProxyType({}), num_free: int | None = None
    ) -> None:
        self.held, self.num_free = dict(held), num_free
        self.free = state.free
        self.refs = {int(block): count for block, count in state.refs.items()}
        self.rows: dict[str, Rows] = state.rows
        self.cached = {int(block): (group, tokens, key) for block, (group, tokens, key) in state.cached.items()}
        self.owners: dict[int, list[tuple[str, int, int]]] = collections.defaultdict(list)
        for id, rows in state.rows.items():
            for group, row in enumerate(rows):
                for column, block in enumerate(row):
                    if block:
                        self.owners[block].append((id, group, column))
        self.entries = {(group, key) for group, _, key in self.cached.values()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Snapshot):
            return NotImplemented
        ours = (self.free, self.refs, self.rows, self.cached)
        return ours == (other.free, other.refs, other.rows, other.cached)

    __hash__ = None  # type: ignore[assignment]

    def spare(self) -> dict[int, int]:
        """References to each block besides those from rows, and those held: those of pending copies."""
        blocks = self.refs.keys() | self.owners.keys() | self.held.keys()
        counts = {
            block: self.refs.get(block, 0) - len(self.owners.get(block, ())) - self.held.get(block, 0)
            for block in blocks
        }
        return {block: count for block, count in counts.items() if count}


class KeyBook:
    """Keys and the prefixes that they stand for, learnt from blocks that a request's row holds when they get a key."""

    def __init__(self) -> None:
        self.prefixes: dict[str, set[int]] = collections.defaultdict(set)
        self.keys: dict[int, set[str]] = collections.defaultdict(set)

    def learn(self, key: str, prefix: int) -> None:
        """`key` was seen to stand for `prefix`."""
        self.prefixes[key].add(prefix)
        self.keys[prefix].add(key)


@dataclasses.dataclass(frozen=True)
class Moment:
    """Operation to judge, with the cache before and after it.

    Attributes:
      config: the cache's configuration.
      ledger: requests as the operations up to this one tell them.
      book: keys and prefixes.
      operation: the operation.
      answer: the engine's answer.
      before: the cache before it.
      after: the cache after it.
      again: answer to the same lookup, asked again.
      hits: of some waiting requests, their hit in tokens before and after; only for operations that fill the cache.
    """

    config: VllmConfig
    ledger: Ledger
    book: KeyBook
    operation: Operation
    answer: Answer
    before: Snapshot
    after: Snapshot
    again: Hit | None
    hits: dict[str, tuple[int, int]]

    def has_entry(self, id: str, group: int, end: int) -> bool:
        """True if some block's primary key names the request's first `end` tokens in `group`, after the operation."""
        prefix = self.ledger.prefix(id, end)
        keys = () if prefix is None else self.book.keys.get(prefix, ())
        return any((group, key) in self.after.entries for key in keys)


# The register of the invariants of vLLM 0.33's logs.

INVARIANTS = Register(NAME)
"""Every invariant of vLLM's operation log, by name. Those with a `start` have to be begun; `Watch` does."""

invariant = INVARIANTS.invariant
remembering = INVARIANTS.remembering


# State of every request as the operations alone tell it: independent of any engine, and of any hash.


@dataclasses.dataclass
class RequestRecord:
    """A request as its operations leave it. Counts are tokens.

    Attributes:
      id: its name.
      tokens: prompt and output so far.
      extra: everything besides its tokens that identifies its prefix.
      prompt: tokens it arrived with.
      computed: tokens computed.
      running: whether it holds blocks.
      preempted: whether it held blocks before, and gave them back.
      processed: computed, hit and external tokens, less those in flight: the most that an `allocate` saw.
      main: tokens it was granted room for since it last waited, look-ahead left out: the most of any grant.
      slots: the same with look-ahead.
      encoder: the most tokens of an encoder's output that it was granted room for since then.
      keys: its prefix keys, where they are given and not computed; else None.
      prefixes: name of the prefix that each of its hash blocks ends, as far as they were asked for.
      reports: whether its hits are published as events.
    """

    id: str
    tokens: list[int]
    extra: ExtraKeys
    prompt: int
    computed: int = 0
    running: bool = False
    preempted: bool = False
    processed: int = 0
    main: int = 0
    slots: int = 0
    encoder: int = 0
    keys: list[str] | None = None
    prefixes: list[int] = dataclasses.field(default_factory=list)
    reports: bool = False


class Ledger:
    """Follows operations and their answers.

    Prefixes are named by interning their content, hash block by hash block: two requests have the same prefix exactly
    when the names are equal. That is what keys ought to say; no hash is computed here.

    Args:
      config: the cache's configuration.

    Attributes:
      requests: every request that was not dropped, by id.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._names: dict[Hashable, int] = {}
        self._parents: list[int] = [0]
        self._lengths: list[int] = [0]
        self.requests: dict[str, RequestRecord] = {}

    def before(self, operation: Operation) -> None:
        """Takes note of what is about to be asked for."""
        match operation:
            case oplog.RequestOp():
                extra = ExtraKeys() if operation.extra is None else operation.extra
                record = RequestRecord(operation.id, list(operation.tokens), extra, len(operation.tokens))
                record.keys = None if operation.keys is None else list(operation.keys)
                record.reports = operation.report is not None
                self.requests[operation.id] = record
            case oplog.AppendOp():
                record = self.requests[operation.id]
                record.tokens += operation.tokens
                if record.keys is not None:
                    record.keys += operation.keys or []
            case oplog.ResumeOp():
                self._resume(operation)
            case oplog.RetireOp():
                record = self.requests[operation.id]
                record.processed = max(record.processed, operation.tokens)
            case oplog.AllocateOp():
                record = self.requests[operation.id]
                record.processed = max(record.processed, self.total(operation) - operation.in_flight)
            case _:
                pass

    def _resume(self, operation: oplog.ResumeOp) -> None:
        record, keys = self.requests[operation.id], operation.keep // self._config.hash_block_size
        record.tokens[operation.keep :] = operation.tokens
        record.prompt = operation.prompt
        record.extra = record.extra if operation.extra is None else operation.extra
        del record.prefixes[keys:]
        if record.keys is not None:
            record.keys[keys:] = operation.keys or []

    def after(self, operation: Operation, answer: Answer) -> None:
        """Takes note of what was answered."""
        match operation:
            case oplog.AllocateOp() if isinstance(answer, Allocation) and answer.blocks is not None:
                record = self.requests[operation.id]
                record.running = True
                record.main = max(record.main, self.main(operation))
                record.slots = max(record.slots, self.slots(operation))
                record.encoder = max(record.encoder, operation.encoder or 0)
            case oplog.AllocateOp() if not self.requests[operation.id].running:
                self.requests[operation.id].processed = 0
            case oplog.AdvanceOp():
                self.requests[operation.id].computed += operation.tokens
            case oplog.ComputedOp():
                self.requests[operation.id].computed = operation.tokens
            case oplog.FreeOp() | oplog.PopOp():
                record = self.requests[operation.id]
                record.computed = record.processed = record.main = record.slots = record.encoder = 0
                record.preempted |= record.running
                record.running = False
            case oplog.DropOp():
                del self.requests[operation.id]
            case _:
                pass

    def total(self, operation: oplog.AllocateOp) -> int:
        """Tokens before those an `allocate` asks new room for: computed, hit, external."""
        computed = self.requests[operation.id].computed
        return min(computed + operation.hit + operation.external, self._config.max_model_len)

    def main(self, operation: oplog.AllocateOp) -> int:
        """Tokens that an `allocate` asks room for, look-ahead left out."""
        return self.total(operation) + operation.new

    def slots(self, operation: oplog.AllocateOp) -> int:
        """Tokens that an `allocate` asks room for, look-ahead included."""
        return min(self.main(operation) + operation.lookahead, self._config.max_model_len)

    def prefix(self, id: str, end: int) -> int | None:
        """Name of the request's first `end` tokens, a positive multiple of the hash block.

        None when the request is not that long, look-ahead included, and so cannot have a key for it; or not there.
        """
        record = self.requests.get(id)
        if record is None:
            return None
        size, lookahead = self._config.hash_block_size, self._config.hash_lookahead
        if end <= 0 or end % size or end + lookahead > len(record.tokens):
            return None
        if record.keys is not None and end // size > len(record.keys):
            return None
        while len(record.prefixes) * size < end:
            start = len(record.prefixes) * size
            parent = record.prefixes[-1] if record.prefixes else 0
            content: tuple[Hashable, ...] = (parent, record.keys[start // size]) if record.keys is not None else ()
            content = content or (parent, *self._content(record, start, start + size, start + size + lookahead))
            name = self._names.setdefault(content, len(self._lengths))
            if name == len(self._lengths):
                self._parents.append(parent)
                self._lengths.append(start + size)
            record.prefixes.append(name)
        return record.prefixes[end // size - 1]

    def length(self, prefix: int) -> int:
        """Tokens of the prefix of that name."""
        return self._lengths[prefix]

    def cut(self, prefix: int, end: int) -> int:
        """Name of the first `end` tokens of a prefix that is at least that long."""
        while self._lengths[prefix] > end:
            prefix = self._parents[prefix]
        return prefix

    def _content(self, record: RequestRecord, start: int, end: int, until: int) -> tuple[Hashable, ...]:
        """All that a key of the hash block `[start, end)` may depend on besides its parent; it looks up to `until`."""
        extra = record.extra
        items = [
            (name, offset - start)
            for name, offset, length in extra.multimodal
            if offset < until and offset + length > start
        ]
        return (
            tuple(record.tokens[start:until]),
            None if extra.lora is None else tuple(extra.lora),
            tuple(items),
            (extra.salt or None) if start == 0 else None,
            tuple(extra.embeds[start:until]) if extra.embeds else None,
        )
