"""The pool and its parts, by example."""

import pytest

from hkv.errors import OperationError
from reference.state.events import Cleared, Removed
from reference.state.free_queue import FreeQueue
from reference.state.pool import NULL, Pool


def test_the_queue_keeps_the_order_of_what_is_put_in_front():
    queue = FreeQueue([1, 2, 3])
    queue.prepend([7, 8])
    queue.append([9])
    queue.remove(2)
    assert list(queue) == [7, 8, 1, 3, 9]
    assert (queue.pop(), len(queue), 8 in queue, 7 in queue) == (7, 4, True, False)


def test_taking_too_many_changes_nothing():
    pool = Pool(3)
    with pytest.raises(OperationError, match="2 blocks that are free"):
        pool.take(3)
    assert list(pool.free) == [1, 2]


def test_blocks_nobody_can_find_go_to_the_front():
    pool = Pool(8)
    blocks = pool.take(4)
    pool.insert((0, "a"), blocks[0], 4)
    pool.insert((0, "b"), blocks[2], 12)
    pool.release([4, 3, 2, 1, NULL])
    assert list(pool.free) == [4, 2, 5, 6, 7, 3, 1]


def test_a_found_block_leaves_the_queue_and_a_handed_out_one_loses_its_keys():
    pool = Pool(3)
    pool.take(2)
    pool.insert((0, "a"), 1, 4)
    pool.insert((0, "b"), 2, 8)
    pool.insert((0, "c"), 2, 6)
    pool.release([2, 1])
    assert pool.find("a", [0]) == [1]
    assert pool.find("a", [0, 1]) is None
    pool.touch([1, NULL])
    assert (list(pool.free), pool.refs[1]) == ([2], 1)
    assert pool.take(1) == [2]
    assert pool.events == [Removed(0, "b"), Removed(0, "c")]
    assert (pool.find("b", [0]), pool.find("c", [0]), pool.evictions) == (None, None, 1)
    assert pool.primary[2] is None
    assert pool.covered[2] == 0


def test_keys_move_without_events_and_extra_ones_with_them():
    pool = Pool(4)
    pool.take(2)
    pool.insert((0, "a"), 1, 8)
    pool.insert((0, "a"), 1, 8)
    pool.insert((0, "part"), 1, 6)
    pool.move_keys(1, 2)
    assert pool.events == []
    assert pool.keys_of(1) == []
    assert pool.keys_of(2) == [(0, "a"), (0, "part")]
    assert pool.find("part", [0]) == [2]
    assert (pool.covered[1], pool.covered[2]) == (0, 8)
    assert pool.writable(1)
    assert not pool.writable(2)
    assert not pool.writable(NULL)


def test_evicting_leaves_references_and_queue_alone():
    pool = Pool(4)
    pool.take(2)
    pool.insert((1, "a"), 1, 4)
    pool.insert((1, "b"), 2, 8)
    pool.release([2])
    pool.evict([1, 2, 3])
    assert (pool.refs[1], list(pool.free)) == (1, [3, 2])
    assert pool.events == [Removed(1, "a"), Removed(1, "b")]
    assert pool.evictions == 0


def test_reset_needs_an_idle_pool_and_keeps_the_queue():
    pool = Pool(4)
    pool.take(2)
    pool.insert((0, "a"), 1, 4)
    pool.insert((0, "b"), 1, 4)
    assert not pool.reset()
    assert pool.find("a", [0]) == [1]
    pool.release([2, 1])
    order = list(pool.free)
    assert pool.reset()
    assert list(pool.free) == order
    assert pool.events == [Cleared()]
    assert (pool.find("a", [0]), pool.keys_of(1), len(pool.table)) == (None, [], 0)


def test_without_recording_there_are_no_events():
    pool = Pool(3)
    pool.records = False
    pool.take(1)
    pool.insert((0, "a"), 1, 4)
    pool.evict([1])
    assert pool.reset() is False
    pool.release([1])
    assert pool.reset()
    assert pool.events == []
