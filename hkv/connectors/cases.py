"""Memory of every form that HKV plans, and the bytes of its blocks by the plan: what a connector is asked for.

The bytes come from the plan itself, `Layout.block_runs`, RTP-LLM's `Addresses`, LMCache's pages and object regions,
and never from the tensors that the connector sees. Cases come from small to large, so that the first that a connector
gets wrong is a small one; sizes differ from each other in some and coincide in others, since either hides mistakes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hkv.chunks.formats import TRAITS, EngineKVFormat, page_index
from hkv.chunks.kernel_groups import EngineGroupInfo, KernelGroup, PageGeometry
from hkv.chunks.objects import object_groups, object_layout
from hkv.connectors.memory import Group, Layer, Memory, Range, Tensor, merged
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning import DescribedModel, RtpOptions
from hkv.dialects.vllm.planning.plan import PlanOptions, tensor_layout
from hkv.dialects.vllm.planning.vllm import plan_vllm
from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.layout.content import quantize
from hkv.layout.layer_cache import LayerCache
from hkv.layout.orders import Order
from hkv.layout.strided import StridedView, dense_strides
from hkv.model.group_policy import DEFAULT_TAG, CacheDescription, GroupType, LayerDescription
from hkv.spec import FullAttention, LayerSpec, Mamba, MLAAttention, RequestLimits, SlidingWindow

Ranges = tuple[Range, ...]


ENGINES: tuple[str, ...] = ("vllm", "rtp-llm", "lmcache")
"""Engines whose memory there are cases of."""


@dataclasses.dataclass(frozen=True)
class MemoryCase:
    """Memory, and the bytes of its blocks.

    Attributes:
      name: the form, in words.
      memory: as a connector gets it.
      data: bytes of a block of a layer that carry data, both by index: all of them have to be moved.
      page: the same with padding: nothing else may be moved.
      parts: keys and values, or states, where a block has several, by name and in their order.
    """

    name: str
    memory: Memory
    data: Callable[[int, int], Ranges]
    page: Callable[[int, int], Ranges]
    parts: Callable[[int, int], tuple[tuple[str, Ranges], ...]]

    def asks(self) -> Iterator[tuple[int, int]]:
        """Layers and blocks to ask for: of each group the first, second and last layer; the first and last blocks."""
        for number, group in enumerate(self.memory.groups):
            members = [index for index, layer in enumerate(self.memory.layers) if layer.group == number]
            blocks = sorted({*range(min(3, group.num_blocks)), group.num_blocks - 1})
            for layer in sorted({*members[:2], *members[-1:]}):
                yield from ((layer, block) for block in blocks)


def all_cases(engines: Sequence[str] = ()) -> tuple[MemoryCase, ...]:
    """The cases of some of `ENGINES`; of all of them where none is named."""
    made = dict(zip(ENGINES, (_vllm, _rtp_llm, _lmcache), strict=True))
    for name in engines:
        if name not in made:
            raise LayoutError("engine", name, f"one of {', '.join(made)}")
    return tuple(case for name in engines or made for case in made[name]())


# vLLM: one kind of layer in each of the six orders, then hybrid models.

SMALL: dict[str, LayerSpec] = {
    "keys and values side by side": FullAttention(
        block_size=4, num_kv_heads=3, head_size=6, head_size_v=5, dtype="float16"
    ),
    "two of everything": FullAttention(block_size=2, num_kv_heads=2, head_size=2, dtype="bfloat16"),
    "one head, padded": FullAttention(block_size=4, head_size=4, dtype="int8", page_size_padded=48),
    "padded pages": FullAttention(block_size=4, num_kv_heads=2, head_size=4, dtype="int8", page_size_padded=96),
    "latents": MLAAttention(block_size=4, head_size=9, dtype="bfloat16"),
    "states": Mamba(block_size=4, shapes=((2, 3), (2, 2, 2)), dtypes=("bfloat16", "float32")),
    "padded states": Mamba(
        block_size=4, shapes=((2, 3), (2, 2, 2)), dtypes=("bfloat16", "float32"), page_size_padded=64
    ),
}
"""Layers, by what is in their pages."""

PACKED = ("kv_planes", "kv_halves", "rocm_pages", "nvfp4", "int8_per_token_head")

BIG = FullAttention(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")


def _vllm() -> Iterator[MemoryCase]:
    packed = FullAttention(block_size=4, num_kv_heads=3, head_size=16, dtype="bfloat16")
    specs = SMALL | {name: quantize(packed, name) for name in PACKED}
    specs["fp8_ds_mla"] = quantize(MLAAttention(block_size=4, head_size=576), "fp8_ds_mla")
    for (name, spec), order in ((each, order) for each in specs.items() for order in Order):
        yield from _of_spec(name, spec, order, num_blocks=2 if name == "two of everything" else 5)
    for (name, layers), order in ((each, order) for each in _hybrids().items() for order in Order):
        yield from _of_plan(name, layers, order)
    for order in Order:
        yield from _of_spec("more than 2^32 bytes", BIG, order, num_blocks=80_000, pieces=(None,))


def _of_spec(
    name: str, spec: LayerSpec, order: Order, *, num_blocks: int, pieces: Sequence[int | None] = (None, 2, 1)
) -> Iterator[MemoryCase]:
    """Three layers in one buffer, from byte 256 on: whole blocks, and those in kernel blocks that the order can have.

    Kernel blocks of a block whose heads lie apart exist only in buffers of a single layer.
    """
    for kernel in pieces:
        for layers in (3, 1):
            try:
                layout = Layout.of_spec(
                    spec, order, num_blocks=num_blocks, num_layers=layers, offset=256, kernel_block_size=kernel
                )
            except LayoutError:
                continue  # the order cannot express the padding or the split
            if (kernel is None) == (layers == 3) and (kernel is None or layout.split > 1):
                told = f", kernel blocks of {kernel} tokens" if kernel else ""
                places = [(f"layers.{index}", 0, layout, index) for index in range(layers)]
                groups = (Group(spec.block_size, num_blocks),)
                yield _of_layouts(f"{name}, {order.value}{told}", groups, places)


def _of_layouts(name: str, groups: Sequence[Group], places: Sequence[tuple[str, int, Layout, int]]) -> MemoryCase:
    """The case of layers by name, group, layout, and index in the layout."""
    layers = []
    for layer, group, layout, index in places:
        view = _engine_view(layout, index)
        tensor = Tensor.of_view(view, "BHNC", rows=layout.split, step=layout.kernel_step)
        layers.append(Layer(layer, group, layout.page_size, (tensor,)))

    def data(layer: int, block: int) -> Ranges:
        _, _, layout, index = places[layer]
        return merged(Range(0, first, size) for first, size in layout.block_runs(index, block))

    def page(layer: int, block: int) -> Ranges:
        _, _, layout, index = places[layer]
        runs = data(layer, block)
        if len(runs) > 1 or layout.page_size <= sum(run.size for run in runs):
            return runs
        return (Range(0, layout.address(index, block, 0, 0), layout.page_size),)

    def parts(layer: int, block: int) -> tuple[tuple[str, Ranges], ...]:
        _, _, layout, index = places[layer]
        names = [each.name for each in layout.content if each.name in ("key", "value") or each.name.startswith("state")]
        return tuple((name, _part(layout, name, index, block)) for name in names)

    ends = [each.first + each.size for at, place in enumerate(places) for each in page(at, place[2].num_blocks - 1)]
    return MemoryCase(name, Memory("vllm", (max(ends),), tuple(groups), tuple(layers)), data, page, parts)


def _part(layout: Layout, name: str, layer: int, block: int) -> Ranges:
    """Bytes of a part of a block; none where the order cannot express it."""
    try:
        cells = layout.part_cells(name)
    except LayoutError:
        return ()
    return tuple(Range(0, first, size) for first, size in cells.select(0, layer).select(0, block).runs())


def _planes(memory: Memory) -> Callable[[int, int], tuple[tuple[str, Ranges], ...]]:
    """Keys and values of a block by the axis K of the layer's first tensor."""

    def parts(layer: int, block: int) -> tuple[tuple[str, Ranges], ...]:
        tensor = memory.layers[layer].tensors[0]
        axis = tensor.axes.find("K")
        if axis < 0 or tensor.shape[axis] != 2:
            return ()
        strides = (*tensor.strides[:axis], *tensor.strides[axis + 1 :])
        shape = (*tensor.shape[:axis], *tensor.shape[axis + 1 :])
        plane = dataclasses.replace(tensor, axes=tensor.axes.replace("K", ""), shape=shape, strides=strides)
        starts = (("key", 0), ("value", tensor.strides[axis]))
        return tuple(
            (name, dataclasses.replace(plane, offset=tensor.offset + start).block(block)) for name, start in starts
        )

    return parts


