"""Rules of vLLM for each kind of layer, by example."""

import pytest

from hkv.errors import ConfigError
from hkv.spec import ChunkedLocal, Mamba, SlidingWindow
from reference.dialects.vllm.kinds.checkpoints import checkpoint_position, checkpoint_possible
from reference.dialects.vllm.kinds.sliding_window import window_blocks
from reference.dialects.vllm.retention import replay_boundaries, snapshot_mask, tail_mask
from tests.reference.build import admit, cached, finish, manager


def test_freed_rows_come_back_group_by_group_tail_first():
    cache = manager("full:4,swa:4:4", num_blocks=20)
    assert admit(cache, "a", range(18)) == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    finish(cache, "a")
    assert list(cache.pool.free) == [10, 5, *range(11, 20), 4, 3, 2, 1, 9, 8, 7, 6]


@pytest.mark.parametrize(("window", "drop", "blocks"), [(1, False, 0), (2, False, 1), (5, False, 1), (6, True, 3)])
def test_blocks_of_a_window(window, drop, blocks):
    assert window_blocks(window, 4, drop) == blocks


def test_retained_tokens_widen_what_is_kept_but_not_what_is_needed():
    spec = SlidingWindow(block_size=4, window=5, extra_retained_tokens=4)
    cache = manager([spec], num_blocks=9)
    admit(cache, "a", range(16))
    cache.append("a", [99])
    cache.allocate("a", 1)
    assert cache.rows("a") == [[0, 0, 3, 4, 5]]


def test_earlier_chunks_count_as_hit_without_a_look():
    cache = manager("chunked:4:8", num_blocks=12)
    admit(cache, "a", range(20))
    cache.evict([1, 2, 3, 4])
    cache.request("b", range(20))
    assert cache.lookup("b").blocks == [[0, 0, 0, 0]]
    cache.request("c", [*range(14), 99, 99])
    assert cache.lookup("c").blocks == [[0, 0]]


def test_chunks_have_no_drop_and_no_finer_alignment():
    with pytest.raises(ConfigError, match="eagle"):
        manager("chunked:4:8", eagle=[0])
    with pytest.raises(ConfigError, match="block_size"):
        manager("full:8,chunked:4:8")


def test_a_state_is_found_at_its_own_length_only():
    cache = manager("mamba:4", num_blocks=9)
    assert admit(cache, "a", range(13)) == [[0, 0, 0, 1]]
    cache.request("b", range(13))
    assert cache.lookup("b").hit == 0
    finish(cache, "a")
    cache.request("c", range(12))
    cache.allocate("c", 8)
    cache.advance("c", 8)
    assert cache.lookup("b").blocks == [[0, 1]]


def test_a_state_of_this_step_is_not_there_yet():
    cache = manager("mamba:4", num_blocks=9)
    cache.step()
    cache.request("a", range(12))
    cache.allocate("a", 8)
    cache.request("b", range(12))
    assert cache.lookup("b").hit == 8
    assert cache.allocate("b", 4, hit=8) is None
    cache.step()
    assert cache.lookup("b").hit == 8
    assert cache.allocate("b", 4, hit=8) == [[2]]


def test_scratch_states_move_behind_the_running_one():
    spec = Mamba(block_size=2, num_speculative_blocks=2)
    cache = manager([spec], num_blocks=9)
    assert admit(cache, "a", range(2)) == [[1, 2, 3]]
    cache.append("a", [9, 9, 9, 9])
    assert cache.allocate("a", 4) == [[2, 4]]
    assert cache.rows("a") == [[1, 0, 3, 2, 4]]


def test_a_recurrent_group_without_caching_is_one_row_with_room_for_drafts():
    spec = Mamba(block_size=64, num_speculative_blocks=1, cache_mode="none")
    cache = manager([spec], num_blocks=9, caching=False)
    assert admit(cache, "a", range(20)) == [[1, 2]]
    cache.append("a", [1])
    assert cache.allocate("a", 1) == [[]]
    with pytest.raises(ConfigError, match="cache_mode"):
        manager([spec], num_blocks=9)


def test_states_of_mode_none_retire_as_windows_do():
    spec = Mamba(block_size=4, cache_mode="none")
    cache = manager([spec], num_blocks=9, caching=False)
    admit(cache, "a", range(12))
    cache.append("a", [1])
    cache.allocate("a", 1)
    assert cache.rows("a") == [[0, 0, 3, 2]]


