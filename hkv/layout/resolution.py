"""Physical orders that a model may use, and the one it gets: legality, precedence, kernel block sizes (vLLM 0.33)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import NamedTuple

from hkv.errors import LayoutError
from hkv.layout.orders import Order
from hkv.layout.strided import StridedView
from hkv.limits import MAX_BLOCKS, MAX_TOKENS, check_whole
from hkv.spec import LayerSpec, attention_of
from hkv.spec.dtypes import item_bytes

DEFAULT_PREFERENCE = (Order.LBNHC, Order.LBHNC, Order.BLNHC, Order.BLHNC, Order.BHLNC, Order.LHBNC)
"""Orders in falling preference when no backend declares any (vLLM 0.33 `get_supported_kv_cache_layouts`)."""

BACKEND_ORDERS = MappingProxyType(
    {
        "flash_attn": None,
        "triton_attn": None,
        "flashinfer": None,
        "flashinfer-sm100": (Order.LBHNC, Order.BLHNC),
        "cpu_attn": (Order.LBHNC,),
        "flex_attention": (Order.LBNHC,),
        "turboquant": (Order.LBNHC,),
        "b12x": (Order.LBHNC, Order.BLHNC),
        "rocm_attn": (Order.LHBNC, Order.LBHNC),
        "rocm_aiter_fa": (Order.LBHNC, Order.LHBNC),
        "mla_indexer": (Order.BLHNC,),
    }
)
"""Orders that some of vLLM 0.33's attention backends declare, most preferred first; None for any."""

ENVIRONMENT = "VLLM_KV_CACHE_LAYOUT"
"""The environment variable in which vLLM is told an order."""


@dataclasses.dataclass(frozen=True)
class Resolution:
    """The order a model gets.

    Attributes:
      order: the order.
      source: origin of the decision: `explicit`, `environment`, `connector` or `backends`.
      note: note for the user (a connector's wish that was not granted), or "".
    """

    order: Order
    source: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class AnyMultiple:
    """Kernel block sizes that are multiples of `base` tokens (vLLM 0.33 `MultipleOf`)."""

    base: int

    def accepts(self, block_size: int) -> bool:
        """True if a kernel with this rule takes blocks of `block_size` tokens."""
        return block_size % self.base == 0


def supported_orders(declared: Iterable[Sequence[Order] | None]) -> tuple[Order, ...]:
    """Orders that every backend of a worker supports, most preferred first.

    Args:
      declared: each backend's orders, most preferred first, or None for any.

    Raises:
      LayoutError: no order is in every list.
    """
    lists = [tuple(orders) for orders in declared if orders is not None] or [DEFAULT_PREFERENCE]
    if all(orders == lists[0] for orders in lists):
        return lists[0]
    common = [order for order in Order if all(order in orders for orders in lists)]
    if not common:
        shown = "; ".join(", ".join(order.value for order in orders) for orders in lists)
        raise LayoutError("declared", shown, "an order that is in every backend's list")
    return tuple(sorted(common, key=lambda order: -sum(orders[0] is order for orders in lists)))


