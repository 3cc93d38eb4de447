"""The second tier's chunks for replays: the rules of `reference.dialects.vllm.offload.pool`, at a cost of its own.

An operation costs as much as the keys it names, however many chunks there are: both policies keep their lists in
ordered dictionaries. A pool also counts what it did, which replays are asked about.
vLLM 0.33 `CPUOffloadingManager`, `LRUCachePolicy`, `ARCCachePolicy`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

Key: TypeAlias = tuple[int, int]
"""Name of a chunk: the interned prefix that ends with it, and its group."""


class PreparedStore(NamedTuple):
    """Answer to a store: keys that are to be written, ids of their chunks, keys that left for them."""

    keys: list[Key]
    chunks: list[int]
    evicted: list[Key]


@dataclasses.dataclass
class Counts:
    """Figures of a pool, in chunks but for `refused`.

    Attributes:
      stored: chunks that were stored.
      read: of these, chunks that were loaded once at least.
      loaded: chunks that were loaded, each time.
      evicted: chunks that left.
      refused: stores that found no room.
      peak: most chunks that were there at a time.
    """

    stored: int = 0
    read: int = 0
    loaded: int = 0
    evicted: int = 0
    refused: int = 0
    peak: int = 0


@dataclasses.dataclass(slots=True)
class _Chunk:
    """A chunk in the tier: its id, transfers that read it (-1: it is being written), its rank, whether it was read."""

    id: int
    readers: int = -1
    rank: tuple[int, int] = (0, 0)
    read: bool = False


@dataclasses.dataclass(slots=True)
class _Uses:
    """Chunks that one request has used since the pool was last emptied."""

    seen: dict[Key, None] = dataclasses.field(default_factory=dict)
    inserted: set[Key] = dataclasses.field(default_factory=set)
    reused: set[Key] = dataclasses.field(default_factory=set)
    missed: set[Key] = dataclasses.field(default_factory=set)
    number: int = 0
    ended: bool = False


class Chunks:
    """Chunks, their keys, and the requests that use them.

    Args:
      capacity: chunks.
      policy: `lru` or `arc`.
      threshold: offers of a key, by any request, from which on it is stored; below 2 at once.
      tracked: keys whose offers are counted at most.

    Attributes:
      chunks: the chunk of each key.
      counts: figures.
    """

    def __init__(self, capacity: int, policy: str = "lru", threshold: int = 0, tracked: int = 64_000) -> None:
        self.capacity, self._threshold, self._tracked = capacity, threshold, tracked
        self.chunks: dict[Key, _Chunk] = {}
        self.counts = Counts()
        self._policy: _Lru | _Arc = (_Lru if policy == "lru" else _Arc)(self.chunks, capacity)
        self._handed_out, self._free = 0, list[int]()
        self._offers: OrderedDict[Key, int] = OrderedDict()
        self._idle = 0

    def begin(self, request: Any) -> _Uses:
        """Chunks that a request has used; `request` has the attributes of the reference's `Context`."""
        if request.uses is None:
            request.uses = (0, _Uses())
        return request.uses[1]

    def settled(self) -> list[int]:
        """Chunks that no request used last which has not ended, the next to leave first.

        Of ARC all, those that one request used first; then how many these are, how many names of either it remembers,
        and whole chunks of its target.
        """
        return self._policy.settled()

    # Stores.

    def store(self, keys: Sequence[Key], request: Any) -> PreparedStore | None:
        """Takes chunks for those of a request's keys that are absent and worth it; None where there is no room."""
        uses = self.begin(request)
        if self._threshold >= 2:
            self._count(keys)
        absent, ready = list[Key](), list[Key]()
        for key in keys:
            chunk = self.chunks.get(key)
            if chunk is not None:
                ready += [key] * (chunk.readers >= 0)
            elif self._threshold < 2 or self._offers.get(key, 0) >= self._threshold:
                absent.append(key)
        self._policy.miss([key for key in absent if key not in uses.missed])
        uses.missed.update(absent)
        wanted = {*absent, *ready}
        self._note([key for key in keys if key in wanted], ready, uses, request)
        if not absent:
            return PreparedStore([], [], [])
        evicted = self._make_room(len(absent), keys)
        if evicted is None:
            self.counts.refused += 1
            return None
        ids = [self._take() for _ in absent]
        for key, id in zip(absent, ids, strict=True):
            self.chunks[key] = _Chunk(id)
            self._policy.insert(key, uses, request.positions)
        uses.inserted.update(absent)
        self.counts.stored += len(absent)
        self.counts.peak = max(self.counts.peak, len(self.chunks))
        return PreparedStore(absent, ids, evicted)

    def complete_store(self, keys: Iterable[Key]) -> None:
        """Chunks can be read from now on."""
        for key in keys:
            chunk = self.chunks.get(key)
            if chunk is not None and chunk.readers < 0:
                chunk.readers = 0
                self._idle += 1

    def _count(self, keys: Sequence[Key]) -> None:
        known = {key for key in keys if key in self._offers}
        for key in keys:
            if key in known:
                self._offers[key] += 1
                self._offers.move_to_end(key)
        replaceable = len(self._offers) - len(known)
        for key in keys:
            if key in self._offers:
                continue
            if len(self._offers) >= self._tracked:
                if not replaceable:
                    continue
                self._offers.popitem(last=False)
                replaceable -= 1
            self._offers[key] = 1

    def _make_room(self, count: int, offered: Sequence[Key]) -> list[Key] | None:
        lacking = count - (len(self._free) + self.capacity - self._handed_out)
        if lacking <= 0:
            return []
        protected = set(offered)
        idle = self._idle - sum((chunk := self.chunks.get(key)) is not None and not chunk.readers for key in protected)
        leaving = None if idle < lacking else self._policy.choose(lacking, protected)
        if leaving is None:
            return None
        for key in leaving:
            self._free.append(self.chunks.pop(key).id)
        self._idle -= len(leaving)
        self.counts.evicted += len(leaving)
        return leaving

    def _take(self) -> int:
        if self._handed_out < self.capacity:
            self._handed_out += 1
            return self._handed_out - 1
        return self._free.pop()

    # Loads.

    def lookup(self, key: Key) -> bool | None:
        """True for a chunk that can be read, False for one that is being written, None for none."""
        chunk = self.chunks.get(key)
        return None if chunk is None else chunk.readers >= 0

    def load(self, keys: Sequence[Key], request: Any) -> list[int]:
        """Chunks of a request's keys, all of which can be read; they stay until `complete_load`."""
        chunks = [self.chunks[key] for key in keys]
        for chunk in chunks:
            self._idle -= not chunk.readers
            chunk.readers += 1
            self.counts.read += not chunk.read
            chunk.read = True
        self.counts.loaded += len(chunks)
        self._note(keys, keys, self.begin(request), request)
        return [chunk.id for chunk in chunks]

    def use(self, keys: Sequence[Key], request: Any) -> None:
        """A request has used those of some keys that can be read, though it read them elsewhere."""
        ready = [key for key in keys if self.lookup(key)]
        self._note(ready, ready, self.begin(request), request)

    def complete_load(self, keys: Iterable[Key]) -> None:
        """A transfer reads these no more."""
        for key in keys:
            chunk = self.chunks[key]
            chunk.readers -= 1
            if not chunk.readers:
                self._idle += 1

    # Requests.

    def end(self, request: Any) -> None:
        """A request has ended: its use of its chunks is made."""
        uses = self.begin(request)
        if not uses.ended:
            uses.ended = True
            order = sorted(uses.seen, key=lambda key: (request.positions[key], key[1]), reverse=True)
            self._policy.end([key for key in order if key in self.chunks], uses)

    def _note(self, keys: Sequence[Key], reused: Sequence[Key], uses: _Uses, request: Any) -> None:
        new = [key for key in keys if key not in uses.seen]
        uses.seen.update(dict.fromkeys(new))
        if new:
            self._policy.seen(new, uses, request.positions)
        uses.reused.update(key for key in reused if key not in uses.inserted)


