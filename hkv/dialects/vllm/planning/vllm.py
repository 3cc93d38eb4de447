"""The plan that vLLM 0.33 makes of a model's layers, a parallel shape and a memory budget, and every layer's place."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.planning.grouping import group_layers
from hkv.dialects.vllm.planning.pages import resolve_block_sizes
from hkv.dialects.vllm.planning.plan import CacheTensor, Plan, PlannedGroup, PlanOptions, WorkerPlan
from hkv.dialects.vllm.planning.residency import check_fits, fit_length, request_blocks
from hkv.errors import LayoutError, PlanError
from hkv.layout.orders import DEFAULT_PREFERENCE, Order, check_groups, legal_orders, order_strides
from hkv.spec import LayerSpec


def plan_vllm(workers: Sequence[Mapping[str, LayerSpec]], memory: Sequence[int], options: PlanOptions) -> Plan:
    """The plan of vLLM 0.33 (`get_kv_cache_configs` and `resolve_kv_cache_block_sizes`).

    Groups are made for the whole model and then restricted to each worker's layers, so that every worker has the same
    groups. The null block is reserved, and every worker takes the smallest number of blocks. Ranks that hold the same
    layers may be given once. A PlanError says why layers cannot be grouped or laid out, or a request does not fit.
    """
    if len(workers) != len(memory) or not workers:
        raise PlanError("memory", list(memory), f"one number of bytes for each of {len(workers)} workers")
    layers = _all_layers(workers)
    if not layers:
        return _without_cache(workers, memory, options)
    idle = next((index for index, owned in enumerate(workers) if not owned), None)
    if idle is not None:
        expected = (
            f"pipeline stages that all cache something: vLLM divides memory by the bytes of a block, stage {idle}'s 0"
        )
        raise PlanError("pipeline_parallel", len(workers), expected)
    order, groups = _grouped(layers, workers, options)
    shares = [[group.restricted(set(owned)) for group in groups] for owned in workers]
    blocks = [bytes_per_block(share, order) for share in shares]
    fitting = [options.num_blocks or max(0, bytes_) // block for bytes_, block in zip(memory, blocks, strict=True)]
    limits = options.limits
    if options.auto_fit:
        limits = fit_length(shares, [count - 1 for count in fitting], limits)
    for share, count, block, bytes_ in zip(shares, fitting, blocks, memory, strict=True):
        check_fits(share, count - 1, block, bytes_, limits)
    limiting = min(range(len(workers)), key=lambda index: fitting[index])
    count = fitting[limiting]
    shown = _placed(groups, shares, options)
    plans = tuple(
        WorkerPlan(
            groups=tuple(share),
            num_blocks=count,
            bytes_per_block=block,
            tensors=cache_tensors(placed, order, count, block, options.bugs),
            memory=bytes_,
            fitting_blocks=own,
            tp_replicas=_replicas(placed, options),
        )
        for share, placed, block, bytes_, own in zip(shares, shown, blocks, memory, fitting, strict=True)
    )
    options = dataclasses.replace(options, limits=limits)
    scheduler, unit = resolve_block_sizes(groups, options)
    return Plan(
        groups=tuple(groups),
        workers=plans,
        num_blocks=count,
        layout=order.value,
        scheduler_block_size=scheduler,
        hash_block_size=unit,
        max_model_len=limits.max_model_len,
        request_blocks=request_blocks(groups, limits),
        limited_by=limiting,
        needs_zeroing=_needs_zeroing(groups),
    )


def _placed(
    groups: Sequence[PlannedGroup], shares: Sequence[Sequence[PlannedGroup]], options: PlanOptions
) -> list[list[PlannedGroup]]:
    """Each worker's groups as they are given tensors: only layers it owns, but for `absent-layers-get-tensors`."""
    if "absent-layers-get-tensors" not in options.bugs:
        return [list(share) for share in shares]
    return [
        [whole if whole.mixed and not own.names else own for whole, own in zip(groups, share, strict=True)]
        for share in shares
    ]


