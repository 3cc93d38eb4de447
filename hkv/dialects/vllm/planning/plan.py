"""Result of planning: groups of layers, blocks in the pool, and the place of each set of layers in the buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hkv.contract.bugs import check_bugs
from hkv.dialects.vllm.bugs import BUGS
from hkv.errors import LayoutError, PlanError
from hkv.layout.block_layout import Layout
from hkv.layout.orders import Order
from hkv.model.topology import Group
from hkv.spec import LayerSpec, RequestLimits


@dataclasses.dataclass(frozen=True)
class PlannedGroup:
    """Layers that share one block table, with the spec under which each is laid out; none on a stage that owns none.

    The table is managed by `spec`: the members' merged one, or the first's in a `mixed` group of one type and several
    sizes (vLLM 0.33 `UniformTypeKVCacheSpecs`). An `eagle` group holds draft layers and takes the EAGLE drop.
    """

    names: tuple[str, ...]
    specs: tuple[LayerSpec, ...]
    spec: LayerSpec
    mixed: bool = False
    eagle: bool = False

    @classmethod
    def merged(cls, names: list[str], spec: LayerSpec) -> PlannedGroup:
        """A group whose layers all take the merged spec."""
        return cls(tuple(names), (spec,) * len(names), spec)

    @classmethod
    def of_type(cls, layers: Mapping[str, LayerSpec]) -> PlannedGroup:
        """A mixed group of at least one layer."""
        specs = tuple(layers.values())
        return cls(tuple(layers), specs, specs[0], mixed=True)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block over all of the group's layers, padding of pages included."""
        return sum(spec.page_size_bytes for spec in self.specs)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block that carry data."""
        return sum(spec.unpadded_page_size_bytes for spec in self.specs)

    @property
    def prefix_cacheable(self) -> bool:
        """True if another request can ever reuse a block of this group."""
        return all(spec.prefix_cacheable for spec in self.specs or (self.spec,))

    def restricted(self, names: set[str]) -> PlannedGroup:
        """The group as a worker that owns only `names` sees it; possibly empty."""
        kept = [(name, spec) for name, spec in zip(self.names, self.specs, strict=True) if name in names]
        spec = kept[0][1] if kept and self.mixed else self.spec
        return dataclasses.replace(self, names=tuple(n for n, _ in kept), specs=tuple(s for _, s in kept), spec=spec)


@dataclasses.dataclass(frozen=True)
class CacheTensor:
    """Place of a set of equal layers: layer `l`'s block `b` starts at `offset + l*layer_stride + b*block_stride`.

    Layers are in the order of the L axis; `size` is that of the whole buffer, in bytes. Tensors of different groups
    overlap on purpose: a block belongs to one group at a time.
    """

    layers: tuple[str, ...]
    layer_stride: int
    block_stride: int
    offset: int
    size: int
    spec: LayerSpec


@dataclasses.dataclass(frozen=True)
class WorkerPlan:
    """One worker's share of the cache: the model's groups restricted to its layers, and places of those.

    `num_blocks`, the null block among them, is the same on every worker; `fitting_blocks` would have fitted on this one
    alone. `tp_replicas` consecutive tensor-parallel ranks hold the same bytes.
    """

    groups: tuple[PlannedGroup, ...]
    num_blocks: int
    bytes_per_block: int
    tensors: tuple[CacheTensor, ...]
    memory: int
    fitting_blocks: int
    tp_replicas: int = 1

    @property
    def size(self) -> int:
        """Bytes of the worker's buffer."""
        return self.bytes_per_block * self.num_blocks

    def spec_of(self, layer: str) -> LayerSpec:
        """The spec under which a layer of this worker is laid out."""
        for group in self.groups:
            if layer in group.names:
                return group.specs[group.names.index(layer)]
        raise KeyError(layer)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of a model's cache: its groups, its tensors and the number of blocks.

    Attributes:
      groups: groups over the whole model, in the order in which the block manager visits them.
      workers: one plan for each rank that has layers of its own (pipeline stages).
      num_blocks: blocks in the pool, the null block 0 included.
      scheduler_block_size: tokens; common multiple of the groups' blocks.
      hash_block_size: tokens between two hashes of a prefix.
      request_blocks: blocks reserved for one request of `max_model_len` tokens, all groups together.
      limited_by: index of the worker that limits the number of blocks.
      needs_zeroing: new blocks must be zeroed: recurrent states, or element types that differ between layers.
    """

    groups: tuple[PlannedGroup, ...]
    workers: tuple[WorkerPlan, ...]
    num_blocks: int
    layout: str
    scheduler_block_size: int
    hash_block_size: int
    max_model_len: int
    request_blocks: int
    limited_by: int = 0
    needs_zeroing: bool = False

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def reserved_concurrency(self) -> float:
        """Requests of the longest length by reservation (vLLM 0.33 `get_max_concurrency_for_kv_cache_config`)."""
        return self.num_blocks / self.request_blocks if self.request_blocks else float("inf")

    def topology_groups(self) -> tuple[Group, ...]:
        """The groups as the block manager knows them, tagged `g0`, `g1`, ..."""
        named = ((f"g{index}", group) for index, group in enumerate(self.groups))
        return tuple(Group(tag=tag, spec=each.spec, layers=each.names, eagle=each.eagle) for tag, each in named)


def tensor_layout(tensor: CacheTensor, plan: Plan, kernel_block_size: int = 0) -> Layout:
    """The layout of a tensor, its blocks cut into kernel blocks where its kind has any."""
    spec = tensor.spec
    split = None
    if kernel_block_size and not spec.snapshot and spec.prefix_cacheable:
        if spec.block_size % kernel_block_size and kernel_block_size % spec.block_size:
            raise LayoutError("kernel_block_size", kernel_block_size, f"a divisor of the {spec.block_size}-token block")
        split = min(kernel_block_size, spec.block_size)
    return Layout.of_spec(
        spec,
        plan.layout,
        num_blocks=plan.num_blocks,
        num_layers=len(tensor.layers),
        layer_stride=tensor.layer_stride,
        block_stride=tensor.block_stride,
        offset=tensor.offset,
        kernel_block_size=split,
    )


# Input of a plan besides the layers: lengths, parallel shape, layout and switches of the engine.


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The switches of vLLM 0.33 that planning reads.

    Attributes:
      layout: name of the physical order, or None to take the first that can express the model.
      supported_layouts: orders that the model's attention backends accept, best first; None for all.
      hybrid: False gives every layer the blocks of full attention (`disable_hybrid_kv_cache_manager`).
      auto_fit: lower `max_model_len` to what fits.
      num_blocks: number of blocks, whatever the memory (`num_gpu_blocks_override`), or None.
      eagle: a draft module whose groups drop a block after a hit is in use.
      prefill_lookahead: tokens that a multi-module draft looks ahead in prefill.
      caching: prefix caching or a connector is on, so that block hashes are used.
      prefix_match_unit: tokens between two hashes, or None for the largest that all groups allow.
    """

    limits: RequestLimits
    layout: str | None = None
    supported_layouts: tuple[str, ...] | None = None
    tensor_parallel: int = 1
    hybrid: bool = True
    auto_fit: bool = False
    num_blocks: int | None = None
    eagle: bool = False
    prefill_lookahead: int = 0
    caching: bool = True
    prefix_match_unit: int | None = None
    bugs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_bugs(self.bugs, BUGS)
        for order in (*(self.supported_layouts or ()), *([] if self.layout is None else [self.layout])):
            Order.parse(order)
        for name in ("tensor_parallel", "num_blocks", "prefix_match_unit"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise PlanError(name, value, "a positive integer")
        if type(self.prefill_lookahead) is not int or self.prefill_lookahead < 0:
            raise PlanError("prefill_lookahead", self.prefill_lookahead, "a non-negative integer")


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