def test_an_opaque_region_is_one_block_for_life():
    cache = manager("full:4,opaque:4", num_blocks=12)
    assert admit(cache, "a", range(9)) == [[1, 2, 3], [4]]
    cache.append("a", range(8))
    assert cache.allocate("a", 8) == [[5, 6], []]
    finish(cache, "a")
    assert 4 not in cached(cache)
    cache.request("b", range(9))
    assert cache.lookup("b").blocks == [[1, 2], []]


def test_an_opaque_region_comes_with_external_tokens_too():
    cache = manager("full:4,opaque:4", num_blocks=12)
    cache.request("a", range(9))
    assert cache.allocate("a", 1, external=8) == [[4], []]
    assert cache.rows("a") == [[1, 2, 4], [3]]


def test_only_opaque_groups_cannot_be_cached():
    with pytest.raises(ConfigError, match="cached"):
        manager("opaque:4,opaque:8")


def test_replay_boundaries():
    assert replay_boundaries(17, 8, drops=False) == (16,)
    assert replay_boundaries(17, 8, drops=True) == (8,)
    assert replay_boundaries(16, 8, drops=True) == (0, 8)
    assert replay_boundaries(3, 8, drops=True) == (0,)


def test_tails_of_segments_are_kept():
    keep = tail_mask(range(8), segment=16, need=1, shift=0, boundaries=(), block_size=4, alignment=16)
    assert keep == [False, False, False, True] * 2
    keep = tail_mask(range(8), segment=16, need=2, shift=1, boundaries=(), block_size=4, alignment=16)
    assert keep == [False, False, False, True, True, False, False, True]
    assert tail_mask(range(8), segment=8, need=2, shift=0, boundaries=(), block_size=4, alignment=8) is None
    assert tail_mask(range(2, 6), None, 2, 0, boundaries=(17,), block_size=4, alignment=4) == [True, True, False, False]


def test_states_at_intervals_and_boundaries_are_kept():
    assert snapshot_mask(range(4), 8, (), block_size=4, alignment=8) == [False, True, False, True]
    assert snapshot_mask(range(4), 0, (15, 40), block_size=4, alignment=4) == [False, False, True, False]
    assert snapshot_mask(range(4), 4, (), block_size=4, alignment=4) is None


def test_sparse_retention_keeps_the_last_window_of_a_prompt():
    cache = manager("swa:4:5", num_blocks=12, retention_interval=0)
    admit(cache, "a", range(21))
    assert cached(cache) == {5: (0, 20)}
    chain = cache.requests["a"].keys
    assert [cache.absence(0, chain[i]) for i in (0, 4)] == ["not retained", "cached"]


def test_a_known_junction_is_retained_too():
    cache = manager("swa:4:5", num_blocks=12, retention_interval=0)
    cache.request("a", range(21))
    cache.allocate("a", 21, shared_prefix=8)
    assert cached(cache) == {2: (0, 8), 5: (0, 20)}


@pytest.mark.parametrize(
    ("tokens", "granularity", "drop", "lookahead", "position"),
    [(9, 4, False, 0, 8), (8, 4, False, 0, 4), (9, 4, False, 2, 4), (9, 4, True, 0, 4), (3, 4, False, 0, 0)],
)
def test_where_a_prompt_can_be_resumed(tokens, granularity, drop, lookahead, position):
    assert checkpoint_position(tokens, granularity, drop, lookahead) == position


def test_when_a_chunk_can_export_a_state():
    assert checkpoint_possible(0, 16, 14, 2, 4, 2)
    assert not checkpoint_possible(0, 16, 14, 2, 4, None)
    assert not checkpoint_possible(1, 16, 14, 2, 4, 1)
    assert not checkpoint_possible(0, 4, 2, 2, 4, 2)
    assert not checkpoint_possible(12, 24, 13, 2, 4, 1)
    assert not checkpoint_possible(0, 16, 14, 2, 4, 4)


def test_admission_counts_what_comes_back_on_the_way():
    window = SlidingWindow(block_size=4, window=5)
    for spec, cap in ((window, 4), (ChunkedLocal(block_size=4, chunk=8), 4)):
        cache = manager([spec], num_blocks=cap + 1, max_in_flight_tokens=8, max_model_len=64)
        cache.request("a", range(60))
        assert cache.allocate("a", 4, must_fit=True) == [[1]]
    cache = manager("full:4", num_blocks=5, max_in_flight_tokens=8)
    cache.request("a", range(60))
    assert cache.allocate("a", 4, must_fit=True) is None
