"""The verbs of a cache under RTP-LLM's rules: requests with tokens, their keys, and the allocator that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hkv.dialects.rtp_llm.config import HYBRID, HYBRID_POOL, SINGLE, RtpConfig
from hkv.errors import OperationError
from hkv.keys.rolling import RollingKeys, first_keys, next_keys
from tests.rtp_llm.witness.allocator import Allocator
from tests.rtp_llm.witness.estimates import batch_peak
from tests.rtp_llm.witness.eviction import evict_and_free
from tests.rtp_llm.witness.hybrid import HybridAllocator
from tests.rtp_llm.witness.hybrid_pool import HybridPoolAllocator
from tests.rtp_llm.witness.operation import CopyPair, MallocInfo, MallocResult, Tokens
from tests.rtp_llm.witness.resource import BatchResource, Resource
from tests.rtp_llm.witness.single import SingleAllocator

ALLOCATORS: dict[str, type[Allocator]] = {
    SINGLE: SingleAllocator,
    HYBRID: HybridAllocator,
    HYBRID_POOL: HybridPoolAllocator,
}
"""The allocator of each dialect."""

PARTIAL = -1
"""Key of a partly filled block of a request that came with keys; it is never looked for and never entered."""


@dataclasses.dataclass
class RtpRequest:
    """A request: one or several sequences of equal length.

    Attributes:
      tokens: the tokens of each sequence.
      lengths: lengths that allocation counts.
      resource: its blocks and keys.
      given: the keys of its whole blocks, now and later, where they came instead of tokens; else None.
    """

    tokens: list[list[int]]
    lengths: Tokens
    resource: BatchResource
    given: Sequence[int] | None = None


class RtpManager:
    """RTP-LLM `KVCacheManager` in plain Python.

    Args:
      config: the cache's configuration; its name decides the allocator.

    Attributes:
      config: the same.
      allocator: the groups, the pools and the cache.
      requests: those that arrived and were not dropped, by name.
    """

    def __init__(self, config: RtpConfig) -> None:
        self.config = config
        self.allocator = ALLOCATORS[config.name](config)
        self.requests: dict[str, RtpRequest] = {}

    def request(self, id: str, tokens: Sequence[int], batch: int = 1, reserve: int = 0) -> None:
        """A request arrives.

        Args:
          id: a name that no request has.
          tokens: its prompt, int32 values.
          batch: sequences that go on from it.
          reserve: tokens to come in a step beyond the next one's.
        """
        if id in self.requests:
            raise OperationError("id", id, "a name that no request has")
        lengths = Tokens(len(tokens), batch, self.config.block_size, reserve)
        self.requests[id] = RtpRequest([list(tokens) for _ in range(batch)], lengths, BatchResource(self.config, batch))

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int], reserve: int = 0) -> None:
        """A request of one sequence arrives of which only its length is known, and what its prefixes are called.

        Args:
          id: a name that no request has.
          num_tokens: tokens of its prompt.
          keys: a non-negative int for each of its whole blocks, now and later; key i names the first i + 1 of them.
          reserve: tokens to come in a step beyond the next one's.
        """
        if id in self.requests:
            raise OperationError("id", id, "a name that no request has")
        lengths = Tokens(num_tokens, 1, self.config.block_size, reserve)
        self.requests[id] = RtpRequest([[]], lengths, BatchResource(self.config), keys)

    def extend(self, id: str, tokens: int) -> None:
        """A request that came with keys has `tokens` more tokens."""
        request = self._request(id)
        if request.given is None:
            raise OperationError("id", id, "a request that came with keys")
        request.lengths.set_length(request.lengths.seq + tokens)
        if request.resource.current_blocks == 0:
            _forget_keys(request)

    def malloc(
        self, id: str, *, reuse: bool = True, device_cache: bool = True, length: int | None = None
    ) -> MallocResult:
        """Blocks for all tokens that a request has now. A new one may take over cached blocks and prunes nothing.

        Args:
          id: the request.
          reuse: its blocks may be reused by others.
          device_cache: it may take over cached blocks, except behind a sharded prefill (`RtpConfig.prefill_cp_size`).
          length: tokens of each sequence that get slots, instead of all it has (RTP-LLM `incr_seq_len_override`).
        """
        request = self._request(id)
        if length is not None and length < 1:
            raise OperationError("length", length, "at least 1")
        new = request.resource.current_blocks == 0
        for row, tokens in zip(request.resource.rows, request.tokens, strict=True):
            if request.given is not None:
                _set_keys(row, _given_keys(request.given, request.lengths.seq, self.config.block_size, partial=new))
            elif not new:
                _set_keys(row, next_keys(RollingKeys(tuple(row.keys), row.aligned), tokens, self.config.block_size))
            elif not row.keys:
                _set_keys(row, first_keys(tokens, self.config.block_size))
        device_cache = device_cache and self.config.prefill_cp_size == 1
        info = MallocInfo(request.resource, request.lengths, reuse, device_cache, cleanup=not new, seq=length)
        return self.allocator.malloc(info)

    def append(self, id: str, tokens: Sequence[Sequence[int]]) -> None:
        """Every sequence of a request gets more tokens, all equally many."""
        request = self._request(id)
        if request.given is not None:
            raise OperationError("id", id, "a request that came with tokens")
        if len(tokens) != request.resource.batch or len({len(more) for more in tokens}) != 1:
            raise OperationError("tokens", tokens, f"equally many for each of {request.resource.batch} sequences")
        for known, more in zip(request.tokens, tokens, strict=True):
            known += more
        request.lengths.set_length(len(request.tokens[0]))
        if request.resource.current_blocks == 0:
            _forget_keys(request)

    def insert(self, id: str, *, resident: bool = False) -> None:
        """Enter a request's whole blocks into the cache; the key of a partly filled one is dropped."""
        request = self._request(id)
        if request.resource.current_blocks == 0:
            raise OperationError("id", id, "a request with blocks")
        if not request.resource.aligned:
            for row in request.resource.rows:
                _set_keys(row, RollingKeys(tuple(row.keys[:-1]), True))
        self.allocator.insert(request.resource, request.lengths.seq, resident)

    def fork(self, id: str, sources: list[int], *, copy_last: bool = True) -> list[CopyPair] | None:
        """The sequences of a request become those that `sources` names; what to copy, or None when refused."""
        request = self._request(id)
        if request.given is not None:
            raise OperationError("id", id, "a request that came with tokens, for its sequences part")
        pairs = self.allocator.update(request.resource, sources, copy_last)
        if pairs is not None and sources:
            request.tokens = [list(request.tokens[source]) for source in sources]
            request.lengths.batch = len(sources)
        return pairs

    def free(self, id: str) -> None:
        """A request gives all its blocks back; when it comes again, it is new, its keys included."""
        request = self._request(id)
        self.allocator.free(request.resource)
        _forget_keys(request)

    def drop(self, id: str) -> None:
        """A request that holds nothing is forgotten."""
        if self._request(id).resource.current_blocks:
            raise OperationError("id", id, "a request without blocks")
        del self.requests[id]

    def evict(self, least: int) -> int:
        """Evict at least that many cached blocks; how many left the cache."""
        return evict_and_free(self.allocator.cache, least)

    def peak(self, id: str, remaining: int, *, reuse: bool = False, target: int = 0) -> int:
        """Blocks beyond those it has that a request holds at its peak, `remaining` tokens from now."""
        request = self._request(id)
        return batch_peak(
            self.allocator,
            request.resource,
            seq=request.lengths.seq,
            common=request.lengths.common,
            remaining=remaining,
            reserve=request.lengths.reserve,
            reuse=reuse,
            target=target,
        )

    def sequence(self, id: str, index: int) -> Resource:
        """One sequence of a request."""
        rows = self._request(id).resource.rows
        if not 0 <= index < len(rows):
            raise OperationError("sequence", index, f"a sequence from 0 to {len(rows) - 1}")
        return rows[index]

    def rows(self, id: str) -> list[list[list[int]]]:
        """Blocks of each sequence of a request and each group, holes included."""
        return [[list(blocks.blocks) for blocks in row.groups] for row in self._request(id).resource.rows]

    def _request(self, id: str) -> RtpRequest:
        try:
            return self.requests[id]
        except KeyError:
            raise OperationError("id", id, "a request that arrived and was not dropped") from None


def _forget_keys(request: RtpRequest) -> None:
    for row in request.resource.rows:
        _set_keys(row, RollingKeys())


def _given_keys(given: Sequence[int], tokens: int, block_size: int, *, partial: bool) -> RollingKeys:
    """The keys of whole blocks, and with `partial` one that nobody else has for a partly filled one."""
    keys = tuple(given[: tokens // block_size])
    if partial and tokens % block_size:
        return RollingKeys((*keys, PARTIAL), False)
    return RollingKeys(keys, True)


def _set_keys(row: Resource, keys: RollingKeys) -> None:
    row.set_keys(keys.keys)
    row.aligned = keys.aligned
