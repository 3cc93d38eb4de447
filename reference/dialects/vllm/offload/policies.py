"""Order in which chunks leave the second tier: LRU by the requests that used them, and ARC.

Neither looks at single lookups. A request counts as one use of every chunk that it stored or read, made when it ends,
from its last position to its first, so that of one prompt the tail leaves before the head. Until then LRU gives all
chunks of a request one rank, and ARC moves nothing. Only chunks that no transfer reads or writes may leave.
vLLM 0.33 `LRUCachePolicy`, `ARCCachePolicy`; its heap of evictable chunks is only an implementation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

Key: TypeAlias = tuple[Any, int]
"""Name of a chunk: the chain key of the prefix that ends with it, and its group. Keys of one cache can be ordered."""


@dataclasses.dataclass
class Chunk:
    """A chunk in the tier.

    Attributes:
      id: its place in the pool.
      readers: transfers that read it; -1 while the one that writes it is not finished.
    """

    id: int
    readers: int = -1


@dataclasses.dataclass
class Uses:
    """Chunks that one request has stored or read since the cache was last emptied.

    Attributes:
      positions: tokens up to the end of each chunk that the request can name.
      groups: keys of each group in the order in which they were first seen.
      inserted: keys that it stored.
      reused: keys that it found ready and did not store itself.
      missed: keys that it was to store and that were absent.
      ended: whether the request has ended.
      number: its number among all requests that used anything (LRU); 0 before it has one.
    """

    positions: dict[Key, int]
    groups: dict[int, list[Key]] = dataclasses.field(default_factory=dict)
    inserted: set[Key] = dataclasses.field(default_factory=set)
    reused: set[Key] = dataclasses.field(default_factory=set)
    missed: set[Key] = dataclasses.field(default_factory=set)
    ended: bool = False
    number: int = 0

    @property
    def seen(self) -> set[Key]:
        """All keys."""
        return {key for keys in self.groups.values() for key in keys}

    def in_order(self) -> list[Key]:
        """All keys by position; of equal ones, by group."""
        keys = [key for group in sorted(self.groups) for key in sorted(self.groups[group], key=self._position)]
        return sorted(keys, key=self._position)

    def _position(self, key: Key) -> int:
        return self.positions[key]


class Policy(Protocol):
    """Chunks of a pool, and which of them leave."""

    def get(self, key: Key) -> Chunk | None:
        """The chunk of a key."""
        ...

    def miss(self, keys: Sequence[Key]) -> None:
        """Takes note of keys that a request is to store, each once a request."""
        ...

    def seen(self, keys: Iterable[Key], uses: Uses) -> None:
        """Takes note of keys that a request uses for the first time."""
        ...

    def insert(self, key: Key, chunk: Chunk, uses: Uses) -> None:
        """Enters a chunk."""
        ...

    def remove(self, key: Key) -> None:
        """Takes a chunk out whose store failed."""
        ...

    def end(self, uses: Uses) -> None:
        """Makes a request's use of its chunks, once it has ended."""
        ...

    def evict(self, count: int, protected: Collection[Key]) -> list[tuple[Key, Chunk]] | None:
        """Takes out that many idle chunks, none of them protected; None, and nothing changes, if there are fewer."""
        ...

    def idle(self, protected: Collection[Key]) -> int:
        """Chunks that `evict` can take out."""
        ...


class Lru:
    """Chunks by rank: the number of the request that used them last, and of one request the last position first.

    Attributes:
      chunks: those that there are.
      ranks: of each, `(number, -position)`; the smallest leaves first.
      last: the number that was given last.
    """

    def __init__(self, capacity: int) -> None:
        del capacity
        self.chunks: dict[Key, Chunk] = {}
        self.ranks: dict[Key, tuple[int, int]] = {}
        self.last = 0

    def get(self, key: Key) -> Chunk | None:
        return self.chunks.get(key)

    def miss(self, keys: Sequence[Key]) -> None:
        pass

    def seen(self, keys: Iterable[Key], uses: Uses) -> None:
        number = self._number(uses)
        for key in keys:
            if key in self.chunks:
                self.ranks[key] = max(self.ranks[key], (number, -uses.positions[key]))

    def insert(self, key: Key, chunk: Chunk, uses: Uses) -> None:
        self.chunks[key] = chunk
        self.ranks[key] = (self._number(uses), -uses.positions[key])

    def remove(self, key: Key) -> None:
        del self.chunks[key], self.ranks[key]

    def end(self, uses: Uses) -> None:
        for key in reversed(uses.in_order()):
            if key in self.chunks:
                self.last += 1
                self.ranks[key] = (self.last, 0)

    def evict(self, count: int, protected: Collection[Key]) -> list[tuple[Key, Chunk]] | None:
        idle = [key for key, chunk in self.chunks.items() if not chunk.readers and key not in protected]
        if len(idle) < count:
            return None
        leaving = sorted(idle, key=lambda key: (self.ranks[key], key))[:count]
        found = [(key, self.chunks[key]) for key in leaving]
        for key in leaving:
            self.remove(key)
        return found

    def idle(self, protected: Collection[Key]) -> int:
        return sum(1 for _ in _idle(self.chunks, protected))

    def _number(self, uses: Uses) -> int:
        if not uses.number:
            self.last += 1
            uses.number = self.last
        return uses.number


