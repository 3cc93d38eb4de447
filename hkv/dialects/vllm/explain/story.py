"""The reference performing a log, with what happens to requests, blocks and keys written down."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.engine import attempt
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.invariants import Snapshot
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.renaming import compare
from hkv.dialects.vllm.log.structs import Allocation, Answer, CacheEvent, Hit, Operation
from hkv.errors import FileError, HKVError
from hkv.oracle.check import describe
from hkv.oracle.engine import Failure
from hkv.oracle.explain import Event
from hkv.oracle.log_file import Log
from reference.dialects.vllm.coordinator import Refusal
from reference.state.key_table import Key


class Story:
    """The reference performing a log, and what happens to requests, blocks and keys as it does."""

    def __init__(self, log: Log) -> None:
        self.log = log
        try:
            self.engine = NumpyEngine(log.header)
        except HKVError as error:
            raise FileError(log.path, 1, error.argument, error.value, error.expected) from error
        self.config: VllmConfig = self.engine.manager.config
        self.requests: dict[str, list[Event]] = collections.defaultdict(list)
        self.blocks: dict[int, list[Event]] = collections.defaultdict(list)
        self.lost: dict[Key, tuple[int, int, str]] = {}
        self.answers: list[Answer | Failure] = []
        self.departed: int | None = None
        self.differs = ""
        self.state = Snapshot(self.engine.state())

    def perform(self, index: int) -> Answer | Failure:
        """Performs one operation and takes note of everything."""
        operation, line = self.log.operations[index], index + 2
        keys = {block: list(self.engine.manager.pool.keys_of(block)) for block in range(self.config.num_blocks)}
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
            for key in set(known) - set(self.engine.manager.pool.keys_of(block)):
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
                return f": refused, {_why(self.engine.manager.cache.refusal)}"
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
        request = self.engine.manager.requests[id]
        state = f"running, {request.num_computed} computed" if request.running else "waiting"
        return f"{state}, {request.num_tokens} tokens, {request.num_prompt} of them prompt"

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
            yield f"{'adopted' if adopted else 'handed out'} to {id}, group {group}, column {column}"
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


def _why(refusal: Refusal | None) -> str:
    """Reason for which an allocation was refused, in words."""
    assert refusal is not None, "whoever refuses says why"
    if refusal.waits:
        groups = ", ".join(map(str, refusal.waits))
        return f"until the next step: the hit ends in what this step has yet to write, in group {groups}"
    total, needs = sum(refusal.needs), " + ".join(map(str, refusal.needs))
    by_group = f" ({needs} by group)" if len(refusal.needs) > 1 else ""
    aside = refusal.free - refusal.usable
    free = f"{refusal.free} free" + (f", {aside} to be left" if aside else "")
    return f"{'the whole request' if refusal.whole else 'it'} needs {total} block{'s' * (total != 1)}{by_group}: {free}"
