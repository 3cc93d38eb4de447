"""A trace whose prefixes are interned once for every size of block, however often it is replayed."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hkv.replay.traces.reader import TraceRequest, granularity


@dataclasses.dataclass(frozen=True)
class Interned:
    """Prefix keys of a trace's requests, one request's after the other's.

    Attributes:
      keys: int32[m]; a request that is too long has none.
      ends: int64[n + 1], where each request's keys begin, and where the last ones end.
    """

    keys: np.ndarray
    ends: np.ndarray

    def of(self, index: int) -> np.ndarray:
        """The keys of one request, int32."""
        return self.keys[self.ends[index] : self.ends[index + 1]]


class InternedTrace:
    """Requests of a trace, with what every replay of them needs to know, found when it is first asked for.

    Attributes:
      arrivals: lists of arrivals that replays of it made, by what these depend on.
      granularity: tokens of the finest part that the trace names, as `hkv.replay.traces.reader.granularity`.
    """

    def __init__(self, requests: Iterable[TraceRequest]) -> None:
        self.requests: Sequence[TraceRequest] = list(requests)
        self.granularity = granularity(self.requests)
        self.arrivals: dict[Any, Any] = {}
        self._keys: dict[tuple[int, int], Interned] = {}
        self._shared: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def keys(self, block: int, max_model_len: int) -> Interned:
        """Prefix keys, one for every `block` tokens of prompt and output."""
        asked = block, max_model_len
        if asked not in self._keys:
            self._keys[asked] = self._interned(block, max_model_len)
        return self._keys[asked]

    def shared(self, max_model_len: int, decode_tokens: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that earlier requests had too, as `hkv.replay.traces.interned.shared_prefixes` finds them."""
        asked = max_model_len, decode_tokens if any(each.output_tokens for each in self.requests) else 0
        if asked not in self._shared:
            self._shared[asked] = shared_prefixes(self.requests, *asked)
        return self._shared[asked]

    def _interned(self, block: int, max_model_len: int) -> Interned:
        served = [each.input_length + each.output_length <= max_model_len for each in self.requests]
        found = Interned(*keys_of_ids(self.requests, served, block, max(1, self.granularity)))
        if all(each.tokens is None for each in self.requests):
            return found
        return Interned(_with_tokens(self.requests, block, found), found.ends)


# Gives the prefixes of a trace's requests dense integer keys: equal keys, equal tokens from the first on.
#
# Keys are 0, 1, 2, ... in the order in which prefixes are met, so tables by key stay small. A prefix of t tokens that
# ends within the j-th id of a request is known by that id and t, since equal ids mean equal prefixes; any block size
# will do, whether or not it divides `tokens_per_id`. Token lists are known by their tokens. Tokens that the trace does
# not name (generated ones, mostly) make keys that no other request has.


