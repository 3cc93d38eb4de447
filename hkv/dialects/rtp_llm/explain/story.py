"""The reference performing a log under RTP-LLM's rules, with what happens to requests, blocks and keys written down."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, TypeAlias

from hkv.dialects.rtp_llm.config import NULL
from hkv.dialects.rtp_llm.engines.engine import attempt_rtp
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.log import structs
from hkv.dialects.rtp_llm.log.structs import RtpAnswer, RtpOp, RtpState
from hkv.errors import FileError, HKVError
from hkv.keys.rolling import first_keys
from hkv.oracle.check import describe
from hkv.oracle.compare import compare
from hkv.oracle.engine import Failure
from hkv.oracle.explain import Event
from hkv.oracle.log_file import Log

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
        self.config = self.engine.manager.config
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
        request = self.engine.manager.requests[id]
        rows = self.engine.manager.rows(id)
        tokens = f"{request.lengths.seq} tokens"
        if len(rows) > 1:
            tokens = f"{len(rows)} sequences of {tokens}"
        slots = max(len(blocks) for blocks in rows[0])
        return f"running, {tokens}, {slots} slots" if slots else f"waiting, {tokens}"

    def keys(self, id: str) -> list[int]:
        """The keys that a new request looks for: of its first sequence, virtual blocks' under context parallelism."""
        manager = self.engine.manager
        keys = list(first_keys(manager.requests[id].tokens[0], self.config.block_size).keys)
        if len(self.config.policies) > 1 or self.config.topology.pools == "independent":
            keys = self.config.mapper.canonical_keys(keys)
        return keys[:-1]

    def computing(self, key: int, apart_from: str) -> list[str]:
        """Running requests that have a key, but for one."""
        requests = self.engine.manager.requests.items()
        return [
            id
            for id, request in requests
            if id != apart_from
            and request.resource.current_blocks
            and any(key in row.keys for row in request.resource.rows)
        ]

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
                    taken = slot * self.engine.manager.allocator.logical_block_size(group) < reused
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
