"""Widths of block tables per kind, geometries of specs, and blocks dealt out to ranks as RTP-LLM does."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.block_tables import slots
from hkv.block_tables.slots import geometry_of_spec, retained_tokens, slot_geometry
from hkv.dialects.vllm.kinds import layer
from hkv.spec import ChunkedLocal, FullAttention, Mamba, MLAAttention, OpaqueState, SlidingWindow
from hkv.spec.layer import RequestLimits


def limits(length, **fields):
    return RequestLimits(max_model_len=length, **fields)


@pytest.mark.parametrize(
    ("spec", "length", "fields", "width"),
    [
        (FullAttention(block_size=16), 1000, {}, 64),
        (FullAttention(block_size=16), 1024, {}, 64),
        (FullAttention(block_size=16), 1025, {}, 72),
        (FullAttention(block_size=128), 1000, {}, 8),
        (FullAttention(block_size=528), 1056, {}, 8),
        (FullAttention(block_size=16, cp_sharded=True), 1024, {"context_parallel": 4}, 16),
        (FullAttention(block_size=16), 1024, {"context_parallel": 4}, 64),
        (MLAAttention(block_size=64, cp_sharded=True), 1000, {"context_parallel": 2}, 8),
        (SlidingWindow(block_size=16, window=64), 1000, {}, 64),
        (ChunkedLocal(block_size=32, chunk=64), 1000, {}, 32),
        (Mamba(block_size=1152), 100_096, {}, 87),
        (Mamba(block_size=1152, num_speculative_blocks=2), 100_096, {}, 89),
        (Mamba(block_size=1152, num_speculative_blocks=2), 100_096, {"context_parallel": 4}, 89),
        (Mamba(block_size=1152, num_speculative_blocks=2), 100_096, {"mamba_mode": "none"}, 3),
        (OpaqueState(block_size=4), 1_000_000, {}, 1),
    ],
)
def test_table_width(spec, length, fields, width):
    assert layer(spec).table_width(limits(length, **fields)) == width


@given(st.integers(1, 600), st.integers(1, 10_000), st.integers(1, 8))
@settings(max_examples=200)
def test_every_token_has_a_column_and_rows_cover_whole_alignments(block_size, length, ranks):
    spec = FullAttention(block_size=block_size, cp_sharded=True)
    width = layer(spec).table_width(limits(length, context_parallel=ranks))
    assert (length - 1) // (block_size * ranks) < width
    assert width * block_size % 128 == 0
    assert width - -(-length // (block_size * ranks)) < 128 // math.gcd(128, block_size)


def test_only_sharded_groups_are_split_and_only_once():
    sharded = FullAttention(block_size=16, cp_sharded=True)
    assert int(geometry_of_spec(sharded, ranks=2, rank=1, interleave=4).ranks) == 2
    assert int(geometry_of_spec(sharded, ranks=2, rank=1, interleave=4).block_size) == 16
    for spec in (FullAttention(block_size=16), Mamba(block_size=16)):
        geometry = geometry_of_spec(spec, ranks=2, rank=1, interleave=4)
        assert (int(geometry.ranks), int(geometry.rank), int(geometry.interleave)) == (1, 0, 1)
    assert not geometry_of_spec(OpaqueState(block_size=16)).mapped


@pytest.mark.parametrize(("block_size", "ranks"), [(4, 2), (1, 3), (8, 4)])
def test_round_robin_blocks_are_an_interleave_of_one_block(block_size, ranks):
    """Logical block b is on rank b % ranks, at local slot b // ranks (RTP-LLM)."""
    for rank in range(ranks):
        geometry = slot_geometry(block_size, ranks=ranks, rank=rank, interleave=block_size)
        local = [[slot, slot, slot] for slot in range(3)]
        offsets = [[0, block_size // 2, block_size - 1]] * 3
        got, dropped = slots.positions_of(geometry, np.array(local, np.int32), np.array(offsets, np.int32))
        slots.require_none(dropped)
        for slot in range(3):
            block = slot * ranks + rank
            assert got[slot].tolist() == [block * block_size + offset for offset in offsets[slot]]


def test_only_windows_let_go_and_only_without_context_parallelism():
    window = SlidingWindow(block_size=4, window=6, extra_retained_tokens=2)
    assert retained_tokens(window) == 7
    assert retained_tokens(window, context_parallel=2) == -1
    assert retained_tokens(FullAttention(block_size=4)) == -1
    assert retained_tokens(Mamba(block_size=4)) == -1
