"""Base of both tiers: the keys they hold, the order in which these are evicted, and the pins."""

from __future__ import annotations

from hkv.tier.byte_lru import ByteLRU


class Tier:
    """Keys of chunk objects, evicted least recently used first, bounded in bytes. What holds the bytes is a subclass's.

    Args:
      capacity_bytes: most bytes that all objects together may have.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._order = ByteLRU(capacity_bytes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    @property
    def used_bytes(self) -> int:
        """Bytes of all objects."""
        return self._order.used_bytes

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Keys, next to be evicted first; pinned ones are passed over."""
        return tuple(self._order)

    def pin(self, key: bytes) -> bool:
        """Keeps an object from eviction, as a lookup does until its load is over; False when it is absent."""
        if key not in self._order:
            return False
        self._order.pin(key)
        return True

    def unpin(self, key: bytes) -> None:
        """Takes back one pin; raises OperationError when there is none."""
        self._order.unpin(key)

    def evict(self, key: bytes) -> bool:
        """Removes an object; False when it is absent. Raises OperationError when it is pinned."""
        if key not in self._order:
            return False
        self._order.remove(key)
        self._discard(key)
        return True

    def _discard(self, key: bytes) -> None:
        """Lets go of the bytes of an object that is no longer in the order."""
        raise NotImplementedError
