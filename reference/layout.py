"""Address of every byte of a cache, by walking memory with a cursor: no stride is ever multiplied.

Coordinates are (layer, block, head, state, byte), in manager blocks; addresses are bytes of one flat buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from hkv.spec import AttentionSpec, LayerSpec, attention_of
from hkv.spec.dtypes import item_bytes

Coordinate = tuple[int, int, int, int, int]
Element = tuple[str, int, int, int, int, int, int]
"""(part, layer, block, head of the part, state, element counted in row-major order, byte of the element)."""


def cell_addresses(
    spec: LayerSpec,
    order: str,
    num_layers: int,
    num_blocks: int,
    *,
    layer_stride: int | None = None,
    block_stride: int | None = None,
    offset: int = 0,
    kernel_block_size: int | None = None,
) -> dict[Coordinate, int]:
    """The address of every byte of every cell.

    Args:
      spec: cache description of each layer.
      order: the axes L, B, H, N, C, outermost first.
      num_layers: layers.
      num_blocks: manager blocks.
      layer_stride: bytes from one layer to the next, None for as close as possible.
      block_stride: bytes from one manager block to the next, None for as close as possible.
      offset: address of the first byte.
      kernel_block_size: tokens in one piece of a manager block, each laid out like a block of its own.
    """
    split = 1 if kernel_block_size is None else spec.block_size // kernel_block_size
    extent = {
        "L": num_layers,
        "B": num_blocks * split,
        "H": spec.num_heads,
        "N": spec.num_states // split,
        "C": spec.content_bytes,
    }
    distance = {"L": layer_stride, "B": None if block_stride is None else block_stride // split}
    padded = getattr(spec, "page_size_padded", None) is not None
    page_axis = max("LB", key=order.index)
    found: dict[Coordinate, int] = {}

    def walk(depth: int, cursor: int, at: dict[str, int]) -> int:
        if depth == 5:
            block, piece = divmod(at["B"], split)
            found[at["L"], block, at["H"], piece * extent["N"] + at["N"], at["C"]] = cursor
            return cursor + 1
        axis = order[depth]
        for index in range(extent[axis]):
            start = cursor
            cursor = walk(depth + 1, start, {**at, axis: index})
            if padded and axis == page_axis:
                cursor = max(cursor, start + spec.page_size_bytes)
            given = distance.get(axis)
            if given is not None:
                cursor = start + given
        return cursor

    walk(0, offset, {})
    return found


def element_addresses(spec: LayerSpec, cells: dict[Coordinate, int], states_per_page: int) -> dict[Element, int]:
    """The address of every byte of every element of every part.

    Args:
      spec: cache description of each layer; its `quantization` names the packing.
      cells: from `cell_addresses`.
      states_per_page: states in the page a kernel sees.
    """
    found: dict[Element, int] = {}
    attention = attention_of(spec)
    if attention is not None and attention.quantization in PLANES:
        pages: dict[tuple[int, int, int], list[int]] = {}
        for (layer, block, _, state, _), address in cells.items():
            pages.setdefault((layer, block, state // states_per_page), []).append(address)
        for (layer, block, piece), addresses in pages.items():
            memory = iter(sorted(addresses))
            for part, head, state, element, byte in page_order(attention, states_per_page):
                key = (part, layer, block, head, piece * states_per_page + state, element, byte)
                found[key] = next(memory)
        return found
    for (layer, block, head, state, byte), address in cells.items():
        if byte == 0:
            for position, (part, element, inside) in enumerate(cell_order(spec)):
                slot, of_part = head, head
                name = part
                if attention is not None and attention.quantization == "kv_planes":
                    name, of_part = ("key", "value")[slot], 0
                found[name, layer, block, of_part, state, element, inside] = address + position
    return found


PLANES = ("nvfp4", "fp8_ds_mla_v4", "fp8_indexer", "kv_halves", "rocm_pages")
"""Packings whose parts are not side by side in a cell."""


def cell_order(spec: LayerSpec) -> Iterator[tuple[str, int, int]]:
    """(part, element, byte) of one cell, in memory order."""
    for part, dtype, count in cell_fields(spec):
        for element in range(count):
            for byte in range(item_bytes(dtype)):
                yield part, element, byte


def cell_fields(spec: LayerSpec) -> list[tuple[str, str, int]]:
    """(part, dtype, elements) of one cell, in memory order."""
    if spec.state_tensors:
        shapes = spec.state_tensors
        return [(f"state{i}", dtype, math.prod(shape)) for i, (shape, dtype) in enumerate(shapes)]
    if (attention := attention_of(spec)) is None:
        return [("entry", "uint8", spec.content_bytes)]
    spec = attention
    keys, values, name = spec.head_size, spec.value_size, spec.quantization
    if name == "fp8_ds_mla":
        return [("latent", "float8_e4m3fn", 512), ("scale", "float32", 4), ("rope", "bfloat16", 64)]
    if name == "nvfp4_ds_mla":
        return [("latent", "uint8", 256), ("rope", "float8_e4m3fn", 64), ("scale", "float8_e4m3fn", 32)]
    if name == "mxfp8_ds_mla_v41":
        return [("latent", "float8_e4m3fn", 512), ("scale", "float8_e8m0fnu", 16)]
    if name == "kv_planes":
        return [("either", spec.dtype, spec.num_kv_heads * spec.head_size)]
    if name.endswith("_per_token_head"):
        packed = 2 if name.startswith("int4") else 1
        if values == 0:
            return [("latent", spec.dtype, keys // packed), ("scale", "float32", 2)]
        key = [("key", spec.dtype, keys // packed), ("key_scale", "float32", 1)]
        return [*key, ("value", spec.dtype, values // packed), ("value_scale", "float32", 1)]
    if spec.state_content_bytes is not None:
        return [("packed", "uint8", spec.state_content_bytes)]
    return [("key", spec.dtype, keys), ("value", spec.dtype, values)] if values else [("latent", spec.dtype, keys)]


def page_order(spec: AttentionSpec, states: int) -> Iterator[tuple[str, int, int, int, int]]:
    """(part, head, state, element, byte) of one page, in memory order, for the packings of `PLANES`."""

    def row(part: str, head: int, state: int, dtype: str, count: int) -> Iterator[tuple[str, int, int, int, int]]:
        for element in range(count):
            for byte in range(item_bytes(dtype)):
                yield part, head, state, element, byte

    if spec.quantization == "fp8_indexer":
        for state in range(states):
            yield from row("key", 0, state, "float8_e4m3fn", spec.head_size)
        for state in range(states):
            yield from row("key_scale", 0, state, "float32", spec.head_size // 128)
    elif spec.quantization == "fp8_ds_mla_v4":
        for state in range(states):
            yield from row("latent", 0, state, "float8_e4m3fn", 448)
            yield from row("rope", 0, state, "bfloat16", 64)
        for state in range(states):
            yield from row("scale", 0, state, "float8_e8m0fnu", 7)
            yield from row("unused", 0, state, "uint8", 1)
    elif spec.quantization == "kv_halves":
        for head in range(spec.num_heads):
            for state in range(states):
                yield from row("key", head, state, spec.dtype, spec.head_size)
            for state in range(states):
                yield from row("value", head, state, spec.dtype, spec.value_size)
    elif spec.quantization == "rocm_pages":
        item = item_bytes(spec.dtype)
        vector = 16 // item
        for head in range(spec.num_kv_heads):
            for first in range(0, spec.head_size, vector):
                for state in range(states):
                    for element in range(first, first + vector):
                        for byte in range(item):
                            yield "key", head, state, element, byte
        for head in range(spec.num_kv_heads):
            for element in range(spec.head_size):
                for state in range(states):
                    for byte in range(item):
                        yield "value", head, state, element, byte
    elif spec.quantization == "nvfp4":
        for side in ("key", "value"):
            for head in range(spec.num_kv_heads):
                for state in range(states):
                    yield from row(side, head, state, "uint8", spec.head_size // 2)
            for head in range(spec.num_kv_heads):
                for state in range(states):
                    yield from row(f"{side}_scale", head, state, "float8_e4m3fn", spec.head_size // 16)


def layer_cache_addresses(num_layers: int, num_blocks: int, stride: int, offset: int = 0) -> dict[tuple[int, int], int]:
    """First byte of every (layer, block) of an RTP-LLM pool, by walking layer after layer, block after block."""
    found: dict[tuple[int, int], int] = {}
    cursor = offset
    for layer in range(num_layers):
        for block in range(num_blocks):
            found[layer, block] = cursor
            cursor += stride
    return found
