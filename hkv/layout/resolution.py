"""Physical orders that a model may use, and the one it gets: legality and precedence (vLLM 0.33)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hkv.errors import LayoutError
from hkv.layout.orders import Order
from hkv.layout.strided import StridedView
from hkv.limits import MAX_BLOCKS, MAX_TOKENS, check_whole
from hkv.spec import LayerSpec, attention_of
from hkv.spec.dtypes import item_bytes

DEFAULT_PREFERENCE = (Order.LBNHC, Order.LBHNC, Order.BLNHC, Order.BLHNC, Order.BHLNC, Order.LHBNC)
"""Orders in falling preference when no backend declares any (vLLM 0.33 `get_supported_kv_cache_layouts`)."""

ENVIRONMENT = "VLLM_KV_CACHE_LAYOUT"
"""The environment variable in which vLLM is told an order."""


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


# Pages of vLLM's ROCm paged attention: keys cut into vectors of 16 bytes, values with tokens innermost.
#
# The buffer is `[2, blocks, block]`, all keys before all values (vLLM 0.33 `PagedAttention.split_kv_cache`). A block
# of keys is `[heads, head size / x, tokens, x]`, x elements being 16 bytes; one of values `[heads, head size,
# tokens]`. No token lies in one piece, so that nothing flattens to slots without a copy.

VECTOR_BYTES = 16
"""Bytes of a key that one access reads."""


class RocmPages(NamedTuple):
    """One layer's keys and values, as the kernels see them and token by token. The same bytes twice.

    `key` is `[blocks, heads, head_size / x, tokens, x]`, `value` `[blocks, heads, head_size, tokens]`; `key_of_token`
    `[blocks, heads, tokens, head_size / x, x]` and `value_of_token` `[blocks, heads, tokens, head_size]`.
    """

    key: StridedView
    value: StridedView
    key_of_token: StridedView
    value_of_token: StridedView


def rocm_pages(
    *, num_blocks: int, heads: int, tokens: int, head_size: int, dtype: str = "bfloat16", offset: int = 0
) -> RocmPages:
    """Views of one layer from byte `offset` on; LayoutError where vectors of 16 bytes do not divide a key."""
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
    return RocmPages(key, value, key.reordered((0, 1, 3, 2, 4)), value.reordered((0, 1, 3, 2)))
