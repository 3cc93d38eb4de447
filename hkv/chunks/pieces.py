"""The pieces of a page: the gapless runs of bytes whose order differs between a page and its rows in an object."""

from __future__ import annotations

import dataclasses

from hkv.chunks.formats import SCALE_BYTES, TRAITS, EngineKVFormat
from hkv.chunks.kernel_groups import PageGeometry


@dataclasses.dataclass(frozen=True)
class Piece:
    """One run.

    Attributes:
      page: bytes from the page's start.
      object: bytes from the start of the page's rows, which have tokens first, heads and scales after.
      length: bytes.
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
