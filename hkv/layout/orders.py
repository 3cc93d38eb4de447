"""The six physical orders of the logical axes [L, B, H, N, C], the strides that follow, and the one a model gets."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence

from hkv.errors import LayoutError
from hkv.spec import LayerSpec, attention_of

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


# Orders that a model may use, and the one it gets: legality and precedence (vLLM 0.33).


DEFAULT_PREFERENCE = (Order.LBNHC, Order.LBHNC, Order.BLNHC, Order.BLHNC, Order.BHLNC, Order.LHBNC)
"""Orders in falling preference when no backend declares any (vLLM 0.33 `get_supported_kv_cache_layouts`)."""

ENVIRONMENT = "VLLM_KV_CACHE_LAYOUT"
"""The environment variable by which vLLM takes an order."""


@dataclasses.dataclass(frozen=True)
class Resolution:
    """The order a model gets; origin is `explicit`, `environment`, `connector` or `backends`.

    `note` tells the user of a connector's wish that was not granted.
    """

    order: Order
    source: str
    note: str = ""


def legal_orders(specs: Iterable[LayerSpec], candidates: Sequence[Order] = DEFAULT_PREFERENCE) -> tuple[Order, ...]:
    """Candidates, most preferred first, that can hold these layers together, before any grouping; LayoutError for none.

    Pages of different shapes can share a block only where a page is one run; layers that context parallelism splits and
    layers that it does not, with pages of different sizes, need blocks outermost.
    """
    layers = tuple(specs)
    remaining = tuple(candidates)
    if len({(spec.num_heads, spec.num_states, spec.page_size_bytes) for spec in layers}) > 1:
        remaining = tuple(order for order in remaining if order.block_compact)
        if not remaining:
            raise LayoutError("candidates", _names(candidates), "a block-compact order, as (H, N, page) differ")
    sharded = {spec.shared_by_ranks for spec in layers if attention_of(spec)}
    if len(sharded) > 1 and len({spec.page_size_bytes for spec in layers}) > 1:
        remaining = tuple(order for order in remaining if order.block_outermost)
        if not remaining:
            expected = "an order with blocks outermost, as only some layers are context-parallel and page sizes differ"
            raise LayoutError("candidates", _names(candidates), expected)
    return remaining


def resolve(
    specs: Iterable[LayerSpec] = (),
    candidates: Sequence[Order] = DEFAULT_PREFERENCE,
    *,
    explicit: str | Order | None = None,
    environment: str | None = None,
    connector: str | None = None,
) -> Resolution:
    """The order a model gets (vLLM 0.33 `resolve_kv_cache_layout`): explicit, environment, connector, backends.

    Args:
      specs: one for each layer with a view of its own.
      candidates: orders that all workers' backends support, most preferred first.
      explicit: order that the configuration already gives; taken as it is.
      environment: value of `VLLM_KV_CACHE_LAYOUT`, or None.
      connector: the order a KV connector asks for, or None; dropped, with a note, if it is not legal.

    Raises:
      LayoutError: unknown name, the environment asks for an order that is not legal, or none is.
    """
    if explicit is not None:
        return Resolution(Order.parse(explicit), "explicit")
    legal = legal_orders(specs, candidates)
    if environment is not None:
        order = Order.parse(environment)
        if order not in legal:
            raise LayoutError(ENVIRONMENT, environment, f"one of {_names(legal)}")
        return Resolution(order, "environment")
    if connector is not None:
        order = Order.parse(connector)
        if order in legal:
            return Resolution(order, "connector")
        note = f"the connector asks for {order.value}, which is none of {_names(legal)}: {legal[0].value} it is"
        return Resolution(legal[0], "backends", note)
    return Resolution(legal[0], "backends")


def check_groups(order: Order, groups: Sequence[Sequence[LayerSpec]]) -> None:
    """Raise LayoutError unless `order` can hold groups of mixed page sizes (vLLM 0.33 `validate_kv_cache_layout`)."""
    sizes = sorted({spec.page_size_bytes for group in groups for spec in group})
    if len(sizes) <= 1:
        return
    if not order.block_compact or (len(groups) > 1 and order.layer_compact):
        wanted = [o.value for o in Order if o.block_compact and (o.block_outermost or len(groups) == 1)]
        raise LayoutError("layout", order.value, f"one of {', '.join(wanted)}, as pages have {sizes} bytes")


def _names(orders: Sequence[Order]) -> str:
    return ", ".join(order.value for order in orders)
