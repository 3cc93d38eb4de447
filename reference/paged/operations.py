"""Write, gather, scatter, copy and zero as loops over elements; a pool is a NumPy array of bytes, changed in place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hkv.layout.block_layout import Layout
from hkv.layout.content import Part
from hkv.spec.dtypes import item_bytes


def element_slices(
    layout: Layout, part: Part, layer: int, block: int, state: int
) -> Iterator[tuple[tuple[int, ...], slice]]:
    """Elements of a part in one state: the `(head, *index)` of each, and its bytes in the pool."""
    heads = layout.shape[2] if part.heads is None else part.heads
    size = item_bytes(part.dtype)
    for head in range(heads):
        for index in itertools.product(*(range(extent) for extent in part.shape)):
            address = layout.element_address(part.name, layer, block, head, state, *index)
            yield (head, *index), slice(address, address + size)


def write(
    pool: np.ndarray,
    layout: Layout,
    layer: int,
    blocks: Sequence[int],
    states: Sequence[int],
    values: Mapping[str, np.ndarray],
) -> int:
    """Twin of `hkv.paged.write`; returns the number of slots that did not exist."""
    dropped = 0
    for token, (block, state) in enumerate(zip(blocks, states, strict=True)):
        if block == -1:
            continue
        if not _exists(layout, layer, block) or not 0 <= state < layout.states_per_block:
            dropped += 1
            continue
        for name, content in values.items():
            for index, place in element_slices(layout, layout.part(name), layer, block, state):
                pool[place] = np.frombuffer(content[(token, *index)].tobytes(), np.uint8)
    return dropped


def write_step(
    pools: Sequence[np.ndarray],
    layouts: Sequence[Layout],
    blocks: Sequence[Sequence[int]],
    states: Sequence[Sequence[int]],
    values: Sequence[Mapping[str, np.ndarray]],
    pool_of: Sequence[int],
) -> int:
    """As `hkv.paged.write_step` of values that are quantised already: layer by layer and group by group."""
    dropped = 0
    for group, layout in enumerate(layouts):
        missing = 0  # tokens without a place, which are the same in every layer
        for layer in range(layout.num_layers):
            mine = {part: content[layer] for part, content in values[group].items()}
            missing = write(pools[pool_of[group]], layout, layer, blocks[group], states[group], mine)
        dropped += missing
    return dropped


def gather(
    pool: np.ndarray,
    layout: Layout,
    layer: int,
    table: Sequence[int],
    dtypes: Mapping[str, np.dtype],
    null_block: int = 0,
) -> tuple[dict[str, np.ndarray], int]:
    """Twin of `hkv.paged.gather`, of the parts that `dtypes` names."""
    found: dict[str, np.ndarray] = {}
    for name, dtype in dtypes.items():
        part = layout.part(name)
        heads = layout.shape[2] if part.heads is None else part.heads
        result = np.zeros((len(table) * layout.states_per_block, heads, *part.shape), dtype)
        for position, block in enumerate(table):
            if block == null_block or not _exists(layout, layer, block):
                continue
            for state in range(layout.states_per_block):
                row = position * layout.states_per_block + state
                for index, place in element_slices(layout, part, layer, block, state):
                    result[(row, *index)] = pool[place].view(dtype)[0]
        found[name] = result
    return found, sum(block != -1 and not _exists(layout, layer, block) for block in table)


def scatter(
    pool: np.ndarray,
    layout: Layout,
    layer: int,
    table: Sequence[int],
    values: Mapping[str, np.ndarray],
    null_block: int = 0,
) -> int:
    """Twin of `hkv.paged.scatter`; returns the number of ids that did not exist."""
    for position, block in enumerate(table):
        if block == null_block or not _exists(layout, layer, block):
            continue
        first = position * layout.states_per_block
        states = range(layout.states_per_block)
        parts = {name: content[first : first + len(states)] for name, content in values.items()}
        write(pool, layout, layer, [block] * len(states), states, parts)
    return sum(block != -1 and not _exists(layout, layer, block) for block in table)


def copy_blocks(pool: np.ndarray, layout: Layout, sources: Sequence[int], targets: Sequence[int]) -> int:
    """Twin of `hkv.paged.copy_blocks`; returns the number of pairs that named a block that does not exist."""
    before = pool.copy()
    dropped = 0
    for source, target in zip(sources, targets, strict=True):
        if source == -1 or target == -1:
            continue
        if not (_exists(layout, 0, source) and _exists(layout, 0, target)):
            dropped += 1
            continue
        for layer in range(layout.num_layers):
            pairs = zip(layout.block_runs(layer, source), layout.block_runs(layer, target), strict=True)
            for (read, length), (written, _) in pairs:
                pool[written : written + length] = before[read : read + length]
    return dropped


def zero_blocks(pool: np.ndarray, layout: Layout, blocks: Sequence[int]) -> int:
    """Twin of `hkv.paged.zero_blocks`; returns the number of ids that did not exist."""
    dropped = 0
    for block in blocks:
        if block == -1:
            continue
        if not _exists(layout, 0, block):
            dropped += 1
            continue
        for layer in range(layout.num_layers):
            for start, length in layout.block_runs(layer, block):
                pool[start : start + length] = 0
    return dropped


def _exists(layout: Layout, layer: int, block: int) -> bool:
    return 0 <= layer < layout.num_layers and 0 <= block < layout.num_blocks
