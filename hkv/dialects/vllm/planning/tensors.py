"""Placement of every layer in one buffer, from groups and a number of blocks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.planning.plan import CacheTensor, Plan, PlannedGroup, PlanOptions
from hkv.errors import PlanError
from hkv.layout.orders import Order, order_strides
from hkv.spec import LayerSpec, MergeError, RequestLimits


def bytes_per_block(groups: Sequence[PlannedGroup], order: Order) -> int:
    """Bytes of the buffer that one more block costs (vLLM 0.33 `_get_kv_cache_bytes_per_block`).

    The widest group decides. Layer-outer orders align each layer's page, block-outer ones the whole block.
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


# Groups of equal page size: layers of one spec dealt out into groups of about the same number of layers.


def group_by_spec(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> list[PlannedGroup]:
    """Groups of layers whose pages are all of one size (vLLM 0.33 `_get_kv_cache_groups_uniform_page_size`).

    Layers whose specs merge share a bucket. Groups are as large as the smallest bucket, or as the largest where that is
    less than one and a half times the smallest. Layers are dealt out in turn, so that every pipeline stage gets its
    share of every group.
    """
    buckets = _buckets(layers, bugs)
    sizes = [len(names) for names, _ in buckets]
    smallest, largest = min(sizes), max(sizes)
    group_size = largest if 2 * largest < 3 * smallest else smallest
    groups = []
    for names, _ in buckets:
        count = -(-len(names) // group_size)
        for index in range(count):
            members = names[index::count]
            specs = [layers[name] for name in members]
            groups.append(PlannedGroup.merged(members, kinds.layer_class(type(specs[0])).merge(specs, bugs)))
    return groups


def _buckets(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> list[tuple[list[str], list[LayerSpec]]]:
    """Layer names and distinct specs of each bucket, in order of first appearance."""
    equal: dict[LayerSpec, list[str]] = {}
    for name, spec in layers.items():
        equal.setdefault(spec, []).append(name)
    buckets: list[tuple[list[str], list[LayerSpec]]] = []
    for spec, names in equal.items():
        for bucket_names, bucket_specs in buckets:
            try:
                kinds.layer_class(type(bucket_specs[0])).merge([*bucket_specs, spec], bugs)
            except MergeError:
                continue
            bucket_names.extend(names)
            bucket_specs.append(spec)
            break
        else:
            buckets.append((list(names), [spec]))
    return buckets


# Options and plans as plain values, for files that outlive a version of the code.


def options_record(options: PlanOptions) -> dict[str, Any]:
    """Options as plain values."""
    record = dataclasses.asdict(options)
    record["bugs"] = sorted(options.bugs)
    record["supported_layouts"] = None if options.supported_layouts is None else list(options.supported_layouts)
    return record


def options_of(record: Mapping[str, Any]) -> PlanOptions:
    """The options of a record."""
    fields = dict(record)
    fields["limits"] = RequestLimits(**fields["limits"])
    fields["bugs"] = frozenset(fields.get("bugs", ()))
    if fields.get("supported_layouts") is not None:
        fields["supported_layouts"] = tuple(fields["supported_layouts"])
    return PlanOptions(**fields)


def plan_record(plan: Plan) -> dict[str, Any]:
    """A plan as plain values: what `hkv plan --json` writes and what installed engines are compared on."""
    sizes = ("num_blocks", "layout", "scheduler_block_size", "hash_block_size", "max_model_len", "request_blocks")
    return {name: getattr(plan, name) for name in sizes} | {
        "tp_replicas": [worker.tp_replicas for worker in plan.workers],
        "needs_zeroing": plan.needs_zeroing,
        "groups": [group_record(group) for group in plan.groups],
        "tensors": [[tensor_record(tensor) for tensor in worker.tensors] for worker in plan.workers],
    }


def group_record(group: PlannedGroup) -> dict[str, Any]:
    """A group as plain values."""
    pages = [spec.page_size_bytes for spec in group.specs if group.mixed] or group.spec.page_size_bytes
    payloads = [s.unpadded_page_size_bytes for s in group.specs if group.mixed] or group.spec.unpadded_page_size_bytes
    return {
        "layers": list(group.names),
        "mixed": group.mixed,
        "eagle": group.eagle,
        "block_size": group.spec.block_size,
        "page_bytes": pages,
        "payload_bytes": payloads,
    }


def tensor_record(tensor: CacheTensor) -> dict[str, Any]:
    """A tensor as plain values: HKV's, or vLLM's own, whose fields are called alike."""
    sizes = ("layer_stride", "block_stride", "offset", "size")
    return {"layers": list(tensor.layers), **{name: getattr(tensor, name) for name in sizes}}
