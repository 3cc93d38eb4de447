"""A tensor as its shape, strides and dtype say, and the contiguous view that an engine's permuted view hides."""

from __future__ import annotations

import dataclasses
import math

from hkv.errors import LayoutError
from hkv.spec.dtypes import item_bytes


@dataclasses.dataclass(frozen=True)
class TensorView:
    """Shape, type and strides of an engine's tensor, without its bytes.

    Attributes:
      shape: extents, outermost first.
      dtype: element type by name.
      strides: distance of neighbours along each axis, in elements; None for contiguous.
      offset: first element within the storage; it never matters to a layout.
    """

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    strides: tuple[int, ...] | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        item_bytes(self.dtype)
        if self.strides is None:
            object.__setattr__(self, "strides", contiguous_strides(self.shape))
        assert self.strides is not None
        if len(self.strides) != len(self.shape) or any(size < 1 for size in self.shape):
            raise LayoutError("strides", self.strides, f"one for each axis of {self.shape}, every extent positive")

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def element_strides(self) -> tuple[int, ...]:
        """Strides in elements."""
        assert self.strides is not None
        return self.strides

    def reshaped(self, *shape: int) -> TensorView:
        """The same contiguous elements under another shape."""
        if self.strides != contiguous_strides(self.shape) or math.prod(shape) != math.prod(self.shape):
            raise LayoutError("shape", shape, f"{math.prod(self.shape)} elements of a contiguous view {self.shape}")
        return TensorView(shape, self.dtype, offset=self.offset)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array of that shape."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def recover_contiguous_view(view: TensorView) -> TensorView:
    """The physical allocation behind a logically permuted view (LMCache 0.5.6, contiguous-view recovery).

    Axes are put in order of descending stride; among equal strides an axis of extent 1 goes innermost. Blocks may lie
    further apart than a block is long; no other gap is accepted.

    Raises:
      LayoutError: the view has gaps elsewhere, or overlapping blocks.
    """
    order = sorted(range(view.rank), key=lambda axis: (-view.element_strides[axis], view.shape[axis] == 1))
    shape = tuple(view.shape[axis] for axis in order)
    strides = tuple(view.element_strides[axis] for axis in order)
    # Extents of 1 carry no stride information: a view is contiguous when the others are.
    dense = contiguous_strides(shape)
    if all(size == 1 or stride == tight for size, stride, tight in zip(shape, strides, dense, strict=True)):
        return _view_by_strides(view, shape, strides)
    _check_only_blocks_padded(view, shape, strides)
    return TensorView(shape, view.dtype, strides, view.offset)


def _view_by_strides(view: TensorView, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorView:
    extents = [math.prod(shape) // strides[0] if strides[0] else shape[0]]
    extents += [
        outer // inner if inner else size
        for outer, inner, size in zip(strides[:-1], strides[1:], shape[1:], strict=True)
    ]
    if math.prod(extents) != math.prod(shape) or min(extents) < 1:
        extents = list(shape)
    return TensorView(tuple(extents), view.dtype, offset=view.offset)


def _check_only_blocks_padded(view: TensorView, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    inner_tight = len(shape) >= 2 and strides[-1] == 1 and strides[-2] == shape[-1]
    interior = all(strides[axis] == math.prod(shape[axis + 1 :]) for axis in range(1, len(shape) - 1))
    if not (inner_tight and interior and strides[0] >= math.prod(shape[1:])):
        expected = f"strides of shape {view.shape} that leave gaps between blocks only"
        raise LayoutError("strides", view.element_strides, expected)
