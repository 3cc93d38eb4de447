"""Slots, kernel tables and forward tables beside their twin, whose invariants `tests.suites.slots` asks.

Widths of block tables by kind, geometries of specs, and blocks dealt out to ranks as RTP-LLM does.
"""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.block_tables import slots
from hkv.block_tables import slots as jitted
from hkv.block_tables.slots import PAD, Slots, geometry_of_spec, require_none, retained_tokens, slot_geometry
from hkv.dialects.vllm.kinds import layer
from hkv.errors import OperationError
from hkv.spec import FullAttention, Mamba, MLAAttention, OpaqueState, SlidingWindow
from hkv.spec.layer import RequestLimits
from reference import slots as plain

ROWS, WIDTH, TOKENS, REQUESTS, SPAN = 3, 5, 24, 4, 4
INT32_MAX = 2**31 - 1
EDGES = [-1, -2, INT32_MAX, INT32_MAX - 1, INT32_MAX // 2, INT32_MAX // 4, -INT32_MAX - 1]


def i32(values) -> np.ndarray:
    return np.array(values, np.int32)


def counts(dropped) -> tuple[int, ...]:
    return tuple(int(getattr(dropped, name)) for name in ("rows", "positions", "blocks"))


def pairs(slots: Slots) -> list[tuple[int, int]]:
    return list(zip(slots.blocks.tolist(), slots.offsets.tolist(), strict=True))


def as_slots(values) -> Slots:
    return Slots(i32([block for block, _ in values]), i32([offset for _, offset in values]))


def test_ids_beyond_int32_are_dropped_and_counted():
    last = (INT32_MAX - 3) // 4
    table, dropped = jitted.kernel_table(i32([[last, last + 1, PAD]]), i32(4), i32(4), i32(INT32_MAX), span=4)
    assert table.tolist() == [[last * 4 + j for j in range(4)] + [0] * 4 + [PAD] * 4]
    assert counts(dropped) == (0, 0, 1)
    with pytest.raises(OperationError, match="blocks = 1"):
        require_none(dropped)


@pytest.mark.parametrize(("ratio", "stride"), [(1, 1), (3, 3), (4, 4), (3, 5), (4, 7)])
def test_the_last_block_whose_kernel_blocks_an_int32_can_name(ratio, stride):
    last = (INT32_MAX - ratio + 1) // stride
    for block, fits in ((last, True), (last + 1, False)):
        if block <= INT32_MAX:
            table, dropped = jitted.kernel_table(i32([[block]]), i32(ratio), i32(stride), i32(INT32_MAX), span=4)
            want, want_dropped = plain.kernel_table([[block]], ratio, stride, INT32_MAX, 4)
            assert table.tolist() == want
            assert counts(dropped) == dataclasses.astuple(want_dropped)
            assert (want_dropped.blocks == 0) == (fits and block < INT32_MAX)


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"block_size": 0}, "block_size"),
        ({"block_size": 4, "ranks": 0}, "ranks"),
        ({"block_size": 0, "ranks": 2, "rank": 0}, "block_size"),
        ({"block_size": 32, "ranks": 2, "rank": -1}, "rank"),
        ({"block_size": 32, "ranks": 2, "rank": 2}, "rank"),
        ({"block_size": 4, "interleave": 3}, "interleave"),
        ({"block_size": 4, "interleave": 8}, "interleave"),
        ({"block_size": 1 << 30, "ranks": 2}, "block_size"),
        ({"block_size": 4.0}, "block_size"),
    ],
    ids=str,
)
def test_j4_bad_geometry_is_refused(arguments, argument):
    with pytest.raises(OperationError) as error:
        slot_geometry(**arguments)
    assert error.value.argument == argument


geometries = st.builds(
    lambda interleave, per_block, ranks, rank, mapped: plain.Geometry(
        interleave * per_block, ranks, rank % ranks, interleave, mapped
    ),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([True, True, True, False]),
)


def of_twin(geometry: plain.Geometry):
    return slot_geometry(**dataclasses.asdict(geometry))


block_ids = st.one_of(st.integers(0, 30), st.sampled_from(EDGES))
tables = st.lists(st.lists(block_ids, min_size=WIDTH, max_size=WIDTH), min_size=ROWS, max_size=ROWS)
some_rows = st.one_of(st.integers(-1, ROWS - 1), st.sampled_from([-2, ROWS, INT32_MAX]))
some_positions = st.one_of(st.integers(-1, 100), st.sampled_from(EDGES))
some_blocks = st.sampled_from([1, 20, 31, INT32_MAX])


def list_of(values, size):
    return st.lists(values, min_size=size, max_size=size)


@given(tables, st.integers(1, SPAN), st.integers(0, 3), some_blocks)
@settings(max_examples=200)
def test_kernel_table_and_twin(table, ratio, gap, num_blocks):
    got, dropped = jitted.kernel_table(i32(table), i32(ratio), i32(ratio + gap), i32(num_blocks), span=SPAN)
    want, want_dropped = plain.kernel_table(table, ratio, ratio + gap, num_blocks, SPAN)
    assert got.tolist() == want
    assert counts(dropped) == dataclasses.astuple(want_dropped)


