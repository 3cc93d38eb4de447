"""The protocol of an engine under vLLM 0.33's rules: one method an operation of its logs."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from hkv.contract.answer import Failure, attempt_with
from hkv.contract.dialect import Process
from hkv.contract.events import DEVICE
from hkv.contract.log import later_fields
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.log import structs as oplog
from hkv.errors import OperationError
from hkv.keys.chained import PrefixIdentity, extra_keys


@runtime_checkable
class Engine(Protocol):
    """A hybrid KV cache. Every method is one operation of the log format and means what `docs/oplog.md` says.

    An engine for logs of live schedulers also has the methods of what later versions of the format add
    (`hkv.dialects.vllm.log.structs.LiveOperation`, `ConnectorOperation`), and takes the fields that these add to the
    operations here.
    """

    def step(self) -> None: ...

    def request(self, id: str, tokens: Sequence[int], extra: oplog.ExtraKeys | None) -> None: ...

    def lookup(self, id: str) -> oplog.Hit: ...

    def allocate(self, operation: oplog.AllocateOp) -> oplog.Allocation: ...

    def advance(self, id: str, tokens: int) -> None: ...

    def append(self, id: str, tokens: Sequence[int]) -> None: ...

    def commit(self, id: str, tokens: int) -> None: ...

    def free(self, id: str) -> None: ...

    def drop(self, id: str) -> None: ...

    def evict(self, blocks: Sequence[int]) -> None: ...

    def copies(self) -> list[tuple[int, int]]: ...

    def reset(self) -> bool: ...

    def events(self) -> list[oplog.CacheEvent]: ...

    def state(self) -> oplog.CacheState: ...


@runtime_checkable
class KeyedEngine(Engine, Protocol):
    """An engine that also takes requests whose prefix keys are known beforehand, as a request trace gives them."""

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int]) -> None:
        """A request arrives whose prompt has `num_tokens` tokens, unnamed.

        `keys[i]`, a non-negative int, identifies the first `(i + 1) * hash_block_size` tokens of the request, in the
        whole of its life: equal keys mean equal tokens from 0 on. Keys beyond the tokens it has so far are not used.
        """
        ...

    def extend(self, id: str, tokens: int) -> None:
        """`tokens` generated tokens, unnamed, are appended to a keyed request."""
        ...

    def num_free(self) -> int:
        """Blocks in the free queue."""
        ...


def missing_methods(engine: object, version: int) -> tuple[str, ...]:
    """Methods of the operations that a version of the log adds and that an engine does not have."""
    asked = [each for each in sorted(oplog.OPERATIONS, key=lambda each: each.since) if 3 <= each.since <= version]
    names = [_call(each).method for each in asked if each not in (oplog.DigestOp, oplog.EndOp)]
    return tuple(name for name in names if not hasattr(engine, name))


class _Call(NamedTuple):
    """The call of an engine that an operation is: fields it takes by place, by name with their defaults."""

    method: str
    plain: tuple[str, ...]
    named: tuple[tuple[str, Any], ...]


@functools.cache
def _call(operation: type[oplog.Operation]) -> _Call:
    later = {name for name, since in later_fields(operation) if since > 2}
    fields = [each for each in msgspec.structs.fields(operation) if each.name != "want"]
    named = tuple((each.name, each.default) for each in fields if each.name in later)
    plain = () if operation.whole else tuple(each.name for each in fields if each.name not in later)
    return _Call(str(operation.__struct_config__.tag), plain, () if operation.whole else named)


def apply(engine: Any, operation: oplog.Operation) -> oplog.Answer:
    """Performs one operation on an engine and returns its answer (None where the operation has none)."""
    kind = type(operation)
    if kind is oplog.EndOp:
        return None
    if kind is oplog.DigestOp:
        return oplog.state_digest(engine.state())
    method, plain, named = _call(kind)
    given = {name: value for name, default in named if (value := getattr(operation, name)) != default}
    arguments = [operation] if kind.whole else [getattr(operation, name) for name in plain]
    answer = getattr(engine, method)(*arguments, **given)
    return BARE[kind](answer) if kind in BARE else answer


BARE: dict[type[oplog.Operation], type[Any]] = {oplog.ResetOp: oplog.Reset, oplog.TruncateOp: oplog.Truncated}
"""Operations of which methods give the one field of the answer, and the answers."""


def attempt(engine: Engine, operation: oplog.Operation) -> oplog.Answer | Failure:
    """Performs one operation; an error, or an answer of the wrong type, stands as a Failure in the answer's place."""
    return attempt_with(apply, engine, operation)


class ProcessEngine:
    """A process that performs the operations of vLLM's logs. Implements `KeyedEngine`; its methods are made below."""

    def __init__(self, process: Process) -> None:
        self.perform, self.close, self.lacks = process.perform, process.close, process.lacks
        self.request_keyed, self.extend, self.num_free = process.request_keyed, process.extend, process.num_free


def _method(kind: type[oplog.Operation]) -> Callable[..., Any]:
    _, plain, _ = _call(kind)

    def perform(engine: ProcessEngine, *arguments: Any, **named: Any) -> Any:
        operation = arguments[0] if kind.whole else kind(**dict(zip(plain, arguments, strict=False)), **named)
        answer = engine.perform(operation)
        return getattr(answer, answer.__struct_fields__[0]) if kind in BARE else answer

    return perform