class _Lru:
    """Chunks in the order in which they leave: by the number of the request that used them last.

    Chunks of requests that ended stand by themselves, where their end put them. In between stand the requests that have
    not, by their numbers, each for the chunks that it used last: these are put in order where one of them has to leave.
    """

    def __init__(self, chunks: dict[Key, _Chunk], capacity: int) -> None:
        del capacity
        self._chunks, self._last = chunks, 0
        self._order: OrderedDict[Key | int, set[Key]] = OrderedDict()

    def miss(self, keys: Sequence[Key]) -> None:
        pass

    def seen(self, keys: Iterable[Key], uses: _Uses, positions: dict[Key, int]) -> None:
        number = self._number(uses)
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and (rank := (number, -positions[key])) > chunk.rank:
                self._take_out(key, chunk)
                self._order[number].add(key)
                chunk.rank = rank

    def insert(self, key: Key, uses: _Uses, positions: dict[Key, int]) -> None:
        number = self._number(uses)
        self._chunks[key].rank = (number, -positions[key])
        self._order[number].add(key)

    def settled(self) -> list[int]:
        found = [(chunk.rank, chunk.id) for chunk in self._chunks.values() if not chunk.rank[1]]
        return [id for _, id in sorted(found)]

    def end(self, keys: Iterable[Key], uses: _Uses) -> None:
        for key in keys:
            chunk = self._chunks[key]
            self._take_out(key, chunk)
            self._last += 1
            chunk.rank = (self._last, 0)
            self._order[key] = set()
        self._order.pop(uses.number, None)

    def choose(self, count: int, protected: Collection[Key]) -> list[Key] | None:
        """Idle keys that leave, in order; there are so many, none of them protected."""
        found = list(itertools.islice(self._leaving(protected), count))
        for key in found:
            self._take_out(key, self._chunks[key])
        return found

    def _leaving(self, protected: Collection[Key]) -> Iterator[Key]:
        for entry, used in self._order.items():
            keys = [entry] if isinstance(entry, tuple) else sorted(used, key=lambda key: (self._chunks[key].rank, key))
            yield from (key for key in keys if not self._chunks[key].readers and key not in protected)

    def _take_out(self, key: Key, chunk: _Chunk) -> None:
        number, position = chunk.rank
        if position:
            self._order[number].discard(key)
        else:
            del self._order[key]

    def _number(self, uses: _Uses) -> int:
        if not uses.number:
            self._last += 1
            uses.number = self._last
            self._order[self._last] = set()
        return uses.number