@given(
    geometries,
    tables,
    list_of(some_rows, REQUESTS),
    list_of(some_positions, REQUESTS),
    st.sampled_from([-1, 0, 1, 7, 30, INT32_MAX]),
)
@settings(max_examples=200)
def test_forward_tables_and_twin(geometry, table, rows, starts, retained):
    got, dropped = jitted.forward_tables(of_twin(geometry), i32(table), i32(rows), i32(starts), i32(retained))
    want, want_dropped = plain.forward_tables(geometry, table, rows, starts, retained)
    assert got.tolist() == want
    assert counts(dropped) == dataclasses.astuple(want_dropped)


@given(
    list_of(some_rows, REQUESTS),
    list_of(some_positions, REQUESTS),
    list_of(st.one_of(st.integers(-1, 12), st.sampled_from([TOKENS + 1, *EDGES])), REQUESTS),
)
@settings(max_examples=200)
def test_batch_tokens_and_twin(rows, starts, wanted):
    *got, dropped = jitted.batch_tokens(i32(rows), i32(starts), i32(wanted), size=TOKENS)
    *want, want_dropped = plain.batch_tokens(rows, starts, wanted, TOKENS)
    assert [array.tolist() for array in got] == want
    assert counts(dropped) == dataclasses.astuple(want_dropped)


@given(
    geometries,
    tables,
    list_of(st.integers(0, WIDTH + 1), ROWS),
    some_blocks,
    list_of(some_rows, TOKENS),
    list_of(some_positions, TOKENS),
)
@settings(max_examples=300)
def test_slot_mapping_and_twin(geometry, table, lengths, num_blocks, rows, positions):
    got, dropped = jitted.slot_mapping(
        of_twin(geometry), i32(table), i32(lengths), i32(num_blocks), i32(rows), i32(positions)
    )
    want, want_dropped = plain.slot_mapping(geometry, table, lengths, num_blocks, rows, positions)
    assert pairs(got) == want
    assert counts(dropped) == dataclasses.astuple(want_dropped)


some_columns = st.one_of(
    st.integers(-1, 9), st.sampled_from([-2, *(INT32_MAX // d + e for d in (1, 2, 3, 4, 8, 16, 64) for e in (-1, 0))])
)


@given(geometries, list_of(some_columns, TOKENS), list_of(st.integers(-1, 17), TOKENS))
@settings(max_examples=200)
def test_inverse_and_twin(geometry, columns, offsets):
    got, dropped = jitted.positions_of(of_twin(geometry), i32(columns), i32(offsets))
    want, want_dropped = plain.positions_of(geometry, columns, offsets)
    assert got.tolist() == want
    assert counts(dropped) == dataclasses.astuple(want_dropped)


@given(
    list_of(st.tuples(block_ids, st.integers(0, 63)), TOKENS),
    st.sampled_from([1, 2, 16, 64]),
    st.integers(1, 9),
    st.sampled_from([1, 64, 1 << 20]),
)
@settings(max_examples=200)
def test_kernel_and_linear_slots_and_twin(values, kernel_block_size, stride, block_size):
    values = [(PAD, PAD) if block == PAD else (block, offset) for block, offset in values]
    kernel, dropped = jitted.kernel_slots(as_slots(values), i32(kernel_block_size), i32(stride))
    want_kernel, want_dropped = plain.kernel_slots(values, kernel_block_size, stride)
    assert pairs(kernel) == want_kernel
    assert counts(dropped) == dataclasses.astuple(want_dropped)
    numbers, dropped = jitted.linear_slots(as_slots(values), i32(block_size))
    want_numbers, want_dropped = plain.linear_slots(values, block_size)
    assert numbers.tolist() == want_numbers
    assert counts(dropped) == dataclasses.astuple(want_dropped)


@given(geometries, list_of(st.integers(0, 300), 8))
@settings(max_examples=100)
def test_holdings_and_twin(geometry, lengths):
    assert jitted.held_tokens(of_twin(geometry), i32(lengths)).tolist() == [
        plain.held_tokens(geometry, length) for length in lengths
    ]
    assert jitted.row_columns(of_twin(geometry), i32(lengths)).tolist() == [
        plain.row_columns(geometry, length) for length in lengths
    ]


def test_geometry_is_data_and_costs_no_compilation():
    def use(geometry):
        table, lengths, tokens = np.ones((2, 3), np.int32), i32([3, 3]), i32([0, 1])
        jitted.slot_mapping(geometry, table, lengths, i32(9), tokens, tokens)
        jitted.forward_tables(geometry, table, tokens, tokens, i32(4))
        jitted.held_tokens(geometry, lengths)

    use(slot_geometry(4))
    functions = (jitted.slot_mapping, jitted.forward_tables, jitted.held_tokens)
    before = [function._cache_size() for function in functions]
    for ranks in (1, 2, 3):
        for interleave in (1, 2, 8):
            use(slot_geometry(8, ranks=ranks, rank=ranks - 1, interleave=interleave, mapped=ranks != 2))
    assert [function._cache_size() for function in functions] == before


def limits(length, **fields):
    return RequestLimits(max_model_len=length, **fields)


@pytest.mark.parametrize(
    ("spec", "length", "fields", "width"),
    [
        (FullAttention(block_size=16), 1024, {}, 64),
        (FullAttention(block_size=16), 1025, {}, 72),
        (FullAttention(block_size=16, cp_sharded=True), 1024, {"context_parallel": 4}, 16),
        (FullAttention(block_size=16), 1024, {"context_parallel": 4}, 64),
        (MLAAttention(block_size=64, cp_sharded=True), 1000, {"context_parallel": 2}, 8),
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
