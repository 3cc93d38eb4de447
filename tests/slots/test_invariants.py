"""Invariants of slots in any configuration: two tables name one slot, each token has one owner, nothing aliases."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.block_tables import rows as block_rows
from hkv.block_tables import slots
from hkv.block_tables.slots import PAD, require_none, slot_geometry

WIDTH, TOKENS, SPAN = 5, 96, 4


def i32(values) -> np.ndarray:
    return np.array(values, np.int32)


def mapping(geometry, ids, positions):
    """Slots of one request's tokens, its row being `ids`."""
    padded = positions + [0] * (TOKENS - len(positions))
    rows = [0] * len(positions) + [PAD] * (TOKENS - len(positions))
    table = i32([ids + [0] * (WIDTH - len(ids))])
    got, dropped = slots.slot_mapping(geometry, table, i32([len(ids)]), i32(100), i32(rows), i32(padded))
    require_none(dropped)
    pairs = list(zip(got.blocks.tolist(), got.offsets.tolist(), strict=True))
    assert pairs[len(positions) :] == [(PAD, PAD)] * (TOKENS - len(positions))
    return pairs[: len(positions)]


@st.composite
def sequences(draw):
    """Geometry, distinct ids of a row, and tokens that fit into it."""
    interleave, per_block, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    block_size = interleave * per_block
    ids = draw(st.lists(st.integers(1, 99), min_size=1, max_size=WIDTH, unique=True))
    length = draw(st.integers(1, min(TOKENS, len(ids) * block_size * ranks)))
    return block_size, interleave, ranks, ids, length


