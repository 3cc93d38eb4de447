"""Cases of vectors: layouts and addresses, chunk objects, pools, block tables and slots."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

from hkv.chunks.formats import TRAITS, EngineKVFormat
from hkv.chunks.kernel_groups import EngineGroupInfo, KernelGroup, PageGeometry
from hkv.chunks.objects import StagingLayout, object_groups, object_layout
from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.layout.orders import Order
from hkv.spec import FullAttention, LayerSpec, Mamba, MLAAttention, SlidingWindow
from hkv.spec.written import spec_record
from reference.layout import cell_addresses, element_addresses
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
from reference.state.events import Removed
from reference.state.pool import Pool

SPECS: dict[str, LayerSpec] = {
    "full, all sizes different": FullAttention(
        block_size=4, num_kv_heads=3, head_size=6, head_size_v=5, dtype="float16"
    ),
    "full, all sizes equal": FullAttention(block_size=2, num_kv_heads=2, head_size=2, dtype="bfloat16"),
    "full, padded": FullAttention(block_size=4, num_kv_heads=2, head_size=4, dtype="int8", page_size_padded=96),
    "window": SlidingWindow(block_size=4, num_kv_heads=1, head_size=8, dtype="float32", window=6),
    "latent": MLAAttention(block_size=4, head_size=9, dtype="bfloat16"),
    "states": Mamba(block_size=4, shapes=((2, 3), (2, 2, 2)), dtypes=("bfloat16", "float32")),
}
"""Layers small enough that every byte can be listed."""

LAYERS, BLOCKS = 2, 3

ADDRESSES = 24
"""Elements of one layout whose address is given."""


def stride_cases() -> Iterator[dict[str, Any]]:
    """Every small layer in every order that can express it, whole and in kernel blocks."""
    for name, spec, order, kernel, layout in _layouts():
        yield {
            "name": f"{name}, {order.value}" + (f", kernel blocks of {kernel}" if kernel else ""),
            "input": _input(spec, order, kernel),
            "expected": {
                "axes": ["layer", "kernel block", "head", "state", "byte"],
                "shape": list(layout.shape),
                "strides": list(layout.strides),
                "kernel_blocks_per_block": layout.split,
                "page_bytes": layout.page_size,
                "end": layout.end,
            },
        }


def address_cases() -> Iterator[dict[str, Any]]:
    """Elements of the same layouts, found by walking through memory."""
    for name, spec, order, kernel, _ in _layouts():
        cells = cell_addresses(spec, order.value, LAYERS, BLOCKS, kernel_block_size=kernel)
        states = spec.num_states if kernel is None else spec.states_in(kernel)
        found = element_addresses(spec, cells, states)
        elements = sorted(key for key in found if key[-1] == 0)
        chosen = random.Random(name + order.value).sample(elements, min(ADDRESSES, len(elements)))
        fields = ("part", "layer", "block", "head", "state", "element")
        yield {
            "name": f"{name}, {order.value}" + (f", kernel blocks of {kernel}" if kernel else ""),
            "input": {
                **_input(spec, order, kernel),
                "elements": [dict(zip(fields, key, strict=False)) for key in chosen],
            },
            "expected": {"addresses": [found[key] for key in chosen]},
        }


def _layouts() -> Iterator[tuple[str, LayerSpec, Order, int | None, Layout]]:
    for name, spec in SPECS.items():
        for order in Order:
            for kernel in (None, 2) if not spec.snapshot else (None,):
                if kernel is not None and spec.block_size <= kernel:
                    continue
                try:
                    layout = Layout.of_spec(spec, order, num_blocks=BLOCKS, num_layers=LAYERS, kernel_block_size=kernel)
                except LayoutError:
                    continue  # this order cannot express the padding or the split
                yield name, spec, order, kernel, layout


def _input(spec: LayerSpec, order: Order, kernel: int | None) -> dict[str, Any]:
    return {
        "spec": spec_record(spec),
        "order": order.value,
        "num_layers": LAYERS,
        "num_blocks": BLOCKS,
        "kernel_block_size": kernel,
    }


# Vectors of chunk objects, as LMCache 0.5.6 lays them out.


def _group(
    format: int, first: int, slots: int, heads: int, size: int, dtype: str, layers: int, **info: Any
) -> KernelGroup:
    kind = EngineKVFormat(format)
    geometry = PageGeometry(kind, TRAITS[kind].kv_size, layers, 100, slots, heads, size, dtype)
    indices = tuple(range(first, first + layers))
    return KernelGroup(indices, geometry, EngineGroupInfo(info.pop("engine_group", 0), indices, **info))


MODELS = {
    "one attention group": (_group(1, 0, 16, 8, 64, "bfloat16", 4),),
    "attention and windows": (
        _group(1, 0, 16, 8, 64, "bfloat16", 2),
        _group(1, 2, 16, 4, 64, "bfloat16", 6, engine_group=1, window=128),
        _group(1, 8, 32, 4, 64, "float16", 3, engine_group=2, window=640),
    ),
    "latent": (_group(3, 0, 64, 1, 576, "bfloat16", 5),),
    "attention and recurrent": (
        _group(1, 0, 16, 2, 128, "bfloat16", 2),
        _group(1, 2, 16, 1, 512, "float32", 6, engine_group=1, window=16, recurrent=True),
    ),
}
"""Kernel groups of small models."""


def chunk_cases() -> Iterator[dict[str, Any]]:
    """Every model, in one object or several, windows kept or whole."""
    for (name, groups), chunk, separate, full in itertools.product(
        MODELS.items(), (64, 256), (False, True), (False, True)
    ):
        objects = object_groups(groups, chunk, separate, full)
        layouts = tuple(object_layout(groups, found, chunk, full) for found in objects)
        staging = StagingLayout(layouts)
        yield {
            "name": f"{name}, chunks of {chunk}, {'separate' if separate else 'together'}{', whole windows' * full}",
            "input": {
                "groups": [_record(group) for group in groups],
                "chunk_tokens": chunk,
                "separate": separate,
                "full_window": full,
            },
            "expected": {
                "objects": [
                    {
                        "members": list(found.members),
                        "window_chunks": found.window,
                        "kind": found.kind,
                        "bytes": layout.nbytes,
                        "regions": [
                            {**dataclasses.asdict(region), "shape": list(region.shape)} for region in layout.regions
                        ],
                    }
                    for found, layout in zip(objects, layouts, strict=True)
                ],
                "staging_slot_bytes": staging.slot_bytes,
                "staging_bytes": staging.nbytes,
            },
        }


def _record(group: KernelGroup) -> dict[str, Any]:
    geometry, info = group.geometry, group.info
    return {
        "format": geometry.format.name,
        "planes": geometry.kv_size,
        "layers": list(info.layer_indices),
        "slots": geometry.slots,
        "heads": geometry.num_heads,
        "head_size": geometry.head_size,
        "dtype": geometry.dtype,
        "engine_group": info.engine_group_id,
        "window": info.window,
        "recurrent": info.recurrent,
    }


# Vectors of the pool: sequences of what can be done to blocks, with the queue after each.

POOL_SEEDS = 24
POOL_LENGTH = 20


def pool_cases() -> Iterator[dict[str, Any]]:
    """Random sequences on small pools. A key is a word; group 0 throughout."""
    for seed in range(POOL_SEEDS):
        draw = random.Random(seed)
        num_blocks = draw.randint(3, 9)
        pool, steps = Pool(num_blocks), []
        for _ in range(POOL_LENGTH):
            operation = _draw(draw, pool)
            taken = _perform(pool, operation)
            lost = [event.chain for event in pool.events if isinstance(event, Removed)]
            pool.events.clear()
            steps.append(
                {
                    "operation": operation,
                    "blocks": taken,
                    "lost_keys": sorted(map(str, lost)),
                    "free": list(pool.free),
                    "refs": list(pool.refs),
                    "keys": {
                        str(block): sorted(str(key[1]) for key in pool.keys_of(block))
                        for block in range(num_blocks)
                        if pool.keys_of(block)
                    },
                }
            )
        yield {
            "name": f"seed {seed}",
            "input": {"num_blocks": num_blocks, "operations": [step["operation"] for step in steps]},
            "expected": {"after": [{key: step[key] for key in step if key != "operation"} for step in steps]},
        }


def _draw(draw: random.Random, pool: Pool) -> dict[str, Any]:
    held = [block for block in range(1, pool.num_blocks) if pool.refs[block]]
    cached = [block for block in range(1, pool.num_blocks) if pool.primary[block] is not None]
    choices = [{"op": "take", "count": draw.randint(1, len(pool.free))}] if len(pool.free) else []
    if held:
        released = draw.sample(held, draw.randint(1, len(held)))
        choices += [{"op": "release", "blocks": released}] * 2
        plain = [block for block in held if block not in cached]
        if plain:
            key = f"key{draw.randint(0, 9)}"
            choices += [{"op": "register", "block": draw.choice(plain), "key": key}] * 3
    if cached:
        choices += [{"op": "touch", "blocks": [draw.choice(cached)]}, {"op": "evict", "blocks": [draw.choice(cached)]}]
    choices.append({"op": "reset"})
    return draw.choice(choices)


def _perform(pool: Pool, operation: dict[str, Any]) -> list[int]:
    match operation["op"]:
        case "take":
            return pool.take(operation["count"])
        case "release":
            pool.release(operation["blocks"])
        case "touch":
            pool.touch(operation["blocks"])
        case "register":
            pool.insert((0, operation["key"]), operation["block"], 1)
        case "evict":
            pool.evict(operation["blocks"])
        case "reset":
            pool.reset()
    return []


# Vectors of block tables and slots.

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
