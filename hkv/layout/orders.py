"""The six physical orders of the logical axes [L, B, H, N, C], and the strides that follow from them."""

from __future__ import annotations

import enum

from hkv.errors import LayoutError
from hkv.spec import LayerSpec

AXES = "LBHNC"
L, B, H, N, C = range(5)

Axes = tuple[int, int, int, int, int]
"""One number for each logical axis, in the order L, B, H, N, C."""


class Order(enum.Enum):
    """The six physical orders of the logical axes, outermost first (vLLM 0.33 `KVCacheLayout`, in its order)."""

    LBHNC = "LBHNC"
    LBNHC = "LBNHC"
    LHBNC = "LHBNC"
    BLHNC = "BLHNC"
    BLNHC = "BLNHC"
    BHLNC = "BHLNC"

    @classmethod
    def parse(cls, name: str | Order) -> Order:
        """The order of that name; `NHD` and `HND` are the old names of LBNHC and LBHNC."""
        if isinstance(name, Order):
            return name
        try:
            return cls(ALIASES.get(name, name))
        except ValueError:
            expected = f"one of {', '.join(order.value for order in cls)}, {', '.join(ALIASES)}"
            raise LayoutError("layout", name, expected) from None

    @property
    def axes(self) -> tuple[int, ...]:
        """Logical axes, outermost first."""
        return tuple(AXES.index(letter) for letter in self.value)

    @property
    def alias(self) -> str | None:
        """The order's old name, or None."""
        return next((alias for alias, name in ALIASES.items() if name == self.value), None)

    @property
    def layer_compact(self) -> bool:
        """True if each layer is one region (L outermost)."""
        return self.value[0] == "L"

    @property
    def block_outermost(self) -> bool:
        """True if all layers of a block lie together (B outermost)."""
        return self.value[0] == "B"

    @property
    def block_compact(self) -> bool:
        """True if one layer of one block is one run of bytes (L and B are the two outermost)."""
        return set(self.value[:2]) == {"L", "B"}


ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}
"""Names that older engines and connectors use."""


def order_strides(
    shape: Axes,
    order: Order,
    page_size_padded: int | None = None,
    fixed: tuple[int | None, ...] = (None,) * 5,
) -> Axes:
    """Bytes between neighbours along each logical axis (vLLM 0.33 `compute_layout_strides`).

    Strides grow from the innermost axis outwards; of `shape`, C is in bytes. A padded page widens the inner one of L
    and B; a fixed stride replaces the derived one (None) and pushes everything outside of it outwards. LayoutError
    where a page would be padded in an order that scatters it, or where pages do not divide a fixed stride.
    """
    for axis, stride in zip(AXES, fixed, strict=True):
        if stride is not None and (type(stride) is not int or stride < 1):
            raise LayoutError(f"{axis} stride", stride, "a positive number of bytes, or None")
    inner_grid = max(order.axes.index(L), order.axes.index(B))
    if page_size_padded is not None and any(shape[a] > 1 for a in order.axes[:inner_grid] if a not in (L, B)):
        expected = (
            f"None: {order.value} scatters a page of {shape[H]} heads; one head or {_compact_names()} can be padded"
        )
        raise LayoutError("page_size_padded", page_size_padded, expected)
    strides, step = [0] * 5, 1
    for position, axis in reversed(tuple(enumerate(order.axes))):
        if page_size_padded is not None and position == inner_grid:
            step = max(step, page_size_padded)
            if step % page_size_padded:
                raise LayoutError("page_size_padded", page_size_padded, f"a divisor of the page's {step} bytes")
        strides[axis] = fixed[axis] or step
        step = strides[axis] * shape[axis]
    return (strides[0], strides[1], strides[2], strides[3], strides[4])


def _compact_names() -> str:
    return ", ".join(order.value for order in Order if order.block_compact)


def aligned_block_stride(spec: LayerSpec, order: Order, shape: Axes, padded: int | None) -> int | None:
    """Block stride that a spec's alignment asks for, None when the natural one is aligned (vLLM 0.33 planning)."""
    alignment = spec.stride_alignment_bytes
    natural = order_strides(shape, order, padded)[B]
    if natural % alignment == 0:
        return None
    if not order.block_outermost and not order.block_compact:
        raise LayoutError(
            "layout", order.value, f"one of {_compact_names()}, as blocks are aligned to {alignment} bytes"
        )
    return -(-natural // alignment) * alignment


def check_split(spec: LayerSpec, order: Order, kernel_block_size: int, padded: int | None, block_stride: int) -> int:
    """Kernel blocks in a manager block, after checking that a block is dense (vLLM 0.33 `create_kv_cache_views`)."""
    if type(kernel_block_size) is not int or kernel_block_size < 1 or spec.block_size % kernel_block_size:
        raise LayoutError("kernel_block_size", kernel_block_size, f"a divisor of block_size {spec.block_size}")
    if padded is not None:
        raise LayoutError("kernel_block_size", kernel_block_size, f"{spec.block_size}: padded pages cannot be split")
    split = spec.block_size // kernel_block_size
    if spec.states_in(kernel_block_size) * split != spec.num_states or spec.snapshot:
        raise LayoutError("kernel_block_size", kernel_block_size, "as many states in the pieces as in the block")
    if block_stride != spec.page_size_bytes or (not order.block_compact and spec.num_heads > 1):
        expected = (
            f"{spec.block_size}: {order.value} puts blocks {block_stride} bytes apart, but only dense pages "
            f"({spec.page_size_bytes} bytes in one run) can be split"
        )
        raise LayoutError("kernel_block_size", kernel_block_size, expected)
    return split
