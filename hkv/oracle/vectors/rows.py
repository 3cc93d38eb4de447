"""Vectors of block tables and slots."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from reference.slots import (
    Dropped,
    Geometry,
    forward_tables,
    held_tokens,
    kernel_slots,
    kernel_table,
    linear_slots,
    positions_of,
    row_columns,
    slot_mapping,
)

SEEDS = 40


def table_cases() -> Iterator[dict[str, Any]]:
    """Random tables, padding (-1) and blocks that do not exist included."""
    for seed in range(SEEDS):
        draw = random.Random(seed)
        num_blocks, ratio = draw.randint(2, 9), draw.choice((1, 2, 4))
        stride, span = ratio + draw.choice((0, 0, 3)), ratio + draw.choice((0, 0, 1))
        table = _table(draw, num_blocks)
        expanded, dropped = kernel_table(table, ratio, stride, num_blocks, span)
        geometry = Geometry(draw.choice((1, 2, 4)))
        rows = [draw.choice((-1, *range(len(table)), len(table))) for _ in range(4)]
        starts = [draw.randint(-1, 20) for _ in rows]
        retained = draw.choice((-1, 0, 1, 3, 7))
        seen, unseen = forward_tables(geometry, table, rows, starts, retained)
        yield {
            "name": f"seed {seed}",
            "input": {
                "table": table,
                "num_blocks": num_blocks,
                "kernel_blocks_per_block": ratio,
                "kernel_block_step": stride,
                "kernel_columns_per_column": span,
                "block_size": geometry.block_size,
                "rows": rows,
                "starts": starts,
                "retained_tokens": retained,
            },
            "expected": {
                "kernel_table": expanded,
                "kernel_dropped": _dropped(dropped),
                "forward_table": seen,
                "forward_dropped": _dropped(unseen),
            },
        }


def slot_cases() -> Iterator[dict[str, Any]]:
    """Random positions on every rank of small context-parallel groups; those that have no slot included."""
    for seed in range(SEEDS):
        draw = random.Random(1000 + seed)
        ranks = draw.choice((1, 1, 2, 3, 4))
        interleave = draw.choice((1, 2, 4))
        block_size = interleave * draw.choice((1, 2, 4))
        geometry = Geometry(block_size, ranks, draw.randrange(ranks), interleave if ranks > 1 else 1)
        num_blocks = draw.randint(2, 9)
        table = _table(draw, num_blocks)
        lengths = [draw.randint(0, len(row)) for row in table]
        rows = [draw.choice((-1, *range(len(table)), len(table))) for _ in range(8)]
        positions = [draw.randint(-1, 4 * block_size * ranks) for _ in rows]
        slots, dropped = slot_mapping(geometry, table, lengths, num_blocks, rows, positions)
        kernel_size = draw.choice([size for size in (1, 2, 4, 8, 16) if block_size % size == 0])
        in_kernel, _ = kernel_slots(slots, kernel_size, block_size // kernel_size)
        linear, _ = linear_slots(slots, block_size)
        columns, offsets = [draw.randint(0, 3) for _ in range(4)], [draw.randrange(block_size) for _ in range(4)]
        held = [draw.randint(0, 40) for _ in range(4)]
        yield {
            "name": f"seed {seed}",
            "input": {
                "geometry": dataclasses.asdict(geometry),
                "table": table,
                "columns_used": lengths,
                "num_blocks": num_blocks,
                "rows": rows,
                "positions": positions,
                "kernel_block_size": kernel_size,
                "columns": columns,
                "offsets": offsets,
                "lengths": held,
            },
            "expected": {
                "slots": [list(slot) for slot in slots],
                "dropped": _dropped(dropped),
                "kernel_slots": [list(slot) for slot in in_kernel],
                "linear_slots": linear,
                "positions_of": positions_of(geometry, columns, offsets)[0],
                "held_tokens": [held_tokens(geometry, length) for length in held],
                "row_columns": [row_columns(geometry, length) for length in held],
            },
        }


def _table(draw: random.Random, num_blocks: int) -> list[list[int]]:
    width = draw.randint(1, 5)
    entries = (*range(num_blocks), *range(num_blocks), -1, num_blocks)
    return [[draw.choice(entries) for _ in range(width)] for _ in range(draw.randint(1, 3))]


def _dropped(dropped: Dropped) -> dict[str, int]:
    return dataclasses.asdict(dropped)
