"""The free queue: blocks without references, next to be handed out first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence


class FreeQueue:
    """A queue of block ids that can also be entered at the front and left from the middle.

    Its order is the order of eviction: a block keeps its cached content until it is handed out. Every operation costs
    one step a block, whatever the length. vLLM 0.33 `FreeKVCacheBlockQueue`.

    Args:
      blocks: the initial content, first to be handed out first; each id once.
    """

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        self._order: OrderedDict[int, None] = OrderedDict.fromkeys(blocks)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __contains__(self, block: int) -> bool:
        return block in self._order

    def pop(self) -> int:
        """Take the block at the front; the queue must not be empty."""
        return self._order.popitem(last=False)[0]

    def remove(self, block: int) -> None:
        """Take a block from wherever it stands."""
        del self._order[block]

    def append(self, blocks: Iterable[int]) -> None:
        """Put blocks at the back, in their order."""
        for block in blocks:
            self._order[block] = None

    def prepend(self, blocks: Sequence[int]) -> None:
        """Put blocks at the front, so that they come out in their order before all others."""
        for block in reversed(blocks):
            self._order[block] = None
            self._order.move_to_end(block, last=False)