class Arc:
    """Chunks used by one request, chunks used by several, and how much room the former are worth (ARC).

    Attributes:
      once: chunks that one request stored, the next to leave first.
      often: chunks that another request found.
      gone_once: keys that left `once`, the oldest first; as many at most as the pool has chunks.
      gone_often: evicted from `often`.
      target: chunks that `once` should have.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.once: dict[Key, Chunk] = {}
        self.often: dict[Key, Chunk] = {}
        self.gone_once: dict[Key, None] = {}
        self.gone_often: dict[Key, None] = {}
        self.target = 0.0

    def get(self, key: Key) -> Chunk | None:
        return self.once.get(key) or self.often.get(key)

    def miss(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            if key in self.gone_once:
                step = max(1, len(self.gone_often) / len(self.gone_once))
                self.target = min(self.target + step, self._capacity)
                _to_end(self.gone_once, key)
            elif key in self.gone_often:
                step = max(1, len(self.gone_once) / len(self.gone_often))
                self.target = max(self.target - step, 0)
                _to_end(self.gone_often, key)

    def seen(self, keys: Iterable[Key], uses: Uses) -> None:
        pass

    def insert(self, key: Key, chunk: Chunk, uses: Uses) -> None:
        self.once[key] = chunk
        self.gone_once.pop(key, None)
        self.gone_often.pop(key, None)

    def remove(self, key: Key) -> None:
        del (self.once if key in self.once else self.often)[key]

    def end(self, uses: Uses) -> None:
        for key in reversed(uses.in_order()):
            if key in uses.reused:
                if key in self.once:
                    self.often[key] = self.once.pop(key)
                else:
                    _to_end(self.often, key)
            elif key in uses.inserted:
                _to_end(self.once, key)
                _to_end(self.often, key)

    def idle(self, protected: Collection[Key]) -> int:
        return sum(1 for chunks in (self.once, self.often) for _ in _idle(chunks, protected))

    def evict(self, count: int, protected: Collection[Key]) -> list[tuple[Key, Chunk]] | None:
        left = len(self.once)
        once, often = (_idle(chunks, protected) for chunks in (self.once, self.often))
        found: list[tuple[Key, Chunk, bool]] = []
        for _ in range(count):
            chosen = next(once, None) if left >= int(self.target) else None
            from_once = chosen is not None
            chosen = chosen or next(often, None)
            if chosen is None:
                chosen, from_once = next(once, None), True
            if chosen is None:
                return None
            left -= from_once
            found.append((*chosen, from_once))
        for key, _, from_once in found:
            self.remove(key)
            (self.gone_once if from_once else self.gone_often)[key] = None
        for gone in (self.gone_once, self.gone_often):
            for key in list(gone)[: max(0, len(gone) - self._capacity)]:
                del gone[key]
        return [(key, chunk) for key, chunk, _ in found]


def _to_end(entries: dict[Key, Any], key: Key) -> None:
    if key in entries:
        entries[key] = entries.pop(key)


def _idle(chunks: dict[Key, Chunk], protected: Collection[Key]) -> Iterator[tuple[Key, Chunk]]:
    return ((key, chunk) for key, chunk in chunks.items() if not chunk.readers and key not in protected)


POLICIES: dict[str, type[Lru] | type[Arc]] = {"lru": Lru, "arc": Arc}
"""Policies by their names in `eviction_policy`."""
