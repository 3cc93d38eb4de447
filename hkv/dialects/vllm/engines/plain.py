"""The text as an engine: `reference.dialects.vllm`, run as it stands, behind the operations of vLLM's logs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from hkv.dialects.vllm.config import check_encoder, check_truncation
from hkv.dialects.vllm.engines.engine import check_offloads, check_zeroing, told
from hkv.dialects.vllm.engines.keyed import HostRequest, Keyed
from hkv.dialects.vllm.engines.numpy import identity_of, key_text
from hkv.dialects.vllm.log import structs as oplog
from hkv.errors import OperationError
from hkv.keys.chained import PLAIN, GivenKeys, KeyChain
from reference.dialects.vllm.pool import primary
from reference.dialects.vllm.records import (
    Code,
    Fate,
    Status,
)

ABSENCES = ("never seen", "evicted", "retired", "not retained")
"""Reason why a key is not cached, by its `Fate`."""


class Refusal(NamedTuple):
    """Reason why an allocation was refused.

    Attributes:
      needs: of each group, the blocks that were asked for; 0 where it waits.
      free: blocks in the free queue.
      usable: number of those that the request could count on.
      whole: the question was whether the whole request fits.
      waits: groups that need what this very step writes.
    """

    needs: tuple[int, ...]
    free: int
    usable: int
    whole: bool
    waits: tuple[int, ...]


class PlainEngine(Keyed):
    """The text under vLLM 0.33's rules. Implements `hkv.dialects.vllm.engines.engine.KeyedEngine`.

    Arguments, attributes and errors as of `Keyed`.
    """

    # Requests come and go.

    def step(self) -> None:
        self._do(Code.STEP)

    def request(
        self,
        id: str,
        tokens: Sequence[int],
        extra: oplog.ExtraKeys | None,
        keys: Sequence[str] | None = None,
        session: str = "",
        report: str = "",
    ) -> None:
        config, identity = self.config, PLAIN if extra is None else identity_of(extra)
        self._check_new(id, len(tokens))
        chain: KeyChain | GivenKeys = GivenKeys()
        if keys is None:
            chain = KeyChain(self._digest, config.hash_block_size, config.hash_lookahead, identity, config.hash_seed)
        host = HostRequest(-1, [], chain, identity=identity, session=session)
        self._arrive(id, host, len(tokens), self._grown(host, tokens, keys or ()), bool(report))

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int]) -> None:
        """A request arrives of which only its length is known, and what its prefixes are called.

        Events name tokens, which such requests do not have: from the first one on, none are told.
        """
        self._check_new(id, num_tokens)
        self.cache.config.events = 0
        self._events.clear()
        host = HostRequest(-1, [], None, keys)
        self._arrive(id, host, num_tokens, self._complete(host, 0, num_tokens), False)

    def append(self, id: str, tokens: Sequence[int], keys: Sequence[str] = ()) -> None:
        host = self._with_tokens(id)
        self._check_length(id, len(tokens))
        grown = self._grown(host, tokens, keys)
        self._do(Code.APPEND, id, self._named(grown, self.record(id).keys), amount=len(tokens))

    def extend(self, id: str, tokens: int) -> None:
        """`tokens` generated tokens are appended to a request that came with keys."""
        host, request = self._host(id), self.record(id)
        if host.chain is not None:
            raise OperationError("id", id, "a request that came with keys")
        _check_not_negative(tokens=tokens)
        self._check_length(id, tokens)
        grown = self._complete(host, request.keys, request.tokens + tokens)
        self._do(Code.APPEND, id, self._named(grown, request.keys), amount=tokens)

    def resume(self, operation: oplog.ResumeOp) -> None:
        id, keep, prompt = operation.id, operation.keep, operation.prompt
        host, request, tokens = self._with_tokens(id), self.record(id), operation.tokens
        identity = None if operation.extra is None else identity_of(operation.extra)
        length, most = keep + len(tokens), self.config.max_model_len
        if not 0 <= keep <= request.tokens:
            raise OperationError("keep", keep, f"at most the request's {request.tokens} tokens")
        if length > most:
            raise OperationError("tokens", length, f"at most max_model_len {most} in all")
        if not 1 <= prompt <= length:
            raise OperationError("prompt", prompt, f"1 to {length} tokens")
        assert host.chain is not None
        host.chain.cut(keep, self.config.hash_block_size, identity)
        host.identity = host.identity if identity is None else identity
        del host.tokens[keep:]
        first = len(host.chain.keys)
        keys = self._named(self._grown(host, tokens, operation.keys or ()), first)
        self._do(Code.RESUME, id, keys, amount=len(tokens), keep=keep, prompt=prompt)

    def drop(self, id: str) -> None:
        self._check_waiting(id)
        self._do(Code.DROP, id)
        self._free.insert(0, self.requests.pop(id).slot)

    def fork(self, parent: str, child: str) -> list[list[tuple[int, int]]] | None:
        """Starts a request from a running one; for each group the copies to make, (source, target), None if refused."""
        if parent not in self.requests or not self.record(parent).running:
            raise OperationError("parent", parent, "a running request")
        if child in self.requests:
            raise OperationError("child", child, "a name that no request has")
        self._make_slot()
        host = self._host(parent)
        tokens, slot = list(host.tokens), self._free[0]
        chain = copy.deepcopy(host.chain)
        result = self._do(Code.FORK, parent, refused=Status.NO_ROOM, amount=slot)
        if result.status != Status.OK:
            return None
        self._free.pop(0)
        self.requests[child] = dataclasses.replace(host, slot=slot, tokens=tokens, chain=chain)
        ours, theirs = self.record(parent).rows, self.record(child).rows
        return [
            [
                (self._number(ours[g].blocks[column]), self._number(theirs[g].blocks[column]))
                for column in range(result.first[g], result.end[g])
            ]
            for g in range(1, self.cache.config.width + 1)
        ]

    # The prefix cache.

    def lookup(self, id: str, limit: int | None = None) -> oplog.Hit:
        self._check_waiting(id)
        result = self._do(Code.LOOKUP, id, amount=0 if limit is None else limit + 1)
        return oplog.Hit(result.value, self._rows_told(result), result.longer)

    def connector_lookup(self, id: str, limit: int | None = None) -> oplog.ConnectorHit:
        self._check_waiting(id)
        result = self._do(Code.CONNECT, id, amount=0 if limit is None else limit + 1)
        hits = [result.own[group.place] for group in self._groups]
        return oplog.ConnectorHit(result.value, self._rows_told(result), result.longer, bool(result.lags), hits)

    def truncate(self, rows: oplog.Rows, tokens: int) -> oplog.Rows:
        """Rows of a hit up to its first `tokens` tokens, whole blocks; states may end before."""
        check_truncation(self.config, rows, tokens)
        return [list(row[: tokens // size]) for row, size in zip(rows, self.config.block_sizes, strict=True)]

    def commit(self, id: str, tokens: int) -> None:
        request, live = self._running(id), self._version >= 3
        most = min(request.computed, request.tokens)
        if not live and not 0 <= tokens <= most:
            raise OperationError("tokens", tokens, f"0 to {most} tokens, computed and not drafts")
        self._do(Code.COMMIT, id, amount=tokens, live=live)

    def evict(self, blocks: Sequence[int]) -> None:
        self._check_blocks(blocks, 0)
        self._do(Code.EVICT, None, blocks)

    def reset(self) -> bool:
        return bool(self._do(Code.RESET, refused=Status.IN_USE).status == Status.OK)

    # Blocks.

    def allocate(self, operation: oplog.AllocateOp) -> oplog.Allocation:
        id, hit, external = operation.id, operation.hit, operation.external
        request = self.record(id)
        given = {name: getattr(operation, name) for name in ("new", "hit", "lookahead", "external", "reserved")}
        _check_not_negative(**given, in_flight=operation.in_flight)
        _check_not_negative(shared_prefix=operation.shared_prefix or 0, encoder=operation.encoder or 0)
        check_encoder(operation.encoder or 0, self.config.encoder_tokens)
        if operation.new + hit + external == 0:
            raise OperationError("new", 0, "something to allocate: new, hit or external tokens")
        if request.running and (hit or external):
            raise OperationError("hit" if hit else "external", hit or external, "0 for a running request")
        if operation.rows is None and hit and (self.cache.asker is not request or self.cache.agreed != hit):
            raise OperationError("hit", hit, "0, or the hit that a lookup of this request just found")
        self._hold_tokens(request.computed + hit + external + operation.new + operation.lookahead)
        if operation.rows is not None:
            rows = [number for row in operation.rows for number in (len(row), *row)]
            self._do(Code.FOUND, id, rows, amount=hit)
        loaded = self.cache.operations[1].loaded
        for group in range(self.cache.config.width):
            loaded[group + 1] = int(group in operation.loaded)
        result = self._do(
            Code.ALLOCATE,
            id,
            refused=Status.NO_ROOM,
            new=operation.new,
            hit=hit,
            ahead=operation.lookahead,
            external=external,
            reserved=operation.reserved,
            in_flight=operation.in_flight,
            boundary=-1 if operation.shared_prefix is None else operation.shared_prefix,
            delay=operation.delay,
            must_fit=operation.must_fit,
            waits=-1 if operation.waiting is None else operation.waiting,
            others=-1 if operation.scheduled is None else operation.scheduled,
            encoder=operation.encoder or 0,
        )
        if result.status != Status.OK:
            return oplog.Allocation(None)
        rows = [[*blocks[first:]] for blocks, first in zip(self._rows_told(result), result.first[1:], strict=False)]
        for each in self.cache.copies[self.cache.pending - result.copies + 1 : self.cache.pending + 1]:
            if each.adopted:
                rows[each.group.place - 1].insert(0, self._number(each.target))
        return oplog.Allocation(rows)

    def advance(self, id: str, tokens: int) -> None:
        request = self._running(id)
        room = request.room - request.computed
        if not 0 <= tokens <= room:
            raise OperationError("tokens", tokens, f"0 to {room}, for which the request has room")
        self._do(Code.ADVANCE, id, amount=tokens)

    def computed(self, id: str, tokens: int) -> None:
        if type(tokens) is not int or tokens < 0:
            raise OperationError("tokens", tokens, "an integer of at least 0")
        self._do(Code.COMPUTED, id, amount=tokens)

    def retire(self, id: str, processed: int) -> None:
        self._do(Code.RETIRE, id, amount=processed)

    def free(self, id: str) -> None:
        self._running(id)
        self._do(Code.FREE, id)

    def pop(self, id: str) -> None:
        self._running(id)
        self._do(Code.POP, id)

    def release(self, blocks: Sequence[int]) -> None:
        self._check_blocks(blocks, 1)
        for block in set(blocks):
            if self.cache.blocks[block].refs < blocks.count(block):
                raise OperationError("blocks", block, "a block with as many references as it is to lose")
        self._do(Code.RELEASE, None, blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        self._check_blocks(blocks, 1)
        self._do(Code.HOLD, None, blocks)

    def pending_copies(self) -> list[list[tuple[int, int]]]:
        """Copies that `copies` would drain, (source, target), a list a group."""
        copies: list[list[tuple[int, int]]] = [[] for _ in self.config.topology.specs]
        for each in self.cache.copies[1 : self.cache.pending + 1]:
            copies[each.group.place - 1].append((self._number(each.source), self._number(each.target)))
        return copies

    def copies(self, hold: bool = False) -> list[tuple[int, int]]:
        copies = [pair for pairs in self.pending_copies() for pair in pairs]
        self._do(Code.COPIES, live=hold)
        return copies

    def zeros(self) -> list[int]:
        check_zeroing(self.config)
        blocks = [block for group in self._zeros for block in group]
        self._zeros = [[] for _ in self._zeros]
        return blocks

    def unwritten(self, id: str, tokens: int) -> None:
        check_zeroing(self.config)
        self._running(id)
        for group in self._groups:
            if group.zeroed and (type(tokens) is not int or tokens < 0 or tokens % group.size):
                expected = f"a multiple of group {group.place - 1}'s block of {group.size}"
                raise OperationError("tokens", tokens, expected)
        self._do(Code.UNWRITTEN, id, amount=tokens)

    def offloads(self) -> oplog.Offers:
        check_offloads(self.config)
        answer: oplog.Offers = {}
        for each in self._told(Code.OFFLOADS, None):
            answer.setdefault(self._name(each.request), []).append(self._offer(each))
        return answer

    def finalize(self, id: str, in_flight: int = 0) -> list[oplog.Offer]:
        check_offloads(self.config)
        self._running(id)
        if type(in_flight) is not int or in_flight < 0:
            raise OperationError("in_flight", in_flight, "an integer of at least 0")
        return [self._offer(each) for each in self._told(Code.FINALIZE, id, in_flight=in_flight)]

    # What can be seen.

    def events(self) -> list[oplog.CacheEvent]:
        events, self._events = self._events, []
        return told(events, self._version)

    def num_free(self) -> int:
        """Blocks in the free queue."""
        return self.cache.free.count

    @property
    def evictions(self) -> int:
        """Cached blocks handed out to another use so far."""
        return self.cache.evictions

    def absence(self, group: int, key: Hashable) -> str:
        """Reason why a group has no block for a prefix.

        `cached` (it has), `never seen`, `evicted`, `retired` (its block was given back before it was registered) or
        `not retained` (it was not worth it).
        """
        entry = self._entry(group, key)
        if entry is not None and entry.first is not None:
            return "cached"
        return ABSENCES[Fate.UNSEEN if entry is None else entry.noted]

    def has(self, group: int, key: Hashable) -> bool:
        """True if a group has a block for a prefix."""
        entry = self._entry(group, key)
        return entry is not None and entry.first is not None

    def keys(self, id: str) -> list[Hashable]:
        """Keys of a request's hash blocks."""
        request = self.record(id)
        return [self._keys.keys[number] for number in request.chain[: request.keys]]

    def keys_of(self, block: int) -> list[tuple[int, Hashable]]:
        """Entries of a block: their groups and keys."""
        entries = [self._named_by(entry) for entry in self.cache.blocks[block].known if entry is not None]
        return [(group, self._keys.keys[key]) for group, key in entries]

    def refusal(self) -> Refusal:
        """Reason why an allocation was refused last."""
        cache, rows = self.cache, [self.cache.refused.rows[group.place] for group in self._groups]
        needs = tuple(row.takes if cache.halfway else row.asked for row in rows)
        waits = tuple(group for group, row in enumerate(rows) if row.late)
        return Refusal(needs, cache.free.count, cache.usable, bool(cache.whole), waits)

    def eviction(self, group: int, key: Hashable) -> tuple[int, int] | None:
        """The step in which a group last lost its last block for a prefix, and the group that got it; None if never."""
        entry = self._entry(group, key)
        return None if entry is None or entry.lost == 0 else (entry.lost, entry.taker.place - 1)

    def rows(self, id: str) -> list[list[int]]:
        """Blocks of a request in each group; 0 is the null block, empty lists mean that it has none."""
        rows = self.record(id).rows
        return [self._row(group, rows[group.place]) for group in self._groups]

    def state(self) -> oplog.CacheState:
        """State of the cache, as far as engines are compared."""
        cache, free, cached = self.cache, list[int](), {}
        block = cache.free.oldest()
        while block is not cache.free.ends:
            free.append(self._number(block))
            block = cache.free.newer[block]
        for number, block in enumerate(cache.blocks[1:-1], 1):
            if (entry := primary(cache, block)) is not None:
                group, key = self._named_by(entry)
                cached[str(number)] = (group, self._end(key), key_text(self._keys.keys[key]))
        rows = {id: self.rows(id) for id in self.requests}
        return oplog.CacheState(
            free=free,
            refs={str(number): block.refs for number, block in enumerate(cache.blocks) if number and block.refs},
            rows={id: blocks for id, blocks in rows.items() if any(blocks)},
            cached=cached,
        )


def _check_not_negative(**numbers: int) -> None:
    for name, value in numbers.items():
        if type(value) is not int or value < 0:
            raise OperationError(name, value, "an integer of at least 0")
