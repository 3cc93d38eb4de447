"""Chunk objects in host memory: pinned through JAX's memory kinds where there is a GPU, NumPy elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hkv.errors import OperationError
from hkv.tier.tier import Tier

PLACEMENTS = ("numpy", "pinned_host")


class MemoryTier(Tier):
    """Flat chunk objects by key, evicted least recently used first, bounded in bytes.

    Args:
      capacity_bytes: most bytes that all objects together may have.
      placement: `numpy` keeps NumPy arrays; `pinned_host` keeps JAX arrays in page-locked host memory, from which a GPU
        copies without staging; None chooses `pinned_host` where the default device is a GPU.
      device: the `jax.Device` whose host memory `pinned_host` uses; None for the default device.
    """

    def __init__(self, capacity_bytes: int, placement: str | None = None, device: Any = None) -> None:
        self.device = jax.devices()[0] if device is None else device
        self.placement = placement or ("pinned_host" if self.device.platform == "gpu" else "numpy")
        self._to_host = _placer(self.placement, self.device)
        super().__init__(capacity_bytes)
        self._objects: dict[bytes, Any] = {}

    def store(self, key: bytes, data: np.ndarray | jax.Array) -> bool:
        """Copies an object to host memory, evicting others as needed.

        Args:
          key: the object's key.
          data: uint8 `[bytes]`.

        Returns:
          False, with nothing changed, when it cannot fit beside the pinned objects, or would replace a pinned one.

        Raises:
          OperationError: `data` is not a flat array of bytes.
        """
        if data.ndim != 1 or data.dtype != np.uint8:
            raise OperationError("data", f"{data.dtype}{list(data.shape)}", "a flat uint8 array")
        if self._order.pinned(key):
            return False
        victims = self._order.victims(data.nbytes, replacing=key)
        if victims is None:
            return False
        for victim in victims:
            self.evict(victim)
        self._objects[key] = self._to_host(data)
        self._order.add(key, data.nbytes)
        return True

    def retrieve(self, key: bytes) -> np.ndarray | jax.Array | None:
        """The object, uint8 `[bytes]`, in host memory, and the most recently used from now on; None when absent."""
        if key not in self._order:
            return None
        self._order.touch(key)
        return self._objects[key]

    def retrieve_to_device(self, key: bytes) -> jax.Array | None:
        """The object as a uint8 `[bytes]` array in the device's memory; None when absent."""
        data = self.retrieve(key)
        return None if data is None else jax.device_put(data, jax.sharding.SingleDeviceSharding(self.device))

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
