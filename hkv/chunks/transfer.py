"""Moving pages into chunk objects and back, bit for bit as LMCache 0.5.6's block kernel does. Jitted.

A kernel group's tensors are given as bytes, uint8 `[pages, page stride]`, in LMCache's order of pointers: a reshape and
a bitcast of any engine's tensors, which XLA does not copy. A page may be longer than its data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from hkv.chunks.formats import (
    INDEXER_ROW_BYTES,
    SCALE_BYTES,
    TRAITS,
    EngineKVFormat,
    num_tensors,
    page_index,
    tensor_index,
)
from hkv.chunks.kernel_groups import PageGeometry
from hkv.chunks.objects import Region
from hkv.errors import LayoutError, OperationError

assert INDEXER_ROW_BYTES > SCALE_BYTES

MAX_OBJECTS = 4
MAX_HEADS = 32

Tensors = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The static part of a transfer: one kernel group's pages and its region in each object.

    Attributes:
      geometry: the group's pages.
      region: its region; `region.slots` rows an object.
    """

    geometry: PageGeometry
    region: Region

    def __post_init__(self) -> None:
        geometry = self.geometry
        if not TRAITS[geometry.format].kernel:
            raise LayoutError("format", geometry.format.name, "a format that the block kernel moves")
        if geometry.num_heads > MAX_HEADS:
            raise LayoutError("num_heads", geometry.num_heads, f"at most {MAX_HEADS}")
        if self.region.slots % geometry.slots:
            raise LayoutError("slots", self.region.slots, f"whole pages of {geometry.slots} slots")
        assert geometry.vector_bytes in (16, 4, 2)

    @property
    def blocks_per_object(self) -> int:
        """Blocks that fill the region of one object."""
        return self.region.slots // self.geometry.slots

    def check_call(self, tensors: Sequence[jax.Array], objects: jax.Array, block_ids: Sequence[int], skip: int) -> None:
        """Refuses, on the host, what the jitted functions would drop or could not do.

        Raises:
          OperationError: tensors of another shape, fewer than 1 or more than 4 objects, a wrong number of block ids, an
            id that is no block, a negative skip.
        """
        geometry = self.geometry
        shapes = [tuple(tensor.shape) for tensor in tensors]
        expected = [(geometry.pages_per_tensor, geometry.page_stride_bytes)] * _tensors_of(geometry)
        if shapes != expected:
            raise OperationError("tensors", shapes, f"uint8 arrays {expected}")
        if not 1 <= objects.shape[0] <= MAX_OBJECTS:
            raise OperationError("objects", objects.shape[0], f"1 to {MAX_OBJECTS} objects")
        if len(block_ids) != objects.shape[0] * self.blocks_per_object:
            raise OperationError("block_ids", len(block_ids), f"{self.blocks_per_object} for each object")
        for block in block_ids:
            if not 0 <= block < geometry.num_blocks:
                raise OperationError("block_ids", block, f"ids from 0 to {geometry.num_blocks - 1}")
        if skip < 0:
            raise OperationError("skip", skip, "at least 0")


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def pack(
    transfer: Transfer, tensors: Tensors, objects: jax.Array, block_ids: jax.Array, skip: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Copies blocks into their objects' region; every other byte of the objects stays.

    Args:
      transfer: the kernel group and its region (static).
      tensors: uint8 `[pages, page stride]` each.
      objects: uint8 `[objects, object bytes]`, donated.
      block_ids: int32 `[objects * blocks_per_object]`, object by object. Ids outside the tensor move nothing.
      skip: int32 scalar; leading blocks that are not moved.

    Returns:
      The objects, and how many block ids, after the skip, were outside the tensor (int32).
    """
    geometry, region = transfer.geometry, transfer.region
    moved, dropped = _selected(geometry, block_ids, skip)
    rows = jnp.stack(
        [
            jnp.stack([_rows_of(geometry, tensors, block_ids, moved, k, layer) for layer in range(geometry.num_layers)])
            for k in range(geometry.kv_size)
        ]
    )  # [planes, layers, ids, slots of a page * row]
    shape = (geometry.kv_size, geometry.num_layers, objects.shape[0], transfer.blocks_per_object, -1)
    fresh = rows.reshape(shape).transpose(2, 0, 1, 3, 4)
    old = objects[:, region.offset : region.offset + region.nbytes].reshape(fresh.shape)
    chosen = moved.reshape(objects.shape[0], 1, 1, transfer.blocks_per_object, 1)
    merged = jnp.where(chosen, fresh, old).reshape(objects.shape[0], region.nbytes)
    return jax.lax.dynamic_update_slice(objects, merged, (0, region.offset)), dropped


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def unpack(
    transfer: Transfer, tensors: Tensors, objects: jax.Array, block_ids: jax.Array, skip: jax.Array
) -> tuple[Tensors, jax.Array]:
    """Copies objects' regions into blocks; every other byte of the tensors stays, padding of the blocks included.

    Args:
      transfer: the kernel group and its region (static).
      tensors: uint8 `[pages, page stride]` each, donated.
      objects: uint8 `[objects, object bytes]`.
      block_ids: int32 `[objects * blocks_per_object]`. Ids outside the tensor move nothing; which object a repeated id
        ends up with is undefined.
      skip: int32 scalar; leading blocks that are not moved.

    Returns:
      The tensors, and how many block ids, after the skip, were outside the tensor (int32).
    """
    geometry, region = transfer.geometry, transfer.region
    moved, dropped = _selected(geometry, block_ids, skip)
    data = objects[:, region.offset : region.offset + region.nbytes]
    shape = (objects.shape[0], geometry.kv_size, geometry.num_layers, transfer.blocks_per_object, -1)
    data = data.reshape(shape).transpose(1, 2, 0, 3, 4)
    pages = _pages_of(geometry, data.reshape(geometry.kv_size, geometry.num_layers, block_ids.shape[0], -1))
    result = list(tensors)
    for tensor in range(len(result)):
        parts = [
            (_page_indices(geometry, block_ids, moved, k, layer), pages[k, layer])
            for k in range(geometry.kv_size)
            for layer in range(geometry.num_layers)
            if tensor_index(TRAITS[geometry.format].structure, k, layer, geometry.num_layers) == tensor
        ]
        indices = jnp.concatenate([part[0] for part in parts])
        values = jnp.concatenate([part[1] for part in parts])
        target = result[tensor].at[indices, : geometry.page_bytes]
        result[tensor] = target.set(values, mode="drop", wrap_negative_indices=False)
    return tuple(result), dropped


def _tensors_of(geometry: PageGeometry) -> int:
    return num_tensors(TRAITS[geometry.format].structure, geometry.num_layers)


def _selected(geometry: PageGeometry, block_ids: jax.Array, skip: jax.Array) -> tuple[jax.Array, jax.Array]:
    wanted = jnp.arange(block_ids.shape[0], dtype=jnp.int32) >= skip
    inside = (block_ids >= 0) & (block_ids < geometry.num_blocks)
    return wanted & inside, jnp.sum(wanted & ~inside, dtype=jnp.int32)


def _page_indices(geometry: PageGeometry, block_ids: jax.Array, moved: jax.Array, plane: int, layer: int) -> jax.Array:
    """Page of each block within its tensor; blocks that are not moved get an index past the end."""
    order = TRAITS[geometry.format].page_order
    sizes = (geometry.kv_size, geometry.num_layers, geometry.num_blocks)
    # page_index is plain arithmetic, so an array of block ids gives an array of pages.
    index = page_index(order, plane, layer, jnp.where(moved, block_ids, 0), *sizes)  # pyright: ignore[reportArgumentType]
    return jnp.where(moved, index, geometry.pages_per_tensor)


def _rows_of(
    geometry: PageGeometry, tensors: Tensors, block_ids: jax.Array, moved: jax.Array, plane: int, layer: int
) -> jax.Array:
    """Uint8 `[ids, slots * row bytes]`, tokens first."""
    tensor = tensors[tensor_index(TRAITS[geometry.format].structure, plane, layer, geometry.num_layers)]
    indices = _page_indices(geometry, block_ids, moved, plane, layer)
    pages = tensor.at[indices].get(mode="fill", fill_value=0)[:, : geometry.page_bytes]
    count = block_ids.shape[0]
    if geometry.format is EngineKVFormat.NL_X_NB_BSV_BSS:
        values = geometry.slots * (geometry.row_bytes - SCALE_BYTES)
        split = (
            pages[:, :values].reshape(count, geometry.slots, -1),
            pages[:, values:].reshape(count, geometry.slots, -1),
        )
        return jnp.concatenate(split, axis=-1).reshape(count, -1)
    if TRAITS[geometry.format].heads_first:
        heads = pages.reshape(count, geometry.num_heads, geometry.slots, geometry.head_bytes)
        return heads.transpose(0, 2, 1, 3).reshape(count, -1)
    return pages


def _pages_of(geometry: PageGeometry, rows: jax.Array) -> jax.Array:
    """The inverse of `_rows_of` over uint8 `[..., slots * row bytes]`."""
    lead = rows.shape[:-1]
    if geometry.format is EngineKVFormat.NL_X_NB_BSV_BSS:
        rows = rows.reshape(*lead, geometry.slots, geometry.row_bytes)
        values, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
        return jnp.concatenate([values.reshape(*lead, -1), scales.reshape(*lead, -1)], axis=-1)
    if TRAITS[geometry.format].heads_first:
        tokens = rows.reshape(*lead, geometry.slots, geometry.num_heads, geometry.head_bytes)
        return jnp.swapaxes(tokens, -3, -2).reshape(*lead, -1)
    return rows
