"""Addresses from block tables, token by token in plain integers: the twin of `hkv.block_tables.slots`."""

from __future__ import annotations

import dataclasses

INT32_MAX = 2**31 - 1
PAD = -1
Table = list[list[int]]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Mapping from one group's token positions to slots on one rank; see `hkv.block_tables.slots.SlotGeometry`."""

    block_size: int
    ranks: int = 1
    rank: int = 0
    interleave: int = 1
    mapped: bool = True


@dataclasses.dataclass
class Dropped:
    """Numbers of inputs that were left out because they do not exist."""

    rows: int = 0
    positions: int = 0
    blocks: int = 0


def kernel_table(table: Table, ratio: int, stride: int, num_blocks: int, span: int) -> tuple[Table, Dropped]:
    """Every entry as its kernel blocks, zero-padded to `span` a column."""
    dropped, expanded = Dropped(), []
    for row in table:
        kernel: list[int] = []
        for block in row:
            if block == PAD:
                kernel += [PAD] * ratio
            elif 0 <= block < num_blocks and block * stride + ratio - 1 <= INT32_MAX:
                kernel += [block * stride + j for j in range(ratio)]
            else:
                dropped.blocks += 1
                kernel += [0] * ratio
        expanded.append(kernel + [0] * (len(row) * span - len(kernel)))
    return expanded, dropped


def forward_tables(
    geometry: Geometry, table: Table, rows: list[int], starts: list[int], retained: int
) -> tuple[Table, Dropped]:
    """Each request's row, blocks wholly behind its window replaced by the null block."""
    dropped, gathered = Dropped(), []
    for row, start in zip(rows, starts, strict=True):
        entries = [0] * len(table[0])
        if row != PAD and not 0 <= row < len(table):
            dropped.rows += 1
        elif row != PAD and start < 0:
            dropped.positions += 1
        elif row != PAD:
            entries = list(table[row])
            for column in range(len(entries)):
                last_token = (column + 1) * geometry.block_size - 1
                if retained >= 0 and geometry.ranks == 1 and last_token < start - retained:
                    entries[column] = 0
        gathered.append(entries)
    return gathered, dropped


def batch_tokens(
    rows: list[int], starts: list[int], counts: list[int], size: int
) -> tuple[list[int], list[int], Dropped]:
    """Rows and positions of a step's tokens, request after request; once one does not fit, none after it does."""
    dropped = Dropped()
    token_rows: list[int] = []
    positions: list[int] = []
    full = False
    for row, start, count in zip(rows, starts, counts, strict=True):
        if not 0 <= count <= size:
            dropped.rows += 1
        elif start < 0 or start + count - 1 > INT32_MAX:
            dropped.positions += 1
        elif count and (full or len(token_rows) + count > size):
            dropped.rows += 1
            full = True
        else:
            token_rows += [row] * count
            positions += range(start, start + count)
    padding = [PAD] * (size - len(token_rows))
    return token_rows + padding, positions + padding, dropped


def place(geometry: Geometry, position: int) -> tuple[int, int, int]:
    """The rank that holds a position, the row's column, the offset in its block: tokens are dealt out like cards."""
    column, inner = divmod(position, geometry.block_size * geometry.ranks)
    deal, within = divmod(inner, geometry.interleave)
    turn, rank = divmod(deal, geometry.ranks)
    return rank, column, turn * geometry.interleave + within


def slot_mapping(
    geometry: Geometry, table: Table, lengths: list[int], num_blocks: int, rows: list[int], positions: list[int]
) -> tuple[list[tuple[int, int]], Dropped]:
    """The (block, offset) of each token on this rank."""
    dropped, slots = Dropped(), []
    for row, position in zip(rows, positions, strict=True):
        slots.append((PAD, PAD))
        if row == PAD or not geometry.mapped:
            continue
        if not 0 <= row < len(table):
            dropped.rows += 1
            continue
        rank, column, offset = place(geometry, position)
        if position < 0 or column >= min(lengths[row], len(table[row])):
            dropped.positions += 1
        elif rank == geometry.rank:
            block = table[row][column]
            if 0 <= block < num_blocks:
                slots[-1] = (block, offset)
            else:
                dropped.blocks += 1
    return slots, dropped


def positions_of(geometry: Geometry, columns: list[int], offsets: list[int]) -> tuple[list[int], Dropped]:
    """The position on each (column, offset) of this rank, by trying all of the column's tokens."""
    dropped, positions = Dropped(), []
    span = geometry.block_size * geometry.ranks
    for column, offset in zip(columns, offsets, strict=True):
        if column == PAD:
            positions.append(PAD)
            continue
        tokens = range(column * span, (column + 1) * span) if column >= 0 else range(0)
        found = [t for t in tokens if place(geometry, t) == (geometry.rank, column, offset) and t <= INT32_MAX]
        dropped.positions += not found
        positions.append(found[0] if found else PAD)
    return positions, dropped


def kernel_slots(
    slots: list[tuple[int, int]], kernel_block_size: int, stride: int
) -> tuple[list[tuple[int, int]], Dropped]:
    """The same slots in kernel blocks."""
    dropped, made = Dropped(), []
    for block, offset in slots:
        made.append((PAD, PAD))
        if block == PAD:
            continue
        kernel = block * stride + offset // kernel_block_size
        if block < 0 or offset < 0 or kernel > INT32_MAX:
            dropped.blocks += 1
        else:
            made[-1] = (kernel, offset % kernel_block_size)
    return made, dropped


def linear_slots(slots: list[tuple[int, int]], block_size: int) -> tuple[list[int], Dropped]:
    """Slots as single numbers."""
    dropped, numbers = Dropped(), []
    for block, offset in slots:
        number = block * block_size + offset
        fits = block >= 0 and offset >= 0 and number <= INT32_MAX
        dropped.blocks += block != PAD and not fits
        numbers.append(number if fits else PAD)
    return numbers, dropped


def held_tokens(geometry: Geometry, length: int) -> int:
    """Tokens of a sequence that this rank holds, by counting them."""
    return sum(place(geometry, position)[0] == geometry.rank for position in range(length))


def row_columns(geometry: Geometry, length: int) -> int:
    """Columns that a sequence fills."""
    return len({place(geometry, position)[1] for position in range(length)})