class _Arc:
    """Chunks used by one request, chunks used by several, and how much room the former are worth."""

    def __init__(self, chunks: dict[Key, _Chunk], capacity: int) -> None:
        self._chunks, self._capacity, self._target = chunks, capacity, 0.0
        self._once: OrderedDict[Key, None] = OrderedDict()
        self._often: OrderedDict[Key, None] = OrderedDict()
        self._gone_once: OrderedDict[Key, None] = OrderedDict()
        self._gone_often: OrderedDict[Key, None] = OrderedDict()

    def miss(self, keys: Sequence[Key]) -> None:
        once, often = self._gone_once, self._gone_often
        for key in reversed(keys):
            if key in once:
                self._target = min(self._target + max(1, len(often) / len(once)), self._capacity)
                once.move_to_end(key)
            elif key in often:
                self._target = max(self._target - max(1, len(once) / len(often)), 0)
                often.move_to_end(key)

    def seen(self, keys: Iterable[Key], uses: _Uses, positions: dict[Key, int]) -> None:
        pass

    def settled(self) -> list[int]:
        found = [self._chunks[key].id for key in (*self._once, *self._often)]
        return [*found, *map(len, (self._once, self._gone_once, self._gone_often)), int(self._target)]

    def insert(self, key: Key, uses: _Uses, positions: dict[Key, int]) -> None:
        self._once[key] = None
        self._gone_once.pop(key, None)
        self._gone_often.pop(key, None)

    def end(self, keys: Iterable[Key], uses: _Uses) -> None:
        for key in keys:
            if key in self._often:
                if key in uses.reused or key in uses.inserted:
                    self._often.move_to_end(key)
            elif key in uses.reused:
                del self._once[key]
                self._often[key] = None
            elif key in uses.inserted:
                self._once.move_to_end(key)

    def choose(self, count: int, protected: Collection[Key]) -> list[Key] | None:
        left = len(self._once)
        once, often = self._idle(self._once, protected), self._idle(self._often, protected)
        found: list[tuple[Key, bool]] = []
        for _ in range(count):
            chosen = next(once, None) if left >= int(self._target) else None
            from_once = chosen is not None
            chosen = chosen or next(often, None)
            if chosen is None:
                chosen, from_once = next(once, None), True
            if chosen is None:
                return None
            left -= from_once
            found.append((chosen, from_once))
        for key, from_once in found:
            del (self._once if from_once else self._often)[key]
            (self._gone_once if from_once else self._gone_often)[key] = None
        for gone in (self._gone_once, self._gone_often):
            while len(gone) > self._capacity:
                gone.popitem(last=False)
        return [key for key, _ in found]

    def _idle(self, keys: Iterable[Key], protected: Collection[Key]) -> Iterator[Key]:
        return (key for key in keys if not self._chunks[key].readers and key not in protected)
