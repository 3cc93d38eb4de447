"""Which physical orders can express a model's layers."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.errors import PlanError
from hkv.orders import Order
from hkv.planning.plan import PlannedGroup
from hkv.spec import AttentionSpec, LayerSpec, is_cp_sharded

PREFERENCE = (Order.LBNHC, Order.LBHNC, Order.BLNHC, Order.BLHNC, Order.BHLNC, Order.LHBNC)
"""Orders from which vLLM 0.33 takes the first that will do, when no backend prefers another."""


def candidate_orders(specs: Sequence[LayerSpec], supported: Sequence[str] | None = None) -> list[Order]:
    """Orders among which the model may choose, best first (vLLM 0.33 `resolve_kv_cache_layout`).

    Layers of several shapes need pages that are one run of bytes; attention layers that differ in sharding and in page
    size need blocks outermost.

    Args:
      specs: every layer.
      supported: names of the orders that the attention backends accept, best first; None for all.

    Raises:
      PlanError: none is left.
    """
    candidates = list(PREFERENCE) if supported is None else [Order.parse(name) for name in supported]
    if len({(spec.num_heads, spec.num_states, spec.page_size_bytes) for spec in specs}) > 1:
        candidates = [order for order in candidates if order.block_compact]
    attention = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    pages = {spec.page_size_bytes for spec in attention}
    if len({is_cp_sharded(spec) for spec in attention}) > 1 and len(pages) > 1:
        candidates = [order for order in candidates if order.block_outermost]
    if not candidates:
        raise PlanError("layout", supported, "an order that can express layers of several page sizes")
    return candidates


def check_order(order: Order, groups: Sequence[PlannedGroup]) -> None:
    """Raise PlanError unless the order can express the groups' pages (vLLM 0.33 `validate_kv_cache_layout`)."""
    pages = sorted({spec.page_size_bytes for group in groups for spec in group.specs})
    if len(pages) <= 1:
        return
    if not order.block_compact or (len(groups) > 1 and order.layer_compact):
        expected = f"BLHNC or BLNHC: pages of {', '.join(map(str, pages))} bytes lie side by side in a block"
        raise PlanError("layout", order.value, expected)
