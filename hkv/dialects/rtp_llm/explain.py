"""History of a request and its blocks under RTP-LLM's rules, and what each group lacked for a longer hit."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, TypeAlias

from hkv.contract.answer import Failure, compare
from hkv.contract.explanation import Event, Explanation, MissingEntry, Resumption, check_there, find_request
from hkv.contract.log import Log, describe
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import NULL
from hkv.dialects.rtp_llm.engines.engine import attempt_rtp
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.log import RtpAnswer, RtpOp, RtpState
from hkv.errors import FileError, HKVError
from hkv.keys.rolling import first_keys
from hkv.model.group_policy import GroupType


def explain_rtp(log: Log, line: int, request: str | None = None) -> Explanation:
    """Performs a log on the reference up to a line and tells about one request.

    Hits are judged by their definition: a full group wants a block under every key, another one that votes under the
    last key only.

    Args:
      log: the log.
      line: 1-based line number of an operation.
      request: the request; None for the one that the line names.

    Raises:
      FileError: there is no such line.
      ConfigError: the line names no request and none was given, or the request has not arrived by then.
    """
    story = RtpStory(log)
    operation, id, stop = find_request(log, line, request, structs.RequestOp)
    answer = None
    for index in range(stop):
        answer = story.perform(index)
    check_there(id, line, story.engine.requests)
    situation, held = story.situation(id), story.blocks_of(id)
    keys = story.keys(id)
    size = _tokens_per_key(story)
    groups, hit = _resumptions(story, id, keys, size)
    lost = (
        {story.lost[group, key][1] for group in range(len(groups)) for key in keys if (group, key) in story.lost}
        if keys
        else set()
    )
    room = (
        _room(story, operation) if isinstance(operation, structs.MallocOp) and situation.startswith("waiting") else ""
    )
    if stop == line - 2:
        answer = story.perform(line - 2)
    held |= story.blocks_of(id)
    shown = held | {place for place in lost if any(lack.block == place[1] for each in groups for lack in each.lacks)}
    looked = isinstance(operation, structs.MallocOp) and operation.device_cache and situation.startswith("waiting")
    granted = isinstance(answer, structs.Malloc) and answer.verdict == "granted"
    return Explanation(
        line=line,
        operation=describe(operation),
        answer=rtp_words(operation, answer) + (room if _refused(answer) else ""),
        departed=story.departed,
        request=id,
        situation=situation,
        events=tuple(story.requests[id]),
        blocks={story.label(place): tuple(story.blocks[place]) for place in sorted(shown)},
        alignment=size,
        hit=hit,
        found=answer.reused if looked and granted and isinstance(answer, structs.Malloc) else None,
        causes=(),
        groups=tuple(groups),
    )


def _refused(answer: object) -> bool:
    return isinstance(answer, structs.Malloc) and answer.verdict != "granted"


def _room(story: RtpStory, operation: structs.MallocOp) -> str:
    """Blocks that a new request needs of each pool before a hit, and those available, in words."""
    from reference.dialects.rtp_llm.allocating import need
    from reference.dialects.rtp_llm.pools import available

    cache, request = story.engine.cache, story.engine.request(operation.id)
    counted = [need(cache, group, request, 0, operation.reuse) for group in cache.groups[1:]]
    needs = [shared + request.batch * each for shared, each in counted]
    if not cache.config.apart:
        needs = [sum(needs)]
    told = [
        f"{count} blocks, {available(pool)} of {pool.total} available" + (f" in pool {i}" if len(needs) > 1 else "")
        for i, (count, pool) in enumerate(zip(needs, cache.pools[1:], strict=True))
    ]
    return f"; it needs before a hit {'; '.join(told)}; reserve {story.config.reserve_blocks}"


def _tokens_per_key(story: RtpStory) -> int:
    return story.engine.cache.config.reused


def _resumptions(story: RtpStory, id: str, keys: list[int], size: int) -> tuple[list[Resumption], int]:
    """Each group alone, and the longest hit of all, in tokens; a hit ends at a key."""
    groups = range(len(story.config.policies))
    lengths = range(len(keys) + 1)
    missing = {(group, n): _missing(story, group, keys[:n]) for group in groups for n in lengths}
    hit = max(n for n in lengths if not any(missing[group, n] for group in groups))
    beyond = hit + 1 if hit < len(keys) else None
    found = []
    for group in groups:
        policy = story.config.policies[group]
        alone = max(n for n in lengths if not missing[group, n])
        lacks = (
            ()
            if beyond is None
            else tuple(
                MissingEntry(
                    index * size if policy.group_type is GroupType.FULL else 0,
                    (index + 1) * size - 1,
                    *_why(story, id, group, keys[index]),
                )
                for index in missing[group, beyond]
            )
        )
        kind = policy.group_type.name if _votes(story, group) else f"{policy.group_type.name}, no vote"
        block_size = story.config.topology.groups[group].spec.block_size
        found.append(
            Resumption(group, kind, block_size, alone * size, None if beyond is None else beyond * size, lacks)
        )
    return found, hit * size


def _votes(story: RtpStory, group: int) -> bool:
    policy = story.config.policies[group]
    return policy.group_type is not GroupType.SWA or policy.enable_prefix_reuse


def _missing(story: RtpStory, group: int, keys: list[int]) -> list[int]:
    """Indices of the keys that the group would have to have and has not."""
    wanted = range(len(keys))
    if story.config.policies[group].group_type is not GroupType.FULL:
        wanted = range(max(len(keys) - 1, 0), len(keys)) if _votes(story, group) else range(0)
    return [index for index in wanted if not _has(story, group, keys[index])]


def _has(story: RtpStory, group: int, key: int) -> bool:
    found = story.engine.key(key)
    return found is not None and found.blocks[group] > 0


def _why(story: RtpStory, id: str, group: int, key: int) -> tuple[str, int | None]:
    if lost := story.lost.get((group, key)):
        line, place, by = lost
        return f"lost on line {line}, from block {story.label(place)} ({by})", place[1]
    if (group, key) in story.without:
        return f"entered on line {story.without[group, key]} without a block of this group", None
    if others := story.computing(key, id):
        return f"computed by {', '.join(others)}, which was not entered yet", None
    return "never entered", None


# The reference performing a log under RTP-LLM's rules, with what happens to requests, blocks and keys written down.

Place: TypeAlias = tuple[int, int]
"""A pool and a block of it."""

Holders: TypeAlias = dict[Place, list[tuple[str, int, int]]]
"""Holders of a block in their lists: request, group and slot."""


class RtpStory:
    """The reference performing a log.

    Args:
      log: the log.

    Attributes:
      engine: the reference.
      requests: of each request, what was asked for it and answered.
      blocks: of each block, what happened to it.
      lost: of each `(group, key)` that left the cache, the line, the block and the operation.
      without: of each `(group, key)` that was entered without a block of the group, the line.
      departed: the first line at which the log's answer is not the reference's, or None.

    Raises:
      FileError: the header is of no configuration.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        try:
            self.engine = RtpNumpyEngine(log.header)
        except HKVError as error:
            raise FileError(log.path, 1, error.argument, error.value, error.expected) from error
        self.config = self.engine.config
        self.requests: dict[str, list[Event]] = collections.defaultdict(list)
        self.blocks: dict[Place, list[Event]] = collections.defaultdict(list)
        self.lost: dict[tuple[int, int], tuple[int, Place, str]] = {}
        self.without: dict[tuple[int, int], int] = {}
        self.departed: int | None = None
        self._state = self.engine.state()

    def perform(self, index: int) -> RtpAnswer | Failure:
        """Performs one operation and takes note of everything."""
        operation, line = self.log.operations[index], index + 2
        answer = attempt_rtp(self.engine, operation)
        if self.departed is None and compare(getattr(operation, "want", None), answer):
            self.departed = line
        before, self._state = self._state, self.engine.state()
        if id := getattr(operation, "id", None):
            self.requests[id].append((line, f"{_asked(operation)}{rtp_words(operation, answer)}"))
        reused = answer.reused if isinstance(answer, structs.Malloc) else 0
        for place, text in self._changes(operation, reused, before, self._state):
            self.blocks[place].append((line, text))
        self._follow_keys(operation, line, before, self._state)
        return answer

    def situation(self, id: str) -> str:
        """State of a request in words: running or waiting, its tokens and its slots."""
        rows = self.engine.rows(id)
        tokens = f"{self.engine.request(id).tokens} tokens"
        if len(rows) > 1:
            tokens = f"{len(rows)} sequences of {tokens}"
        slots = max(len(blocks) for blocks in rows[0])
        return f"running, {tokens}, {slots} slots" if slots else f"waiting, {tokens}"

    def keys(self, id: str) -> list[int]:
        """The keys that a new request looks for: of its first sequence, virtual blocks' under context parallelism."""
        keys = list(first_keys(self.engine.requests[id].tokens[0], self.config.block_size).keys)
        if len(self.config.policies) > 1 or self.config.topology.pools == "independent":
            keys = self.config.mapper.canonical_keys(keys)
        return keys[:-1]

    def computing(self, key: int, apart_from: str) -> list[str]:
        """Running requests that have a key, but for one."""
        return [id for id in self._state.lists if id != apart_from and self.engine.has_key(id, key)]

    def blocks_of(self, id: str) -> set[Place]:
        """The blocks in a request's lists."""
        return {place for place, holders in self._holders(self._state).items() if any(who == id for who, *_ in holders)}

    def label(self, place: Place) -> str:
        """A block in words."""
        return str(place[1]) if len(self.config.num_blocks) == 1 else f"{place[1]} of pool {place[0]}"

    def pool_of(self, group: int) -> int:
        """The pool that a group draws from."""
        return self.config.topology.pool_of(self.config.topology.groups[group].tag)

    def _holders(self, state: RtpState) -> Holders:
        holders: Holders = collections.defaultdict(list)
        for id, rows in state.lists.items():
            for row in rows:
                for group, blocks in enumerate(row):
                    for slot, block in enumerate(blocks):
                        if block != NULL:
                            holders[self.pool_of(group), block].append((id, group, slot))
        return holders

    def _cached(self, state: RtpState) -> dict[Place, tuple[int, int]]:
        return {
            (self.pool_of(group), block): (key, group)
            for key, blocks in state.cached
            for group, block in enumerate(blocks)
            if block != NULL
        }

    def _changes(self, operation: RtpOp, reused: int, before: RtpState, after: RtpState) -> Iterator[tuple[Place, str]]:
        old, new = self._holders(before), self._holders(after)
        knew, knows = self._cached(before), self._cached(after)
        for place in sorted({*old, *new, *knew, *knows}):
            for id, group, slot in new[place]:
                if (id, group, slot) not in old[place]:
                    taken = slot * self.engine.cache.groups[group + 1].logical < reused
                    verb = "taken over by" if taken else ("shared with" if old[place] else "handed out to")
                    yield place, f"{verb} {id}, group {group}, slot {slot}"
            if place in knows and knew.get(place) != knows[place]:
                yield place, f"cached by {getattr(operation, 'id', '?')} for group {knows[place][1]}"
            if place in knew and place not in knows:
                yield place, "evicted" + ("" if new[place] else ", free" * self._is_free(place, after))
            for id in dict.fromkeys(id for id, *_ in old[place] if id not in {who for who, *_ in new[place]}):
                kept = ", cached" if place in knows else ", free" * self._is_free(place, after)
                verb = "given back" if isinstance(operation, structs.FreeOp) else "given up"
                yield place, f"{verb} by {id}{kept}"

    def _is_free(self, place: Place, state: RtpState) -> bool:
        return place[1] in state.pools[place[0]].free

    def _follow_keys(self, operation: RtpOp, line: int, before: RtpState, after: RtpState) -> None:
        name = str(type(operation).__struct_config__.tag)
        by = f"{name} {id}" if (id := getattr(operation, "id", None)) else name
        known = {(group, key): place for place, (key, group) in self._cached(before).items()}
        knows = {(group, key) for key, group in self._cached(after).values()}
        for entry, place in known.items():
            if entry not in knows:
                self.lost[entry] = (line, place, by)
        if isinstance(operation, structs.InsertOp):
            for key, blocks in after.cached:
                for group, block in enumerate(blocks):
                    if block == NULL and (group, key) not in self.lost:
                        self.without.setdefault((group, key), line)


