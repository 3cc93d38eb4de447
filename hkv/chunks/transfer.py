"""Moving pages into chunk objects and back, bit for bit as LMCache 0.5.6's block kernel does. Jitted.

A kernel group's tensors are given as bytes, uint8 `[pages, page stride]`, in LMCache's order of pointers: a reshape and
a bitcast of any engine's tensors, which XLA does not copy. A page may be longer than its data.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hkv.chunks.formats import (
    INDEXER_ROW_BYTES,
    SCALE_BYTES,
    TRAITS,
    EngineKVFormat,
    Structure,
    num_tensors,
    page_index,
)
from hkv.chunks.kernel_groups import PageGeometry
from hkv.chunks.objects import Region
from hkv.errors import LayoutError, OperationError
from hkv.layout.views.runs import ROW_LIMIT
from hkv.paged.implementations import Implementation, choose

assert INDEXER_ROW_BYTES > SCALE_BYTES

MAX_OBJECTS = 4
MAX_HEADS = 32

Tensors = tuple[jax.Array, ...]
"""One kernel group's tensors, uint8 `[pages, page stride]` each."""


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
        if geometry.pages_per_tensor * geometry.page_stride_bytes // self.row_bytes > ROW_LIMIT:
            raise LayoutError("block_stride", geometry.block_stride, f"tensors of at most {ROW_LIMIT} rows")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row such that pages are whole rows and start at rows, whatever their stride."""
        return math.gcd(self.geometry.page_bytes, self.geometry.page_stride_bytes)

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


@functools.partial(jax.jit, static_argnames=("transfers", "implementation"), donate_argnames="objects")
def pack_groups(
    transfers: tuple[Transfer, ...],
    tensors: tuple[Tensors, ...],
    objects: jax.Array,
    block_ids: tuple[jax.Array, ...],
    skips: tuple[jax.Array, ...],
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Copies blocks of several kernel groups into their objects' regions; every other byte of the objects stays.

    Groups whose tensors have one shape, pages one size and block ids one number are gathered in one launch.

    Args:
      transfers: the kernel groups and their regions (static).
      tensors: per group, uint8 `[pages, page stride]` each.
      objects: uint8 `[objects, object bytes]`, donated.
      block_ids: per group, int32 `[objects * blocks_per_object]`, object by object. Ids outside the tensor move
        nothing.
      skips: per group, int32 scalar; leading blocks that are not moved.
      implementation: name of the code that moves the bytes (static), as in `hkv.paged.write`.

    Returns:
      The objects, and how many block ids, after the skips, were outside their tensor (int32).
    """
    chosen = [_selected(t.geometry, ids, skip) for t, ids, skip in zip(transfers, block_ids, skips, strict=True)]
    code = choose(implementation)
    for bucket in _launches(transfers, tensors, block_ids):
        pools, starts = _operands(bucket, transfers, tensors, block_ids, chosen)
        found = code.gather_runs(pools, starts, transfers[bucket[0]].geometry.page_bytes // pools[0].shape[1])
        for group, words in zip(bucket, jnp.split(found, len(bucket)), strict=True):
            pages = _by_plane_and_layer(transfers[group], words.reshape(len(tensors[group]), -1))
            if _pages_are_rows(transfers[group], objects):
                objects = _scatter_pages(transfers[group], objects, pages, chosen[group][0], code)
            else:
                objects = _select_rows(transfers[group], objects, pages, chosen[group][0])
    return objects, jnp.sum(jnp.stack([dropped for _, dropped in chosen]), dtype=jnp.int32)


@functools.partial(jax.jit, static_argnames=("transfers", "implementation"), donate_argnames="tensors")
def unpack_groups(
    transfers: tuple[Transfer, ...],
    tensors: tuple[Tensors, ...],
    objects: jax.Array,
    block_ids: tuple[jax.Array, ...],
    skips: tuple[jax.Array, ...],
    implementation: str | None = None,
) -> tuple[tuple[Tensors, ...], jax.Array]:
    """Copies objects' regions into blocks of several kernel groups; padding and every other block stay.

    Args:
      transfers: the kernel groups and their regions (static).
      tensors: per group, uint8 `[pages, page stride]` each, donated.
      objects: uint8 `[objects, object bytes]`.
      block_ids: per group, int32 `[objects * blocks_per_object]`. Ids outside the tensor move nothing; the bytes of a
        block that is named twice are undefined.
      skips: per group, int32 scalar; leading blocks that are not moved.
      implementation: as in `pack_groups`.

    Returns:
      The tensors, and how many block ids, after the skips, were outside their tensor (int32).
    """
    chosen = [_selected(t.geometry, ids, skip) for t, ids, skip in zip(transfers, block_ids, skips, strict=True)]
    code = choose(implementation)
    result = list(tensors)
    for bucket in _launches(transfers, tensors, block_ids):
        pools, starts = _operands(bucket, transfers, tensors, block_ids, chosen)
        shape = (*starts.shape, -1, pools[0].shape[1])
        values = [_by_tensor(transfers[g], _from_region(transfers[g], objects), len(tensors[g])) for g in bucket]
        written = code.scatter_runs(pools, starts, jnp.concatenate(values).reshape(shape))
        for position, group in enumerate(bucket):
            count = len(tensors[group])
            mine = written[position * count : (position + 1) * count]
            result[group] = tuple(pool.reshape(tensors[group][0].shape) for pool in mine)
    return tuple(result), jnp.sum(jnp.stack([dropped for _, dropped in chosen]), dtype=jnp.int32)


@functools.partial(jax.jit, static_argnames=("transfer", "implementation"), donate_argnames="objects")
def pack(
    transfer: Transfer,
    tensors: Tensors,
    objects: jax.Array,
    block_ids: jax.Array,
    skip: jax.Array,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`pack_groups` of one kernel group."""
    return pack_groups((transfer,), (tensors,), objects, (block_ids,), (skip,), implementation)


@functools.partial(jax.jit, static_argnames=("transfer", "implementation"), donate_argnames="tensors")
def unpack(
    transfer: Transfer,
    tensors: Tensors,
    objects: jax.Array,
    block_ids: jax.Array,
    skip: jax.Array,
    implementation: str | None = None,
) -> tuple[Tensors, jax.Array]:
    """`unpack_groups` of one kernel group."""
    written, dropped = unpack_groups((transfer,), (tensors,), objects, (block_ids,), (skip,), implementation)
    return written[0], dropped


def _tensors_of(geometry: PageGeometry) -> int:
    return num_tensors(TRAITS[geometry.format].structure, geometry.num_layers)


def _selected(geometry: PageGeometry, block_ids: jax.Array, skip: jax.Array) -> tuple[jax.Array, jax.Array]:
    wanted = jnp.arange(block_ids.shape[0], dtype=jnp.int32) >= skip
    inside = (block_ids >= 0) & (block_ids < geometry.num_blocks)
    return wanted & inside, jnp.sum(wanted & ~inside, dtype=jnp.int32)


def _launches(
    transfers: tuple[Transfer, ...], tensors: tuple[Tensors, ...], block_ids: tuple[jax.Array, ...]
) -> list[list[int]]:
    """Kernel groups by what one launch can move: tensors, pages and numbers of pages all alike."""
    buckets: dict[tuple[object, ...], list[int]] = {}
    for index, (transfer, group, ids) in enumerate(zip(transfers, tensors, block_ids, strict=True)):
        geometry = transfer.geometry
        pages = ids.shape[0] * geometry.kv_size * geometry.num_layers
        key = (group[0].shape, geometry.page_bytes, transfer.row_bytes, len(group), pages)
        buckets.setdefault(key, []).append(index)
    return list(buckets.values())


def _operands(
    bucket: list[int],
    transfers: tuple[Transfer, ...],
    tensors: tuple[Tensors, ...],
    block_ids: tuple[jax.Array, ...],
    chosen: list[tuple[jax.Array, jax.Array]],
) -> tuple[Tensors, jax.Array]:
    """The tensors of a launch as rows, and int32 `[tensors, pages, 1]`, where their pages start."""
    pools = tuple(tensor.reshape(-1, transfers[g].row_bytes) for g in bucket for tensor in tensors[g])
    starts = [_start_rows(transfers[g], block_ids[g], chosen[g][0]) for g in bucket]
    return pools, jnp.concatenate(starts)[..., None]


def _start_rows(transfer: Transfer, block_ids: jax.Array, moved: jax.Array) -> jax.Array:
    """Int32 `[tensors, pages]`: first row of each page, past the end for blocks that are not moved."""
    geometry = transfer.geometry
    order = TRAITS[geometry.format].page_order
    sizes = (geometry.kv_size, geometry.num_layers, geometry.num_blocks)
    blocks = jnp.where(moved, block_ids, 0)
    # page_index is plain arithmetic, so an array of block ids gives an array of pages.
    pages = jnp.stack(
        [
            jnp.stack([page_index(order, k, layer, blocks, *sizes) for layer in range(geometry.num_layers)])  # pyright: ignore[reportArgumentType]
            for k in range(geometry.kv_size)
        ]
    )
    rows_per_page = geometry.page_stride_bytes // transfer.row_bytes
    rows = jnp.where(moved, pages * rows_per_page, geometry.pages_per_tensor * rows_per_page)
    return _by_tensor(transfer, rows, _tensors_of(geometry))


def _by_tensor(transfer: Transfer, pages: jax.Array, count: int) -> jax.Array:
    """`[planes, layers, ids, ...]` as `[tensors, everything else of a tensor]`."""
    if TRAITS[transfer.geometry.format].structure is Structure.LAYER_LIST:
        pages = jnp.swapaxes(pages, 0, 1)
    return pages.reshape(count, -1)


def _by_plane_and_layer(transfer: Transfer, pages: jax.Array) -> jax.Array:
    """The inverse, for whole pages: uint8 `[planes, layers, ids, page bytes]`."""
    geometry = transfer.geometry
    if TRAITS[geometry.format].structure is Structure.LAYER_LIST:
        shape = (geometry.num_layers, geometry.kv_size, -1, geometry.page_bytes)
        return jnp.swapaxes(pages.reshape(shape), 0, 1)
    return pages.reshape(geometry.kv_size, geometry.num_layers, -1, geometry.page_bytes)


def _pages_are_rows(transfer: Transfer, objects: jax.Array) -> bool:
    """True if a page has its tokens in the object's order, so that it moves as it is."""
    fmt = transfer.geometry.format
    reordered = TRAITS[fmt].heads_first or fmt is EngineKVFormat.NL_X_NB_BSV_BSS
    return not reordered and objects.size // _object_row(transfer, objects) <= ROW_LIMIT


def _object_row(transfer: Transfer, objects: jax.Array) -> int:
    return math.gcd(objects.shape[1], transfer.region.offset, transfer.geometry.page_bytes)


def _scatter_pages(
    transfer: Transfer, objects: jax.Array, pages: jax.Array, moved: jax.Array, code: Implementation
) -> jax.Array:
    """Writes whole pages where they belong: to page `(plane * layers + layer) * blocks + block` of the region."""
    geometry, row = transfer.geometry, _object_row(transfer, objects)
    page = geometry.page_bytes // row
    index = np.arange(moved.shape[0], dtype=np.int32)
    which, block = np.divmod(index, np.int32(transfer.blocks_per_object))
    first = which * np.int32(objects.shape[1] // row) + block * np.int32(page) + transfer.region.offset // row
    planes = np.arange(geometry.kv_size * geometry.num_layers, dtype=np.int32)[:, None]
    starts = planes * np.int32(transfer.blocks_per_object * page) + first.astype(np.int32)
    starts = jnp.where(moved, starts, objects.size // row).reshape(-1, 1)
    values = pages.reshape(-1, 1, page, row)
    return code.scatter(objects.reshape(-1, row), starts, values).reshape(objects.shape)


def _select_rows(transfer: Transfer, objects: jax.Array, pages: jax.Array, moved: jax.Array) -> jax.Array:
    """Reorders pages to tokens first and selects, byte by byte, between them and what the objects hold."""
    geometry, region, count = transfer.geometry, transfer.region, objects.shape[0]
    shape = (geometry.kv_size, geometry.num_layers, count, transfer.blocks_per_object, geometry.page_bytes)
    fresh = _rows_of(geometry, pages).reshape(shape).transpose(2, 0, 1, 3, 4).reshape(count, region.nbytes)
    chosen = jnp.broadcast_to(moved.reshape(count, 1, 1, -1, 1), (count, *shape[:2], *shape[3:]))
    # The selection is element by element in the objects' own shape, so that XLA can do it in place.
    old = objects[:, region.offset : region.offset + region.nbytes]
    merged = jnp.where(chosen.reshape(count, region.nbytes), fresh, old)
    return jax.lax.dynamic_update_slice(objects, merged, (0, region.offset))


def _from_region(transfer: Transfer, objects: jax.Array) -> jax.Array:
    """Uint8 `[planes, layers, ids, page bytes]`: the region's rows as pages."""
    geometry, region, count = transfer.geometry, transfer.region, objects.shape[0]
    shape = (count, geometry.kv_size, geometry.num_layers, transfer.blocks_per_object, geometry.page_bytes)
    data = objects[:, region.offset : region.offset + region.nbytes].reshape(shape).transpose(1, 2, 0, 3, 4)
    return _pages_of(geometry, data.reshape(geometry.kv_size, geometry.num_layers, -1, geometry.page_bytes))


def _rows_of(geometry: PageGeometry, pages: jax.Array) -> jax.Array:
    """Uint8 `[..., page bytes]` with tokens first, heads and scales after."""
    lead = pages.shape[:-1]
    if geometry.format is EngineKVFormat.NL_X_NB_BSV_BSS:
        values = geometry.slots * (geometry.row_bytes - SCALE_BYTES)
        split = (
            pages[..., :values].reshape(*lead, geometry.slots, -1),
            pages[..., values:].reshape(*lead, geometry.slots, -1),
        )
        return jnp.concatenate(split, axis=-1).reshape(*lead, -1)
    if TRAITS[geometry.format].heads_first:
        heads = pages.reshape(*lead, geometry.num_heads, geometry.slots, geometry.head_bytes)
        return jnp.swapaxes(heads, -3, -2).reshape(*lead, -1)
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
