"""Keys say what blocks hold: one key for one content, kept as long as the content is, gone with it.

KV events tell of them, so that a consumer that saw nothing else knows what is cached.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.engine import UNKNOWN, untagged
from hkv.dialects.vllm.engines.numpy import identity_of
from hkv.dialects.vllm.invariants.moment import Moment, RequestRecord, invariant, remembering
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import CacheEvent, ConnectorHit, Hit
from hkv.keys.chained import extra_keys


@invariant("identity", "B-I6", needs=("keys",))
def identity(moment: Moment) -> Iterator[str]:
    """Equal keys mean equal prefixes, and equal prefixes have equal keys.

    A prefix is its tokens from 0 on, and everything else that shapes the cache: adapter, salt, multimodal items where
    they lie, prompt embeddings, look-ahead tokens. Holds after every operation. Exception: only the first 8 bytes of
    keys are seen, so that a collision of those alone would be reported too.
    """
    for key, prefixes in moment.book.prefixes.items():
        if len(prefixes) > 1:
            yield f"key {key} stands for {len(prefixes)} different prefixes"
    for prefix, keys in moment.book.keys.items():
        if len(keys) > 1:
            yield f"one prefix of {moment.ledger.length(prefix)} tokens has keys {sorted(keys)}"


@invariant("index", "B-I5", "B-I30", "B-I31", needs=("keys",))
def index(moment: Moment) -> Iterator[str]:
    """The key of a block in a row names what the row's owner has there: its group, its column, its tokens.

    Holds after every operation; so a block that is handed out anew has lost the key of its old content. Exception: a
    Mamba checkpoint inside a chunk stands in a column of its own: 15 tokens in blocks of 4 leave the state after 12 in
    column 2 as usual, but one after 14 would stand there too.
    """
    config, ledger, sizes = moment.config, moment.ledger, moment.config.block_sizes
    for block, (group, tokens, key) in moment.after.cached.items():
        names = moment.book.prefixes.get(key, set())
        if not any(ledger.length(name) == tokens for name in names):
            known = sorted({ledger.length(name) for name in names})
            said = f"stands for {', '.join(map(str, known))}" if known else "is of no prefix that a request ever had"
            yield f"block {block} is cached as {tokens} tokens of group {group} under key {key}, which {said}"
        for id, owner_group, column in moment.after.owners.get(block, ()):
            start = column * sizes[owner_group]
            inside = start < tokens <= start + sizes[owner_group]
            if owner_group != group or not (inside or _holds_checkpoints(config, group)):
                known = f"{tokens} tokens of group {group}"
                yield f"block {block} at column {column} of group {owner_group} is cached as {known}"
            elif ledger.prefix(id, tokens) not in names:
                yield f"block {block} holds the first {tokens} tokens of {id}, but its key is of another prefix"


def _holds_checkpoints(config: VllmConfig, group: int) -> bool:
    """True if chunks export states on their way, each in a column that says nothing of its length."""
    spec = config.topology.groups[group].spec
    return kinds.layer(spec).checkpoint_blocks > 0


@invariant("key life", "B-I5", needs=("keys",))
def key_life(moment: Moment) -> Iterator[str]:
    """Keys come when blocks are filled and go when blocks are handed out, evicted, filled further or reset; only then.

    Holds after every operation: `allocate` and `commit` may add keys to blocks in rows, and take them only from blocks
    of the request's own row or of the queue's front; `evict` takes exactly the keys of the blocks it names; a
    successful `reset` all of them; everything else none. Exception: a Mamba owner that writes on leaves its key to a
    copy: the block in its row loses it, a block taken from the queue has it. (Under a prefill lookahead the block may
    get the same key again at once, as its tokens are settled one step later.)
    """
    before, after, operation = moment.before, moment.after, moment.operation
    lost = {block for block, entry in before.cached.items() if after.cached.get(block) != entry}
    gained = {block for block, entry in after.cached.items() if before.cached.get(block) != entry}
    if isinstance(operation, oplog.EvictOp):
        if gained or lost != set(operation.blocks) & before.cached.keys():
            yield f"blocks {sorted(lost)} lost keys and {sorted(gained)} gained some, not {operation.blocks}"
    elif isinstance(operation, oplog.ResetOp):
        done = isinstance(moment.answer, oplog.Reset) and moment.answer.ok
        if done and before.cached.keys() - lost:
            yield f"reset answered True, and blocks {sorted(before.cached.keys() - lost)} keep their keys"
        elif gained or (lost and not done):
            yield f"reset answered {done}: {_keys_changed(lost, gained)}"
    elif isinstance(operation, oplog.AllocateOp | oplog.CommitOp):
        taken = set(before.free) - set(after.free)
        own = {block for block, owners in before.owners.items() if any(id == operation.id for id, _, _ in owners)}
        moved = {before.cached[block] for block in own & before.cached.keys()}
        for block in sorted(gained - after.owners.keys()):
            if after.cached[block] not in moved:
                yield f"block {block} gained a key, in nobody's row, that no block of the request's had"
        strange = lost - taken - own
        if strange:
            yield f"blocks {sorted(strange)} lost their keys, though neither handed out nor the request's own"
        early = {block for block in gained if after.cached[block] not in moved}
        if isinstance(operation, oplog.AllocateOp) and operation.delay and early:
            yield f"blocks {sorted(early)} gained keys, though registration was to wait"
    elif lost or gained:
        yield f"{_keys_changed(lost, gained)}, though nothing was handed out, computed or evicted"


def _keys_changed(lost: set[int], gained: set[int]) -> str:
    changes = (("lose their keys", lost), ("gain keys", gained))
    return " and ".join(f"blocks {sorted(blocks)} {verb}" for verb, blocks in changes if blocks)


@invariant("registration", "B-I13", "B-I31", after=(oplog.AllocateOp, oplog.CommitOp))
def registration(moment: Moment) -> Iterator[str]:
    """Keys come to blocks that a hit may end in, and that nobody fills again; full attention's all get theirs at once.

    Holds after `allocate` and `commit`. Tokens that drafts may prefill again are left out where a draft's group, or one
    group alone, is concerned; of several groups, blocks beyond the last whole scheduler block too, but for one more of
    a draft's. Without caching there are no keys. Exceptions: the lower bound is not asked of `commit`, of tokens that
    come from elsewhere, of sparse retention, under bounded replay and with hits inside blocks. With blocks of 4 and 6,
    of 20 tokens the first 12 get keys.
    """
    operation, config = moment.operation, moment.config
    assert isinstance(operation, oplog.AllocateOp | oplog.CommitOp)
    if not config.caching and moment.after.cached:
        yield f"blocks {sorted(moment.after.cached)} have keys, though nothing is to be cached"
    length = len(moment.ledger.requests[operation.id].tokens)
    allocating = isinstance(operation, oplog.AllocateOp)
    tokens = min(moment.ledger.main(operation), length) if allocating else operation.tokens
    moved = moment.before.entries
    for block, (group, covered, key) in moment.after.cached.items():
        fresh = moment.before.cached.get(block) != (group, covered, key) and (group, key) not in moved
        if fresh and covered > registrable(config, group, tokens):
            limit = registrable(config, group, tokens)
            whose = f"the first {covered} tokens of {operation.id}"
            yield f"block {block} of group {group} is cached as {whose}, beyond the {limit} that a hit may end in"
    granted = isinstance(moment.answer, oplog.Allocation) and moment.answer.blocks is not None
    dense = config.caching and config.retention_interval is None and not config.partial_hits
    dense = dense and not any(kinds.layer(spec).replays for spec in config.topology.specs)
    if not (allocating and granted and dense) or operation.delay:
        return
    rows = moment.after.rows.get(operation.id, [])
    for group in range(len(config.topology.groups)):
        row = rows[group] if group < len(rows) else []
        size, end = config.block_size(group), registrable(config, group, tokens)
        if config.topology.groups[group].spec.reads_all:
            end = min(end, max(0, length - config.hash_lookahead) // config.hash_block_size * config.hash_block_size)
            for column in range(-(-(moment.ledger.total(operation) + 1) // size) - 1, end // size):
                block = row[column] if column < len(row) else 0
                if block not in moment.after.cached:
                    yield f"block {block} at column {column} of group {group} is full, and has no key"


def registrable(config: VllmConfig, group: int, tokens: int) -> int:
    """Number of the first `tokens` tokens that may get keys in a group: those that drafts do not prefill again; of
    several groups only whole scheduler blocks, in a draft's group one block more."""
    settled = max(0, tokens - max(0, config.prefill_lookahead - 1))
    if len(config.topology.groups) == 1:
        return settled
    drafts = {config.topology.groups[index].spec for index in config.eagle_group_ids}
    unit = 1 if config.partial_hits else config.scheduler_block_size
    if config.topology.groups[group].spec in drafts and tokens >= unit:
        return min(settled, settled // unit * unit + config.block_size(group))
    return tokens // unit * unit


# KV events rebuild the index: a consumer that saw nothing else knows what is cached.

REPORTED_BY_COLUMNS = "hit-reported-by-columns"
"""The defect (`hkv.dialects.vllm.bugs`) of vLLM 0.33's published hits."""

LOOKUPS = (oplog.LookupOp, oplog.ConnectorLookupOp)


@remembering("event index", "B-I34", after=(oplog.EventsOp, *LOOKUPS), needs=("events", "keys"))
class EventIndex:
    """Index of cached keys that a router rebuilds from the event stream. One for each run.

    Args:
      config: the cache's configuration.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._single = {
            group
            for group, spec in enumerate(config.topology.specs)
            if not kinds.layer(spec).registers_parts or config.block_size(group) == config.hash_block_size
        }
        self._blind = False
        self._due: collections.Counter[tuple[int, tuple[int, ...]]] = collections.Counter()
        self._unsure: set[tuple[int, str]] = set()
        self._blocks: collections.Counter[tuple[int, str]] = collections.Counter()

    def check(self, moment: Moment) -> Iterator[str]:
        """Replaying the events gives exactly the keys that are cached, group by group, each with its tokens.

        Holds after `events`. Nothing is removed that was not stored; a stored span carries the tokens that follow its
        parent. Exception: in groups whose blocks are longer than hash blocks, a block may have keys besides the one
        that `state` shows (the prompt's tail of 28 tokens, in a block of 32), so the index may hold more than is seen.
        Of events without keys, as in logs of version 1, nothing is rebuilt, and from the first one on nothing is
        judged. A hit that is published (`report`) looks as what was stored: it has to be there, and how many blocks
        have the keys that it may have named is not judged.
        """
        if isinstance(moment.operation, LOOKUPS):
            self._note_report(moment)
            return
        assert isinstance(moment.answer, list)
        for event in moment.answer:
            assert isinstance(event, CacheEvent)
            self._blind |= event.type != "cleared" and event.keys is None
            yield from () if self._blind else self._apply(moment, event)
        if self._blind:
            return
        if silent := sorted(group for (group, _), missing in self._due.items() if missing > 0):
            yield f"hits in groups {silent} were to be published, and no event says so"
        self._due.clear()
        seen = collections.Counter((group, key) for group, _, key in moment.after.cached.values())
        if missing := [entry for entry in seen - self._blocks if entry not in self._unsure]:
            yield f"no stored event names what is cached, as (group, key): {sorted(missing)}"
        gone = [entry for entry in self._blocks - seen if entry[0] in self._single and entry not in self._unsure]
        if gone:
            yield f"stored by the events, and no block is cached so, as (group, key): {sorted(gone)}"

    def _note_report(self, moment: Moment) -> None:
        """A hit of a request that reports: an event for the whole blocks of each group, one for a block's part."""
        assert isinstance(moment.operation, LOOKUPS)
        assert isinstance(moment.answer, Hit)
        full = self._config.completed_group
        if (
            isinstance(moment.answer, ConnectorHit)
            and full is not None
            and max(moment.answer.hits) <= moment.answer.hits[full]
        ):
            return  # vLLM publishes what all groups agree on
        record, found = moment.ledger.requests[moment.operation.id], moment.answer
        for group, row in enumerate(found.blocks if record.reports and found.hit else ()):
            size, part = self._config.block_size(group), self._config.hash_block_size
            whole = found.hit // size
            if REPORTED_BY_COLUMNS in self._config.bugs and row:
                end = len(row) * self._config.topology.specs[group].block_size
                self._due[group, tuple(record.tokens[:end])] += 1
                continue
            if any(row[:whole]):
                self._due[group, tuple(record.tokens[: whole * size])] += 1
            if any(row[whole:]):
                self._due[group, tuple(record.tokens[found.hit - part : found.hit])] += 1

    def _apply(self, moment: Moment, event: CacheEvent) -> Iterator[str]:
        keys = event.keys or []
        span = event.group, tuple(event.tokens or ())
        if event.type == "cleared":
            self._blocks.clear()
            self._unsure.clear()
        elif event.type == "stored" and span in self._due:  # one of these is the published hit
            self._due[span] -= 1
            self._unsure.update((event.group, key) for key in keys)
        elif event.type == "removed":
            for key in keys:
                if not self._blocks[event.group, key] and (event.group, key) not in self._unsure:
                    yield f"key {key} of group {event.group} is removed, but was not stored"
                self._blocks[event.group, key] -= 1
        else:
            if event.num_blocks != len(keys):
                yield f"{event.num_blocks} blocks are stored under {len(keys)} keys"
            for key in keys:
                self._blocks[event.group, key] += 1
                yield from self._wrong_tokens(moment, event, key)

    def _wrong_tokens(self, moment: Moment, event: CacheEvent, key: str) -> Iterator[str]:
        ledger, names = moment.ledger, moment.book.prefixes
        parents = names.get(event.parent or "", set())
        start = ledger.length(next(iter(parents))) if parents else 0 if event.parent == "" else None
        if start is None or event.tokens is None or key not in names:
            return
        wanted = next(iter(names[key]))
        end = start + len(event.tokens)
        for record in ledger.requests.values():
            if ledger.prefix(record.id, ledger.length(wanted)) == wanted:
                if not start < ledger.length(wanted) <= end:
                    yield f"key {key} names {ledger.length(wanted)} tokens, outside of its event's {start} to {end}"
                elif record.tokens[start : ledger.length(wanted)] != event.tokens[: ledger.length(wanted) - start]:
                    yield f"the event of key {key} carries other tokens than follow its parent's {start}"
                elif parents and ledger.cut(wanted, start) not in parents:
                    yield f"the event of key {key} names a parent of another prefix"
                return


# KV events say whose blocks they are: kinds of groups, adapters, extra keys.


@invariant("event fields", "B-I34", after=(oplog.EventsOp,), needs=("events", "keys"))
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
    kind, window = kinds.layer(spec).event_kind or UNKNOWN, getattr(spec, "window", 0)
    if event.spec_kind not in (None, kind) or event.window not in (None, window):
        yield f"blocks of group {event.group}, {kind} with window {window}, are {event.spec_kind} with {event.window}"
    lookahead = moment.config.hash_lookahead
    for name, entries in (("extra_keys", event.extra_keys), ("lookahead", event.lookahead)):
        wanted = len(event.keys or ()) if name == "extra_keys" or lookahead else 0
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
    lookahead = moment.config.hash_lookahead
    covered = untagged(extra_keys(identity_of(record.extra), end - event.block_size, end + lookahead))
    if event.extra_keys is not None and _plain(event.extra_keys[place]) != _plain(covered):
        mine, theirs = (_plain(entry) or [] for entry in (covered, event.extra_keys[place]))
        lacks = [_component(record, part) for part in mine if part not in theirs]
        has = [_component(record, part) for part in theirs if part not in mine]
        wrong = [f"without {', '.join(lacks)}"] * bool(lacks) + [f"with {', '.join(has)}"] * bool(has)
        said = " and ".join(wrong) or f"in the order {theirs}, not {mine}"
        yield f"the first {end} tokens of {record.id} are stored {said}, other than what their key {key} covers"
    ahead = record.tokens[end : end + lookahead]
    if lookahead and event.lookahead is not None and event.lookahead[place] != ahead:
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