def _engine_view(layout: Layout, index: int) -> StridedView:
    """The layer as vLLM registers it, or its bytes where its elements are not aligned to their type."""
    try:
        return layout.layer_view(index)
    except LayoutError:
        return dataclasses.replace(layout, dtype="uint8").layer_view(index)


def _hybrids() -> dict[str, dict[str, LayerSpec]]:
    """Layers of models whose groups differ: in what they cache, in the bytes of a block, or in its tokens."""

    def full(heads: int, **fields: Any) -> LayerSpec:
        return FullAttention(block_size=4, num_kv_heads=heads, head_size=8, dtype="bfloat16", **fields)

    def window(heads: int) -> LayerSpec:
        return SlidingWindow(block_size=4, num_kv_heads=heads, head_size=8, dtype="bfloat16", window=8)

    state = Mamba(block_size=64, shapes=((2, 3), (2, 2, 2)), dtypes=("bfloat16", "float32"), page_size_padded=256)
    latent = MLAAttention(block_size=4, head_size=9, dtype="bfloat16")
    return {
        "full attention and windows": {
            "full.0": full(2),
            "window.0": window(2),
            "window.1": window(2),
            "full.1": full(2),
        },
        "windows with more heads": {"full.0": full(2), "window.0": window(4), "window.1": window(4), "full.1": full(2)},
        "a group of two sizes": {"full.0": full(2), "full.1": full(3), "window.0": window(2)},
        "attention and states": {"full.0": full(2), "state.0": state, "full.1": full(2)},
        "latents and an indexer": {
            "latent": latent,
            "indexer": MLAAttention(block_size=4, head_size=12, dtype="bfloat16"),
        },
    }


