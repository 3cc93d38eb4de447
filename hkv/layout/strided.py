"""A strided view of one flat byte buffer: which byte is an element, and which element a byte, in exact integers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from hkv.errors import LayoutError
from hkv.limits import MAX_BYTES, MAX_RUNS
from hkv.spec.dtypes import item_bytes

COPY_WIDTHS = (16, 8, 4, 2, 1)
"""Bytes that one vector access may move, widest first."""


@dataclasses.dataclass(frozen=True)
class StridedView:
    """Elements of one dtype in a flat byte buffer; their axes nest, so that no two elements share a byte.

    This is the descriptor that NumPy, JAX, PyTorch, a copy engine or a transfer library is handed.

    Attributes:
      shape: elements along each axis; every extent at least 1.
      strides: bytes between neighbours along each axis.
      offset: byte of element (0, ..., 0).
      dtype: element type by name, see `hkv.spec.dtypes`.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: str

    def __post_init__(self) -> None:
        item = self.itemsize
        if len(self.shape) != len(self.strides):
            raise LayoutError("strides", self.strides, f"{len(self.shape)} of them, one for each axis of {self.shape}")
        if any(type(n) is not int or n < 1 for n in self.shape):
            raise LayoutError("shape", self.shape, "positive integers")
        if self.offset < 0 or self.offset % item:
            raise LayoutError("offset", self.offset, f"a multiple of {item}, the bytes of one {self.dtype}")
        for stride in self.strides:
            if stride < 1 or stride % item:
                raise LayoutError(
                    "strides", self.strides, f"positive multiples of {item}, the bytes of one {self.dtype}"
                )
        self._check_nested()

    def _check_nested(self) -> None:
        span = self.itemsize
        for stride, extent in sorted((s, n) for s, n in zip(self.strides, self.shape, strict=True) if n > 1):
            if stride < span:
                expected = f"to nest, each beyond the span of the smaller ones, so that {self.shape} shares no byte"
                raise LayoutError("strides", self.strides, expected)
            span += (extent - 1) * stride
        if self.offset + span > MAX_BYTES:
            raise LayoutError("shape", self.shape, f"at most {MAX_BYTES} bytes from the first to the last")

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return item_bytes(self.dtype)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that belong to the elements, gaps not counted."""
        return self.size * self.itemsize

    @property
    def end(self) -> int:
        """First byte after the last element."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.itemsize

    def reordered(self, axes: Sequence[int]) -> StridedView:
        """The same elements with their axes in another order."""
        shape, strides = (tuple(values[axis] for axis in axes) for values in (self.shape, self.strides))
        return StridedView(shape, strides, self.offset, self.dtype)

    def address(self, *index: int) -> int:
        """First byte of the element at `index`; negative indices do not wrap."""
        if len(index) != len(self.shape):
            raise LayoutError("index", index, f"{len(self.shape)} numbers, one for each axis of {self.shape}")
        if any(type(i) is not int or not 0 <= i < n for i, n in zip(index, self.shape, strict=True)):
            raise LayoutError("index", index, f"numbers inside shape {self.shape}")
        return self.offset + sum(i * s for i, s in zip(index, self.strides, strict=True))

    def locate(self, byte: int) -> tuple[tuple[int, ...], int] | None:
        """The element that `byte` belongs to and which of its bytes it is, or None if it belongs to none."""
        rest = byte - self.offset
        index = [0] * len(self.shape)
        if rest < 0:
            return None
        for stride, axis in sorted(((s, a) for a, s in enumerate(self.strides) if self.shape[a] > 1), reverse=True):
            index[axis], rest = divmod(rest, stride)
            if index[axis] >= self.shape[axis]:
                return None
        return (tuple(index), rest) if rest < self.itemsize else None

    def select(self, axis: int, index: int) -> StridedView:
        """The view without `axis`, at one index of it."""
        where = [0] * len(self.shape)
        where[axis] = index
        keep = [a for a in range(len(self.shape)) if a != axis]
        shape, strides = tuple(self.shape[a] for a in keep), tuple(self.strides[a] for a in keep)
        return StridedView(shape, strides, self.address(*where), self.dtype)

    def run_axes(self) -> tuple[tuple[int, ...], int]:
        """Axes that lie without a gap, innermost first, and the bytes of one such run."""
        run, axes = self.itemsize, []
        for stride, axis in sorted((s, a) for a, s in enumerate(self.strides) if self.shape[a] > 1):
            if stride != run:
                break
            run *= self.shape[axis]
            axes.append(axis)
        return tuple(axes), run

    def runs(self) -> Iterator[tuple[int, int]]:
        """Every maximal stretch of bytes without a gap between axes, as (first byte, bytes), in rising order."""
        inside, length = self.run_axes()
        outer = [(s, n) for a, (s, n) in enumerate(zip(self.strides, self.shape, strict=True)) if a not in inside]
        count = math.prod(n for _, n in outer)
        if count > MAX_RUNS:
            raise LayoutError("runs", count, f"at most {MAX_RUNS} stretches of bytes, to be listed one by one")
        outer.sort(reverse=True)
        for index in itertools.product(*(range(n) for _, n in outer)):
            yield self.offset + sum(i * s for i, (s, _) in zip(index, outer, strict=True)), length

    def check_fits(self, size: int) -> None:
        """Raise LayoutError unless a buffer of `size` bytes holds every element."""
        if self.end > size:
            raise LayoutError("buffer", size, f"at least {self.end} bytes for shape {self.shape} at {self.offset}")


def dense_strides(shape: Sequence[int], item: int = 1) -> tuple[int, ...]:
    """Distances between neighbours along each axis of a dense array: in bytes of an item's, else in elements."""
    return tuple(item * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def check_index(name: str, value: int, limit: int) -> None:
    """Raises LayoutError unless a number is one of `limit`, from 0 on."""
    if type(value) is not int or not 0 <= value < limit:
        raise LayoutError(name, value, f"a number from 0 to {limit - 1}")


def copy_width(*quantities: int) -> int:
    """Bytes of the widest vector access that divides every address, stride and length given: 16, 8, 4, 2 or 1.

    A head of 132 bytes (an fp8 indexer key with its scale) allows 4, not 16.
    """
    common = math.gcd(*quantities)
    return next(width for width in COPY_WIDTHS if common % width == 0)
