"""The second tier's text over plain objects: a pool of chunks for those who name chunks by tuples."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from hkv.dialects.vllm.offload import log as structs
from hkv.errors import OperationError
from hkv.version import check_reference

check_reference()  # before the first import of it

from reference.dialects.vllm.offload.doubles import HALF  # noqa: E402
from reference.dialects.vllm.offload.pool import perform  # noqa: E402
from reference.dialects.vllm.offload.records import (  # noqa: E402
    FATES,
    LISTS,
    Code,
    Counts,
    Event,
    Key,
    Offloaded,
    Tier,
    Use,
    is_ready,
)
from reference.language import NOTHING, Layout  # noqa: E402

LAYOUT = Layout(Tier)
"""Names and places of the tier's state."""

Name: TypeAlias = tuple[Any, int]
"""Name of a chunk: the chain key of the prefix that ends with it, and its group. Names of one tier can be ordered."""


class PreparedStore(NamedTuple):
    """Answer to a store: keys that are to be written, ids of their chunks, keys that left for them."""

    keys: list[Name]
    chunks: list[int]
    evicted: list[Name]


class PoolEvent(NamedTuple):
    """Something that happened to keys: they left, in order, or can be read, or left since their store `failed`."""

    keys: list[Name]
    removed: bool
    failed: bool = False


@dataclasses.dataclass(eq=False)
class Context:
    """A request as a pool's caller knows it.

    Attributes:
      positions: tokens up to the end of each chunk that it can name.
      row: its record, once it has one.
      uses: the records of chunks that it has named.
      ended: whether it has ended.
    """

    positions: dict[Name, int] = dataclasses.field(default_factory=dict)
    row: Offloaded | None = None
    uses: dict[Name, Use] = dataclasses.field(default_factory=dict)
    ended: bool = False


def least(layout: Layout) -> dict[str, int]:
    """One of everything that a layout wants the size of."""
    flats = layout.arrays.values()
    return dict.fromkeys([*layout.tables, *(flat.name for flat in flats if flat.line or not flat.table)], 1)


def empty(capacity: int, policy: str, threshold: int, tracked: int, *, tells: bool, **sizes: int) -> Tier:
    """An empty tier.

    Args:
      capacity: chunks.
      policy: `lru` or `arc`.
      threshold: offers of a key from which on it is stored.
      tracked: keys whose offers are counted at most.
      tells: whether what happens to keys is told.
      sizes: places for chunks, `room`; for uses that operations are about, `payload`; of tables, arrays and lines, by
        their names; of those that are not named, 1.
    """
    room, payload, keys = sizes.pop("room", 1), sizes.pop("payload", 1), sizes.pop("keys", 1)
    known = least(LAYOUT)
    known |= {"free": room, "aside": room, "heap.items": room + 2, "keys": keys + LISTS}
    known |= dict.fromkeys(("payload", "lacked", "moving"), payload)
    made: Tier = LAYOUT.make(known | sizes)
    made.config.chunks, made.config.arc = capacity, int(policy == "arc")
    made.config.threshold, made.config.tracked, made.config.tells = threshold, tracked, int(tells)
    lists = made.lists
    lists.once, lists.often, lists.gone_once, lists.gone_often, made.counted.ends = made.keys[1 : LISTS + 1]
    for ends in made.keys[1 : LISTS + 1]:
        for ring in (lists, made.counted):
            ring.newer[ends], ring.older[ends] = ends, ends
    made.known, made.filling, made.step = LISTS, 1, 1
    return made