def _of_plan(name: str, layers: dict[str, LayerSpec], order: Order) -> Iterator[MemoryCase]:
    limits = RequestLimits(max_model_len=4, max_in_flight_tokens=4, max_num_encoder_input_tokens=4)
    try:
        plan = plan_vllm([layers], [1 << 20], PlanOptions(limits=limits, layout=order.value, num_blocks=6))
    except LayoutError:
        return  # the order cannot have pages of several sizes
    places = []
    for number, group in enumerate(plan.groups):
        for tensor in plan.workers[0].tensors:
            layout = tensor_layout(tensor, plan)
            places += [
                (layer, number, layout, index) for index, layer in enumerate(tensor.layers) if layer in group.names
            ]
    groups = [Group(group.spec.block_size, plan.num_blocks) for group in plan.groups]
    yield _of_layouts(f"{name}, {order.value}", groups, places)


# RTP-LLM: pools shared by groups, and pools of their own; scales in a region behind all blocks.


def _rtp_llm() -> Iterator[MemoryCase]:
    def layer(tag: str, spec: LayerSpec, **policy: Any) -> LayerDescription:
        return LayerDescription(caches=(CacheDescription(tag=tag, spec=spec, **policy),))

    def attention(dtype: str, heads: int = 3) -> LayerSpec:
        return FullAttention(block_size=8, num_kv_heads=heads, head_size=4, dtype=dtype)

    state = Mamba(block_size=8, shapes=((2, 8), (2, 2, 2)), dtypes=("bfloat16", "float32"))
    latent = MLAAttention(block_size=8, head_size=8, dtype="bfloat16")
    plain, scaled = (layer(DEFAULT_TAG, attention(dtype)) for dtype in ("bfloat16", "float8_e4m3fn"))
    draft = DescribedModel((plain,))
    yield _of_pools("one pool", DescribedModel((plain,) * 3))
    yield _of_pools("one pool with scales", DescribedModel((scaled,) * 2))
    yield _of_pools("kernel blocks of 4 tokens, with scales", DescribedModel((scaled,) * 2), kernel_block_size=4)
    yield _of_pools("latents", DescribedModel((layer(DEFAULT_TAG, latent),) * 2, (6, 2), None))
    yield _of_pools("a draft's region behind the target's", DescribedModel((plain,) * 2), draft)
    mixed = (layer("full", attention("bfloat16")), layer("linear0", state), layer("linear0", state))
    yield _of_pools("a pool shared by attention and states", DescribedModel(mixed), kernel_block_size=4)
    several = (*mixed[:2], layer("swa", attention("float8_e4m3fn", 1), group_type=GroupType.SWA))
    yield _of_pools("a pool a group", DescribedModel(several), pools="independent")