for _kind in oplog.OPERATIONS:
    setattr(ProcessEngine, _call(_kind).method, _method(_kind))


def check_offloads(config: VllmConfig) -> None:
    """Raises OperationError unless a configuration offers states to a connector."""
    if not config.offloads:
        raise OperationError("offloads", False, "a configuration that offers states to a connector")


def check_zeroing(config: VllmConfig) -> None:
    """Raises OperationError unless a configuration zeroes new blocks."""
    if not config.zeroing:
        raise OperationError("zeroing", False, "a configuration that zeroes new blocks")


# Fields of KV events that say whose blocks they are and where they lie, as version 3 of the log writes them.

UNKNOWN = "unknown"
"""Kind of a spec that vLLM 0.33 `get_kv_cache_spec_kind` has no name for."""


def describe_stored(
    event: oplog.CacheEvent,
    config: VllmConfig,
    identity: PrefixIdentity,
    session: str,
    ends: Sequence[int],
    ahead: Sequence[Sequence[int]],
) -> oplog.CacheEvent:
    """A stored event with the fields of version 3 (vLLM 0.33 `BlockPool._build_block_stored_event`, `take_events`).

    `identity` and `session` are those of the request that stored the blocks. Of each key, `ends` has the length of the
    prefix that it names, in tokens, and `ahead`, looked at only under a hash lookahead, the tokens after its block that
    it covers. The event is changed.
    """
    spec, lookahead = config.topology.specs[event.group], config.hash_lookahead
    event.medium, event.spec_kind = DEVICE, kinds.layer(spec).event_kind or UNKNOWN
    event.window = getattr(spec, "window", 0)
    event.lora_name = "" if identity.lora is None else identity.lora[0]
    event.session = session
    event.extra_keys = [untagged(extra_keys(identity, end - event.block_size, end + lookahead)) for end in ends]
    event.lookahead = [list(tokens) for tokens in ahead] if lookahead else []
    return event


def told(events: Iterable[oplog.CacheEvent], version: int) -> list[oplog.CacheEvent]:
    """Events as logs of a version write them: without what later ones add. Version 1 knows no `cleared`."""
    kept = [event for event in events if version > 1 or event.type != "cleared"]
    for name, since in later_fields(oplog.CacheEvent):
        if since > version:
            for event in kept:
                setattr(event, name, None)
    return kept


def untagged(keys: tuple[Any, ...] | None) -> list[str | tuple[str, int]] | None:
    """Extra keys of one block as events publish them (vLLM 0.33 `to_event_extra_keys`).

    An adapter's name, `(identifier, offset)` of an item, the salt, the digest of embeddings, in hex.
    """
    if keys is None:
        return None
    texts = [key[1:] if key[0] == "mm" else key[1] for key in keys]
    return [text.hex() if isinstance(text, bytes) else text for text in texts]


# Parts of vLLM 0.33's answers that another engine may lack, and answers without them.

CAPABILITIES: Mapping[str, str] = types.MappingProxyType(
    {
        "events": "KV events",
        "keys": "keys that are vLLM's chained hashes: events and states are compared but for keys",
        "order": "the order in which free blocks are handed out: blocks are counted, not named",
        "references": "reference counts in states",
        "state": "states",
    }
)
"""Capabilities that an engine may lack, with their meanings."""


def without(answer: Any, lacks: frozenset[str]) -> Any:
    """An answer but for what belongs to these capabilities."""
    if isinstance(answer, list) and answer and isinstance(answer[0], oplog.CacheEvent):
        told = {"keys": None, "parent": None} if "keys" in lacks else {}
        return [] if "events" in lacks else [msgspec.structs.replace(event, **told) for event in answer]
    if isinstance(answer, list) and answer and "order" in lacks:
        return [(0, 0)] * len(answer)
    if isinstance(answer, dict) and "order" in lacks:
        return {id: [(group, 0, tokens) for group, _, tokens in offers] for id, offers in answer.items()}
    if isinstance(answer, oplog.Hit) and "order" in lacks:
        return msgspec.structs.replace(answer, blocks=_counted(answer.blocks))
    if isinstance(answer, oplog.Allocation) and answer.blocks is not None and "order" in lacks:
        return oplog.Allocation(_counted(answer.blocks))
    if isinstance(answer, oplog.CacheState | oplog.Digest) and "state" in lacks:
        return None
    if isinstance(answer, oplog.Digest) and lacks & {"keys", "order", "references"}:
        return oplog.Digest("")
    return _partial(answer, lacks) if isinstance(answer, oplog.CacheState) else answer


def _partial(state: oplog.CacheState, lacks: frozenset[str]) -> oplog.CacheState:
    free, refs, rows, cached = state.free, state.refs, state.rows, state.cached
    if "references" in lacks:
        refs = {}
    if "keys" in lacks:
        cached = {block: (group, tokens, "") for block, (group, tokens, _) in cached.items()}
    if "order" in lacks:
        free = [0] * len(free)
        refs = {str(index): count for index, count in enumerate(sorted(refs.values()))}
        rows = {id: _counted(row) for id, row in rows.items()}
        cached = {str(index): entry for index, entry in enumerate(sorted(cached.values()))}
    return oplog.CacheState(free, refs, rows, cached)


def _counted(rows: oplog.Rows) -> oplog.Rows:
    """Every block a 1, every column without one still a 0."""
    return [[int(block != 0) for block in row] for row in rows]
