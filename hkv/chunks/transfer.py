"""Moving pages into chunk objects and back, bit for bit as LMCache 0.5.6's block kernel does. Jitted.

A kernel group's tensors are given as bytes, uint8 `[pages, page stride]`, in LMCache's order of pointers: a reshape and
a bitcast of any engine's tensors, which XLA does not copy. A page may be longer than its data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hkv.chunks.formats import (
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
from hkv.layout.views.runs import ROW_LIMIT
from hkv.paged.implementations import choose
from hkv.paged.words import as_words, like, widest_word
from hkv.typed_jit import Ids, typed_jit
from pallas_kernels.move.moves import Move

MAX_OBJECTS = 4
MAX_HEADS = 32

Tensors = tuple[jax.Array, ...]
"""One kernel group's tensors, uint8 `[pages, page stride]` each."""


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The static part of a transfer: one kernel group's pages and its region in each object."""

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
        """Refuses, on the host, what the jitted functions would drop or could not do."""
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


@typed_jit(static_argnames=("transfers", "implementation"), donate_argnames="objects")
def pack_groups(
    transfers: tuple[Transfer, ...],
    tensors: tuple[Tensors, ...],
    objects: jax.Array,
    block_ids: tuple[Ids, ...],
    skips: tuple[Ids, ...],
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Copies blocks of several kernel groups into their objects' regions; every other byte of the objects stays.

    Every byte is read once and written once, those of all groups in one launch of a kernel, or in one of XLA for each
    tensor.

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
    flat, dtype = [tensor for group in tensors for tensor in group], _word(transfers, objects)
    moves, dropped = _moves(transfers, objects, block_ids, skips, dtype)
    (words,) = choose(implementation).move_runs([as_words(t, dtype) for t in flat], [as_words(objects, dtype)], moves)
    return like(words, objects), dropped


@typed_jit(static_argnames=("transfers", "implementation"), donate_argnames="tensors")
def unpack_groups(
    transfers: tuple[Transfer, ...],
    tensors: tuple[Tensors, ...],
    objects: jax.Array,
    block_ids: tuple[Ids, ...],
    skips: tuple[Ids, ...],
    implementation: str | None = None,
) -> tuple[tuple[Tensors, ...], jax.Array]:
    """Copies objects' regions into blocks of several kernel groups; padding and every other block stay.

    Arguments are those of `pack_groups`, but that the tensors are donated and the objects are not. The bytes of a block
    that is named twice are undefined. Gives the tensors, and how many block ids, after the skips, were outside their
    tensor (int32).
    """
    flat, dtype = [tensor for group in tensors for tensor in group], _word(transfers, objects)
    packing, dropped = _moves(transfers, objects, block_ids, skips, dtype)
    moves = [Move(0, m.source or 0, m.written, m.read, m.runs, m.unit, m.length) for m in packing]
    found = choose(implementation).move_runs([as_words(objects, dtype)], [as_words(t, dtype) for t in flat], moves)
    arrays = iter([like(words, tensor) for words, tensor in zip(found, flat, strict=True)])
    return tuple(tuple(next(arrays) for _ in group) for group in tensors), dropped


@typed_jit(static_argnames=("transfer", "implementation"), donate_argnames="objects")
def pack(
    transfer: Transfer,
    tensors: Tensors,
    objects: jax.Array,
    block_ids: Ids,
    skip: Ids,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`pack_groups` of one kernel group."""
    return pack_groups((transfer,), (tensors,), objects, (block_ids,), (skip,), implementation)


@typed_jit(static_argnames=("transfer", "implementation"), donate_argnames="tensors")
def unpack(
    transfer: Transfer,
    tensors: Tensors,
    objects: jax.Array,
    block_ids: Ids,
    skip: Ids,
    implementation: str | None = None,
) -> tuple[Tensors, jax.Array]:
    """`unpack_groups` of one kernel group."""
    written, dropped = unpack_groups((transfer,), (tensors,), objects, (block_ids,), (skip,), implementation)
    return written[0], dropped


def _tensors_of(geometry: PageGeometry) -> int:
    return num_tensors(TRAITS[geometry.format].structure, geometry.num_layers)


def _unit_bytes(transfer: Transfer, objects: jax.Array) -> int:
    """Bytes that divide every address of a transfer; LayoutError for more units than a 32-bit number counts."""
    geometry, region = transfer.geometry, transfer.region
    pieces = [quantity for piece in pieces_of(geometry) for quantity in (piece.page, piece.object, piece.length)]
    strides = (geometry.page_stride_bytes, geometry.page_bytes, objects.shape[1], region.offset)
    unit = math.gcd(*pieces, *strides)
    if geometry.pages_per_tensor * geometry.page_stride_bytes // unit > ROW_LIMIT or objects.size // unit > ROW_LIMIT:
        raise LayoutError("block_stride", geometry.block_stride, f"arrays of at most {ROW_LIMIT} units of {unit} bytes")
    return unit


def _word(transfers: tuple[Transfer, ...], objects: jax.Array) -> np.dtype:
    """The word in which bytes of all transfers are moved."""
    return widest_word(math.gcd(*(_unit_bytes(transfer, objects) for transfer in transfers)), 1)


def _moves(
    transfers: tuple[Transfer, ...],
    objects: jax.Array,
    block_ids: tuple[jax.Array, ...],
    skips: tuple[jax.Array, ...],
    dtype: np.dtype,
) -> tuple[list[Move], jax.Array]:
    """Every run of every transfer, from a tensor, counted through all groups, to the objects; and blocks left out.

    Starts of runs of blocks that are not moved are past the end. Left out are ids after the skips, outside of a tensor.
    """
    found, first, dropped = [], 0, []
    for transfer, ids, skip in zip(transfers, block_ids, skips, strict=True):
        unit = _unit_bytes(transfer, objects)
        wanted = jnp.arange(ids.shape[0], dtype=jnp.int32) >= skip
        inside = (ids >= 0) & (ids < transfer.geometry.num_blocks)
        dropped.append(jnp.sum(wanted & ~inside, dtype=jnp.int32))
        lengths: dict[int, list[Piece]] = {}
        for piece in pieces_of(transfer.geometry):
            lengths.setdefault(piece.length, []).append(piece)
        for tensor, pages, rows in _pages(transfer, objects, ids, wanted & inside):
            for length, pieces in lengths.items():
                within = np.asarray([piece.page for piece in pieces], np.int64) // unit
                along = np.asarray([piece.object for piece in pieces], np.int64) // unit
                page = jnp.where(
                    pages[:, None] >= 0,
                    pages[:, None] * (transfer.geometry.page_stride_bytes // unit) + within.astype(np.int32),
                    -1,
                )
                place = (rows[:, None] // unit + along).astype(np.int32)
                words = unit // dtype.itemsize, length // dtype.itemsize
                starts = page.reshape(-1), jnp.asarray(place.reshape(-1))
                found.append(Move(first + tensor, 0, *starts, page.size, *words))
        first += _tensors_of(transfer.geometry)
    return found, jnp.sum(jnp.stack(dropped), dtype=jnp.int32)


def _pages(
    transfer: Transfer, objects: jax.Array, block_ids: jax.Array, moved: jax.Array
) -> Iterator[tuple[int, jax.Array, np.ndarray]]:
    """For each tensor: its number, int32 `[pages]`, which of its pages move, -1 for none, and bytes to their rows."""
    geometry, region = transfer.geometry, transfer.region
    traits = TRAITS[geometry.format]
    sizes = (geometry.kv_size, geometry.num_layers, geometry.num_blocks)
    which, block = np.divmod(np.arange(block_ids.shape[0], dtype=np.int64), transfer.blocks_per_object)
    start = which * objects.shape[1] + region.offset + block * geometry.page_bytes
    blocks = jnp.where(moved, block_ids, 0)
    found: dict[int, list[tuple[jax.Array, np.ndarray]]] = {}
    for plane in range(geometry.kv_size):
        for layer in range(geometry.num_layers):
            # page_index is plain arithmetic, so an array of block ids gives an array of pages.
            page = page_index(traits.page_order, plane, layer, blocks, *sizes)  # pyright: ignore[reportArgumentType]
            rows = (plane * geometry.num_layers + layer) * region.slots * geometry.row_bytes + start
            tensor = tensor_index(traits.structure, plane, layer, geometry.num_layers)
            found.setdefault(tensor, []).append((jnp.where(moved, page, -1), rows))
    for tensor, parts in sorted(found.items()):
        yield tensor, jnp.concatenate([page for page, _ in parts]), np.concatenate([rows for _, rows in parts])


# The pieces of a page: the gapless runs of bytes whose order differs between a page and its rows in an object.


@dataclasses.dataclass(frozen=True)
class Piece:
    """One run of bytes, from the page's start and from the start of the page's rows in the object.

    Rows have tokens first, heads and scales after.
    """

    page: int
    object: int
    length: int


def pieces_of(geometry: PageGeometry) -> tuple[Piece, ...]:
    """The pieces of each page of a kernel group: the whole page where its tokens are in the object's order."""
    slots, row = range(geometry.slots), geometry.row_bytes
    if geometry.format is EngineKVFormat.NL_X_NB_BSV_BSS:
        values = row - SCALE_BYTES
        scales = geometry.slots * values
        return (
            *(Piece(slot * values, slot * row, values) for slot in slots),
            *(Piece(scales + slot * SCALE_BYTES, slot * row + values, SCALE_BYTES) for slot in slots),
        )
    if not TRAITS[geometry.format].heads_first:
        return (Piece(0, 0, geometry.page_bytes),)
    heads, size = range(geometry.num_heads), geometry.head_bytes
    return tuple(
        Piece((head * geometry.slots + slot) * size, (slot * geometry.num_heads + head) * size, size)
        for head in heads
        for slot in slots
    )