def _with_tokens(requests: Sequence[TraceRequest], block: int, found: Interned) -> np.ndarray:
    """Keys in which equal prefixes of token lists have the first one's key, and that are dense again."""
    keys, known, size = found.keys.copy(), dict[tuple[int, bytes], int](), 4 * block
    for index, request in enumerate(requests):
        mine, parent = found.of(index).tolist(), -1
        data = np.asarray([*(request.tokens or ()), *(request.output_tokens or ())], np.uint32).tobytes()
        named = min(len(data) // size, len(mine))
        for place in range(named):
            parent = known.setdefault((parent, data[place * size : (place + 1) * size]), mine[place])
            mine[place] = parent
        keys[found.ends[index] : found.ends[index] + named] = mine[:named]
    return np.unique(keys, return_inverse=True)[1].astype(np.int32)


def keys_of_ids(
    requests: Sequence[TraceRequest], served: Sequence[bool], hash_block_size: int, tokens_per_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keys of requests that are served, by their `hash_ids` where they have some, of all of them at once.

    Of each request, element i names the first `(i + 1) * hash_block_size` tokens of prompt and output together.

    Returns:
      int32[m], the keys of one request after the other's; int64[n + 1], where each request's begin, and the end.
    """
    step, there = hash_block_size, np.asarray(served, bool)
    ids = [request.hash_ids or [] if has else [] for request, has in zip(requests, served, strict=True)]
    counts = np.array([len(each) for each in ids], np.int64)
    prompts = np.where(there, [request.input_length for request in requests], 0)
    lengths = np.where(there, [request.input_length + request.output_length for request in requests], 0)
    numbers: dict[int, int] = {}
    which = np.fromiter(
        (numbers.setdefault(each, len(numbers)) for some in ids for each in some), np.int64, counts.sum()
    )
    first = np.flatnonzero(np.diff(np.maximum.accumulate(which), prepend=-1))
    owner = np.repeat(np.arange(len(ids)), counts)
    place = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    begun, ended = place * tokens_per_id // step, (place + 1) * tokens_per_id // step
    known = np.minimum(prompts, counts * tokens_per_id) // step
    totals = lengths // step
    # Keys are taken in the order of the trace: of each request those of ids that are new, then those of no id.
    taken = np.zeros(len(which), np.int64)
    taken[first] = (ended - begun)[first]
    new = np.bincount(owner, taken, len(ids)).astype(np.int64)
    start = np.cumsum(new + totals - known) - (new + totals - known)
    before = np.cumsum(taken) - taken - np.repeat(np.cumsum(new) - new, counts)
    key_of_id = (start[owner] + before)[first][which]
    named = np.clip(np.minimum(ended, known[owner]) - begun, 0, None)
    # Keys of a request follow each other in runs: one for each of its ids, and one for what no id names.
    ids_at, rest_at = np.arange(len(which)) + owner, np.cumsum(counts) + np.arange(len(ids))
    sizes, begins = np.zeros((2, len(which) + len(ids)), np.int64)
    sizes[ids_at], sizes[rest_at] = named, totals - known
    begins[ids_at], begins[rest_at] = key_of_id, start + new
    begins -= np.cumsum(sizes) - sizes
    ends = np.concatenate([[0], np.cumsum(totals)])
    return np.arange(ends[-1], dtype=np.int32) + np.repeat(begins.astype(np.int32), sizes), ends


# Prefixes that requests of a trace have in common with earlier ones: what a cache of any size could know of them.

BLOCK = 64
"""Tokens of a node of the tree that token lists are kept in."""


def shared_prefixes(
    requests: Sequence[TraceRequest], max_model_len: int, decode_tokens: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens at the start of each prompt that an earlier request had too, its output included.

    Requests that are too long are refused on arrival, so that nobody shares anything with them. Where so many tokens
    are generated a step, the last step's are left out: they are never computed.

    Returns:
      Two int64[n]: tokens that the trace says are shared; and how many more after them may be, which it cannot say: at
      most what an earlier request of the same prefix goes on with, to the end of the id. All of a prompt that the trace
      does not name.
    """
    ids, tokens = _Ids(), _Tokens()
    shared, unresolved = np.zeros((2, len(requests)), np.int64)
    for index, request in enumerate(requests):
        served = request.input_length + request.output_length <= max_model_len
        if request.hash_ids is not None:
            shared[index], unresolved[index] = ids.found(request)
            if served:
                ids.add(request)
        elif request.tokens is not None:
            shared[index] = tokens.found(request.tokens)
            if served:
                output = request.output_tokens or []
                computed = max(len(output) - 1, 0) // decode_tokens * decode_tokens if decode_tokens else len(output)
                tokens.add([*request.tokens, *output[:computed]])
        else:
            unresolved[index] = request.input_length
    return shared, unresolved


class _Ids:
    """Prefixes by ids. An id names all that is before it, so that the last one of a prefix is the prefix."""

    ROOT = -1

    def __init__(self) -> None:
        self._named: dict[int, int] = {}
        self._reached: dict[int, int] = {}

    def found(self, request: TraceRequest) -> tuple[int, int]:
        """Tokens that are known, and tokens after them that may be."""
        ids, size, length = request.hash_ids or [], request.tokens_per_id, request.input_length
        count = next((place for place, each in enumerate(ids) if each not in self._named), len(ids))
        last = ids[count - 1] if count else self.ROOT
        known = min(self._named.get(last, 0), length)
        if known == count * size:
            more = min(self._reached.get(last, 0) - known, size - 1, length - known)
        else:  # the last id named fewer tokens before: the rest of them may be equal too
            more = min(self._reached[last] - known, count * size - known, length - known)
        return known, max(more, 0)

    def add(self, request: TraceRequest) -> None:
        """The request is served: what it names, and how far it goes on, is known from now on."""
        ids, size, length = request.hash_ids or [], request.tokens_per_id, request.input_length
        total = length + request.output_length
        self._reached[self.ROOT] = max(self._reached.get(self.ROOT, 0), total)
        for place, each in enumerate(ids, start=1):
            self._named[each] = max(self._named.get(each, 0), min(place * size, length))
            self._reached[each] = max(self._reached.get(each, 0), total)


class _Tokens:
    """Prefixes by tokens: a tree of blocks; what follows each node is kept in order, so that neighbours share most."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, bytes], int] = {}
        self._following: list[list[bytes]] = [[]]

    def found(self, tokens: Sequence[int]) -> int:
        """Length of the longest prefix that was added before."""
        data, node, place = _bytes(tokens), 0, 0
        while (child := self._children.get((node, data[place : place + 4 * BLOCK]))) is not None:
            node, place = child, place + 4 * BLOCK
        rest, following = data[place : place + 4 * BLOCK], self._following[node]
        middle = bisect.bisect_left(following, rest)
        return place // 4 + max((_common(rest, each) for each in following[max(middle - 1, 0) : middle + 1]), default=0)

    def add(self, tokens: Sequence[int]) -> None:
        """Adds a sequence, and with it all of its prefixes."""
        data, node = _bytes(tokens), 0
        for place in range(0, len(data), 4 * BLOCK):
            part = data[place : place + 4 * BLOCK]
            following = self._following[node]
            middle = bisect.bisect_left(following, part)
            if middle == len(following) or following[middle] != part:
                following.insert(middle, part)
            if len(part) == 4 * BLOCK:
                child = self._children.setdefault((node, part), len(self._following))
                if child == len(self._following):
                    self._following.append([])
                node = child


def _bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as bytes whose order is theirs."""
    return np.asarray(tokens, ">u4").tobytes()


def _common(mine: bytes, other: bytes) -> int:
    """Tokens that two sequences begin with alike."""
    length = min(len(mine), len(other)) // 4 * 4
    different = np.flatnonzero(np.frombuffer(mine[:length], ">u4") != np.frombuffer(other[:length], ">u4"))
    return int(different[0]) if len(different) else length // 4
