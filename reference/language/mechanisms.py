"""Collections that dialects share, as texts themselves: a list of free ids, a heap, a ring.

Records know nothing of the collections that they are in: places and neighbours are columns of the collection, so that a
record can be in several.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from reference.language.records import Array, Column, Part, Record
from reference.language.text import Text

TEXT = Text(__name__)

T = TypeVar("T", bound=Record)


class FreeList(Part):
    """Free ids, the next one in front. Those that come back keep their order, behind the others or before them.

    Attributes:
      free: a ring of `mask + 1` places, a power of two. front: place of the next one. count: how many there are.
    """

    free: Array[int]
    front: int
    count: int
    mask: int

    def take(self) -> int:
        """Takes the id in front; there must be one."""
        found = self.free[self.front & self.mask]
        self.front += 1
        self.count -= 1
        return found

    def reserve(self, count: int, in_front: int) -> int:
        """Makes room for ids that come back; the place of the first, for `put`."""
        place = self.front + self.count
        if in_front:
            self.front -= count
            place = self.front
        self.count += count
        return place

    def put(self, place: int, given: int) -> None:
        """Puts an id at a place that `reserve` made room at, or behind it."""
        self.free[place & self.mask] = given


class Heap(Part, Generic[T]):
    """Records by what leaves before another, which a subclass says (`before`).

    Attributes:
      items: from place 1 on; each leaves before those below it. count: how many. place: of a record, 0 for none.
    """

    items: Array[T]
    count: int
    place: Column[T, int]

    def before(self, one: T, other: T) -> bool:
        """True of a record that leaves before another."""
        raise NotImplementedError

    def first(self) -> T:
        """The record that leaves next; None or one that left where there is none."""
        return self.items[1]

    def add(self, item: T) -> None:
        """Puts a record in that is not in it."""
        self.count += 1
        self.settle(item, self.count)

    def remove(self, item: T) -> None:
        """Takes out a record that is in it."""
        last, at = self.items[self.count], self.place[item]
        self.count -= 1
        self.place[item] = 0
        if last is not item:
            self.settle(last, at)

    def toggle(self, item: T) -> None:
        """Puts a record in that is not in it, or takes out one that is: `add` and `remove` at one call site."""
        moved, at = item, self.place[item]
        if at == 0:
            self.count += 1
            at = self.count
        else:
            moved = self.items[self.count]
            self.count -= 1
            self.place[item] = 0
            at = 0 if moved is item else at
        if at > 0:
            self.settle(moved, at)

    def settle(self, item: T, at: int) -> None:
        """Puts a record in at a place that is free, or its own: others move there as long as one of them should be
        there."""
        while True:
            other = self.misplaced(item, at)
            if other == 0:
                break
            moved = self.items[other]
            self.items[at] = moved
            self.place[moved] = at
            at = other
        self.items[at] = item
        self.place[item] = at

    def misplaced(self, item: T, at: int) -> int:
        """The place above or below one whose record should be there rather than `item`; 0 for none."""
        above, below = at // 2, 2 * at
        if above > 0 and self.before(item, self.items[above]):
            return above
        if below < self.count and self.before(self.items[below + 1], self.items[below]):
            below += 1
        if below <= self.count and self.before(self.items[below], item):
            return below
        return 0


class Ring(Part, Generic[T]):
    """Records in order, say of use, through `ends`, a record that stands between the last and the first.

    Attributes:
      newer, older: neighbours of a record that is in it.
    """

    ends: T
    newer: Column[T, T]
    older: Column[T, T]

    def oldest(self) -> T:
        """The first to leave; `ends` where there is none."""
        return self.newer[self.ends]

    def put(self, item: T) -> None:
        """Makes a record that is not in it the newest."""
        self.put_behind(item, self.ends)

    def put_behind(self, item: T, newer: T) -> None:
        """Puts a record that is not in it next to one that is, on its older side."""
        older = self.older[newer]
        self.newer[item] = newer
        self.older[item] = older
        self.older[newer] = item
        self.newer[older] = item

    def remove(self, item: T) -> None:
        """Takes out a record that is in it."""
        newer, older = self.newer[item], self.older[item]
        self.older[newer] = older
        self.newer[older] = newer
