"""The protocol of an engine under vLLM 0.33's rules: one method an operation of its logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from hkv.contract.answer import Failure, attempt_with
from hkv.contract.events import DEVICE
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import (
    Allocation,
    Answer,
    CacheEvent,
    CacheState,
    Digest,
    ExtraKeys,
    Hit,
    Operation,
    state_digest,
)
from hkv.keys.chained import PrefixIdentity, extra_keys


@runtime_checkable
class Engine(Protocol):
    """A hybrid KV cache. Every method is one operation of the log format and means what `docs/oplog.md` says."""

    def step(self) -> None: ...

    def request(self, id: str, tokens: Sequence[int], extra: ExtraKeys | None) -> None: ...

    def lookup(self, id: str) -> Hit: ...

    def allocate(self, operation: oplog.AllocateOp) -> Allocation: ...

    def advance(self, id: str, tokens: int) -> None: ...

    def append(self, id: str, tokens: Sequence[int]) -> None: ...

    def commit(self, id: str, tokens: int) -> None: ...

    def free(self, id: str) -> None: ...

    def drop(self, id: str) -> None: ...

    def evict(self, blocks: Sequence[int]) -> None: ...

    def copies(self) -> list[tuple[int, int]]: ...

    def reset(self) -> bool: ...

    def events(self) -> list[CacheEvent]: ...

    def state(self) -> CacheState: ...


@runtime_checkable
class LiveEngine(Engine, Protocol):
    """An engine that also performs what version 3 of the log adds, for logs of live engines.

    Of the operations above, `request` also takes `keys`, `session` and `report`, `append` takes `keys`, `lookup` takes
    `limit`, `copies` takes `hold`. They are given only where a log has them.
    """

    def computed(self, id: str, tokens: int) -> None: ...

    def retire(self, id: str, tokens: int) -> None: ...

    def pop(self, id: str) -> None: ...

    def release(self, blocks: Sequence[int]) -> None: ...

    def hold(self, blocks: Sequence[int]) -> None: ...

    def resume(self, operation: oplog.ResumeOp) -> None: ...

    def zeros(self) -> list[int]: ...

    def unwritten(self, id: str, tokens: int) -> None: ...

    def offloads(self) -> oplog.Offers: ...

    def finalize(self, id: str, in_flight: int) -> list[oplog.Offer]: ...


@runtime_checkable
class ConnectorEngine(LiveEngine, Protocol):
    """An engine that also performs what version 4 of the log adds: what a connector asks of it."""

    def connector_lookup(self, id: str, limit: int | None) -> oplog.ConnectorHit: ...

    def truncate(self, rows: oplog.Rows, tokens: int) -> oplog.Rows: ...


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
    wanted = [LiveEngine, ConnectorEngine][: max(0, version - 2)]
    names = [name for protocol in wanted for name in vars(protocol) if name[0] != "_"]
    return tuple(name for name in names if not hasattr(engine, name))


def apply(engine: Any, operation: Operation) -> Answer:
    """Performs one operation on an engine and returns its answer (None where the operation has none)."""
    match operation:
        case oplog.StepOp():
            return engine.step()
        case oplog.RequestOp():
            return engine.request(operation.id, operation.tokens, operation.extra, **arrival_fields(operation))
        case oplog.LookupOp(limit=None):
            return engine.lookup(operation.id)
        case oplog.LookupOp():
            return engine.lookup(operation.id, operation.limit)
        case oplog.AllocateOp():
            return engine.allocate(operation)
        case oplog.AdvanceOp():
            return engine.advance(operation.id, operation.tokens)
        case oplog.AppendOp(keys=None):
            return engine.append(operation.id, operation.tokens)
        case oplog.AppendOp():
            return engine.append(operation.id, operation.tokens, operation.keys)
        case oplog.CommitOp():
            return engine.commit(operation.id, operation.tokens)
        case oplog.FreeOp():
            return engine.free(operation.id)
        case oplog.DropOp():
            return engine.drop(operation.id)
        case oplog.EvictOp():
            return engine.evict(operation.blocks)
        case oplog.CopiesOp(hold=False):
            return engine.copies()
        case oplog.CopiesOp():
            return engine.copies(hold=True)
        case oplog.ResetOp():
            return oplog.Reset(engine.reset())
        case oplog.EventsOp():
            return engine.events()
        case oplog.StateOp():
            return engine.state()
        case oplog.DigestOp():
            return state_digest(engine.state())
        case _:
            return _apply_live(engine, operation)


def arrival_fields(operation: oplog.RequestOp) -> dict[str, Any]:
    """Arguments of `request` that version 3 adds, as far as an arrival has them."""
    fields = {name: getattr(operation, name) for name in ("keys", "session", "report")}
    return {name: value for name, value in fields.items() if value is not None}


def _apply_live(engine: ConnectorEngine, operation: Operation) -> Answer:
    match operation:
        case oplog.ComputedOp():
            return engine.computed(operation.id, operation.tokens)
        case oplog.RetireOp():
            return engine.retire(operation.id, operation.tokens)
        case oplog.PopOp():
            return engine.pop(operation.id)
        case oplog.ReleaseOp():
            return engine.release(operation.blocks)
        case oplog.HoldOp():
            return engine.hold(operation.blocks)
        case oplog.ResumeOp():
            return engine.resume(operation)
        case oplog.ZerosOp():
            return engine.zeros()
        case oplog.UnwrittenOp():
            return engine.unwritten(operation.id, operation.tokens)
        case oplog.OffloadsOp():
            return engine.offloads()
        case oplog.FinalizeOp():
            return engine.finalize(operation.id, operation.in_flight)
        case oplog.ConnectorLookupOp():
            return engine.connector_lookup(operation.id, operation.limit)
        case oplog.TruncateOp():
            return oplog.Truncated(engine.truncate(operation.rows, operation.tokens))
        case _:
            return None


_ANSWERS: dict[type, type | None] = {
    oplog.LookupOp: Hit,
    oplog.ConnectorLookupOp: oplog.ConnectorHit,
    oplog.TruncateOp: oplog.Truncated,
    oplog.AllocateOp: Allocation,
    oplog.CopiesOp: list,
    oplog.ZerosOp: list,
    oplog.OffloadsOp: dict,
    oplog.FinalizeOp: list,
    oplog.ResetOp: oplog.Reset,
    oplog.EventsOp: list,
    oplog.StateOp: CacheState,
    oplog.DigestOp: Digest,
}


def answer_type(operation: Operation) -> type | None:
    """The type of the answer to an operation; None where there is none."""
    return _ANSWERS.get(type(operation))


def attempt(engine: Engine, operation: Operation) -> Answer | Failure:
    """Performs one operation; an error, or an answer of the wrong type, stands as a Failure in the answer's place."""
    return attempt_with(apply, answer_type(operation), engine, operation)


