"""The chunks of the second tier: which keys they have, which is handed out next, what a request may store.

One pool serves all groups, and a chunk of any group costs the same. A store is all or nothing: room for every new chunk
of a request's step, or none of them. vLLM 0.33 `CPUOffloadingManager`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from hkv.errors import OperationError
from reference.dialects.vllm.offload.policies import POLICIES, Chunk, Key, Uses


class PreparedStore(NamedTuple):
    """Answer to a store.

    Attributes:
      keys: those that are to be written, in the order of the offer.
      chunks: ids of their chunks.
      evicted: keys that left for them, in order.
    """

    keys: list[Key]
    chunks: list[int]
    evicted: list[Key]


class PoolEvent(NamedTuple):
    """Something that happened to keys.

    Attributes:
      keys: in the order in which they were evicted, else sorted.
      removed: whether they left; else they can be read from now on.
      failed: whether they left because their store failed.
    """

    keys: list[Key]
    removed: bool
    failed: bool = False


@dataclasses.dataclass
class Context:
    """A request as the pool knows it.

    Attributes:
      positions: tokens up to the end of each chunk that it can name.
      uses: chunks that it has used, and when the pool had been emptied how often; None before it used any.
    """

    positions: dict[Key, int] = dataclasses.field(default_factory=dict)
    uses: tuple[int, Uses] | None = None


class ChunkPool:
    """Chunks, their keys, and the requests that use them.

    Args:
      capacity: chunks.
      policy: `lru` or `arc`.
      threshold: offers of a key, by any request, from which on it is stored; below 2 at once.
      tracked: keys whose offers are counted at most.

    Attributes:
      policy: chunks by their keys, and the order in which they leave.
      handed_out: ids below this have been handed out since the pool was emptied.
      free: ids that came back; the last one is handed out first, once all ids have been.
      offers: of each key that is tracked, how often it was offered; the one offered longest ago first.
      events: what happened since they were last taken.
    """

    def __init__(self, capacity: int, policy: str = "lru", threshold: int = 0, tracked: int = 64_000) -> None:
        self.capacity, self._kind, self._threshold, self._tracked = capacity, policy, threshold, tracked
        self.offers: dict[Key, int] = {}
        self.events: list[PoolEvent] = []
        self._cleared = 0
        self.clear()

    def clear(self) -> None:
        """Empties the pool, whatever is being transferred; offers that were counted stay, and uses count no more."""
        self.policy = POLICIES[self._kind](self.capacity)
        self.handed_out = 0
        self.free: list[int] = []
        self._cleared += 1

    def begin(self, request: Context) -> Uses:
        """Chunks that a request has used since the pool was last emptied.

        Raises:
          OperationError: it has ended.
        """
        if request.uses is None or request.uses[0] != self._cleared:
            request.uses = (self._cleared, Uses(request.positions))
        if request.uses[1].ended:
            raise OperationError("request", "one that has ended", "a request that goes on")
        return request.uses[1]

    # Stores.

    def store(self, keys: Sequence[Key], request: Context, spared: Collection[Key] = ()) -> PreparedStore | None:
        """Takes chunks for those of a request's keys that are absent and worth it; None where there is no room.

        In any case offers are counted, and what is resident and ready counts as used. What is `spared` does
        not leave for it.

        Raises:
          OperationError: the request has ended.
        """
        uses = self.begin(request)
        if self._threshold >= 2:
            self._count(keys)
        absent = [key for key in keys if self.policy.get(key) is None]
        ready = [key for key in keys if (chunk := self.policy.get(key)) is not None and chunk.readers >= 0]
        if self._threshold >= 2:
            absent = [key for key in absent if self.offers.get(key, 0) >= self._threshold]
        self.policy.miss([key for key in absent if key not in uses.missed])
        uses.missed.update(absent)
        self._note([key for key in keys if key in absent or key in ready], uses, ready)
        if not absent:
            return PreparedStore([], [], [])
        evicted = self._make_room(len(absent), [*keys, *spared])
        if evicted is None:
            return None
        chunks = [self._take() for _ in absent]
        for key, chunk in zip(absent, chunks, strict=True):
            self.policy.insert(key, Chunk(chunk), uses)
        uses.inserted.update(absent)
        return PreparedStore(absent, chunks, evicted)

    def room(self, keys: Sequence[Key], spared: Collection[Key] = ()) -> int:
        """Chunks that are free, or can be made free without those of these keys."""
        return len(self.free) + self.capacity - self.handed_out + self.policy.idle({*keys, *spared})

    def complete_store(self, keys: Iterable[Key], ok: bool = True) -> None:
        """Chunks can be read from now on; or, where the transfer failed, leave again."""
        changed = []
        for key in keys:
            chunk = self.policy.get(key)
            if chunk is None or chunk.readers >= 0:
                continue
            chunk.readers = 0
            if not ok:
                self.policy.remove(key)
                self.free.append(chunk.id)
            changed.append(key)
        if changed:
            self.events.append(PoolEvent(sorted(changed), removed=not ok, failed=not ok))

    def _count(self, keys: Sequence[Key]) -> None:
        """Counts an offer; keys that it names do not leave for others that it names."""
        known = [key for key in keys if key in self.offers]
        for key in known:
            self.offers[key] = self.offers.pop(key) + 1
        replaceable = len(self.offers) - len(set(known))
        for key in keys:
            if key in self.offers:
                continue
            if len(self.offers) >= self._tracked:
                if not replaceable:
                    continue
                del self.offers[next(iter(self.offers))]
                replaceable -= 1
            self.offers[key] = 1

    def _make_room(self, count: int, offered: Sequence[Key]) -> list[Key] | None:
        """Keys that leave so that `count` chunks are free: none of those offered; None where that is impossible."""
        lacking = count - (len(self.free) + self.capacity - self.handed_out)
        if lacking <= 0:
            return []
        leaving = self.policy.evict(lacking, set(offered))
        if leaving is None:
            return None
        self.free += [chunk.id for _, chunk in leaving]
        keys = [key for key, _ in leaving]
        self.events.append(PoolEvent(keys, removed=True))
        return keys

    def _take(self) -> int:
        if self.handed_out < self.capacity:
            self.handed_out += 1
            return self.handed_out - 1
        return self.free.pop()

    # Loads.

    def lookup(self, key: Key) -> bool | None:
        """True for a chunk that can be read, False for one that is being written, None for none."""
        chunk = self.policy.get(key)
        return None if chunk is None else chunk.readers >= 0

    def load(self, keys: Sequence[Key], request: Context) -> list[int]:
        """Chunks of a request's keys; they stay until `complete_load`.

        Raises:
          OperationError: a key that cannot be read; the request has ended.
        """
        uses, chunks = self.begin(request), []
        for key in keys:
            chunk = self.policy.get(key)
            if chunk is None or chunk.readers < 0:
                raise OperationError("keys", key, "keys of chunks that can be read")
            chunks.append(chunk)
        for chunk in chunks:
            chunk.readers += 1
        self._note(keys, uses, keys)
        return [chunk.id for chunk in chunks]

    def use(self, keys: Sequence[Key], request: Context) -> None:
        """A request has used those of some keys that can be read, though it read them elsewhere."""
        ready = [key for key in keys if self.lookup(key)]
        self._note(ready, self.begin(request), ready)

    def complete_load(self, keys: Iterable[Key]) -> None:
        """A transfer reads these no more."""
        for key in keys:
            chunk = self.policy.get(key)
            if chunk is None or chunk.readers < 1:
                raise OperationError("keys", key, "keys of chunks that are being read")
            chunk.readers -= 1

    # Requests.

    def end(self, request: Context) -> None:
        """A request has ended: its use of its chunks is made."""
        if request.uses is not None and request.uses[0] == self._cleared and not request.uses[1].ended:
            request.uses[1].ended = True
            self.policy.end(request.uses[1])

    def _note(self, keys: Sequence[Key], uses: Uses, reused: Sequence[Key]) -> None:
        new = list(dict.fromkeys(key for key in keys if key not in uses.seen))
        for key in new:
            uses.groups.setdefault(key[1], []).append(key)
        if new:
            self.policy.seen(new, uses)
        uses.reused.update(key for key in reused if key not in uses.inserted)

    # Events.

    def take_events(self) -> list[PoolEvent]:
        """Drains the events; of keys whose store failed, those that have not come back since."""
        events, self.events = self.events, []
        told = []
        for event in events:
            keys = [key for key in event.keys if not event.failed or self.policy.get(key) is None]
            if keys:
                told.append(event._replace(keys=keys))
        return told
