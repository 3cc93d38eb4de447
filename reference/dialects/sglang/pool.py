"""The pools of slots, and how the two of a model with windows are tied.

A slot is where one layer group keeps one token. Slots of pages of one token come from the front of a list and go back
to its end; larger pages go back to its front, so that the page freed last is used next. Slot 0 (and with it page 0) is
padding: no request ever has it.

Where layers have windows there are two pools. Every token gets a slot in both, and requests and the tree remember the
full pool's; a mapping leads from there to the window's, but for slots whose window has been given back.
"""

from __future__ import annotations

from collections.abc import Sequence

from hkv.dialects.sglang.config import DECODE_LOSES_PAGE, FULL, SWA, SGLangConfig


class SlotPool:
    """`TokenToKVPoolAllocator` for pages of one token, `PagedTokenToKVPoolAllocator` for larger ones.

    Attributes:
      page_size: tokens of a page.
      free: ids of free pages, in the order in which they are handed out.
      waiting: pages that were given back and wait to be sorted in (`need_sort`).
    """

    def __init__(self, num_slots: int, page_size: int, *, need_sort: bool = False) -> None:
        self.page_size = page_size
        self.free = list(range(1, num_slots // page_size + 1))
        self.waiting: list[int] = []
        self._need_sort = need_sort

    @property
    def available(self) -> int:
        """Tokens that there is room for."""
        return (len(self.free) + len(self.waiting)) * self.page_size

    def pages_for(self, start: int, end: int) -> int:
        """Pages that a sequence of `start` tokens lacks to have `end` (`get_num_new_pages`)."""
        return -(-end // self.page_size) - -(-start // self.page_size)

    def sort_in(self, needed: int) -> None:
        """Takes the waiting pages back, sorted, if the free ones are fewer than needed (`merge_and_sort_free`)."""
        if self.waiting and needed > len(self.free):
            self.free = sorted(self.free + self.waiting)
            self.waiting = []

    def extend(self, start: int, end: int, last: int) -> list[int] | None:
        """Slots of positions start..end: the rest of the last page first, then new pages. None if there are too few.

        Args:
          start: tokens that have slots.
          end: tokens that shall have them.
          last: slot of token start - 1; -1 for none.
        """
        pages = self.pages_for(start, end)
        # The engine bounds the pages from above before it counts them, and sorts by the bound.
        self.sort_in(pages if self.page_size == 1 else (end - start) // self.page_size + 2)
        if pages > len(self.free):
            return None
        return self._take(start, end, last, pages)

    def decode(self, length: int, last: int) -> int | None:
        """The slot of one more token (`alloc_decode`); None if it needs a page and none is free."""
        self.sort_in(1)
        pages = self.pages_for(length, length + 1)
        if pages > len(self.free):
            return None
        return self._take(length, length + 1, last, pages)[0]

    def give_back(self, slots: Sequence[int]) -> None:
        """Frees the pages of a run of slots that begins a page (`free_segment`)."""
        self.give_back_pages([slot // self.page_size for slot in slots[:: self.page_size]])

    def give_back_pages(self, pages: list[int]) -> None:
        """Frees pages, of which the first is handed out first (`free_page_ids`)."""
        if self._need_sort:
            self.waiting += pages
        elif self.page_size == 1:
            self.free += pages
        else:
            self.free = pages + self.free

    def _take(self, start: int, end: int, last: int, pages: int) -> list[int]:
        taken, self.free = iter(self.free[:pages]), self.free[pages:]
        slots = list[int]()
        for position in range(start, end):
            last = last + 1 if position % self.page_size else next(taken) * self.page_size
            slots.append(last)
        return slots


class Pools:
    """The full pool, and beside it the window's and the states' where there are any (`SWATokenToKVPoolAllocator`).

    Attributes:
      full: the full pool.
      window: the window's pool, or None.
      states: the pool of states, one a page (`MambaSlotAllocator`), or None.
      window_of: of full slots, the window's slot; those that have none are not there.
    """

    def __init__(self, config: SGLangConfig) -> None:
        self.full, *others = (SlotPool(size, config.page_size, need_sort=config.need_sort) for size in config.num_slots)
        self.window: SlotPool | None = others[0] if others else None
        self.states: SlotPool | None = None if config.states is None else SlotPool(config.states, 1)
        self.window_of: dict[int, int] = {}
        self._components = config.components
        self._decode_loses_page = DECODE_LOSES_PAGE in config.bugs and config.page_size > 1

    @property
    def all(self) -> list[SlotPool]:
        """Those that there are, in the order of components."""
        return [pool for pool in (self.full, self.window, self.states) if pool is not None]

    @property
    def available(self) -> dict[str, int]:
        """Tokens, or states, that there is room for, by component."""
        return {name: pool.available for name, pool in zip(self._components, self.all, strict=True)}

    def extend(self, start: int, end: int, last: int) -> list[int] | None:
        """As `SlotPool.extend`, in both pools or in neither."""
        pages = self.full.pages_for(start, end)
        if self.window is None:
            return self.full.extend(start, end, last)
        if pages * self.full.page_size > self._both:
            return None
        slots = self.full.extend(start, end, last)
        others = self.window.extend(start, end, self.window_of.get(last, -1))
        assert slots is not None
        assert others is not None
        self.window_of.update(zip(slots, others, strict=True))
        return slots

    def decode(self, length: int, last: int) -> int | None:
        """As `SlotPool.decode`, in both pools or in neither.

        SGLang takes the full page before it asks the window's pool; when that has none, the page is lost.
        """
        if self.window is None:
            return self.full.decode(length, last)
        pages = self.full.pages_for(length, length + 1)
        if not self._decode_loses_page and pages * self.full.page_size > self._both:
            return None
        slot = self.full.decode(length, last)
        other = self.window.decode(length, self.window_of.get(last, -1))
        if slot is None or other is None:
            return None
        self.window_of[slot] = other
        return slot

    def give_back(self, slots: Sequence[int]) -> None:
        """Frees slots in both pools: the window's first, for the mapping says which they are (`free_segment`)."""
        self.give_back_window(slots)
        self.full.give_back(slots)

    def give_back_window(self, slots: Sequence[int]) -> None:
        """Frees the window's slots of some full ones (`free_swa_segment`)."""
        if self.window is None or not slots:
            return
        size = self.full.page_size
        pages = [slot // size * size for slot in slots[::size]]
        self.window.give_back_pages([self.window_of[page] // size for page in pages])
        for page in pages:
            for slot in range(page, page + size):
                self.window_of.pop(slot, None)

    def move_window(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Gives full slots the window's slots of others (`set_full_to_swa_mapping`)."""
        others = [self.window_of.pop(slot) for slot in source]
        self.window_of.update(zip(target, others, strict=True))

    @property
    def _both(self) -> int:
        """Tokens that there is room for in both pools."""
        return min(self.available[FULL], self.available[SWA])
