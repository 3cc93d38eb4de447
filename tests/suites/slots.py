"""Slots: from a token's position to a rank, a block and an offset, by manager blocks and by kernel blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from hkv.contract.traffic import Choices
from reference.slots import (
    INT32_MAX,
    PAD,
    Geometry,
    batch_tokens,
    forward_tables,
    held_tokens,
    kernel_slots,
    kernel_table,
    linear_slots,
    positions_of,
    row_columns,
    slot_mapping,
)
from reference.state.rows import BlockRows
from tests.suites.suite import CaseSuite, case_check


@dataclasses.dataclass(frozen=True)
class Addressing:
    """Rows of blocks, no id twice, and tokens to place. `ratio` kernel blocks are one block of a rank, `stride` of them
    lie between the beginnings of two; `retained` tokens before the position `start` are still read.
    """

    geometry: Geometry
    table: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    num_blocks: int
    ratio: int
    stride: int
    start: int
    retained: int

    @property
    def span(self) -> int:
        """Tokens that one column stands for, all ranks together."""
        return self.geometry.block_size * self.geometry.ranks

    def rank(self, rank: int) -> Geometry:
        """The geometry of another rank."""
        return dataclasses.replace(self.geometry, rank=rank)

    def tables(self) -> list[list[int]]:
        """The table as lists."""
        return [list(row) for row in self.table]

    def slots(self, geometry: Geometry, row: int, positions: list[int]) -> list[tuple[int, int]]:
        """Slots of positions of one row."""
        made, _ = slot_mapping(
            geometry, self.tables(), list(self.lengths), self.num_blocks, [row] * len(positions), positions
        )
        return made


def draw_addressing(choices: Choices) -> Addressing:
    """A random case, sizes all different or all alike."""
    ranks = choices.pick((1, 1, 2, 3, 4))
    interleave = choices.integer(1, 3)
    kernel = choices.pick((1, 2, 4))
    ratio = choices.pick((1, 2, 3))
    block = kernel * ratio * interleave
    width, rows = choices.integer(1, 4), choices.integer(1, 3)
    ids = list(range(1, 1 + width * rows))
    table = tuple(tuple(ids.pop(choices.integer(0, len(ids) - 1)) for _ in range(width)) for _ in range(rows))
    return Addressing(
        Geometry(block, ranks, 0, interleave),
        table,
        tuple(choices.integer(1, width) for _ in range(rows)),
        1 + width * rows,
        ratio,
        ratio + choices.pick((0, 0, 1)),
        choices.integer(0, width * block),
        choices.integer(0, 2 * block),
    )


@case_check("one owner", "B-I25", "B-I18")
def one_owner(case: Addressing) -> Iterator[str]:
    """Each token of a row is held by exactly one rank, no two tokens in one slot, none in another row's block."""
    taken = {}
    for row in range(len(case.table)):
        positions = list(range(case.lengths[row] * case.span))
        placed = [case.slots(case.rank(rank), row, positions) for rank in range(case.geometry.ranks)]
        for position in positions:
            owners = [
                (rank, *placed[rank][position])
                for rank in range(case.geometry.ranks)
                if placed[rank][position][0] != PAD
            ]
            if len(owners) != 1:
                yield f"token {position} of row {row} is held by {len(owners)} ranks"
                continue
            if owners[0] in taken:
                yield f"the slot {owners[0]} is that of {taken[owners[0]]} and of {(row, position)}"
            taken[owners[0]] = (row, position)
            _, block, offset = owners[0]
            if block != case.table[row][position // case.span] or not 0 <= offset < case.geometry.block_size:
                yield f"token {position} of row {row} lies in block {block} at {offset}, not in its column's block"


@case_check("slot inverse", "B-I18")
def slot_inverse(case: Addressing) -> Iterator[str]:
    """A slot's column and offset lead back to its token, on every rank."""
    positions = list(range(case.lengths[0] * case.span))
    for rank in range(case.geometry.ranks):
        placed = case.slots(case.rank(rank), 0, positions)
        mine = [position for position, (block, _) in zip(positions, placed, strict=True) if block != PAD]
        columns, offsets = [position // case.span for position in mine], [placed[position][1] for position in mine]
        found, _ = positions_of(case.rank(rank), columns, offsets)
        if found != mine:
            yield f"rank {rank}: the tokens {mine[:8]} come back as {found[:8]}"


@case_check("kernel slots", "B-I20")
def kernel_agreement(case: Addressing) -> Iterator[str]:
    """A slot by the manager's table is the slot by the kernel's table, for every token, gaps between blocks or not."""
    size = case.geometry.block_size // case.ratio
    tables, dropped = kernel_table(case.tables(), case.ratio, case.stride, case.num_blocks, case.ratio)
    if dropped.blocks:
        yield f"{dropped.blocks} blocks of a sound table are dropped"
    for row in range(len(case.table)):
        positions = list(range(case.lengths[row] * case.span))
        placed = case.slots(case.geometry, row, positions)
        kernel, _ = kernel_slots(placed, size, case.stride)
        for position, (block, offset), found in zip(positions, placed, kernel, strict=True):
            if block == PAD:
                if found != (PAD, PAD):
                    yield f"no slot becomes kernel slot {found}"
                continue
            column = position // case.span * case.ratio + offset // size
            if found != (tables[row][column], offset % size):
                wanted = (tables[row][column], offset % size)
                yield f"token {position} of row {row}: {found} by slots, {wanted} by table"
            if not block * case.stride <= found[0] < block * case.stride + case.ratio:
                yield f"token {position} of row {row}: kernel block {found[0]} is no piece of block {block}"


@case_check("holes stay holes", "B-I4", "B-I20")
def holes(case: Addressing) -> Iterator[str]:
    """No block stays no block in a kernel's table; rows are padded; what does not exist is dropped and counted."""
    rows = [[case.table[0][0], PAD, case.num_blocks]]
    tables, dropped = kernel_table(rows, case.ratio, case.stride, case.num_blocks, case.ratio + 1)
    wanted = [case.table[0][0] * case.stride + piece for piece in range(case.ratio)] + [PAD] * case.ratio
    wanted += [0] * (3 * (case.ratio + 1) - len(wanted))
    if tables[0] != wanted or dropped.blocks != 1:
        yield f"{rows[0]} becomes {tables[0]} with {dropped.blocks} dropped, not {wanted}"


@case_check("chunk independence", "B-I20")
def chunk_independence(case: Addressing) -> Iterator[str]:
    """A token's slot does not depend on the steps it is computed in; padding goes nowhere, stale or not."""
    total = case.lengths[0] * case.span
    whole = case.slots(case.geometry, 0, list(range(total)))
    cut = min(total, max(1, case.start))
    made: list[tuple[int, int]] = []
    for start, stop in ((0, cut), (cut, total)):
        size = stop - start + 2
        rows, positions, _ = batch_tokens([0], [start], [stop - start], size)
        slots, _ = slot_mapping(case.geometry, case.tables(), list(case.lengths), case.num_blocks, rows, positions)
        if len(rows) != size or slots[stop - start :] != [(PAD, PAD)] * 2:
            yield f"a batch of {size} with {stop - start} tokens ends in the slots {slots[stop - start :]}"
        made += slots[: stop - start]
    if made != whole:
        yield f"{total} tokens at once and cut at {cut} lie in different slots"


@case_check("what does not exist", "B-I16", "B-I4")
def absent(case: Addressing) -> Iterator[str]:
    """Tokens beyond a row, negative ones, rows and blocks that do not exist get no slot and are counted."""
    beyond = case.lengths[0] * case.span
    rows, positions = [0, 0, len(case.table), PAD, 0], [beyond, -1, 0, 0, 0]
    slots, dropped = slot_mapping(case.geometry, case.tables(), list(case.lengths), case.num_blocks, rows, positions)
    if any(slot != (PAD, PAD) for slot in slots[:4]) or (dropped.positions, dropped.rows) != (2, 1):
        yield f"slots {slots} with {dropped}"
    few, dropped = slot_mapping(case.geometry, case.tables(), list(case.lengths), case.table[0][0], [0], [0])
    if few != [(PAD, PAD)] or dropped.blocks != 1:
        yield f"a block that does not exist gets {few}"


@case_check("tokens counted", "B-I25", "B-I16")
def counted(case: Addressing) -> Iterator[str]:
    """Ranks together hold every token of a sequence, in as few columns as there are."""
    for length in (0, case.start, case.span, case.span + 1):
        held = sum(held_tokens(case.rank(rank), length) for rank in range(case.geometry.ranks))
        if held != length:
            yield f"{held} of {length} tokens are held"
        if row_columns(case.geometry, length) != -(-length // case.span):
            yield f"{length} tokens fill {row_columns(case.geometry, length)} columns of {case.span}"


@case_check("window tables", "B-I14", "B-I4")
def window_tables(case: Addressing) -> Iterator[str]:
    """A table for a step names every block that a token from `start` on reads, and none wholly behind the window."""
    tables, _ = forward_tables(case.geometry, case.tables(), [0, PAD], [case.start, 0], case.retained)
    first = case.start - case.retained
    for column, block in enumerate(case.table[0]):
        read = (column + 1) * case.span > first or case.geometry.ranks > 1
        if tables[0][column] != (block if read else 0):
            yield f"column {column} of {case.span} tokens is {tables[0][column]}, read from token {first} on"
    if any(tables[1]):
        yield f"an empty row of a batch has the table {tables[1]}"


@case_check("no overflow", "B-I36")
def no_overflow(case: Addressing) -> Iterator[str]:
    """Products beyond 32 bits are refused and counted, never wrapped."""
    block = INT32_MAX // case.geometry.block_size
    for number in (block, block + 1, INT32_MAX):
        exact = number * case.geometry.block_size
        found, dropped = linear_slots([(number, 0)], case.geometry.block_size)
        if found != [exact if exact <= INT32_MAX else PAD] or dropped.blocks != (exact > INT32_MAX):
            yield f"block {number} of {case.geometry.block_size} tokens is slot {found[0]}"
        first = number * case.stride
        kernel, _ = kernel_slots([(number, 0)], case.geometry.block_size, case.stride)
        if kernel != [(first, 0) if first <= INT32_MAX else (PAD, PAD)]:
            yield f"block {number} with {case.stride} kernel blocks each is kernel block {kernel[0]}"
        table, _ = kernel_table([[number]], case.ratio, case.stride, INT32_MAX + 1, case.ratio)
        fits = first + case.ratio - 1 <= INT32_MAX
        if table[0] != [first + piece if fits else 0 for piece in range(case.ratio)]:
            yield f"block {number} becomes the kernel blocks {table[0]}"
    rows, _, dropped = batch_tokens([0], [INT32_MAX], [2], 4)
    if rows != [PAD] * 4 or dropped.positions != 1:
        yield f"tokens beyond 32 bits are placed: {rows}"


@case_check("rows follow requests", "B-I35", "B-I16")
def rows_follow(case: Addressing) -> Iterator[str]:
    """A row that moves takes its blocks along and leaves none; both tables follow every change; nothing is aliased."""
    rows = BlockRows(3, 4, ratio=case.ratio)
    first, second = [1, 2, 3], [7, 8]
    rows.append(0, first, 2)
    rows.assign(1, second, 2)
    first[0] = second[0] = 99
    rows.append(0, [4, 5], 1)
    rows.set_at(1, 1, 9)
    rows.remove(0, [1], 1)
    rows.swap(0, 0, 2)
    expected = [[4, 0, 1], [7, 9], []]
    if rows.rows != expected:
        yield f"rows are {rows.rows}, not {expected}"
    rows.move(0, 2)
    rows.move(1, 1)
    rows.resize(1, 3, 6)
    expected = [[], [7, 9, 6], [4, 0, 1]]
    if rows.rows != expected or rows.pop(1) != 6:
        yield f"rows are {rows.rows}, not {expected}"
    rows.append(0, [5], 1)
    blocks, kernels = rows.tables(case.ratio)
    for row, ids in enumerate(rows.rows):
        wanted = [block * case.ratio + piece for block in ids for piece in range(case.ratio)]
        if list(blocks[row]) != ids + [0] * (4 - len(ids)) or list(kernels[row]) != wanted + [0] * (
            4 * case.ratio - len(wanted)
        ):
            yield f"row {row} of {ids} has the tables {list(blocks[row])} and {list(kernels[row])}"


SUITE = CaseSuite(
    "slots",
    "positions, ranks, block tables and kernel tables",
    draw_addressing,
    (
        one_owner,
        slot_inverse,
        kernel_agreement,
        holes,
        chunk_independence,
        absent,
        counted,
        window_tables,
        no_overflow,
        rows_follow,
    ),
)