class ChunkPool:
    """Chunks, their keys, and the requests that use them.

    Args:
      capacity: chunks.
      policy: `lru` or `arc`.
      threshold: offers of a key, by any request, from which on it is stored; below 2 at once.
      tracked: keys whose offers are counted at most.
      sizes: as of `empty`.

    Attributes:
      tier: the state of the text.
      keys: its records by name.
    """

    def __init__(
        self, capacity: int, policy: str = "lru", threshold: int = 0, tracked: int = 64_000, **sizes: int
    ) -> None:
        self.tier = empty(capacity, policy, threshold, tracked, tells=True, **sizes)
        self.keys: dict[Name, Key] = {}
        self._names: dict[Key, Name] = {}
        self._spare: dict[str, list[Any]] = {"keys": [self.tier.keys[LISTS + 1]], "named": [], "requests": []}
        self._events: list[PoolEvent] = []

    @property
    def counts(self) -> Counts:
        """Figures."""
        return self.tier.counts

    def begin(self, request: Context) -> None:
        """A request begins, or goes on.

        Raises:
          OperationError: it has ended.
        """
        self._do(Code.BEGIN, request)

    def clear(self) -> None:
        """Empties the pool, whatever is being transferred; offers that were counted stay, and uses count no more."""
        self._do(Code.CLEAR)

    def store(self, keys: Sequence[Name], request: Context, spares: bool = False) -> PreparedStore | None:
        """Takes chunks for those of a request's keys that are absent and worth it; None where there is no room.

        In any case offers are counted, and what is resident and ready counts as used. What the request has used does
        not leave for it where it `spares` that.
        """
        count = self._do(Code.STORE, request, keys, spares=spares)
        evicted = [key for event in self.drain() for key in event.keys]
        if count == NOTHING:
            return None
        lacked = [use.key for use in self.tier.lacked[:count]]
        return PreparedStore([self._names[key] for key in lacked], [key.chunk - 1 for key in lacked], evicted)

    def room(self, keys: Sequence[Name], request: Context, spares: bool = False) -> int:
        """Chunks that are free, or can be made free without these, and without those that the request has used."""
        return self._do(Code.ROOM, request, keys, spares=spares)

    def complete_store(self, keys: Iterable[Name], ok: bool = True) -> None:
        """Chunks can be read from now on; or, where the transfer failed, leave again."""
        self._do(Code.STORED if ok else Code.FAILED, None, list(keys))
        self.drain()

    def lookup(self, key: Name) -> bool | None:
        """True for a chunk that can be read, False for one that is being written, None for none."""
        found = self.keys.get(key)
        return is_ready(found) if found is not None and found.chunk else None

    def load(self, keys: Sequence[Name], request: Context) -> list[int]:
        """Chunks of a request's keys; they stay until `complete_load`.

        Raises:
          OperationError: a key that cannot be read; the request has ended.
        """
        for key in keys:
            if not self.lookup(key):
                raise OperationError("keys", key, "keys of chunks that can be read")
        self._do(Code.LOAD, request, keys)
        return [self.keys[key].chunk - 1 for key in keys]

    def use(self, keys: Sequence[Name], request: Context) -> None:
        """A request has used those of some keys that can be read, though it read them elsewhere."""
        self._do(Code.USE, request, keys)

    def complete_load(self, keys: Iterable[Name]) -> None:
        """A transfer reads these no more."""
        self._do(Code.LOADED, None, list(keys))

    def end(self, request: Context) -> None:
        """A request has ended: its use of its chunks is made, and its records are others'."""
        if request.row is not None:
            self._do(Code.END, request)
            for use in request.uses.values():
                use.seen = use.stored = use.found = use.missed = 0
            self._spare["named"] += request.uses.values()
            request.row.filling = 0
            self.spare(request.row)
        request.row, request.uses, request.ended = None, {}, True

    def take_events(self) -> list[PoolEvent]:
        """Drains the events; of keys whose store failed, those that have not come back since."""
        events, self._events = self._events, []
        told = []
        for event in events:
            keys = [key for key in event.keys if not event.failed or self.lookup(key) is None]
            if keys:
                told.append(event._replace(keys=keys))
        return told

    def settled(self) -> list[int]:
        """Chunks that no request used last which has not ended, the next to leave first.

        Of ARC all, those that one request used first; then how many these are, how many names of either it remembers,
        and whole chunks of its target.
        """
        lists, there = self.tier.lists, [key for key in self._names if key.chunk]
        if not self.tier.config.arc:
            return [key.chunk - 1 for key in sorted(there, key=lambda key: key.number) if not key.end]
        found = [key.chunk - 1 for ends in (lists.once, lists.often) for key in self._listed(lists, ends)]
        return [*found, *(lists.size[ends] for ends in (lists.once, lists.gone_once, lists.gone_often)), lists.target]

    def state(self, named: Callable[[Name], structs.Key]) -> structs.PoolState:
        """Everything, by the names that a log has for keys."""
        tier, lists = self.tier, self.tier.lists
        if tier.config.arc:
            once, often, *gone = (
                list(self._listed(lists, ends)) for ends in (lists.once, lists.often, lists.gone_once, lists.gone_often)
            )
            order, ranked = [*once, *often], False
        else:
            order, often, gone, ranked = [key for key in self._names if key.chunk], [], [], True
            order.sort(key=lambda key: (key.number, -key.end, self._names[key]))
        return structs.PoolState(
            [
                structs.ChunkState(
                    named(self._names[key]), key.chunk - 1, key.readers, (key.number, -key.end) if ranked else None
                )
                for key in order
            ],
            tier.handed_out,
            [chunk - 1 for chunk in tier.free[: tier.unused]],
            len(often),
            [[named(self._names[key]) for key in keys] for keys in gone],
            lists.target + (lists.target_high + lists.target_low / (1 << HALF)) / (1 << HALF),
            [(named(self._names[key]), key.offers) for key in self._listed(tier.counted, tier.counted.ends)],
        )

    # Records.

    def _do(self, code: Code, request: Context | None = None, keys: Sequence[Name] = (), spares: bool = False) -> int:
        """Performs one operation; its result."""
        tier, count = self.tier, len(keys)
        self.make_room(count)
        row: Any = None
        if request is None:
            tier.moving[:count] = [self.key(key) for key in keys]
        else:
            row = self._row(request)
            tier.payload[:count] = [self._use(request, key) for key in keys]
        op = tier.operations[1]
        op.start, op.count, op.spares = 0, count, int(spares)
        return perform(tier, op, row, code)

    def _row(self, request: Context) -> Offloaded:
        if request.ended:
            raise OperationError("request", "one that has ended", "a request that goes on")
        if request.row is None:
            row: Offloaded = self.record("requests")
            row.ends = row.ends or self.record("named")
            row.ends.end = 0
            request.row = row
        return request.row

    def _use(self, request: Context, key: Name) -> Use:
        found = request.uses.get(key)
        if found is None:
            found = request.uses[key] = self.record("named")
            found.key, found.end = self.key(key), request.positions[key]
        return found

    def key(self, key: Name) -> Key:
        """The record of a key."""
        found = self.keys.get(key)
        if found is None:
            found = self.keys[key] = self.record("keys")
            found.group, self._names[found] = key[1], key
            self.tier.known += 1
        return found

    def record(self, table: str) -> Any:
        """A record that nobody has."""
        spare = self._spare[table]
        if not spare:
            records = getattr(self.tier, table)
            LAYOUT.grow(self.tier, table, count := len(records))
            spare += reversed(records[-count:])
        return spare.pop()

    def name(self, key: Key) -> Name:
        """The name of a key."""
        return self._names[key]

    def spare(self, row: Offloaded) -> None:
        """A request's record is nobody's."""
        self._spare["requests"].append(row)

    def make_room(self, count: int) -> None:
        """Places for what an operation about so many keys may need."""
        tier = self.tier
        room = min(tier.config.chunks, tier.handed_out + count)
        for array, wanted in (
            *((each, count) for each in (tier.payload, tier.lacked, tier.moving, tier.events, tier.kinds)),
            *((tier.free, room), (tier.aside, room), (tier.heap.items, room + 2)),
        ):
            if len(array) < wanted:
                array += [None] * max(wanted - len(array), len(array))  # type: ignore[list-item]

    def drain(self) -> list[PoolEvent]:
        """Events of the last operation, which are kept to be taken."""
        told, self.tier.told = self.tier.told, 0
        fates = zip(self.tier.kinds[:told], self.tier.events[:told], strict=True)
        found = list[PoolEvent]()
        for kind, group in itertools.groupby(fates, key=operator.itemgetter(0)):
            fate, keys = kind % FATES, [self._names[key] for _, key in group]
            removed = fate != Event.STORED
            found.append(PoolEvent(keys if fate == Event.LEFT else sorted(keys), removed, fate == Event.FAILED))
        self._events += found
        return found

    def _listed(self, ring: Any, ends: Key) -> Iterator[Key]:
        key = ring.newer[ends]
        while key is not ends:
            yield key
            key = ring.newer[key]