@given(sequences())
@settings(max_examples=150)
def test_each_token_of_a_sharded_group_is_owned_by_exactly_one_rank(sequence):
    block_size, interleave, ranks, ids, length = sequence
    owners = [0] * length
    for rank in range(ranks):
        geometry = slot_geometry(block_size, ranks=ranks, rank=rank, interleave=interleave)
        held = [pair != (PAD, PAD) for pair in mapping(geometry, ids, list(range(length)))]
        assert slots.held_tokens(geometry, i32([length])).tolist() == [sum(held)]
        owners = [count + mine for count, mine in zip(owners, held, strict=True)]
        assert slots.row_columns(geometry, i32([length])).tolist() == [-(-length // (block_size * ranks))]
    assert owners == [1] * length


@given(sequences(), st.data())
@settings(max_examples=100)
def test_slots_do_not_alias_and_can_be_inverted(sequence, data):
    block_size, interleave, ranks, ids, length = sequence
    rank = data.draw(st.integers(0, ranks - 1))
    geometry = slot_geometry(block_size, ranks=ranks, rank=rank, interleave=interleave)
    mine = [(t, pair) for t, pair in enumerate(mapping(geometry, ids, list(range(length)))) if pair != (PAD, PAD)]
    assert len({pair for _, pair in mine}) == len(mine)
    padding = [PAD] * (TOKENS - len(mine))
    columns = [ids.index(block) for _, (block, _) in mine] + padding
    offsets = [offset for _, (_, offset) in mine] + padding
    positions, dropped = slots.positions_of(geometry, i32(columns), i32(offsets))
    require_none(dropped)
    assert positions.tolist() == [t for t, _ in mine] + padding


@given(sequences(), st.lists(st.integers(1, 13), min_size=1, max_size=12))
@settings(max_examples=100)
def test_slots_do_not_depend_on_chunking(sequence, chunks):
    block_size, interleave, ranks, ids, length = sequence
    geometry = slot_geometry(block_size, ranks=ranks, rank=ranks - 1, interleave=interleave)
    whole = mapping(geometry, ids, list(range(length)))
    table = i32([[0] * WIDTH, ids + [0] * (WIDTH - len(ids))])
    parts, start = [], 0
    while start < length:
        count = min(chunks[len(parts) % len(chunks)], length - start)
        rows, positions, dropped = slots.batch_tokens(i32([PAD, 1]), i32([3, start]), i32([2, count]), size=TOKENS)
        require_none(dropped)
        got, dropped = slots.slot_mapping(geometry, table, i32([0, len(ids)]), i32(100), rows, positions)
        require_none(dropped)
        pairs = list(zip(got.blocks.tolist(), got.offsets.tolist(), strict=True))
        assert pairs[:2] == [(PAD, PAD)] * 2, "a dummy request's tokens are written nowhere"
        assert set(pairs[2 + count :]) <= {(PAD, PAD)}, "nothing of an earlier chunk is left behind"
        parts += pairs[2 : 2 + count]
        start += count
    assert parts == whole


@pytest.mark.parametrize("chunks", [[16], [5, 7, 4], [1] * 16])
def test_chunks_of_5_7_and_4(chunks):
    geometry, found, start = slot_geometry(8), [], 0
    for count in chunks:
        found += mapping(geometry, [3, 2], list(range(start, start + count)))
        start += count
    assert found == [(3, t) for t in range(8)] + [(2, t) for t in range(8)]


@given(st.integers(1, SPAN), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.data())
@settings(max_examples=150)
def test_a_slot_is_the_same_via_the_managers_and_the_kernels_table(ratio, kernel_size, gap, ranks, data):
    """Kernel tables by expansion, dense and packed, and by the dual index; under context parallelism too."""
    block_size, stride = ratio * kernel_size, ratio + gap
    ids = data.draw(st.lists(st.integers(1, 99), min_size=1, max_size=WIDTH, unique=True))
    rank = data.draw(st.integers(0, ranks - 1))
    length = min(TOKENS, len(ids) * block_size * ranks)
    geometry = slot_geometry(block_size, ranks=ranks, rank=rank)
    pairs = [pair for pair in mapping(geometry, ids, list(range(length))) if pair != (PAD, PAD)]
    padded = pairs + [(PAD, PAD)] * (TOKENS - len(pairs))
    manager = slots.Slots(*(i32(axis) for axis in zip(*padded, strict=True)))
    kernel, dropped = slots.kernel_slots(manager, i32(kernel_size), i32(stride))
    require_none(dropped)
    table = i32([ids + [0] * (WIDTH - len(ids))])
    kernel_ids, dropped = slots.kernel_table(table, i32(ratio), i32(stride), i32(100), span=SPAN)
    require_none(dropped)
    kernel_ids = np.asarray(kernel_ids)
    for nth, (block, offset) in enumerate(
        zip(kernel.blocks.tolist()[: len(pairs)], kernel.offsets.tolist()[: len(pairs)], strict=True)
    ):
        # The nth token of this rank stands at place nth of its cache, in blocks of either size.
        assert (block, offset) == (int(kernel_ids[0, nth // kernel_size]), nth % kernel_size)
    if gap == 0:
        rows = block_rows.init_rows(1, WIDTH, ratio=ratio, span=SPAN)
        rows, _ = block_rows.append(rows, np.int32(0), table[0], np.int32(len(ids)))
        used = len(ids) * ratio
        assert np.asarray(rows.kernel_blocks)[0, :used].tolist() == kernel_ids[0, :used].tolist()
        numbers, _ = slots.linear_slots(manager, i32(block_size))
        same, _ = slots.linear_slots(kernel, i32(kernel_size))
        assert numbers.tolist() == same.tolist()


def test_a_window_never_hides_a_block_that_is_still_read():
    block_size, window = 4, 6
    geometry = slot_geometry(block_size)
    table = i32([list(range(1, 9))])
    for start in range(32):
        got, dropped = slots.forward_tables(geometry, table, i32([0]), i32([start]), i32(window - 1))
        require_none(dropped)
        first = max(0, start - window + 1) // block_size
        assert np.asarray(got)[0].tolist() == [0] * first + list(range(first + 1, 9))
    split = slot_geometry(block_size, ranks=2)
    got, _ = slots.forward_tables(split, table, i32([0]), i32([31]), i32(window - 1))
    assert got.tolist() == table.tolist()
