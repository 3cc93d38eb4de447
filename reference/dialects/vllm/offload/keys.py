"""Keys of chunks, and the orders in which these leave the second tier: a heap under LRU, lists under ARC.

vLLM 0.33 `LRUCachePolicy`, `ARCCachePolicy`.
"""

from __future__ import annotations

from reference.language import Column, Heap, Record, Ring, Text

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
      loading: whether it is being loaded while others run.
    """

    group: int
    chunk: int
    readers: int
    read: int
    number: int
    end: int
    offers: int
    spared: int
    loading: int


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
