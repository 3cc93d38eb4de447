"""Bytes of RTP-LLM's pools by walking them with a cursor: what lies where, without multiplying a stride."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hkv.dialects.rtp_llm.planning.pools import PoolGroup, PoolPlan
from hkv.spec.dtypes import item_bytes

FLOAT8 = ("float8_e4m3fn", "float8_e8m0fnu")


class Element(NamedTuple):
    """One element of a cache.

    Attributes:
      pool: index of its pool.
      layer: global index of its layer.
      tag: the group's tag.
      block: block id.
      row: kernel block, counted within the block.
      part: name of the part.
      head: head of the part.
      state: token, entry or state within the kernel block.
      place: number of the element in the part of that head and state.
      address: its first byte in the pool.
      size: its bytes.
    """

    pool: int
    layer: int
    tag: str
    block: int
    row: int
    part: str
    head: int
    state: int
    place: int
    address: int
    size: int


def walk_pools(plan: PoolPlan) -> Iterator[Element]:
    """Every element of every pool of a plan, in the order of memory but for groups that share places."""
    models = (plan.groups, *plan.modules)
    for pool in range(1 if plan.shared else len(plan.groups)):
        cursor = 0
        # A draft's blocks lie behind the target's scales in a shared pool, and before them in a group's own.
        shared = [(groups, scales) for groups in models for scales in (False, True)]
        for groups, scales in shared if plan.shared else sorted(shared, key=lambda each: each[1]):
            mine = [group for group in (groups if plan.shared else groups[pool : pool + 1]) if group.layers]
            if mine:
                cursor = yield from _region(pool, mine, cursor, scales)


def _region(pool: int, groups: Sequence[PoolGroup], cursor: int, scales: bool) -> Iterator[Element]:
    """One model's blocks, or their scales; returns the byte behind them."""
    longest = max(groups, key=lambda group: len(group.layers))
    for slot, _ in enumerate(longest.layers):
        for block in range(groups[0].num_blocks):
            for group in groups:
                if slot < len(group.layers):
                    where = (pool, group.layers[slot], group.tag, block)
                    for row, part, head, state, place, offset, size in _block(group, scales):
                        yield Element(*where, row, part, head, state, place, cursor + offset, size)
            cursor += groups[0].scale_stride if scales else groups[0].stride
    return cursor


Found = tuple[int, str, int, int, int, int, int]
"""Row, part, head, state, place, offset in the block, bytes."""


def _block(group: PoolGroup, scales: bool) -> Iterator[Found]:
    """The elements of one block of a group, or of its scales."""
    block, offset = group.block, 0
    if scales and not block.scale:
        return
    for row in range(group.kernel_blocks):
        start = offset
        for part, head, state, place, size in _kernel_block(group, scales):
            yield row, part, head, state, place, offset, size
            offset += size
        if block.kind.startswith("opaque"):
            offset = start + block.bytes  # padding


def _kernel_block(group: PoolGroup, scales: bool) -> Iterator[tuple[str, int, int, int, int]]:
    """Part, head, state, place and bytes of each element of a kernel block, one behind the other."""
    block = group.block
    tokens = block.seq_size // group.kernel_blocks
    if block.kind == "mha":
        for side in ("key", "value"):
            for head in range(block.local_heads):
                for token in range(tokens):
                    if scales:
                        yield f"{side}_scale", head, token, 0, 4
                        continue
                    for place in range(block.k_elems // block.local_heads // block.seq_size):
                        yield side, head, token, place, item_bytes(block.dtype)
    elif block.kind == "mla":
        for token in range(tokens):
            for part, count, size in _latent(group, scales):
                for place in range(count):
                    yield part, 0, token, place, size
    elif block.kind == "linear":
        (_, state_dtype), (_, conv_dtype) = block.spec.state_tensors
        for place in range(block.k_elems):
            yield "state", 0, 0, place, item_bytes(state_dtype)
        for place in range(block.v_elems):
            yield "conv", 0, 0, place, item_bytes(conv_dtype)
    elif block.slices > 1:
        for place in range(block.bytes):
            yield "slice", 0, 0, place, 1
    else:
        for entry in range(block.entries):
            for place in range(block.elems // block.entries):
                yield "entry", 0, entry, place, item_bytes(block.dtype)


def _latent(group: PoolGroup, scales: bool) -> list[tuple[str, int, int]]:
    """Parts of one token of a latent, or of its indexer's key: names, elements, bytes of one."""
    block = group.block
    if scales:
        return [("indexer", block.scale // block.seq_size, 1)]
    lora, rope = block.k_elems // block.seq_size, block.v_elems // block.seq_size
    if block.dtype not in FLOAT8:
        return [("latent", lora, item_bytes(block.dtype)), ("rope", rope, item_bytes(block.dtype))]
    return [("latent", lora, 1), ("latent_scale", lora // 128, 4), ("rope", rope, 2)]
