"""Prefixes that requests of a trace have in common with earlier ones: what a cache of any size could know of them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from hkv.replay.traces.reader import TraceRequest

BLOCK = 64
"""Tokens of a node of the tree that token lists are kept in."""


def shared_prefixes(requests: Sequence[TraceRequest], max_model_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens at the start of each prompt that an earlier request had too, its output included.

    Requests that are too long are refused on arrival, so that nobody shares anything with them.

    Args:
      requests: in order of arrival.
      max_model_len: most tokens of a request that is served.

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
                tokens.add([*request.tokens, *(request.output_tokens or ())])
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