# Fields of KV events that say whose blocks they are and where they lie, as version 3 of the log writes them.

UNKNOWN = "unknown"
"""Kind of a spec that vLLM 0.33 `get_kv_cache_spec_kind` has no name for."""


def describe_stored(
    event: CacheEvent,
    config: VllmConfig,
    identity: PrefixIdentity,
    session: str,
    ends: Sequence[int],
    ahead: Sequence[Sequence[int]],
) -> CacheEvent:
    """A stored event with the fields of version 3 (vLLM 0.33 `BlockPool._build_block_stored_event`, `take_events`).

    Args:
      event: the event; it is changed.
      config: configuration of the cache.
      identity: what besides its tokens identifies the prefix of the request that stored the blocks.
      session: its session, "" for none.
      ends: of each key, the length of the prefix that it names, in tokens.
      ahead: of each key, the tokens after its block that it covers; looked at only under a hash lookahead.
    """
    spec, reach = config.topology.specs[event.group], config.hash_lookahead
    event.medium, event.spec_kind = DEVICE, kinds.layer(spec).event_kind or UNKNOWN
    event.window = getattr(spec, "window", 0)
    event.lora_name = "" if identity.lora is None else identity.lora[0]
    event.session = session
    event.extra_keys = [untagged(extra_keys(identity, end - event.block_size, end + reach)) for end in ends]
    event.lookahead = [list(tokens) for tokens in ahead] if reach else []
    return event


def describe_removed(event: CacheEvent) -> CacheEvent:
    """A removed event with the field of version 3."""
    event.medium = DEVICE
    return event


def untagged(keys: tuple[Any, ...] | None) -> list[str | tuple[str, int]] | None:
    """Extra keys of one block as events publish them (vLLM 0.33 `to_event_extra_keys`).

    An adapter's name, `(identifier, offset)` of an item, the salt, the digest of embeddings, in hex.
    """
    if keys is None:
        return None
    return [key[1:] if key[0] == "mm" else text_of(key[1]) for key in keys]


def text_of(key: str | bytes) -> str:
    """An extra key as a log writes it: bytes in hex."""
    return key.hex() if isinstance(key, bytes) else key
