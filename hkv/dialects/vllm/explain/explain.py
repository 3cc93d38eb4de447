"""History of a request and its blocks up to a line of a log, and the reason why its hit is not longer."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator

from hkv.contract.answer import Failure
from hkv.contract.explanation import Event, Explanation, MissingEntry, Resumption, check_there, find_request
from hkv.contract.log import Log, describe
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.engine import attempt
from hkv.dialects.vllm.engines.plain import PlainEngine, Refusal
from hkv.dialects.vllm.invariants import Snapshot
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.renaming import compare
from hkv.dialects.vllm.log.structs import Allocation, Answer, CacheEvent, Hit, Operation
from hkv.dialects.vllm.traffic.hit_comparison import causes
from hkv.errors import FileError, HKVError
from reference import hits


def explain(log: Log, line: int, request: str | None = None) -> Explanation:
    """Performs a log on the reference up to a line and tells about one request.

    Hits are judged by their definition (`reference.hits`), never by how an engine looks for them. Of a line up to which
    no request is there, such as an `events` before the first one, the answers are told alone.

    Args:
      log: the log.
      line: 1-based line number of an operation.
      request: the request; None for the one that the line names.

    Raises:
      FileError: there is no such line.
      ConfigError: the request has not arrived by then.
    """
    operation, id, stop = find_request(log, line, request, oplog.RequestOp, needed=False)
    story = Story(log)
    if not id and request is None:
        for index in range(line - 1):
            story.perform(index)
        return _of_a_line(story, line, describe(operation))
    for index in range(stop):
        story.perform(index)
    check_there(id, line, story.engine.requests)
    situation = story.situation(id)
    held = story.blocks_of(id)
    hit, groups, lagging = _resumptions(story, id, operation)
    answer = story.answers[-1] if stop == line - 1 else story.perform(line - 2)
    held |= story.blocks_of(id)
    held |= {lack.block for group in groups for lack in group.lacks if lack.block is not None}
    num_tokens = story.engine.record(id).tokens if id in story.engine.requests else 0
    return Explanation(
        line=line,
        operation=describe(operation),
        answer=story.words(answer),
        departed=story.departed,
        request=id,
        situation=situation,
        events=tuple(story.requests[id]),
        blocks={block: tuple(story.blocks[block]) for block in sorted(held)},
        alignment=hits.hit_alignment(story.config),
        hit=hit,
        found=answer.hit if isinstance(answer, Hit) else None,
        causes=tuple(sorted(cause.value for cause in causes(story.config, num_tokens))),
        groups=groups,
        differs=story.differs,
        lagging=lagging,
    )


def _of_a_line(story: Story, line: int, operation: str) -> Explanation:
    """The account of the last line that was performed, without a request."""
    return Explanation(
        line=line,
        operation=operation,
        answer=story.words(story.answers[-1]),
        departed=story.departed,
        differs=story.differs,
    )


# Boundaries at which each group alone could resume a request, by definition, and the entries missing for more.


def _resumptions(story: Story, id: str, operation: Operation) -> tuple[int, tuple[Resumption, ...], tuple[int, ...]]:
    """The hit that a lookup may find, in tokens; each group that can be cached, alone; and the groups that lag behind.

    Asks the definition of a hit (`reference.hits`), not how an engine looks for one. Of what a connector is told,
    groups from which the hit's end is missing are asked for it, the others for the next longer hit.
    """
    config, judge = story.config, _Judge(story, id)
    limit = getattr(operation, "limit", None)
    num_tokens = story.engine.record(id).tokens if limit is None else limit + 1
    alignment = hits.hit_alignment(config)
    hit, lagging = hits.longest_hit_by_definition(config, judge.has_entry, num_tokens), ()
    if isinstance(operation, oplog.ConnectorLookupOp):
        hit, _, lagging = hits.connector_hit_by_definition(config, judge.has_entry, num_tokens)
    wanted = hit if lagging else hit + alignment
    lengths = range(0, num_tokens, alignment) if config.caching else range(1)
    groups = []
    for group, spec in enumerate(config.topology.specs):
        if not spec.prefix_cacheable:
            continue
        able = [length for length in lengths if not judge.missing(group, length)]
        largest = max(able, default=0)
        beyond = wanted if wanted in lengths else None
        lacks = () if beyond is None else tuple(judge.missing(group, beyond))
        groups.append(Resumption(group, spec.kind, config.block_size(group), largest, beyond, lacks))
    return hit, tuple(groups), lagging


class _Judge:
    """Cache entries of one request's prefixes."""

    def __init__(self, story: Story, id: str) -> None:
        self._story, self._config = story, story.config
        self._keys = story.engine.keys(id)

    def has_entry(self, group: int, end: int) -> bool:
        """True if some block of `group` is cached under the key of the request's first `end` tokens."""
        key = self._key(end)
        return key is not None and self._story.engine.has(group, key)

    def missing(self, group: int, length: int) -> list[MissingEntry]:
        """The entries that a group would need to resume at `length` tokens and does not have."""
        config, has = self._config, self.has_entry
        if hits.can_read(config, has, group, length) and hits.can_draft(config, has, group, length):
            return []
        spec = config.topology.groups[group].spec
        ranges = spec.reads(length)
        if spec.snapshot:
            ends = [position + 1 for position in itertools.chain(*ranges) if not has(group, position + 1)]
            return [MissingEntry(0, end - 1, *self._why(group, (end,))) for end in ends]
        found = [lack for positions in ranges for lack in self._missing(group, positions)]
        if not hits.can_draft(config, has, group, length):
            unit = min(config.block_size(group), hits.hit_alignment(config))
            draft = self._missing(group, range(length, length + unit))
            found += [
                dataclasses.replace(lack, why=f"{lack.why}; proves the draft layer's last value") for lack in draft
            ]
        return found

    def _missing(self, group: int, positions: range) -> Iterator[MissingEntry]:
        size = self._config.block_size(group)
        for block in sorted({position // size for position in positions}):
            last = min((block + 1) * size, positions.stop)
            ends = range(last, (block + 1) * size + 1)
            if not any(self.has_entry(group, end) for end in ends):
                yield MissingEntry(max(block * size, positions.start), last - 1, *self._why(group, tuple(ends)))

    def _key(self, end: int) -> Hashable | None:
        size = self._config.hash_block_size
        return self._keys[end // size - 1] if end % size == 0 and 0 < end <= len(self._keys) * size else None

    def _why(self, group: int, ends: tuple[int, ...]) -> tuple[str, int | None]:
        keys = [key for key in map(self._key, ends) if key is not None]
        if not keys:
            return "the request has no key for it, being too short", None
        for key in keys:
            lost = self._story.lost.get((group, key))
            if lost is not None:
                line, block, operation = lost
                return f"lost on line {line}, from block {block} ({operation})", block
        return self._story.engine.absence(group, keys[0]), None


# The reference performing a log, with what happens to requests, blocks and keys written down.


class Story:
    """The reference performing a log, and what happens to requests, blocks and keys as it does."""

    def __init__(self, log: Log) -> None:
        self.log = log
        try:
            self.engine = PlainEngine(log.header)
        except HKVError as error:
            raise FileError(log.path, 1, error.argument, error.value, error.expected) from error
        self.config: VllmConfig = self.engine.config
        self.requests: dict[str, list[Event]] = collections.defaultdict(list)
        self.blocks: dict[int, list[Event]] = collections.defaultdict(list)
        self.lost: dict[tuple[int, Hashable], tuple[int, int, str]] = {}
        self.answers: list[Answer | Failure] = []
        self.departed: int | None = None
        self.differs = ""
        self.state = Snapshot(self.engine.state())

    def perform(self, index: int) -> Answer | Failure:
        """Performs one operation and takes note of everything."""
        operation, line = self.log.operations[index], index + 2
        keys = {block: self.engine.keys_of(block) for block in range(1, self.config.num_blocks)}
        answer = attempt(self.engine, operation)
        self.answers.append(answer)
        mismatch = compare(getattr(operation, "want", None), answer, self.log.header.oplog)
        self.differs = ""
        if mismatch:
            self.differs = f"{mismatch.field}: the log has {mismatch.want}, the reference {mismatch.got}"
            self.departed = self.departed or line
        before, self.state = self.state, Snapshot(self.engine.state())
        if id := getattr(operation, "id", None):
            self.requests[id].append((line, f"{_asked(operation)}{self.words(answer)}"))
        for block in range(1, self.config.num_blocks):
            for text in _changes(block, operation, before, self.state):
                self.blocks[block].append((line, text))
        name = str(type(operation).__struct_config__.tag)
        by = f"{name} {id}" if id else name
        for block, known in keys.items():
            for key in set(known) - set(self.engine.keys_of(block)):
                self.lost[key] = (line, block, by)
        return answer

    def words(self, answer: Answer | Failure) -> str:
        """The last answer in words, to stand behind the operation; nothing for an operation that has none."""
        match answer:
            case Failure():
                return f": fails, {answer.message}"
            case Hit():
                return f": hit {answer.hit}, blocks {answer.blocks}"
            case Allocation(blocks=None):
                return f": refused, {_why(self.engine.refusal())}"
            case Allocation():
                return f": new blocks {answer.blocks}"
            case None:
                return ""
            case [CacheEvent(), *_]:
                return ": " + "; ".join(_told(event) for event in answer if isinstance(event, CacheEvent))
            case []:
                return ": nothing"
            case _:
                return ": answered"

    def situation(self, id: str) -> str:
        """State of a request in words: running or waiting, and its tokens."""
        request = self.engine.record(id)
        state = f"running, {request.computed} computed" if request.running else "waiting"
        return f"{state}, {request.tokens} tokens, {request.prompt} of them prompt"

    def blocks_of(self, id: str) -> set[int]:
        """The blocks in a request's rows."""
        return {block for row in self.state.rows.get(id, []) for block in row if block}


def _told(event: CacheEvent) -> str:
    """An event in words."""
    keys = "" if event.keys is None else f" {', '.join(event.keys)}"
    match event.type:
        case "stored":
            return f"stored {event.num_blocks} blocks of group {event.group}, {len(event.tokens or ())} tokens:{keys}"
        case "removed":
            return f"removed from group {event.group}:{keys}"
        case _:
            return event.type


def _changes(block: int, operation: Operation, before: Snapshot, after: Snapshot) -> Iterable[str]:
    old, new = before.owners.get(block, []), after.owners.get(block, [])
    known, knows = before.cached.get(block), after.cached.get(block)
    for id, group, column in new:
        if (id, group, column) not in old:
            adopted = known is not None and known == knows
            yield f"{'adopted by' if adopted else 'handed out to'} {id}, group {group}, column {column}"
    if known != knows:
        if known is not None and (knows is None or known[2] != knows[2]):
            yield f"lost its key, of {known[1]} tokens in group {known[0]}"
        if knows is not None:
            yield f"cached as the first {knows[1]} tokens of {getattr(operation, 'id', '?')}, group {knows[0]}"
    for id, group, _ in old:
        if not any((id, group) == (other, where) for other, where, _ in new):
            verb = "given back" if isinstance(operation, oplog.FreeOp) else "retired"
            yield f"{verb} by {id}" + ("" if block in after.refs else ", free" + (", cached" if knows else ""))


def _asked(operation: Operation) -> str:
    text = describe(operation, 400)
    for name in ("id", "tokens") if isinstance(operation, oplog.RequestOp | oplog.AppendOp) else ("id",):
        text = " ".join(word for word in text.split(" ") if not word.startswith(f"{name}="))
    plain = ("hit=0", "lookahead=0", "external=0", "delay=false", "must_fit=false", "reserved=0", "in_flight=0")
    text = " ".join(word for word in text.split(" ") if word not in plain)
    tokens = getattr(operation, "tokens", None)
    return f"{text} {len(tokens)} tokens" if isinstance(tokens, list) else text


def _why(refusal: Refusal) -> str:
    """Reason for which an allocation was refused, in words."""
    if refusal.waits:
        groups = ", ".join(map(str, refusal.waits))
        return f"until the next step: the hit ends in what this step has yet to write, in group {groups}"
    total, needs = sum(refusal.needs), " + ".join(map(str, refusal.needs))
    by_group = f" ({needs} by group)" if len(refusal.needs) > 1 else ""
    aside = refusal.free - refusal.usable
    free = f"{refusal.free} free" + (f", {aside} to be left" if aside else "")
    return f"{'the whole request' if refusal.whole else 'it'} needs {total} block{'s' * (total != 1)}{by_group}: {free}"