def legal_orders(specs: Iterable[LayerSpec], candidates: Sequence[Order] = DEFAULT_PREFERENCE) -> tuple[Order, ...]:
    """Candidates that can hold these layers together, before any grouping.

    Pages of different shapes can share a block only where a page is one run; layers that context parallelism splits and
    layers that it does not, with pages of different sizes, need blocks outermost.

    Args:
      specs: one for each layer with a view of its own.
      candidates: orders to choose from, most preferred first.

    Raises:
      LayoutError: none remains.
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
    """Raise LayoutError unless `order` can hold groups of mixed page sizes (vLLM 0.33 `validate_kv_cache_layout`).

    Args:
      order: the resolved order.
      groups: for each group, the spec of each of its layers.
    """
    sizes = sorted({spec.page_size_bytes for group in groups for spec in group})
    if len(sizes) <= 1:
        return
    if not order.block_compact or (len(groups) > 1 and order.layer_compact):
        wanted = [o.value for o in Order if o.block_compact and (o.block_outermost or len(groups) == 1)]
        raise LayoutError("layout", order.value, f"one of {', '.join(wanted)}, as pages have {sizes} bytes")


def common_kernel_block_size(block_size: int, backends: Sequence[Sequence[int | AnyMultiple]]) -> int:
    """Tokens in a kernel's block, for all kernels that read one group (vLLM 0.33 `select_common_block_size`).

    The manager's size if every kernel takes it, else the largest size that one kernel names, every kernel takes, and
    the manager's size is a multiple of.

    Args:
      block_size: tokens in the manager's block.
      backends: for each kernel, the sizes it takes.

    Raises:
      LayoutError: no size suits every kernel.
    """

    def accepted(size: int) -> bool:
        return all(any(r.accepts(size) if isinstance(r, AnyMultiple) else r == size for r in b) for b in backends)

    named = {rule for rules in backends for rule in rules if isinstance(rule, int) and block_size % rule == 0}
    for size in (block_size, *sorted(named, reverse=True)):
        if accepted(size):
            return size
    raise LayoutError("block_size", block_size, f"a size that every kernel can split: {[list(b) for b in backends]}")


def _names(orders: Sequence[Order]) -> str:
    return ", ".join(order.value for order in orders)


# Pages of vLLM's ROCm paged attention: keys cut into vectors of 16 bytes, values with tokens innermost.
#
# The buffer is `[2, blocks, block]`, all keys before all values (vLLM 0.33 `PagedAttention.split_kv_cache`). A block
# of keys is `[heads, head size / x, tokens, x]`, x elements being 16 bytes; one of values `[heads, head size,
# tokens]`. No token lies in one piece, so that nothing flattens to slots without a copy.

VECTOR_BYTES = 16
"""Bytes of a key that one access reads."""


class RocmPages(NamedTuple):
    """One layer's keys and values, as the kernels see them and token by token. The same bytes twice.

    Attributes:
      key: `[blocks, heads, head_size / x, tokens, x]`.
      value: `[blocks, heads, head_size, tokens]`.
      key_of_token: the keys as `[blocks, heads, tokens, head_size / x, x]`.
      value_of_token: the values as `[blocks, heads, tokens, head_size]`.
    """

    key: StridedView
    value: StridedView
    key_of_token: StridedView
    value_of_token: StridedView


def rocm_pages(
    *, num_blocks: int, heads: int, tokens: int, head_size: int, dtype: str = "bfloat16", offset: int = 0
) -> RocmPages:
    """Views of one layer.

    Args:
      num_blocks: blocks of the pool.
      heads: key/value heads on this rank.
      tokens: tokens in a block.
      head_size: elements of a key, and of a value.
      dtype: element type.
      offset: byte of the layer's first key.

    Raises:
      LayoutError: vectors of 16 bytes that do not divide a key.
    """
    check_whole("num_blocks", num_blocks, 1, MAX_BLOCKS, LayoutError)
    for name, value in (("heads", heads), ("tokens", tokens), ("head_size", head_size)):
        check_whole(name, value, 1, MAX_TOKENS, LayoutError)
    item = item_bytes(dtype)
    x = VECTOR_BYTES // item
    if head_size % x:
        raise LayoutError("head_size", head_size, f"a multiple of {x}, the {dtype} elements of {VECTOR_BYTES} bytes")
    block = heads * tokens * head_size * item
    head = tokens * head_size * item
    key = StridedView(
        (num_blocks, heads, head_size // x, tokens, x),
        (block, head, tokens * x * item, x * item, item),
        offset,
        dtype,
    )
    value = StridedView(
        (num_blocks, heads, head_size, tokens), (block, head, tokens * item, item), offset + num_blocks * block, dtype
    )
    return RocmPages(key, value, _moved(key, (0, 1, 3, 2, 4)), _moved(value, (0, 1, 3, 2)))


def _moved(view: StridedView, axes: tuple[int, ...]) -> StridedView:
    """The same elements with their axes in another order."""
    shape, strides = (tuple(values[axis] for axis in axes) for values in (view.shape, view.strides))
    return StridedView(shape, strides, view.offset, view.dtype)
