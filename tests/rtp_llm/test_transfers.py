"""RTP-LLM's conformance vectors for ranks, store plans and transfers, and the projection for connectors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.dialects.rtp_llm.config import CpSlotMapper, RtpConfig
from hkv.dialects.rtp_llm.transfers import (
    Peer,
    slice_for_peer,
    store_plan,
    tensor_parallel_peers,
)
from hkv.errors import ConfigError, LayoutError
from hkv.model.group_policy import CpMapping, CpSlice, default_policy
from hkv.model.topology import Topology
from reference.dialects.rtp_llm.connector_projection import project
from tests.rtp_llm.build import FULL, LINEAR, SWA, group, tiny_hybrid

N = -1
ROUND = CpMapping.BLOCK_ROUND_ROBIN


def test_local_blocks() -> None:
    mapper = CpSlotMapper(0, 2, 4)
    assert [mapper.local_blocks(seq) for seq in (0, 4, 5, 8, 12, 16)] == [0, 1, 1, 1, 2, 2]
    assert [mapper.effective_tokens(seq, ROUND) for seq in (0, 4, 8, 12, 16)] == [0, 4, 4, 8, 8]


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_allocates_alike(rank: int) -> None:
    mapper = CpSlotMapper(rank, 4, 8)
    assert (mapper.local_blocks(55), mapper.effective_tokens(55, ROUND)) == (2, 16)


@pytest.mark.parametrize("geometry", [(0, 0, 32), (0, 2, 0), (-1, 2, 32), (2, 2, 32)])
def test_bad_geometry(geometry: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError):
        CpSlotMapper(*geometry)


@pytest.mark.parametrize(
    ("ranks", "total", "plan"), [(4, 8, [(3, 0), (7, 1)]), (2, 1, [(0, 0)]), (2, 11, [(9, 4), (10, 5)]), (2, 0, [])]
)
def test_store_plan_of_a_window(ranks: int, total: int, plan: list[tuple[int, int]]) -> None:
    assert store_plan(default_policy(SWA), CpSlotMapper(0, ranks, 4), total) == plan


def test_store_plan_of_a_full_group() -> None:
    assert store_plan(default_policy(FULL), CpSlotMapper(1, 2, 4), 5) == [(1, 0), (3, 1)]


def test_store_plans_without_ranks() -> None:
    alone = CpSlotMapper(0, 1, 4)
    assert store_plan(default_policy(FULL), alone, 3, reused=1, hybrid=False) == [(1, 1), (2, 2)]
    assert store_plan(default_policy(LINEAR), alone, 3, reused=1) == [(2, 2)]
    assert store_plan(default_policy(SWA), alone, 3, reused=1) == [(1, 1), (2, 2)]


@given(ranks=st.integers(1, 5), total=st.integers(0, 40))
def test_full_groups_store_every_key_once(ranks: int, total: int) -> None:
    plans = [store_plan(default_policy(FULL), CpSlotMapper(rank, ranks, 4), total) for rank in range(ranks)]
    assert sorted(stored.key for plan in plans for stored in plan) == list(range(total))
    assert all([stored.slot for stored in plan] == list(range(len(plan))) for plan in plans)


def test_peers_of_unlike_sides() -> None:
    assert tensor_parallel_peers(4, 2, 3) == [Peer(1, (1, 0), (2, 1))]
    assert tensor_parallel_peers(2, 4, 1) == [Peer(2, (2, 0), (1, 0)), Peer(3, (2, 1), (1, 0))]
    assert tensor_parallel_peers(3, 2, 0) == []
    with pytest.raises(ConfigError):
        tensor_parallel_peers(2, 2, 2)


def test_slices_for_peers() -> None:
    assert slice_for_peer(CpSlice.NONE, 100, 90, 4, 1) == (0, 100)
    assert slice_for_peer(CpSlice.EQUAL_BYTES, 100, 90, 4, 1) == (25, 25)
    assert slice_for_peer(CpSlice.PAYLOAD_BYTES, 100, 90, 3, 2) == (60, 30)
    for arguments in ((CpSlice.EQUAL_BYTES, 100, 90, 3, 0), (CpSlice.EQUAL_BYTES, 100, 90, 4, 4)):
        with pytest.raises(LayoutError):
            slice_for_peer(*arguments)
    with pytest.raises(LayoutError, match="within the block"):
        slice_for_peer(CpSlice.PAYLOAD_BYTES, 10, 90, 3, 2)


@pytest.mark.parametrize(
    ("count", "aligned", "keys"), [(4, True, [1, 3]), (4, False, [1, 3]), (5, False, [1, 3, 4]), (5, True, [1, 3])]
)
def test_a_partial_block_off_the_last_rank_gets_a_dummy_tail(count: int, aligned: bool, keys: list[int]) -> None:
    config = tiny_hybrid(cp_size=2).config
    lists = [list(range(10, 10 + count)), [20, 21, 22][: -(-count // 2)]]
    assert project(config, range(count), lists, [1, 3], aligned=aligned) == (keys, [[11, 13], [20, 21]])


@pytest.mark.parametrize("mapping", [CpMapping.NONE, ROUND])
def test_no_block_belongs_to_the_dummy_tail(mapping: CpMapping) -> None:
    """Of a state's blocks that are dealt out there is one a virtual block; else every second one stands for it."""
    states, full = group("linear", LINEAR, 4, cp_mapping=mapping), group("full", FULL, 4)
    config = RtpConfig(topology=Topology((states, full)), num_blocks=(10,), cp_size=2, block_size=4)
    keys, (blocks, _) = project(config, [67, 3, 27], [[5, 8], []], [3], aligned=False)
    assert (keys, blocks) == ([3, 27], [5 if mapping is ROUND else 8])


@given(
    ranks=st.integers(1, 4),
    count=st.integers(0, 9),
    aligned=st.booleans(),
    lengths=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_a_projection_has_a_block_a_selected_key(
    ranks: int, count: int, aligned: bool, lengths: tuple[int, int]
) -> None:
    config = tiny_hybrid(cp_size=ranks).config
    selected = config.mapper.canonical_keys(range(count))
    keys, projected = project(
        config, range(count), [range(100, 100 + length) for length in lengths], selected, aligned=aligned
    )
    # Read off RTP-LLM `projectConnectorResource`, slot by slot.
    dealt_out = lengths[1] <= len(selected) or lengths[1] < count
    for number, positional in enumerate((False, dealt_out and ranks > 1)):
        slots = [place if positional else (place + 1) * ranks - 1 for place in range(len(selected))]
        wanted = [100 + slot if slot < lengths[number] else N for slot in slots]
        assert projected[number] == wanted
    dummy = not aligned and count and count % ranks
    assert keys == [*selected, *([count - 1] if dummy else [])]