def _asked(operation: RtpOp) -> str:
    text = " ".join(word for word in describe(operation, 400).split(" ") if not word.startswith("id="))
    if isinstance(operation, structs.RequestOp | structs.AppendOp):
        text = " ".join(word for word in text.split(" ") if not word.startswith("tokens="))
        rows: Any = operation.tokens
        return f"{text} {len(rows[0] if isinstance(operation, structs.AppendOp) else rows)} tokens"
    return text


def rtp_words(operation: RtpOp, answer: RtpAnswer | Failure) -> str:
    """An answer in words, to stand behind the operation; nothing for an operation that has none."""
    match answer:
        case Failure():
            return f": fails, {answer.message}"
        case structs.Malloc(verdict="granted"):
            taken = f", {answer.reused} tokens taken over" if answer.reused else ""
            return f": granted{taken}, lists {answer.lists[0] if len(answer.lists) == 1 else answer.lists}"
        case structs.Malloc():
            return f": refused, {answer.verdict}"
        case structs.Fork(copies=None):
            return ": refused"
        case structs.Fork():
            copies = ", ".join(f"{source} to {target} ({tag})" for tag, source, target in answer.copies or [])
            return f": copies {copies or 'nothing'}"
        case structs.Selected():
            return ": nothing" if answer.keys is None else f": {len(answer.keys)} keys, blocks {answer.blocks}"
        case structs.Count():
            return f": {answer.count} blocks"
        case _:
            return ""
