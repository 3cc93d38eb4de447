"""The text as an engine: `reference.dialects.rtp_llm`, run as it stands, behind the operations of its logs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.engines.engine import check_unused, taken
from hkv.dialects.rtp_llm.log import to_rtp_config
from hkv.dialects.rtp_llm.plain import LAYOUT, empty, grow_batch, grow_keys, grow_row, grow_slots, holes, lists, state
from hkv.errors import OperationError
from hkv.keys.rolling import RollingKeys, first_keys, next_keys
from reference.dialects.rtp_llm import operations
from reference.dialects.rtp_llm.records import Cache, Code, Key, Operation, Request, Result, Role, Status, current

VERDICTS = ("granted", "permanent", "retryable", "internal_error")
"""Names of the verdicts in logs, by their status."""

ARGUMENTS = (
    *("tokens", "count", "start", "sequences", "reserve", "reuse", "device_cache", "resident", "copy"),
    *("sequence", "role", "least", "length"),
)
"""Fields of an operation that its caller names."""

FORK = "a request that came with tokens, for its sequences part"

EXPECTED = {
    Status.TAIL_MISSING: ("blocks", "the last blocks of a window to be there"),
    Status.NOT_HELD: ("blocks", "blocks with a reference of that role"),
    Status.HAS_BLOCKS: ("id", "a request without blocks"),
    Status.HAS_NONE: ("id", "a request with blocks"),
}
"""Arguments that a status is of, and what was expected of them."""


@dataclasses.dataclass
class HostRequest:
    """A request as the host knows it.

    Attributes:
      slot: its slot in the cache.
      tokens: of each sequence; none of a request that came with keys.
      keys: of each sequence's whole blocks.
      partial: of each sequence, the place and key of a partly filled block, when it was new.
      given: the keys of its whole blocks, now and later, where they came instead of tokens; else None.
    """

    slot: int
    tokens: list[list[int]]
    keys: list[list[int]]
    partial: list[tuple[int, int] | None]
    given: Sequence[int] | None = None


class RtpNumpyEngine:
    """The text under RTP-LLM's rules. Implements `hkv.dialects.rtp_llm.engines.engine.KeyedRtpEngine`.

    Args:
      header: the configuration, as a log's first line.

    Attributes:
      config: the same. cache: the text's objects.
      requests: those that arrived and were not dropped, by name.

    Raises:
      HKVError: a configuration the dialect forbids.
    """

    room = MappingProxyType({"keys": 16, "slots": 4, "batch": 2, "row": 8, "payload": 16, "told": 16})
    """Room that a cache begins with, as `hkv.dialects.rtp_llm.plain.empty` takes it; it grows."""

    def __init__(self, header: structs.RtpHeader) -> None:
        self.config = to_rtp_config(header)
        self.cache: Cache = empty(self.config, **self.room)
        self.requests: dict[str, HostRequest] = {}
        self._free = list(range(self.cache.config.slots))
        self._numbers: dict[int, int] = {}
        self._keys: list[int] = []
        self._history = KeyHistory(len(header.groups))
        self._held: dict[str, tuple[Role, list[list[int]]]] = {}
        self._exported: dict[str, tuple[Role, list[list[int]]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Copies are made of numbers: records refer to each other as deep as rows are long."""
        return {**vars(self), "cache": LAYOUT.numbers_of(self.cache)}

    def __setstate__(self, found: dict[str, Any]) -> None:
        vars(self).update(found, cache=LAYOUT.restored(found["cache"]))

    def request(self, id: str) -> Request:
        """A request of the cache."""
        return self.cache.requests[self._host(id).slot + 1]

    def key(self, key: int) -> Key | None:
        """A key that something is cached under; None for any other."""
        number = self._numbers.get(key)
        found = None if number is None else self.cache.keys[number + 2]
        return found if found is not None and found.cached else None

    @property
    def names(self) -> dict[Key, int]:
        """Meanings of the cache's keys."""
        return dict(zip(self.cache.keys[2:], self._keys, strict=False))

    def has_key(self, id: str, key: int) -> bool:
        """True if a request has a key in use."""
        request, host = self.request(id), self._host(id)
        rows = enumerate(zip(request.rows[: request.batch], host.keys, strict=True))
        return any(
            key in keys[: row.count] or (not row.aligned and (host.partial[n] or (0, None))[1] == key)
            for n, (row, keys) in rows
        )

    def rows(self, id: str) -> structs.Lists:
        """Blocks of each sequence of a request and each group, holes included."""
        return lists(self.cache, self.request(id))

    def perform(self, operation: structs.RtpOp) -> structs.RtpAnswer:
        match operation:
            case structs.RequestOp():
                keys = first_keys(operation.tokens, self.config.block_size).without_partial().keys
                host = HostRequest(0, [list(operation.tokens) for _ in range(max(operation.sequences, 0))], [], [])
                self._arrive(operation.id, host, len(operation.tokens), keys, operation.sequences, operation.reserve)
            case structs.MallocOp():
                return self._malloc(operation)
            case structs.AppendOp():
                self._append(operation)
            case structs.InsertOp():
                self._insert(operation)
            case structs.ForkOp():
                return self._fork(operation)
            case structs.FreeOp():
                self._free_all(operation.id)
            case structs.DropOp():
                self._do(Code.DROP, operation.id)
                self._free.insert(0, self.requests.pop(operation.id).slot)
            case structs.HoldOp():
                return self._hold(operation)
            case structs.ReleaseOp():
                self._give_back(*taken(self._held, operation.name))
            case structs.ExportOp():
                return self._export(operation)
            case structs.SettleOp():
                self._give_back(*taken(self._exported, operation.name))
            case structs.EvictOp():
                return structs.Count(self._do(Code.EVICT, None, least=operation.least).value)
            case structs.PeakOp():
                given: dict[str, Any] = {
                    "tokens": operation.remaining,
                    "reuse": operation.reuse,
                    "sequences": operation.sequences,
                }
                return structs.Count(self._do(Code.PEAK, operation.id, **given).value)
            case structs.StateOp():
                return self.state()
        return None

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int], reserve: int = 0) -> None:
        """A request of one sequence arrives of which only its length is known, and what its prefixes are called."""
        whole = keys[: num_tokens // self.config.block_size]
        self._arrive(id, HostRequest(0, [[]], [], [], keys), num_tokens, whole, 1, reserve)

    def extend(self, id: str, tokens: int) -> None:
        """A request that came with keys has `tokens` more tokens."""
        host, request = self._host(id), self.request(id)
        if host.given is None:
            raise OperationError("id", id, "a request that came with keys")
        whole = host.given[request.whole : (request.tokens + tokens) // self.config.block_size]
        self._do(Code.APPEND, id, keys=whole, tokens=tokens)
        host.keys[0] += whole

    def num_available(self) -> int:
        """Blocks that no request and no connector holds, over all pools."""
        return sum(pool.total - pool.held for pool in self.cache.pools[1:])

    def num_cached(self) -> int:
        """Blocks that the cache holds, over all pools."""
        return sum(block.cache > 0 for block in self.cache.blocks[1:])

    @property
    def evictions(self) -> int:
        """Blocks that were evicted so far."""
        return self.cache.evictions

    @property
    def duplicates(self) -> int:
        """Blocks of keyed requests that were not cached because another one was there."""
        return self._history.duplicates

    def absence(self, group: int, key: int) -> str:
        """State of a group's block under a key of keyed requests (`KeyHistory`)."""
        found = self.key(key)
        return self._history.absence(group, key, cached=found is not None and found.blocks[group] > 0)

    def state(self) -> structs.RtpState:
        """State of the cache, as far as engines are compared."""
        return state(self.cache, {id: self.request(id) for id in self.requests}, self.names)

    # Operations.

    def _arrive(
        self, id: str, host: HostRequest, tokens: int, keys: Sequence[int], sequences: int, reserve: int
    ) -> None:
        if id in self.requests:
            raise OperationError("id", id, "a name that no request has")
        for name, value, least in (("seq", tokens, 1), ("batch", sequences, 1), ("reserve", reserve, 0)):
            if value < least:
                raise OperationError(name, value, f"at least {least}")
        if not self._free:
            self._free += range(self.cache.config.slots, 2 * self.cache.config.slots)
            grow_slots(self.cache, self.cache.config.slots)
        self._widen(sequences)
        host.slot = self._free.pop(0)
        host.keys, host.partial = [list(keys) for _ in range(sequences)], [None] * sequences
        self.requests[id] = host
        self._do(Code.REQUEST, id, keys=keys, tokens=tokens, sequences=sequences, reserve=reserve)

    def _malloc(self, operation: structs.MallocOp) -> structs.Malloc:
        host, request = self._host(operation.id), self.request(operation.id)
        if operation.length is not None and operation.length < 1:
            raise OperationError("length", operation.length, "at least 1")
        new = current(self.cache, request) == 0
        for number, row in enumerate(request.rows[: request.batch]):
            if not new:
                host.partial[number] = None
            elif row.count == 0 and host.given is None:
                keys = first_keys(host.tokens[number], self.config.block_size)
                host.partial[number] = None if keys.aligned else (len(keys.keys) - 1, keys.keys[-1])
        given: dict[str, Any] = {
            "reuse": operation.reuse,
            "device_cache": operation.device_cache,
            "length": operation.length or 0,
        }
        result = self._do(Code.MALLOC, operation.id, refused=Status.INTERNAL_ERROR, **given)
        if new and host.given is not None and result.status == Status.OK:
            self._history.begin(host.given)
        return structs.Malloc(VERDICTS[result.status], result.value, self.rows(operation.id))

    def _append(self, operation: structs.AppendOp) -> None:
        host, request = self._host(operation.id), self.request(operation.id)
        if host.given is not None:
            raise OperationError("id", operation.id, "a request that came with tokens")
        more = operation.tokens
        if len(more) != request.batch or len({len(each) for each in more}) != 1:
            raise OperationError("tokens", more, f"equally many for each of {request.batch} sequences")
        rows = [[*known, *each] for known, each in zip(host.tokens, more, strict=True)]
        size, whole = self.config.block_size, request.whole
        keys = [
            list(next_keys(RollingKeys(tuple(known), True), row, size).keys)
            for known, row in zip(host.keys, rows, strict=True)
        ]
        self._do(Code.APPEND, operation.id, keys=[key for row in keys for key in row[whole:]], tokens=len(more[0]))
        host.tokens, host.keys = rows, keys

    def _insert(self, operation: structs.InsertOp) -> None:
        self._do(Code.INSERT, operation.id, resident=operation.resident)
        host, request = self._host(operation.id), self.request(operation.id)
        if host.given is not None:
            row = request.rows[0]
            keys = host.keys[0][: row.count]
            found = [self.key(key) for key in keys]
            absent = [-1] * self.cache.config.groups
            mine = [holes(ids.blocks[: ids.length]) for ids in row.groups[: len(absent)]]
            self._history.inserted(keys, mine, [absent if key is None else holes(key.blocks) for key in found])

    def _fork(self, operation: structs.ForkOp) -> structs.Fork:
        host, cache = self._host(operation.id), self.cache
        if host.given is not None:
            raise OperationError("id", operation.id, FORK)
        batch = self.request(operation.id).batch
        for source in operation.sources:
            if not 0 <= source < batch:
                raise OperationError("sources", source, f"a sequence from 0 to {batch - 1}")
        self._widen(len(operation.sources))
        copy: dict[str, Any] = {"copy": operation.copy_last}
        result = self._do(
            Code.FORK, operation.id, numbers=operation.sources, refused=Status.NO_BLOCKS, room=batch * 8, **copy
        )
        if result.status != Status.OK:
            return structs.Fork(None, self.rows(operation.id))
        if operation.sources:
            for name in ("tokens", "keys", "partial"):
                held = getattr(host, name)
                copies = [list(held[n]) if name != "partial" else held[n] for n in operation.sources]
                setattr(host, name, copies)
        groups = self.config.topology.groups
        told = [cache.told[result.first + 3 * n : result.first + 3 * n + 3] for n in range(result.count)]
        return structs.Fork([(groups[group].tag, old, new) for group, old, new in told], self.rows(operation.id))

    def _free_all(self, id: str) -> None:
        host = self._host(id)
        if host.given is not None and current(self.cache, self.request(id)):
            self._history.end(host.given)
        self._do(Code.FREE, id)

    def _hold(self, operation: structs.HoldOp) -> structs.Selected:
        check_unused(self._held, operation.name)
        host, request = self._host(operation.id), self.request(operation.id)
        if not 0 <= operation.sequence < request.batch:
            raise OperationError("sequence", operation.sequence, f"a sequence from 0 to {request.batch - 1}")
        role = Role.CONNECTOR if operation.connector else Role.REQUEST
        given: dict[str, Any] = {"role": role, "sequence": operation.sequence}
        result = self._do(Code.HOLD, operation.id, room=self.cache.config.row + 1, **given)
        if result.value == 0:
            return structs.Selected(None, None)
        row, places = request.rows[operation.sequence], self.cache.told[result.first : result.first + result.count]
        whole, partial = host.keys[operation.sequence], host.partial[operation.sequence]
        groups = row.groups[: self.cache.config.groups]
        keys = [partial[1] if partial and not row.aligned and at == partial[0] else whole[at] for at in places]
        blocks = [holes([ids.blocks[at] if at < ids.length else 0 for at in places]) for ids in groups]
        return self._kept(self._held, operation.name, role, keys, blocks)

    def _export(self, operation: structs.ExportOp) -> structs.Selected:
        check_unused(self._exported, operation.name)
        cache, groups = self.cache, self.cache.config.groups
        result = self._do(Code.EXPORT, None, room=len(cache.keys) * groups, least=operation.least)
        if result.count == 0:
            return structs.Selected(None, None)
        names = self.names
        keys = [names[key] for key in cache.told_keys[: result.count * groups : groups]]
        told = cache.told[: result.count * groups]
        return self._kept(
            self._exported, operation.name, Role.CACHE, keys, [holes(told[group::groups]) for group in range(groups)]
        )

    def _kept(
        self, kept: dict[str, Any], name: str, role: Role, keys: list[int], blocks: list[list[int]]
    ) -> structs.Selected:
        kept[name] = role, blocks
        return structs.Selected(keys, [list(each) for each in blocks])

    def _give_back(self, role: Role, blocks: list[list[int]]) -> None:
        numbers = [n for group, held in enumerate(blocks) for block in held if block > 0 for n in (group, block)]
        self._do(Code.RELEASE, None, numbers=numbers, role=role)

    def _do(
        self,
        code: Code,
        id: str | None,
        *,
        keys: Sequence[int] = (),
        numbers: Sequence[int] = (),
        refused: Status = Status.OK,
        room: int = 0,
        **given: int,
    ) -> Result:
        """Performs one operation, for whose answer there is room; raises what refuses it, but for a
        status up to `refused`, which is an answer."""
        cache = self.cache
        op: Operation = cache.operations[1]
        op.code, op.slot = code, 0 if id is None else self._host(id).slot
        for name in ARGUMENTS:
            setattr(op, name, int(given.get(name, 0)))
        op.count, cache.said = max(len(keys), len(numbers)), 0
        self._make_room(id, op, room)
        cache.payload[: len(keys)] = [cache.keys[self._number(key)] for key in keys]
        cache.numbers[: len(numbers)] = numbers
        self._perform(code)
        result: Result = cache.results[1]
        if result.status > refused:
            status, other = Status(result.status), (code.name.lower(), "one that applies to the request's state")
            name, expected = EXPECTED.get(status, other)
            raise OperationError(name, id if name == "id" else status.name, expected)
        return result

    def _perform(self, code: Code) -> None:
        operations.perform_at(self.cache, 1, code)

    def _make_room(self, id: str | None, op: Operation, room: int) -> None:
        """Room for an operation's keys and numbers, its answer, and a request's lists."""
        cache = self.cache
        if (lacking := op.count - len(cache.payload)) > 0:
            cache.payload += [None] * max(lacking, len(cache.payload))  # type: ignore[list-item]
            cache.numbers += [0] * max(lacking, len(cache.numbers))
        if (lacking := max(op.count, room, 3 * cache.config.batch * cache.config.groups) - len(cache.told)) > 0:
            cache.told += [0] * max(lacking, len(cache.told))
            cache.told_keys += [None] * max(lacking, len(cache.told_keys))  # type: ignore[list-item]
            cache.room = len(cache.told)
        if id is not None and op.code in (Code.REQUEST, Code.APPEND, Code.MALLOC):
            request = self.request(id)
            reserve = max(op.reserve, request.reserve)  # of states so many slots, of others so many tokens
            longest = max(op.length, request.tokens + op.tokens) + reserve
            smallest = min(group.block for group in cache.groups[1 : cache.config.groups + 1])
            lacking = longest // min(smallest, self.config.block_size) + reserve + 2 - cache.config.row
            if lacking > 0:
                grow_row(cache, max(lacking, cache.config.row))

    def _widen(self, sequences: int) -> None:
        """Room for so many sequences of a request."""
        if (lacking := sequences - self.cache.config.batch) > 0:
            grow_batch(self.cache, lacking)

    def _number(self, key: int) -> int:
        """Number of a key, for which there is room then."""
        number = self._numbers.setdefault(key, len(self._keys))
        if number == len(self._keys):
            self._keys.append(key)
            if number + 2 >= len(self.cache.keys):
                grow_keys(self.cache, len(self.cache.keys))
        return number + 2

    def _host(self, id: str) -> HostRequest:
        try:
            return self.requests[id]
        except KeyError:
            raise OperationError("id", id, "a request that arrived and was not dropped") from None


# State of the blocks under a key: cached, evicted, never kept, or still with the request that computed them.

CACHED, EVICTED, NOT_KEPT, UNFINISHED, NEVER_SEEN = STATES = (
    "cached",
    "evicted",
    "not kept",
    "not finished",
    "never seen",
)
"""Values of `KeyHistory.absence`."""


class KeyHistory:
    """Follows keys from the request that computes them to the cache and out of it.

    Attributes:
      duplicates: blocks that were not entered because another one was there under their key.
    """

    def __init__(self, groups: int) -> None:
        self.duplicates = 0
        self._entered: list[set[int]] = [set() for _ in range(groups)]
        self._inserted: set[int] = set()
        self._running: Counter[int] = Counter()

    def begin(self, keys: Iterable[int]) -> None:
        """A request got blocks for these keys."""
        self._running.update(keys)

    def end(self, keys: Iterable[int]) -> None:
        """A request gave back the blocks of these keys."""
        for key in keys:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]

    def inserted(self, keys: Sequence[int], blocks: Sequence[Sequence[int]], cached: Sequence[Sequence[int]]) -> None:
        """A request's blocks were entered: `blocks` of each group, -1 for holes.

        `cached` are those that the cache has under each key now, one a group.
        """
        self._inserted.update(keys)
        for group, (entered, mine) in enumerate(zip(self._entered, blocks, strict=True)):
            for key, block, held in zip(keys, mine, cached, strict=False):
                if block > 0:
                    entered.add(key)
                    self.duplicates += held[group] not in (block, -1)

    def absence(self, group: int, key: int, *, cached: bool) -> str:
        """State of a key's block in a group: one of `STATES`; `cached`: the cache has it."""
        if cached:
            return CACHED
        if key in self._entered[group]:
            return EVICTED
        if key in self._inserted:
            return NOT_KEPT
        return UNFINISHED if key in self._running else NEVER_SEEN
