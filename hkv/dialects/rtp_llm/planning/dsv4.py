"""DeepSeek-V4's seven groups under RTP-LLM: compressed keys and values, their compressors' states, and the window."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hkv.dialects.rtp_llm.planning.opaque import OpaqueRegion
from hkv.model.group_policy import CacheDescription, CpSlice, MemoryPlacement

CSA_TAGS = ("csa_kv", "indexer_kv", "indexer_state", "csa_state", "swa_kv")
HCA_TAGS = ("hca_kv", "hca_state", "swa_kv")
PACKED, PACKED_INDEXER, PACKED_ALIGNMENT = 584, 132, 576
EXPLICIT_BLOCKS = 256
"""Blocks of the pool of the rarely compressed state, paid from the budget."""


def layer_tags(ratio: int) -> tuple[str, ...]:
    """Groups of a layer that compresses `ratio` tokens into one: 4, 128, or anything else for a window alone."""
    return {4: CSA_TAGS, 128: HCA_TAGS}.get(ratio, ("swa_kv",))


def tag_order(ratios: Sequence[int]) -> tuple[str, ...]:
    """Groups in the order in which the layers first name them."""
    return tuple(dict.fromkeys(tag for ratio in ratios for tag in layer_tags(ratio)))


def descriptions(
    *, head_dim: int, indexer_dim: int, float8: bool, block_size: int = 256, pinned: bool = False
) -> dict[str, CacheDescription]:
    """The description of each group: packed vectors of one byte an element, else bfloat16; pools may be pinned."""
    vector = PACKED if float8 else 2 * head_dim
    key = PACKED_INDEXER if float8 else 2 * indexer_dim
    alignment = PACKED_ALIGNMENT if float8 else 0
    kv = OpaqueRegion(
        block_size=block_size, state=False, entry_elems=vector, entry_dtype="uint8", count="compressed", ratio=4
    )
    ring = OpaqueRegion(
        block_size=block_size,
        state=True,
        entry_elems=1,
        entry_dtype="float32",
        count="ring",
        ratio=4,
        overlap=1,
        alignment_min_entries=128,
        cp_align_payload=True,
        cp_scale_seq=True,
        cp_slice="payload",
    )
    window = {"entry_elems": vector, "entry_dtype": "uint8", "alignment": alignment, "cp_slice": "stride"}
    rare = dataclasses.replace(ring, ratio=128, overlap=0)
    state = {
        "state_cache": True,
        "cp_slice": CpSlice.PAYLOAD_BYTES,
        "memory_placement": MemoryPlacement.HOST_PINNED if pinned else MemoryPlacement.DEVICE,
    }
    fixed = {
        "enable_prefix_reuse": False,
        "active_tail_blocks": 1,
        "validate_tail_blocks": False,
        "explicit_block_num": EXPLICIT_BLOCKS,
        "charge_to_paged_budget": not pinned,
    }
    described: dict[str, tuple[OpaqueRegion, dict[str, Any]]] = {
        "csa_kv": (dataclasses.replace(kv, alignment=alignment), {}),
        "hca_kv": (dataclasses.replace(kv, ratio=128, alignment=alignment), {}),
        "indexer_kv": (dataclasses.replace(kv, entry_elems=key), {}),
        "indexer_state": (dataclasses.replace(ring, entry_elems=4 * indexer_dim), state),
        "csa_state": (dataclasses.replace(ring, entry_elems=4 * head_dim), state),
        "hca_state": (dataclasses.replace(rare, entry_elems=2 * head_dim), {**state, **fixed}),
        "swa_kv": (dataclasses.replace(rare, **window), {**state, "cp_slice": CpSlice.EQUAL_BYTES}),
    }
    return {tag: CacheDescription(tag=tag, spec=spec, **fields) for tag, (spec, fields) in described.items()}
