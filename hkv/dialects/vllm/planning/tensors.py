"""Placement of every layer in one buffer, from groups and a number of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hkv.dialects.vllm.planning.plan import CacheTensor, PlannedGroup
from hkv.errors import PlanError
from hkv.layout.orders import Order, order_strides
from hkv.spec import LayerSpec


def bytes_per_block(groups: Sequence[PlannedGroup], order: Order) -> int:
    """Bytes of the buffer that one more block costs (vLLM 0.33 `_get_kv_cache_bytes_per_block`).

    The widest group decides. Layer-outer orders align each layer's page, block-outer ones the whole block.

    Args:
      groups: groups of one worker, at least one with a layer.
      order: physical order of the axes.
    """
    if not order.block_outermost:
        return max(sum(map(aligned_page, group.specs)) for group in groups)
    widest = max(group.page_bytes for group in groups)
    alignment = math.lcm(*(spec.stride_alignment_bytes for group in groups for spec in group.specs))
    return -(-widest // alignment) * alignment


def aligned_page(spec: LayerSpec) -> int:
    """Bytes from one block of a layer to the next where each layer is a region of its own."""
    alignment = spec.stride_alignment_bytes
    return -(-spec.page_size_bytes // alignment) * alignment


def cache_tensors(
    groups: Sequence[PlannedGroup], order: Order, num_blocks: int, block: int, bugs: frozenset[str] = frozenset()
) -> tuple[CacheTensor, ...]:
    """Tensors of all layers in a buffer of `num_blocks` blocks (vLLM 0.33 `get_kv_cache_config_from_groups`).

    Every group starts at byte 0: a block belongs to one group at a time, so the groups' tensors overlap on purpose.

    Args:
      groups: groups of one worker.
      order: physical order of the axes.
      num_blocks: blocks in the pool, the null block included.
      block: bytes of one block, see `bytes_per_block`.
      bugs: names of upstream defects to reproduce.

    Raises:
      PlanError: the order cannot pad a page, or lays its heads' blocks at distances that are not aligned.
      LayoutError: the order cannot pad a page of several heads.
    """
    tensors = []
    for group in groups:
        offset = 0
        for spec, names in _layers_by_spec(group).items():
            layer_stride, block_stride = _strides(spec, len(names), order, num_blocks, block, bugs)
            tensors.append(CacheTensor(tuple(names), layer_stride, block_stride, offset, block * num_blocks, spec))
            offset += len(names) * (spec.page_size_bytes if order.block_outermost else layer_stride)
    return tuple(tensors)


def _layers_by_spec(group: PlannedGroup) -> dict[LayerSpec, list[str]]:
    layers: dict[LayerSpec, list[str]] = {}
    for name, spec in zip(group.names, group.specs, strict=True):
        layers.setdefault(spec, []).append(name)
    return layers


def _strides(
    spec: LayerSpec, layers: int, order: Order, num_blocks: int, block: int, bugs: frozenset[str]
) -> tuple[int, int]:
    fixed = block if order.block_outermost else None
    if fixed is None and aligned_page(spec) != spec.page_size_bytes:
        if not order.block_compact:
            raise PlanError("layout", order.value, f"an order that can pad pages to {aligned_page(spec)} bytes")
        fixed = aligned_page(spec)
    padded = None if getattr(spec, "page_size_padded", None) is None else spec.page_size_bytes
    shape = (layers, num_blocks, spec.num_heads, spec.num_states, spec.content_bytes)
    strides = order_strides(shape, order, padded, (None, fixed, None, None, None))
    if fixed is None and strides[1] % spec.stride_alignment_bytes and "scattered-heads-unaligned" not in bugs:
        expected = f"an order with blocks a multiple of {spec.stride_alignment_bytes} bytes apart, not {strides[1]}"
        raise PlanError("layout", order.value, expected)
    return strides[0], strides[1]