def _all_layers(workers: Sequence[Mapping[str, LayerSpec]]) -> dict[str, LayerSpec]:
    layers: dict[str, LayerSpec] = {}
    for owned in workers:
        for name, spec in owned.items():
            if layers.setdefault(name, spec) != spec:
                raise PlanError(name, spec, f"the same on every worker: {layers[name]!r}")
    return layers


def _without_cache(workers: Sequence[Mapping[str, LayerSpec]], memory: Sequence[int], options: PlanOptions) -> Plan:
    """The plan of a model that caches nothing: the null block alone."""
    plans = tuple(WorkerPlan((), 1, 0, (), bytes_, 1) for bytes_ in memory)
    order = Order.parse(options.layout) if options.layout else _candidates(options)[0]
    return Plan((), plans, 1, order.value, 1, 1, options.limits.max_model_len, 0)


def _grouped(
    layers: dict[str, LayerSpec], workers: Sequence[Mapping[str, LayerSpec]], options: PlanOptions
) -> tuple[Order, list[PlannedGroup]]:
    """The order that was asked for, or the first that can express the model, and the groups under it."""
    if options.layout is not None:
        order = Order.parse(options.layout)
        return order, _checked(layers, workers, order, options)
    refusal: PlanError | LayoutError | None = None
    for order in legal_orders(layers.values(), _candidates(options)):
        try:
            return order, _checked(layers, workers, order, options)
        except (PlanError, LayoutError) as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _candidates(options: PlanOptions) -> tuple[Order, ...]:
    """Orders that the attention backends accept, best first."""
    if options.supported_layouts is None:
        return DEFAULT_PREFERENCE
    return tuple(map(Order.parse, options.supported_layouts))


def _checked(
    layers: dict[str, LayerSpec], workers: Sequence[Mapping[str, LayerSpec]], order: Order, options: PlanOptions
) -> list[PlannedGroup]:
    """The groups, after checking that the order can express each worker's share of them."""
    groups = group_layers(layers, order, options)
    for owned in workers:
        share = [group.restricted(set(owned)) for group in groups]
        check_groups(order, [group.specs for group in share])
        cache_tensors(share, order, 1, bytes_per_block(share, order), options.bugs)
    return groups


def _replicas(groups: Sequence[PlannedGroup], options: PlanOptions) -> int:
    """Consecutive ranks with the same bytes in every layer (vLLM 0.33 `kv_cache_groups_tp_replicas`)."""
    ranks, context = options.tensor_parallel, options.limits.context_parallel
    specs = [spec for group in groups for spec in (group.specs if group.mixed else (group.spec,))]
    return functools.reduce(math.gcd, (kinds.layer(spec).replicas(ranks, context) for spec in specs), ranks)


def _needs_zeroing(groups: Sequence[PlannedGroup]) -> bool:
    """True if a new block's old bytes could be read: states, or element types that differ (vLLM 0.33)."""
    specs = [spec for group in groups for spec in group.specs]
    types = {kinds.layer(spec).element for spec in specs} - {None}
    return len(types) > 1 or any(spec.snapshot for spec in specs)


# Placement of every layer in one buffer, from groups and a number of blocks.


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
    return -(-spec.page_size_bytes // spec.stride_alignment_bytes) * spec.stride_alignment_bytes


def cache_tensors(
    groups: Sequence[PlannedGroup], order: Order, num_blocks: int, block: int, bugs: frozenset[str] = frozenset()
) -> tuple[CacheTensor, ...]:
    """Tensors of all layers in a buffer of `num_blocks` blocks (vLLM 0.33 `get_kv_cache_config_from_groups`).

    Every group starts at byte 0: a block belongs to one group at a time, so the groups' tensors overlap on purpose.
    """
    tensors = []
    for group in groups:
        offset = 0
        layers: dict[LayerSpec, list[str]] = {}
        for name, spec in zip(group.names, group.specs, strict=True):
            layers.setdefault(spec, []).append(name)
        for spec, names in layers.items():
            layer_stride, block_stride = _strides(spec, len(names), order, num_blocks, block, bugs)
            tensors.append(CacheTensor(tuple(names), layer_stride, block_stride, offset, block * num_blocks, spec))
            offset += len(names) * (spec.page_size_bytes if order.block_outermost else layer_stride)
    return tuple(tensors)


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
