"""Block transfer by definition: where each run of bytes lies in a page's tensor, and where in the object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hkv.chunks.formats import SCALE_BYTES, TRAITS, EngineKVFormat, page_index, tensor_index
from hkv.chunks.kernel_groups import PageGeometry
from hkv.chunks.objects import Region

Run = tuple[int, int, int, int]
"""`(tensor, byte within the tensor, byte within the object, bytes)`."""


def runs(geometry: PageGeometry, region: Region, block_in_object: int, block: int) -> Iterator[Run]:
    """Every run of bytes that one block contributes to one object (LMCache 0.5.6, the block kernel's address map).

    Args:
      geometry: the kernel group's pages.
      region: its region in the object.
      block_in_object: index of the block in the object.
      block: the engine's block id.
    """
    traits = TRAITS[geometry.format]
    for plane in range(geometry.kv_size):
        for layer in range(geometry.num_layers):
            tensor = tensor_index(traits.structure, plane, layer, geometry.num_layers)
            sizes = (geometry.kv_size, geometry.num_layers, geometry.num_blocks)
            page = page_index(traits.page_order, plane, layer, block, *sizes) * geometry.page_stride_bytes
            for slot in range(geometry.slots):
                row = (plane * geometry.num_layers + layer) * region.slots + block_in_object * geometry.slots + slot
                start = region.offset + row * geometry.row_bytes
                for within_page, within_row, length in slot_runs(geometry, slot):
                    yield tensor, page + within_page, start + within_row, length


def slot_runs(geometry: PageGeometry, slot: int) -> Iterator[tuple[int, int, int]]:
    """`(byte within the page, byte within the row, bytes)` of one slot's pieces."""
    if geometry.format is EngineKVFormat.NL_X_NB_BSV_BSS:
        values = geometry.row_bytes - SCALE_BYTES
        yield slot * values, 0, values
        yield geometry.slots * values + slot * SCALE_BYTES, values, SCALE_BYTES
        return
    for head in range(geometry.num_heads):
        if TRAITS[geometry.format].heads_first:
            position = head * geometry.slots + slot
        else:
            position = slot * geometry.num_heads + head
        yield position * geometry.head_bytes, head * geometry.head_bytes, geometry.head_bytes


def pack(
    geometry: PageGeometry,
    region: Region,
    tensors: Sequence[np.ndarray],
    objects: np.ndarray,
    block_ids: Sequence[int],
    skip: int = 0,
) -> int:
    """Copies blocks into their objects' region, in place; returns how many ids were no block and moved nothing.

    Args:
      geometry: the kernel group's pages.
      region: its region in each object.
      tensors: uint8 `[pages, page stride]` each.
      objects: uint8 `[objects, object bytes]`.
      block_ids: object by object.
      skip: leading ids that are not moved.
    """
    return _transfer(geometry, region, tensors, objects, block_ids, skip, to_objects=True)


def unpack(
    geometry: PageGeometry,
    region: Region,
    tensors: Sequence[np.ndarray],
    objects: np.ndarray,
    block_ids: Sequence[int],
    skip: int = 0,
) -> int:
    """Copies objects' regions into blocks, in place, in the order of `block_ids`; else as `pack`."""
    return _transfer(geometry, region, tensors, objects, block_ids, skip, to_objects=False)


def _transfer(
    geometry: PageGeometry,
    region: Region,
    tensors: Sequence[np.ndarray],
    objects: np.ndarray,
    block_ids: Sequence[int],
    skip: int,
    to_objects: bool,
) -> int:
    flat = [tensor.reshape(-1) for tensor in tensors]
    per_object = len(block_ids) // len(objects)
    dropped = 0
    for position in range(skip, len(block_ids)):
        block = block_ids[position]
        if not 0 <= block < geometry.num_blocks:
            dropped += 1
            continue
        target = objects[position // per_object]
        for tensor, page_byte, object_byte, length in runs(geometry, region, position % per_object, block):
            if to_objects:
                target[object_byte : object_byte + length] = flat[tensor][page_byte : page_byte + length]
            else:
                flat[tensor][page_byte : page_byte + length] = target[object_byte : object_byte + length]
    return dropped
