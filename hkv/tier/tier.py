"""Base of both tiers: the keys they hold, the order in which these are evicted, and the pins."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from hkv.errors import OperationError


class Tier:
    """Keys of chunk objects, evicted least recently used first, bounded in bytes; a subclass holds the bytes."""

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
        """Takes back one pin; raises OperationError if it has no pin."""
        self._order.unpin(key)

    def evict(self, key: bytes) -> bool:
        """Removes an object; False when it is absent. Raises OperationError when it is pinned."""
        if key not in self._order:
            return False
        self._order.remove(key)
        self._discard(key)
        return True

    def _make_room(self, key: bytes, size: int) -> bool:
        """Evicts others for an object of so many bytes; False, with nothing changed, where that is no help."""
        victims = None if self._order.pinned(key) else self._order.victims(size, replacing=key)
        for victim in victims or ():
            self.evict(victim)
        return victims is not None

    def _discard(self, key: bytes) -> None:
        """Lets go of the bytes of an object that is no longer in the order."""
        raise NotImplementedError


def check_flat(data: np.ndarray | jax.Array) -> None:
    """Refuses objects that are no uint8 `[bytes]`."""
    if data.ndim != 1 or data.dtype != np.uint8:
        raise OperationError("data", f"{data.dtype}{list(data.shape)}", "a flat uint8 array")


# Least recently used order over objects of different sizes, with pins: what both tiers evict by.


class ByteLRU:
    """Keys in order of use, with their sizes in bytes and their pins.

    The sum of sizes never exceeds `capacity_bytes`. A pinned key is never chosen for eviction; pins count, so a key
    pinned twice needs two unpins.
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
        """Keeps a present key from eviction until it is unpinned as often as it was pinned."""
        if key not in self._sizes:
            raise OperationError("key", key.hex(), "a key that is stored")
        self._pins[key] += 1

    def unpin(self, key: bytes) -> None:
        """Takes back one pin; OperationError if it has no pin."""
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

        The bytes of a present key that is to be replaced count as free, and it is not itself a victim.
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
        """Enters a key as the most recently used, or changes its size; OperationError where the caller made no room."""
        used = self.used_bytes - self._sizes.get(key, 0) + size
        if used > self.capacity_bytes:
            raise OperationError(
                "size", size, f"at most the {self.capacity_bytes - self.used_bytes} bytes that are free"
            )
        self.used_bytes = used
        self._sizes[key] = size
        self._sizes.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """Forgets a present key; OperationError where it is pinned."""
        if key in self._pins:
            raise OperationError("key", key.hex(), "a key without pins")
        self.used_bytes -= self._sizes.pop(key)


# Chunk objects in host memory: pinned through JAX's memory kinds where there is a GPU, NumPy elsewhere.

PLACEMENTS = ("numpy", "pinned_host")


class MemoryTier(Tier):
    """Flat chunk objects by key, evicted least recently used first, bounded in bytes.

    `placement` `numpy` keeps NumPy arrays; `pinned_host` keeps JAX arrays in page-locked host memory of `device`, from
    which a GPU copies without staging; None chooses `pinned_host` where the default device is a GPU.
    """

    def __init__(self, capacity_bytes: int, placement: str | None = None, device: Any = None) -> None:
        device = jax.devices()[0] if device is None else device
        self.placement = placement or ("pinned_host" if device.platform == "gpu" else "numpy")
        self._to_host = _placer(self.placement, device)
        super().__init__(capacity_bytes)
        self._objects: dict[bytes, Any] = {}

    def store(self, key: bytes, data: np.ndarray | jax.Array) -> bool:
        """Copies uint8 `[bytes]` to host memory, evicting others as needed.

        False, with nothing changed, when it cannot fit next to the pinned objects, or would replace a pinned one.
        """
        check_flat(data)
        if not self._make_room(key, data.nbytes):
            return False
        self._objects[key] = self._to_host(data)
        self._order.add(key, data.nbytes)
        return True

    def retrieve(self, key: bytes) -> np.ndarray | jax.Array | None:
        """The object, uint8 `[bytes]`, in host memory, and the most recently used from now on; None when absent."""
        if key not in self._order:
            return None
        self._order.touch(key)
        return self._objects[key]

    def _discard(self, key: bytes) -> None:
        del self._objects[key]


def _placer(placement: str, device: Any) -> Callable[[np.ndarray | jax.Array], Any]:
    if placement == "numpy":
        return _numpy_copy
    if placement != "pinned_host":
        raise OperationError("placement", placement, f"one of {', '.join(PLACEMENTS)}")
    kinds = {memory.kind for memory in device.addressable_memories()}
    if placement not in kinds:
        raise OperationError("placement", placement, f"a memory kind of {device}: {', '.join(sorted(kinds))}")
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=placement)

    def place(data: np.ndarray | jax.Array) -> jax.Array:
        # device_put aliases a NumPy buffer even under may_alias=False (seen on the CPU backend), so it gets its own.
        private = data if isinstance(data, jax.Array) else np.array(data, copy=True)
        return jax.device_put(private, sharding, may_alias=False)

    return place


def _numpy_copy(data: np.ndarray | jax.Array) -> np.ndarray:
    copy = np.array(data, copy=True)
    copy.flags.writeable = False
    return copy
