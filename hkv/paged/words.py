"""A pool of any dtype and rank as flat unsigned words, as wide as runs allow where that costs nothing.

On a GPU, every change of width or dtype of a whole buffer is a bitcast to XLA, which copies nothing, and four bytes are
moved at once instead of one. On a CPU a change of width copies the pool, so it keeps its own words there, and one that
is not of unsigned words is copied once a call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from hkv.errors import LayoutError
from hkv.layout.strided import StridedView
from hkv.layout.views.runs import Runs, runs_of

WIDEST = 4
"""Bytes of the widest word: JAX has none of 8 unless a program allows 64-bit numbers."""

WORDS = (1, 2, 4)


def check_buffer(buffer: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Refuses what has no words: elements of no whole number of bytes, of more than 4, or booleans."""
    dtype = np.dtype(buffer.dtype)
    if dtype.itemsize not in WORDS or dtype == np.bool_ or dtype.name.endswith(("int4", "int2", "e2m1fn")):
        given = f"{dtype}{list(buffer.shape)}"
        raise LayoutError("buffer", given, "elements of 1, 2 or 4 bytes, such as uint8, bfloat16 or uint32")


Views = Sequence[tuple[StridedView, int]]
"""Strided views of a pool's bytes, each with how many of its leading axes say which unit."""


def runs_of_pool(buffer: jax.Array | jax.ShapeDtypeStruct, views: Views) -> tuple[np.dtype, list[Runs]]:
    """The words that a pool is moved in, and the runs of several views of it in those words."""
    dtypes, runs = runs_of_pools([buffer], [0], [views])
    return dtypes[0], runs[0]


def runs_of_pools(
    buffers: Sequence[jax.Array | jax.ShapeDtypeStruct],
    places: Sequence[int],
    views: Sequence[Views],
    widest: int = WIDEST,
) -> tuple[list[np.dtype], list[list[Runs]]]:
    """The words that each pool is moved in, and the runs of views of several groups, each of the pool at its place.

    On a GPU the words of all pools are of one width, at most `widest` bytes, so that a launch can move all of them.
    """
    for buffer in buffers:
        check_buffer(buffer)
    sizes = [math.prod(buffer.shape) * np.dtype(buffer.dtype).itemsize for buffer in buffers]
    groups = [(pool, *view) for pool, some in zip(places, views, strict=True) for view in some]
    in_bytes = [jax.ShapeDtypeStruct((size,), np.uint8) for size in sizes]
    row = math.gcd(*(runs_of(in_bytes[pool], view, count).row for pool, view, count in groups), *sizes, widest)
    dtypes = [widest_word(row, np.dtype(buffer.dtype).itemsize) for buffer in buffers]
    flat = [jax.ShapeDtypeStruct((size // d.itemsize,), d) for size, d in zip(sizes, dtypes, strict=True)]
    return dtypes, [
        [runs_of(flat[pool], view, count) for view, count in some] for pool, some in zip(places, views, strict=True)
    ]


def widest_word(row_bytes: int, own: int) -> np.dtype:
    """The widest word that divides rows and costs nothing, on the device that the program is traced for.

    `row_bytes` divide every address; `own` bytes of an array's element stay where a bitcast would copy.
    """
    if traced_for().platform != "gpu":
        return np.dtype(f"uint{8 * own}")
    return np.dtype(f"uint{8 * next(width for width in (WIDEST, 2, 1) if row_bytes % width == 0)}")


def as_words(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """All of an array's bytes in order, as one axis of unsigned words."""
    own, word = array.dtype.itemsize, dtype.itemsize
    if array.dtype == dtype:
        return array.reshape(-1)
    if own < word:
        array = array.reshape(-1, word // own)
    return lax.bitcast_convert_type(array, dtype).reshape(-1)


def like(words: jax.Array, array: jax.Array) -> jax.Array:
    """The inverse of `as_words`: words as an array of the dtype and shape of `array`."""
    own, word = array.dtype.itemsize, words.dtype.itemsize
    if array.dtype == words.dtype:
        return words.reshape(array.shape)
    if own > word:
        words = words.reshape(-1, own // word)
    return lax.bitcast_convert_type(words, array.dtype).reshape(array.shape)


# The device that a program is being traced for: whether it is a GPU, and which.


@dataclasses.dataclass(frozen=True)
class Target:
    """A device, as far as the choice of kernels depends on it: a platform (`cpu`, `gpu`, `tpu`) and the device's name.

    `capability` is an NVIDIA GPU's, `(0, 0)` for other devices, and None for a GPU that is described and not there.
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