def _of_pools(name: str, model: DescribedModel, draft: DescribedModel | None = None, **options: Any) -> MemoryCase:
    cache = PlannedCache.of_layers(model, RtpOptions(block_size=8, **options), num_blocks=5, draft=draft)
    addresses, plan = cache.addresses, cache.plan
    models = (plan.groups, *plan.modules)
    members = [(number, group, layer) for each in models for number, group in enumerate(each) for layer in group.layers]
    layers = [
        Layer(
            f"{layer}/{group.tag}",
            number,
            group.stride + group.scale_stride,
            _pool_tensors(cache.layer_cache(layer, group.tag)),
        )
        for number, group, layer in members
    ]

    def page(layer: int, block: int) -> Ranges:
        _, group, index = members[layer]
        spans = (
            addresses.buffers(index, block)
            if len(addresses.homes(index)) == 1
            else addresses.buffers(index, block, group.tag)
        )
        return merged(Range(*span) for span in spans)

    def data(layer: int, block: int) -> Ranges:
        _, group, index = members[layer]
        own, padding = addresses.buffers(index, block, group.tag), group.padding_bytes
        size = min(own[0].size, group.stride - padding)
        return merged([Range(own[0].pool, own[0].offset, size), *(Range(*span) for span in own[1:])])

    groups = tuple(Group(group.block.seq_size, group.num_blocks or plan.num_blocks) for group in plan.groups)
    memory = Memory("rtp-llm", cache.pool_sizes, groups, tuple(layers))
    return MemoryCase(f"RTP-LLM, {name}", memory, data, page, _planes(memory))


def _pool_tensors(cache: LayerCache) -> tuple[Tensor, ...]:
    axes = {5: "BKHNC", 3: "BNC", 2: "BC"}
    tensors = [Tensor.of_view(cache.kv, axes[len(cache.kv.shape)], buffer=cache.pool, rows=cache.kernel_blocks)]
    if cache.scale is not None:
        rows = cache.kernel_blocks * cache.scale.shape[0] // cache.kv.shape[0]
        inner = axes[len(cache.scale.shape)]
        tensors.append(Tensor.of_view(cache.scale, inner, name="scale", buffer=cache.pool, rows=rows))
    return tuple(tensors)


# LMCache: engines' tensors by their formats, and chunk objects.

FORMATS = {0: "BLKNHC", 1: "KBNHC", 2: "BKNHC", 6: "KBHNC", 7: "BKHNC", 8: "BLKHNC", 10: "BHNC", 11: "BNHC"}
"""Axes of formats whose keys and values are apart, side by side, or of all layers in a block."""


def _lmcache() -> Iterator[MemoryCase]:
    for number, axes in FORMATS.items():
        for blocks in (2, 5):
            yield _of_format(EngineKVFormat(number), axes, blocks)
    for chunk in (32, 64):
        for separate, first_window in itertools.product((False, True), repeat=2):
            yield _of_objects(chunk, separate, first_window)


