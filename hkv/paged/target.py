"""The device that a program is being traced for: whether it is a GPU, and which."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Target:
    """A device, as far as the choice of kernels depends on it.

    Attributes:
      platform: `cpu`, `gpu` or `tpu`.
      kind: the device's name.
      capability: compute capability of an NVIDIA GPU, `(0, 0)` for other devices; None for a GPU that is described and
        not there.
    """

    platform: str
    kind: str
    capability: tuple[int, int] | None

    def __str__(self) -> str:
        if self.capability in (None, (0, 0)):
            return f"{self.platform} ({self.kind})"
        return f"{self.platform} ({self.kind}, {'.'.join(map(str, self.capability))})"


def traced_for() -> Target:
    """The device of the abstract mesh in use, else the default device.

    A program whose arguments are committed to another device is not seen here: tracing does not show them.
    """
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is None:
        return _of_device(_default_device())
    if described.platform != "gpu":
        return Target(described.platform, described.device_kind, (0, 0))
    if jax.default_backend() == "gpu":
        for device in jax.devices():
            if device.device_kind == described.device_kind:
                return _of_device(device)
    return Target("gpu", described.device_kind, None)


def _default_device() -> Any:
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if chosen is None:
        return jax.devices()[0]
    return jax.devices(chosen)[0] if isinstance(chosen, str) else chosen


def _of_device(device: Any) -> Target:
    numbers = str(getattr(device, "compute_capability", "")).split(".")
    capability = (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 and all(map(str.isdigit, numbers)) else (0, 0)
    return Target(device.platform, device.device_kind, capability)
