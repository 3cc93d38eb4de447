"""The state of vLLM's second tier: chunks by their keys, the order in which they leave, and the requests that use them.

A key is the name of a prefix and a group; whoever drives the tier makes keys of hashes: equal ones are the same. It has
a chunk while that is in the tier. Of one request a prefix of each length has one name.
vLLM 0.33 `CPUOffloadingManager`, `LRUCachePolicy`, `ARCCachePolicy`, `OffloadingConnectorScheduler`.
"""

from __future__ import annotations

import enum

from reference.language import Array, Column, Heap, Part, Record, Ring, Settings, Table, Text

TEXT = Text(__name__)


class Key(Record):
    """Name of a chunk (`OffloadKey`).

    Attributes:
      group: its group.
      chunk: the chunk that it has, from 1 on; 0 if it is not in the tier.
      readers: transfers that read that; -1 while the one that writes it is not finished.
      read: whether it was read since it was stored.
      number, end: its rank under LRU: the number of the request that used it last, and tokens up to its end, 0 once
      that request has ended.
      offers: how often it was offered, as far as that is tracked; 0 if it is not.
      spared: the last store for which it was not to leave.
    """

    group: int
    chunk: int
    readers: int
    read: int
    number: int
    end: int
    offers: int
    spared: int


class Use(Record):
    """A chunk as a request names it.

    Attributes:
      key: its key. end: tokens of the prefix that ends with it.
      seen: whether the request has used it since the tier was emptied. stored: whether it stored it. found: whether it
      found it ready and had not stored it. missed: whether it was to store it, and it was absent.
    """

    key: Key
    end: int
    seen: int
    stored: int
    found: int
    missed: int


class Offloaded(Record):
    """A request as the tier knows it (`RequestOffloadState`).

    Attributes:
      ends: a record that its uses begin and end with, in the order of their ends; its own is 0. near: the use that was
      entered last, or `ends`.
      number: its number among those that used anything, under LRU; 0 before it has one.
      filling: how often the tier had been emptied when its uses began; 0 before they did.
      ended: whether it has ended.
    """

    ends: Use
    near: Use
    number: int
    filling: int
    ended: int


class Operation(Record):
    """Something asked of the pool, about `count` uses from `start` on in `payload`, or keys in `moving`.

    Attributes:
      spares: of STORE and ROOM, whether nothing that the request has used leaves for it.
    """

    code: int
    request: int
    start: int
    count: int
    spares: int


class Result(Record):
    """An answer: of STORE how many chunks are to be written, NOTHING where there was no room; of ROOM how many can be
    had. The uses themselves are in `lacked`, from the operation's start on."""

    count: int


class Idle(Heap[Key]):
    """Chunks that no transfer reads or writes, under LRU; the smallest rank leaves first (`evictable_blocks`)."""

    def before(self, one: Key, other: Key) -> bool:
        """By number, of one request the last position first, and of one position by group."""
        if one.number != other.number:
            return one.number < other.number
        return one.end > other.end or (one.end == other.end and one.group < other.group)

    def moved(self, key: Key) -> None:
        """Puts a key whose rank has changed in its place, if it is there."""
        at = self.place[key]
        if at > 0:
            self.settle(key, at)


class Lists(Ring[Key]):
    """ARC's lists, from the next to leave to the last; a record of its own begins and ends each.

    Attributes:
      once: chunks that one request stored (`T1`). often: chunks that another one found (`T2`). gone_once, gone_often:
      keys that left these (`B1`, `B2`), as many at most as the tier has chunks.
      within: the list that a key is in. size: of a list, how many are.
      target: chunks that `once` should have, a double, in words (`doubles`): whole ones, and two behind the point.
    """

    once: Key
    often: Key
    gone_once: Key
    gone_often: Key
    within: Column[Key, Key]
    size: Column[Key, int]
    target: int
    target_high: int
    target_low: int

    def append(self, key: Key, to: Key) -> None:
        """Puts a key that is in none at the end of a list."""
        self.within[key] = to
        self.size[to] += 1
        self.put_behind(key, to)

    def take_out(self, key: Key) -> None:
        """Takes a key out of its list."""
        self.size[self.within[key]] -= 1
        self.within[key] = None  # type: ignore[assignment]
        self.remove(key)


class Counts(Part):
    """Figures, in chunks but for `refused`.

    Attributes:
      stored: chunks that were stored. read: of these, chunks that were loaded once at least. loaded: chunks that were
      loaded, each time. evicted: chunks that left. refused: stores that found no room. peak: most that were there.
    """

    stored: int
    read: int
    loaded: int
    evicted: int
    refused: int
    peak: int


class Config(Settings):
    """The configuration.

    Attributes:
      chunks: chunks of the tier. arc: whether the policy is ARC, not LRU. threshold: offers of a key, by any request,
      from which on it is stored; below 2 at once. tracked: keys whose offers are counted at most. tells: whether what
      happens to keys is told.
    """

    chunks: int
    arc: int
    threshold: int
    tracked: int
    tells: int


class Tier(Part):
    """The second tier.

    Attributes:
      known: keys that are in use, with those that begin lists.
      payload: uses that operations are about. lacked: of a store, those that are to be written. moving: keys that
      transfers were about.
      handed_out: chunks that have been handed out since the tier was emptied, the first ones. free: those that came
      back, of which the last is handed out first once all have been; `unused` of them.
      idle: chunks that no transfer reads or writes; `heap`: under LRU, in order. aside: spared ones, while
      others leave.
      lists: chunks and keys under ARC. counted: keys whose offers are tracked, the one offered longest ago first;
      `tracked` of them.
      uses: those of each request, by their ends.
      numbers: the number that LRU gave last. filling: how often the tier was begun anew. stores: stores so far.
      events: keys to which something happened, and `kinds` what (`Event`); `told` of them.
    """

    keys: Table[Key]
    named: Table[Use]
    requests: Table[Offloaded]
    operations: Table[Operation]
    results: Table[Result]
    payload: Array[Use]
    lacked: Array[Use]
    moving: Array[Key]
    free: Array[int]
    aside: Array[Key]
    heap: Idle
    lists: Lists
    counted: Ring[Key]
    uses: Ring[Use]
    counts: Counts
    config: Config
    events: Array[Key]
    kinds: Array[int]
    known: int
    told: int
    handed_out: int
    unused: int
    idle: int
    tracked: int
    numbers: int
    filling: int
    stores: int


class Code(enum.IntEnum):
    """Operations."""

    BEGIN, STORE, LOAD, USE, STORED, FAILED, LOADED, END, ROOM, CLEAR = range(10)


class Event(enum.IntEnum):
    """Fate of a key: its chunk left for others, can be read now, or left as its store failed."""

    LEFT, STORED, FAILED = range(3)


def is_ready(key: Key) -> bool:
    """True for a chunk that can be read."""
    return key.chunk > 0 and key.readers >= 0


def tell(t: Tier, key: Key, kind: int) -> None:
    """Notes the fate of a key, if anybody asks."""
    if t.config.tells:
        t.events[t.told], t.kinds[t.told] = key, kind
        t.told += 1