def _of_format(kind: EngineKVFormat, axes: str, blocks: int) -> MemoryCase:
    traits, layers, slots, heads, size = TRAITS[kind], 3, 4, 2, 6
    extent = {"B": blocks, "L": layers, "K": 2, "N": slots, "H": heads, "C": size * (1 if "K" in axes else 2)}
    shape = [extent[axis] for axis in axes]
    strides = dict(zip(axes, dense_strides(shape, 2), strict=True))
    pages, tensor_bytes = 2 if "K" in axes else 1, strides[axes[0]] * extent[axes[0]]
    page_bytes = slots * heads * extent["C"] * 2
    apart = "L" not in axes

    def tensor(layer: int) -> Tensor:
        own = [axis for axis in axes if axis != "L"]
        offset = 0 if apart else layer * strides["L"]
        view = StridedView(tuple(extent[a] for a in own), tuple(strides[a] for a in own), offset, "bfloat16")
        return Tensor.of_view(view, "".join(own), buffer=layer if apart else 0)

    def data(layer: int, block: int) -> Ranges:
        found = [page_index(traits.page_order, plane, layer, block, pages, layers, blocks) for plane in range(pages)]
        return merged(Range(layer if apart else 0, index * page_bytes, page_bytes) for index in found)

    told = tuple(Layer(f"layers.{layer}", 0, pages * page_bytes, (tensor(layer),)) for layer in range(layers))
    memory = Memory("lmcache", (tensor_bytes,) * (layers if apart else 1), (Group(slots, blocks),), told)
    return MemoryCase(f"LMCache's format {kind.name}, {blocks} blocks", memory, data, data, _planes(memory))


def _of_objects(chunk: int, separate: bool, first_window: bool) -> MemoryCase:
    """Chunk objects, a buffer each; a block is one of those that its group keeps of a chunk.

    A window's group keeps fewer blocks: where it is the first, later ones have blocks that it lacks.
    """
    kinds = [("bfloat16", 2, -1, 16, 3), ("bfloat16", 3, 16, 8, 4), ("float16", 1, -1, 16, 5)]
    kinds = [kinds[1], kinds[0], kinds[2]] if first_window else kinds
    groups, first = [], 0
    for number, (dtype, layers, window, slots, size) in enumerate(kinds):
        indices = tuple(range(first, first + layers))
        geometry = PageGeometry(EngineKVFormat(1), 2, layers, 9, slots, 2, size, dtype)
        groups.append(KernelGroup(indices, geometry, EngineGroupInfo(number, indices, window=window)))
        first += layers
    objects = object_groups(groups, chunk, separate)
    layouts = [object_layout(groups, found, chunk) for found in objects]
    regions = {region.group: (number, region) for number, each in enumerate(layouts) for region in each.regions}
    members = [(number, index) for number, group in enumerate(groups) for index in range(len(group.layer_indices))]

    def tensor(number: int, index: int) -> Tensor:
        buffer, region = regions[number]
        slots, item = groups[number].geometry.slots, groups[number].geometry.item_bytes
        planes, _, rows, row = region.shape
        plane, layer, slot, element = dense_strides(region.shape, item)
        shape, strides = (planes, rows // slots, slots, row), (plane, slots * slot, slot, element)
        view = StridedView(shape, strides, region.offset + index * layer, region.dtype)
        return Tensor.of_view(view, "KBNC", buffer=buffer)

    def data(layer: int, block: int) -> Ranges:
        number, index = members[layer]
        buffer, region = regions[number]
        geometry, layers = groups[number].geometry, region.shape[1]
        rows = [(plane * layers + index) * region.slots + block * geometry.slots for plane in range(2)]
        return merged(Range(buffer, region.offset + row * geometry.row_bytes, geometry.page_bytes) for row in rows)

    layers = tuple(
        Layer(
            f"layers.{groups[number].layer_indices[index]}",
            number,
            2 * groups[number].geometry.page_bytes,
            (tensor(number, index),),
        )
        for number, index in members
    )
    kept = tuple(Group(each.geometry.slots, each.num_blocks(each.kept_tokens(chunk))) for each in groups)
    memory = Memory("lmcache", tuple(layout.nbytes for layout in layouts), kept, layers)
    form = "an object a window" if separate else "one object"
    window = "a window's group first" if first_window else "a window's group second"
    return MemoryCase(f"LMCache's chunks of {chunk} tokens, {form}, {window}", memory, data, data, _planes(memory))


# The same as plain values.


def vector_cases() -> Iterator[dict[str, Any]]:
    """Every case as plain values: the memory, and for the blocks asked for the ranges of data and of pages."""
    for case in all_cases():
        asked = [
            {
                "layer": layer,
                "block": block,
                "data": [list(each) for each in case.data(layer, block)],
                "page": [list(each) for each in case.page(layer, block)],
            }
            for layer, block in case.asks()
        ]
        yield {"name": case.name, "input": case.memory.record, "expected": {"blocks": asked}}
