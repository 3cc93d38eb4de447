"""Memory that a kernel is let loose on: the pool, inputs and outputs in one buffer, with poison between them.

Everything that a kernel gets is a view of this buffer, so that one comparison before and after finds every byte that it
changed, wherever it lies. A pool of more than 2^31 elements is a file in memory of which only the pages exist that
somebody touched: Linux says which (`SEEK_DATA`), and nothing of the pool's size is ever read or copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence

import numpy as np

PAGE = 4096
MARGIN = 4096
"""Bytes of poison around the pool; a kernel that strays further ends by a signal or changes what comes next."""

SPARSE = 1 << 24
"""Bytes from which on memory is a sparse file."""


class Memory:
    """A buffer of bytes that remembers what it held.

    Args:
      size: bytes.
      shared: if another process is to map it, too: then it is a file, of any size.
      guards: first bytes of pages that nobody may touch while they are `guarded`.
    """

    def __init__(self, size: int, shared: bool = False, guards: tuple[int, ...] = ()) -> None:
        self.guards = guards
        self.size = -(-size // PAGE) * PAGE
        self.sparse = self.size >= SPARSE
        self.file: int | None = None
        if self.sparse or shared or guards:
            self.file = os.memfd_create("hkv-kernel")
            os.ftruncate(self.file, self.size)
            self.array = np.frombuffer(mmap.mmap(self.file, self.size), np.uint8)
        else:
            whole = np.zeros(self.size + 64, np.uint8)
            self.array = whole[-whole.ctypes.data % 64 :][: self.size]

    def __del__(self) -> None:
        if self.file is not None:
            os.close(self.file)

    def guarded(self) -> contextlib.AbstractContextManager[None]:
        """Ends this process while a guard is touched."""
        return guarded(self.array.ctypes.data, self.guards)

    def snapshot(self) -> MemorySnapshot:
        """All bytes as they are now."""
        if not self.sparse:
            return MemorySnapshot({}, self.array.copy())
        return MemorySnapshot({start // PAGE: self._page(start) for start in self._touched()}, None)

    def changes(self, before: MemorySnapshot) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that are not as they were: their addresses, rising, and what they are now."""
        if not self.sparse:
            assert before.dense is not None
            found = np.flatnonzero(self.array != before.dense)
            return found, self.array[found]
        addresses, values = [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)]
        for start in self._touched():
            page = self._page(start)
            found = np.flatnonzero(page != before.pages.get(start // PAGE, 0))
            addresses.append(found + start)
            values.append(page[found])
        return np.concatenate(addresses), np.concatenate(values)

    def _page(self, start: int) -> np.ndarray:
        assert self.file is not None
        return np.frombuffer(os.pread(self.file, PAGE, start), np.uint8).copy()

    def _touched(self) -> Iterator[int]:
        """First bytes of the pages that exist."""
        assert self.file is not None
        position = 0
        while position < self.size:
            try:
                start = os.lseek(self.file, position, os.SEEK_DATA)
            except OSError:  # no more of them
                return
            position = min(os.lseek(self.file, start, os.SEEK_HOLE), self.size)
            yield from range(start // PAGE * PAGE, position, PAGE)


@contextlib.contextmanager
def guarded(base: int, guards: Sequence[int]) -> Iterator[None]:
    """Takes every right to some pages of this process, by their first bytes behind an address, and gives them back."""
    protect = ctypes.CDLL(None, use_errno=True).mprotect

    def allow(rights: int) -> None:
        for guard in guards:
            if protect(ctypes.c_void_p(base + guard), ctypes.c_size_t(PAGE), rights):
                raise OSError(ctypes.get_errno(), "mprotect")

    allow(0)
    try:
        yield
    finally:
        allow(mmap.PROT_READ | mmap.PROT_WRITE)


class MemorySnapshot:
    """Bytes of a memory at one moment, which slices read and change: enough of an array for the reference.

    Args:
      pages: of a sparse memory, those that exist; the others are zero.
      dense: of a small one, all bytes.
      start: byte that slices count from.
    """

    def __init__(self, pages: dict[int, np.ndarray], dense: np.ndarray | None, start: int = 0) -> None:
        self.pages, self.dense, self.start = pages, dense, start

    def copy(self) -> MemorySnapshot:
        """The same bytes, to be changed apart."""
        pages = {number: page.copy() for number, page in self.pages.items()}
        return MemorySnapshot(pages, None if self.dense is None else self.dense.copy(), self.start)

    def behind(self, start: int) -> MemorySnapshot:
        """The same bytes, counted from another one."""
        return MemorySnapshot(self.pages, self.dense, self.start + start)

    def __getitem__(self, place: slice) -> np.ndarray:
        if self.dense is not None:
            return self.dense[self.start + place.start : self.start + place.stop]
        return self.read(np.arange(self.start + place.start, self.start + place.stop))

    def __setitem__(self, place: slice, content: np.ndarray | int) -> None:
        first, last = self.start + place.start, self.start + place.stop
        if self.dense is not None:
            self.dense[first:last] = content
            return
        content = np.broadcast_to(np.asarray(content, np.uint8), last - first)
        while first < last:
            number, inside = divmod(first, PAGE)
            page = self.pages.setdefault(number, np.zeros(PAGE, np.uint8))
            count = min(PAGE - inside, last - first)
            page[inside : inside + count] = content[:count]
            first, content = first + count, content[count:]

    def read(self, addresses: np.ndarray) -> np.ndarray:
        """The bytes at absolute addresses."""
        if self.dense is not None:
            return self.dense[addresses]
        found = np.zeros(addresses.shape, np.uint8)
        for number in np.unique(addresses // PAGE):
            if int(number) in self.pages:
                here = addresses // PAGE == number
                found[here] = self.pages[int(number)][addresses[here] % PAGE]
        return found

    def changes(self, before: MemorySnapshot) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that differ from those of another moment, as `Memory.changes`."""
        if self.dense is not None and before.dense is not None:
            found = np.flatnonzero(self.dense != before.dense)
            return found, self.dense[found]
        addresses, values = [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)]
        for number in sorted(self.pages):
            found = np.flatnonzero(self.pages[number] != before.pages.get(number, 0))
            addresses.append(found + number * PAGE)
            values.append(self.pages[number][found])
        return np.concatenate(addresses), np.concatenate(values)
