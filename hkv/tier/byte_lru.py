"""Least recently used order over objects of different sizes, with pins: what both tiers evict by."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from hkv.errors import OperationError


class ByteLRU:
    """Keys in order of use, with their sizes in bytes and their pins.

    The sum of sizes never exceeds `capacity_bytes`. A pinned key is never chosen for eviction; pins count, so a key
    pinned twice needs two unpins.

    Args:
      capacity_bytes: most bytes that all keys together may have.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if type(capacity_bytes) is not int or capacity_bytes < 1:
            raise OperationError("capacity_bytes", capacity_bytes, "a positive number of bytes")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._pins: Counter[bytes] = Counter()

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[bytes]:
        """Keys, least recently used first."""
        return iter(self._sizes)

    def size(self, key: bytes) -> int:
        """Bytes of a key that is present."""
        return self._sizes[key]

    def touch(self, key: bytes) -> None:
        """Makes a present key the most recently used."""
        self._sizes.move_to_end(key)

    def pin(self, key: bytes) -> None:
        """Keeps a present key from eviction until it is unpinned as often as it was pinned.

        Raises:
          OperationError: the key is absent.
        """
        if key not in self._sizes:
            raise OperationError("key", key.hex(), "a key that is stored")
        self._pins[key] += 1

    def unpin(self, key: bytes) -> None:
        """Takes back one pin.

        Raises:
          OperationError: the key has no pin.
        """
        if not self._pins[key]:
            del self._pins[key]
            raise OperationError("key", key.hex(), "a key that is pinned")
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]

    def pinned(self, key: bytes) -> bool:
        """True if the key has a pin."""
        return key in self._pins

    def victims(self, size: int, replacing: bytes | None = None) -> list[bytes] | None:
        """Keys to evict, least recently used first, so that `size` more bytes fit; None when they cannot fit.

        Args:
          size: bytes wanted.
          replacing: a present key whose own bytes count as free, and which is not itself a victim.
        """
        free = self.capacity_bytes - self.used_bytes + self._sizes.get(replacing or b"", 0)
        chosen: list[bytes] = []
        for key in self._sizes:
            if free >= size:
                break
            if key != replacing and key not in self._pins:
                chosen.append(key)
                free += self._sizes[key]
        return chosen if free >= size else None

    def add(self, key: bytes, size: int) -> None:
        """Enters a key as the most recently used, or changes its size; the caller has made room.

        Raises:
          OperationError: it does not fit.
        """
        used = self.used_bytes - self._sizes.get(key, 0) + size
        if used > self.capacity_bytes:
            raise OperationError(
                "size", size, f"at most the {self.capacity_bytes - self.used_bytes} bytes that are free"
            )
        self.used_bytes = used
        self._sizes[key] = size
        self._sizes.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """Forgets a present, unpinned key.

        Raises:
          OperationError: the key is pinned.
        """
        if key in self._pins:
            raise OperationError("key", key.hex(), "a key without pins")
        self.used_bytes -= self._sizes.pop(key)
