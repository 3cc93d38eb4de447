"""A cache of the text's with names: of requests, blocks and keys; its room grows, and it is heard what it tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from types import MappingProxyType
from typing import Any

from hkv.contract.bugs import check_bugs
from hkv.contract.events import DEVICE
from hkv.dialects.vllm.bugs import BUGS
from hkv.dialects.vllm.engines.engine import describe_stored
from hkv.dialects.vllm.engines.numpy import key_text
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.plain import LAYOUT, columns, columns_of, empty, endless, take_rows
from hkv.errors import EngineFailure, OperationError
from hkv.keys.chained import PLAIN, GivenKeys, Interner, KeyChain, PrefixIdentity, digest_by_name
from reference.dialects.vllm import operations
from reference.dialects.vllm.records import (
    Block,
    Code,
    Entry,
    Failure,
    Operation,
    Request,
    Result,
    Row,
    Status,
    Told,
)

BLANK = MappingProxyType(
    {name: 0 for name in Operation.__annotations__ if name != "loaded"}
    | dict.fromkeys(("boundary", "waits", "others"), -1)
)
"""Fields of an operation where nothing is said."""

FAILURES = MappingProxyType(
    {
        Failure.KEYS: ("keys", "a key for every block up to the last token"),
        Failure.BLOCKS: ("blocks", "as many blocks as an allocation takes"),
        Failure.TAIL: ("partial", "a state that was not given back"),
        Failure.COLUMN: ("checkpoint", "a state in one of the row's columns"),
        Failure.CHECKPOINT: ("checkpoint", "a state at a length that has a key"),
        Failure.SIZE: ("keys", "a key of whole hash blocks for each column"),
    }
)
"""Argument that a defect asked for by name fails over, and what was expected."""


@dataclasses.dataclass
class HostRequest:
    """A request as far as the text does not know it: its name is what it is found by.

    Attributes:
      slot: its slot. tokens: the tokens themselves; none of a request of which only the keys are known. chain: its keys
      as they grow; `given`, those that are known beforehand. identity: everything besides tokens that identifies its
      prefix. session: the session that its events name.
    """

    slot: int
    tokens: list[int]
    chain: KeyChain | GivenKeys | None
    given: Sequence[Hashable] = ()
    identity: PrefixIdentity = PLAIN
    session: str = ""


class Keyed:
    """The text's objects under a header, with names and with room for what comes.

    Args:
      header: the configuration, as a log's first line.

    Attributes:
      config: the same. cache: the text's objects. requests: every request that was not dropped, by name.

    Raises:
      ConfigError: a configuration that vLLM refuses.
    """

    room = MappingProxyType({"keys": 16, "requests": 4, "tokens": 64})
    """Room that a cache begins with, as `hkv.dialects.vllm.plain.empty` takes it; it grows."""

    def __init__(self, header: oplog.Header) -> None:
        self.config = config = to_config(header)
        check_bugs(config.bugs, BUGS)
        self._version, self._digest = header.oplog, digest_by_name(config.hash)
        self.cache = endless(empty(config, **self.room))  # type: ignore[arg-type]
        self.requests: dict[str, HostRequest] = {}
        self._groups = self.cache.groups[1 : self.cache.config.width + 1]
        self._free = list(range(self.cache.slots))
        self._tokens = self.room["tokens"]
        self._keys = Interner()
        self._events: list[oplog.CacheEvent] = []
        self._zeros: list[list[int]] = [[] for _ in config.topology.specs]
        self._numbers = {id(block): number for number, block in enumerate(self.cache.blocks)}
        self._entries: dict[int, int] = {}

    # Operations.

    def record(self, id: str) -> Request:
        """The text's record of a request."""
        return self.cache.requests[self._host(id).slot + 1]

    def _do(
        self, code: Code, id: str | None = None, payload: Sequence[int] = (), refused: Status = Status.OK, **given: Any
    ) -> Result:
        """Performs one operation; raises what refuses it, but for one reason that is an answer."""
        cache, slot = self.cache, 0 if id is None else self._host(id).slot
        vars(cache.operations[1]).update(BLANK, code=code, slot=slot, count=len(payload), **given)
        cache.payload[: len(payload)] = payload
        self._perform(code)
        result: Result = self.cache.results[1]
        self._hear()
        if result.status == Status.FAILED:
            argument, expected = FAILURES[Failure(self.cache.failed)]
            raise EngineFailure(argument, id, expected)
        if result.status not in (Status.OK, refused):
            status = Status(result.status).name
            raise OperationError(code.name.lower(), status, "one that applies to the request's state")
        return result

    def _perform(self, code: Code) -> None:
        cache = self.cache
        cache.listed = cache.told = 0
        operations.perform_at(cache, 1, code)

    def _hear(self) -> None:
        """Reads what the last operation told of: events, and blocks to be zeroed."""
        cache, keys = self.cache, list[int]()
        for each in cache.news[1 : cache.told + 1]:
            match each.kind:
                case Told.KEY:
                    keys.append(self._named_by(each.entry)[1])
                case Told.STORED:
                    self._events.append(self._stored(each, keys))
                    keys = []
                case Told.REMOVED:
                    group, key = self._named_by(each.entry)
                    names = [key_text(self._keys.keys[key])]
                    self._events.append(
                        oplog.CacheEvent(type="removed", group=group, num_blocks=1, keys=names, medium=DEVICE)
                    )
                case Told.CLEARED:
                    self._events.append(oplog.CacheEvent(type="cleared"))
                case Told.ZERO:
                    self._zeros[each.group.place - 1].append(self._number(each.block))

    def _told(self, code: Code, id: str | None, in_flight: int = 0) -> list[Any]:
        self._do(code, id, in_flight=in_flight)
        return [each for each in self.cache.news[1 : self.cache.told + 1] if each.kind == Told.OFFER]

    def _stored(self, each: Any, keys: Sequence[int]) -> oplog.CacheEvent:
        """The event of a span that was stored, under these keys."""
        host = self.requests[self._name(each.request)]
        ahead, config, parent = self.config.hash_lookahead, self.config, ""
        if each.start and each.request.keys:
            at = each.request.chain[each.start // config.hash_block_size - 1]
            parent = key_text(self._keys.keys[at])
        ends = [self._end(key) for key in keys]
        event = oplog.CacheEvent(
            type="stored",
            group=each.group.place - 1,
            num_blocks=len(keys),
            block_size=each.size,
            tokens=host.tokens[each.start : each.end],
            keys=[key_text(self._keys.keys[key]) for key in keys],
            parent=parent,
        )
        return describe_stored(
            event, config, host.identity, host.session, ends, [host.tokens[end : end + ahead] for end in ends]
        )

    def _offer(self, each: Any) -> oplog.Offer:
        return each.group.place - 1, self._number(each.block), self._end(self._named_by(each.entry)[1])

    # Names: of blocks, of entries, of keys.

    def _number(self, block: Block | None) -> int:
        return 0 if block is None else self._numbers[id(block)]

    def _name(self, request: Request) -> str:
        """The name of a request that the text tells of."""
        return next(id for id, host in self.requests.items() if self.cache.requests[host.slot + 1] is request)

    def _row(self, group: Any, row: Row) -> list[int]:
        return [self._number(block) for block in columns(group, row)]

    def _rows_told(self, result: Result) -> oplog.Rows:
        """Rows of an answer, null where it does not tell."""
        at, rows = result.start, []
        for group in self._groups:
            first, end = result.first[group.place], result.end[group.place]
            rows.append([0] * first + [self._number(block) for block in self.cache.ids[at : at + end - first]])
            at += end - first
        return rows

    def _named_by(self, entry: Entry) -> tuple[int, int]:
        """The group of an entry, and its key's number."""
        for number in range(len(self._entries) + 1, len(self.cache.entries)):
            self._entries[id(self.cache.entries[number])] = number
        key, group = divmod(self._entries[id(entry)] - 1, self.cache.config.width)
        return group, key

    def _entry(self, group: int, key: Hashable) -> Entry | None:
        number = self._keys.find(key)
        return None if number is None else self.cache.entries[number * self.cache.config.width + group + 1]

    def _end(self, key: int) -> int:
        """Tokens that a key names."""
        return (self._keys.places[key] + 1) * self.config.hash_block_size

    # Room that grows.

    def _arrive(self, id: str, host: HostRequest, tokens: int, keys: Sequence[Hashable], reports: bool) -> None:
        self._make_slot()
        numbers = self._named(keys, 0)
        self._hold_tokens(tokens)
        host.slot = self._free.pop(0)
        self.requests[id] = host
        self._do(Code.REQUEST, id, numbers, amount=tokens, reports=reports, named=host.identity != PLAIN)

    def _make_slot(self) -> None:
        cache = self.cache
        if not self._free:
            self._free += range(cache.slots, 2 * cache.slots)
            LAYOUT.grow(cache, "rows", cache.slots * cache.config.width)
            LAYOUT.grow(cache, "requests", cache.slots)
            take_rows(cache)

    def _grown(self, host: HostRequest, tokens: Sequence[int], keys: Sequence[str]) -> Sequence[Hashable]:
        """Appends tokens; the keys that they complete."""
        assert host.chain is not None
        known = len(host.chain.keys)
        if isinstance(host.chain, GivenKeys):
            host.chain.give(keys)
        elif keys:
            raise OperationError("keys", list(keys), "none: this request's are computed")
        host.tokens.extend(tokens)
        host.chain.extend(host.tokens)
        return host.chain.keys[known:]

    def _complete(self, host: HostRequest, known: int, tokens: int) -> Sequence[Hashable]:
        """Keys beyond the first `known` that so many tokens complete, of a request that came with keys."""
        complete = max(0, tokens - self.config.hash_lookahead) // self.config.hash_block_size
        return host.given[known:complete]

    def _named(self, keys: Sequence[Hashable], first: int) -> list[int]:
        """Numbers of keys, from the request's hash block `first` on, for which there is room then."""
        numbers = self._keys.numbers(keys, first)
        if (lacking := len(self._keys) * self.cache.config.width + 1 - len(self.cache.entries)) > 0:
            LAYOUT.grow(self.cache, "entries", max(lacking, len(self.cache.entries)))
        self._hold_tokens((first + len(keys)) * self.config.hash_block_size)
        return numbers

    def _hold_tokens(self, tokens: int) -> None:
        """Makes sure that rows hold so many tokens."""
        if tokens > self._tokens:
            self._tokens = 2 * tokens
            columns = columns_of(self.config, self._tokens)
            for records, field, length in (
                (self.cache.rows, "blocks", columns),
                (self.cache.rows, "stands", columns),
                (self.cache.requests, "chain", self._tokens // self.config.hash_block_size + 2),
            ):
                for record in records[1:]:
                    line = getattr(record, field)
                    line += [None if field == "blocks" else 0] * (length - len(line))
            self.cache.ids += [None] * columns * self.cache.config.width  # type: ignore[list-item]

    # Checks.

    def _host(self, id: str) -> HostRequest:
        try:
            return self.requests[id]
        except KeyError:
            raise OperationError("id", id, "a request that arrived and was not dropped") from None

    def _running(self, id: str) -> Request:
        request = self.record(id)
        if not request.running:
            raise OperationError("id", id, "a running request, one that was granted blocks")
        return request

    def _check_waiting(self, id: str) -> None:
        if self.record(id).running:
            raise OperationError("id", id, "a waiting request, one that holds no blocks")

    def _with_tokens(self, id: str) -> HostRequest:
        host = self._host(id)
        if host.chain is None:
            raise OperationError("id", id, "a request that came with tokens")
        return host

    def _check_new(self, id: str, num_tokens: int) -> None:
        if id in self.requests:
            raise OperationError("id", id, "a name that no request has")
        if not 1 <= num_tokens <= self.config.max_model_len:
            raise OperationError("tokens", num_tokens, f"1 to max_model_len {self.config.max_model_len} tokens")

    def _check_length(self, id: str, more: int) -> None:
        room = self.config.max_model_len - self.record(id).tokens
        if more > room:
            raise OperationError("tokens", more, f"at most {room}: max_model_len is {self.config.max_model_len}")

    def _check_blocks(self, blocks: Sequence[int], least: int) -> None:
        for block in blocks:
            if type(block) is not int or not least <= block < self.config.num_blocks:
                raise OperationError("blocks", block, f"block ids from {least} to {self.config.num_blocks - 1}")
