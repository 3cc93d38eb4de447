"""Whole steps are what the sequential rules say, to the block."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hkv.cache import step as serving
from hkv.cache.blocks import on_rank, ranks_of
from hkv.cache.state import OWN_ERA, SLOTS, StepBatch, StepRequest, StepRow, checkpoint_groups
from hkv.errors import ConfigError
from hkv.keys.fingerprint import ROOT
from hkv.spec import FullAttention, Mamba, SlidingWindow
from hkv.state.status import Status
from reference.slots import Geometry, slot_mapping
from reference.step import NO_ROOM, OK, Rows
from tests.reference.build import config as build
from tests.step.sample import assert_same, configs

R, W, T, N, L = 5, 20, 6, 64, 3
PLACES = R * (T + L)
ROOM = 3 * R * (T + L + 24)
SMALL = 6
"""A room that a step may need more than."""
CHAIN, PARTS = 8 * W, 4


def batch(tokens, lookahead=None, in_flight=None, order=range(R)) -> StepBatch:
    """The new tokens of every row, with `lookahead` drafts behind them, as a ragged batch of rows in some order."""
    as_array = functools.partial(np.asarray, dtype=np.int32)
    drafts = as_array([0] * R if lookahead is None else lookahead)
    flat, ends = [], [0]
    for row in order:
        flat += [*tokens[row], *[9] * drafts[row]] if tokens[row] else []
        ends.append(len(flat))
    drafts = as_array([drafts[row] if tokens[row] else 0 for row in order])
    in_flight = as_array([0] * R if in_flight is None else in_flight)[as_array(order)]
    return StepBatch(as_array([*flat, *[8] * (PLACES - len(flat))]), as_array(ends), as_array(order), drafts, in_flight)


class Pair:
    """The reference and the compiled cache, in step."""

    def __init__(self, config, room=ROOM) -> None:
        self.rows = Rows(config, R, W)
        self.room = room
        # Three groups whatever the configuration, so that all share one executable.
        self.parameters, self.state = padded(config)

    def start(self, row, root=ROOT, prompt=0) -> None:
        self.rows.start(row, root, prompt)
        rows, roots, prompts = np.full(R, -1, np.int32), np.tile(np.uint32(root), (R, 1)), np.zeros(R, np.int32)
        rows[0], prompts[0] = row, prompt
        self.state, status = serving.start(self.state, rows, roots, prompts)
        assert status.tolist() == [OK] * R

    def finish(self, *rows) -> None:
        for row in rows:
            self.rows.finish(row)
        self.state, status = serving.finish(self.state, np.array([*rows, *[-1] * (R - len(rows))], np.int32))
        assert not status.any()

    def step(self, tokens, lookahead=None, in_flight=None, order=range(R)):
        """One step of both, compared. Returns the statuses by row."""
        known = [self.rows.request(row) for row in range(R)]
        before = [request.num_computed if request else 0 for request in known]
        reads = [self.rows.states(row, before[row]) if known[row] else [] for row in range(R)]
        allowed = [min(len(new), self.rows.allowed(row)) if known[row] else 0 for row, new in enumerate(tokens)]
        new = batch(tokens, lookahead, in_flight, order)
        self.state, result = serving.jitted(self.room)(self.parameters, self.state, new)
        result = jax.device_get(result)
        status = self.rows.step(tokens, lookahead or [0] * R, in_flight or [0] * R, order=order)
        assert result.status.tolist() == [status[row] for row in order]
        assert result.allowed.tolist() == [allowed[row] for row in order]
        assert not result.deferred.any()
        self.assert_same_copies(result.copies, order)
        self.assert_same_checkpoints(result.checkpoints, order)
        rest = np.ones(PLACES, bool)
        for query, row in enumerate(order):
            served = status[row] == OK and tokens[row]
            start, end = new.cu_q_lens[query : query + 2]
            for group in range(len(self.rows.config.topology.specs)):
                positions = range(before[row], before[row] + end - start)
                want = self.rows.slots(row, group, positions) if served else [(-1, -1)] * (end - start)
                got = zip(
                    result.blocks[group, start:end].tolist(), result.offsets[group, start:end].tolist(), strict=True
                )
                assert list(got) == want
            rest[start:end] = False
            groups = len(reads[row])
            writes = self.rows.states(row, before[row] + len(tokens[row])) if served else []
            for moved, group, block, copy in self.rows.copies:
                if moved == row and reads[row][group] == block and block not in self.rows.blocks(row, group):
                    reads[row][group] = copy
            assert result.reads[query, : len(writes)].tolist() == reads[row][: len(writes)]
            assert result.writes[query, : len(writes)].tolist() == [block or -1 for block in writes]
            if not served:
                assert not result.reads[query, :groups].any()
                assert (result.writes[query, :groups] == -1).all()
        assert (result.blocks[:, rest] == -1).all()
        assert_same(self.rows, self.state)
        return status

    def assert_same_copies(self, copies, order) -> None:
        if copies is None:
            assert not self.rows.copies
            return
        found = [(order[q], g, *copies[q, g].tolist()) for q in range(R) for g in range(3) if copies[q, g, 0] >= 0]
        assert found == sorted(self.rows.copies, key=lambda copy: (order.index(copy[0]), copy[1]))
        assert ((copies >= 0).all(axis=2) | (copies == -1).all(axis=2)).all()

    def assert_same_checkpoints(self, pairs, order) -> None:
        if pairs is None:
            assert not self.rows.checkpoints
            return
        found = [(order[q], g, *pairs[q, g].tolist()) for q in range(R) for g in range(3) if pairs[q, g, 0] >= 0]
        assert found == sorted(self.rows.checkpoints, key=lambda left: (order.index(left[0]), left[1]))
        assert ((pairs > 0).all(axis=2) | (pairs == -1).all(axis=2)).all()


def padded(config):
    parameters, state = serving.init(config, rows=R, row=W, blocks=N)
    groups = np.zeros((4, parameters.groups.shape[1]), np.int32)
    groups[: len(parameters.groups)] = parameters.groups
    fields = int(StepRow.EXPORT if config.partial_hits else StepRow.PARTIAL)
    fields += (len(StepRow) - StepRow.EXPORT) * (checkpoint_groups(config) > 0)
    arrays = {
        "rows": np.zeros((R, 3, W), np.int32),
        "requests": np.zeros((R, len(StepRequest) + 3 * fields), np.int32),
        "chains": np.zeros((R, CHAIN, 4), np.uint32),
    }
    if len(state.keys) > N or (config.partial_hits and checkpoint_groups(config)):
        arrays["keys"] = np.zeros((PARTS * N, OWN_ERA + 1), np.uint32)
        arrays["index"] = np.zeros(len(state.queue) * SLOTS * PARTS, np.int32)
    return type(parameters)(parameters.cache, groups), type(state)(**{**vars(state), **arrays})


def drawn_tokens(data, pair, allow=True):
    tokens = []
    for row in range(R):
        request = pair.rows.request(row)
        count = data.draw(st.sampled_from((0, 1, 1, 1, 2, T))) if request is not None else 0
        if request is not None:
            count = min(count, pair.rows.config.max_model_len - request.num_computed)
            if data.draw(st.integers(0, 4)):
                count = min(count, pair.rows.allowed(row))
        tokens.append(drawn(data, count, st.integers(0, 1)))
    return tokens


def drawn(data, count: int, each: st.SearchStrategy[int]) -> list[int]:
    """So many values in one draw: a draw of its own takes Hypothesis as long as a token of a step takes to compare."""
    return data.draw(st.lists(each, min_size=count, max_size=count))


@settings(max_examples=60)
@given(config=configs(), data=st.data())
def test_steps_are_the_sequential_operations_in_order(config, data):
    pair = Pair(config)
    for _ in range(data.draw(st.integers(3, 14))):
        for row in range(R):
            if pair.rows.names[row] is None:
                if data.draw(st.integers(0, 2)) > 0:
                    pair.start(row, prompt=data.draw(st.integers(0, 30)))
            elif data.draw(st.integers(0, 9)) == 0:
                pair.finish(row)
        tokens = drawn_tokens(data, pair)
        lookahead = drawn(data, R, st.sampled_from((0, 0, L)))
        computed = [request.num_computed if (request := pair.rows.request(row)) else 0 for row in range(R)]
        in_flight = list(map(min, drawn(data, R, st.sampled_from((0, 0, 1, 4))), computed))
        pair.step(tokens, lookahead, in_flight, data.draw(st.permutations(range(R))))


@settings(max_examples=60)
@given(config=configs(least_blocks=30), data=st.data())
def test_vllms_order_gives_the_same_up_to_renaming(config, data):
    """Rows that allocate before the next one retires get the same but for ids; the same ids if nothing retires."""
    batched, interleaved = Rows(config, R, W), Rows(config, R, W)
    for row in range(R):
        batched.start(row)
        interleaved.start(row)
    zeros = [0] * R
    for _ in range(data.draw(st.integers(1, 8))):
        tokens = [drawn(data, data.draw(st.integers(0, T)), st.integers(0, 1)) for _ in range(R)]
        nulls = [held_nulls(batched, row) for row in range(R)]
        first = batched.step(tokens, zeros, zeros)
        second = interleaved.step(tokens, zeros, zeros, interleaved=True)
        assume(NO_ROOM not in first + second)
        retired = any(held_nulls(batched, row) != nulls[row] for row in range(R))
        if not retired:
            assert same_names(batched, interleaved, {})
        names: dict[int, int] = {}
        assert same_names(batched, interleaved, names)
        assert len(set(names.values())) == len(names)
        if retired:
            return


def held_nulls(rows, row):
    request = rows.request(row)
    return [[i for i, block in enumerate(blocks) if block == 0] for blocks in rows.manager.rows(request.id)]


def same_names(one, other, names):
    for row in range(R):
        pairs = zip(one.manager.rows(one.names[row]), other.manager.rows(other.names[row]), strict=True)
        for left, right in pairs:
            if len(left) != len(right):
                return False
            for a, b in zip(left, right, strict=True):
                if names.setdefault(a, b) != b:
                    return False
    return True


@pytest.mark.parametrize("interleave", [1, 2])
def test_ranks_share_the_tokens_of_a_group_as_slot_mappings_say(interleave):
    specs = [FullAttention(block_size=2, cp_sharded=True), SlidingWindow(block_size=4, window=5)]
    config = build(specs, num_blocks=60, context_parallel=2, hash_block_size=4, scheduler_block_size=4)
    pair = Pair(config)
    pair.start(0)
    pair.start(3)
    assert pair.step([[1] * 5, [], [], [1] * 2, []]) == [OK] * 5
    assert pair.step([[1] * 6, [], [], [1] * 5, []], [1, 0, 0, 3, 0]) == [OK] * 5
    new = batch([[1] * 3, [], [], [1] * 6, []])
    pair.state, result = serving.jitted(ROOM)(pair.parameters, pair.state, new)
    pair.rows.step([[1] * 3, [], [], [1] * 6, []], [0] * R, [0] * R)
    tables = pair.rows.manager.rows(pair.rows.names[0]), pair.rows.manager.rows(pair.rows.names[3])
    for rank in range(2):
        blocks, offsets = on_rank(result.blocks[:2], result.offsets[:2], ranks_of(config), rank, interleave)
        for group, (size, ranks) in enumerate(((2, 2), (4, 1))):
            geometry = Geometry(size, ranks, rank % ranks, interleave if ranks > 1 else 1)
            for (place, first, count), table in zip(((0, 11, 3), (3, 7, 6)), tables, strict=True):
                columns = [table[group]]
                positions = list(range(first, first + count))
                wanted, _ = slot_mapping(geometry, columns, [len(columns[0])], 60, [0] * count, positions)
                places = slice(place, place + count)
                got = zip(blocks[group, places].tolist(), offsets[group, places].tolist(), strict=True)
                assert list(got) == wanted


def test_the_tail_of_a_prompt_is_registered_until_its_block_is_full():
    """A block of two hash blocks with the prompt's tail alone waits behind blocks without keys."""
    pair = Pair(build("full:4,swa:2:4", num_blocks=60, eagle=(0, 1)))
    pair.start(0, prompt=7)
    pair.start(1, prompt=7)
    assert pair.step([[1, 2, 3, 4, 5, 6], [7, 6, 5, 4, 3, 2], [], [], []]) == [OK] * R
    tails = [pair.rows.manager.rows(pair.rows.names[row])[0][1] for row in range(2)]
    assert np.asarray(pair.state.refs)[tails].tolist() == [3, 3]
    pair.finish(1)
    assert_same(pair.rows, pair.state)
    assert pair.step([[7, 8, 9, 1, 2, 3], [], [], [], []]) == [OK] * R


def test_states_for_drafts_move_along_with_their_row():
    specs = [Mamba(block_size=2, num_speculative_blocks=2), FullAttention(block_size=2)]
    pair = Pair(build(specs, num_blocks=60))
    pair.start(0)
    for count in (2, 6, 1, 1):
        assert pair.step([[1] * count, [], [], [], []], [L, 0, 0, 0, 0])[0] == OK


def test_states_that_eagle_registers_inside_blocks_are_refused():
    """For vLLM 0.33 registers the state at 6 tokens of a prompt of 8 inside a block of 4, and copies it on write."""
    for groups, eagle, other in (("full:2,mamba:4", (0, 1), (0,)), ("mamba:2,mamba:4,full:2", (1,), (0, 2))):
        with pytest.raises(ConfigError, match=r"^hash_block_size = 2: expected the block of every recurrent group"):
            serving.init(build(groups, num_blocks=60, eagle=eagle, hash_block_size=2), rows=R, row=W)
        serving.init(build(groups, num_blocks=60, eagle=other, hash_block_size=2), rows=R, row=W)


def test_misuse_takes_nothing_and_says_why():
    pair = Pair(build("full:2,swa:4:4", num_blocks=60, max_model_len=16))
    pair.start(0)
    before = jax.tree.map(np.array, pair.state)
    new = batch([[], [1], [1], [1], [1]], order=[0, 1, 0, 99 % R, 2])
    new.rows[:] = 0, 1, 0, 99, -1
    pair.state, result = serving.jitted(ROOM)(pair.parameters, pair.state, new)
    assert result.status.tolist() == [OK, Status.NOT_RUNNING, OK, Status.NO_SUCH_SLOT, OK]
    for name, values, wrong in (
        ("cu_q_lens", [0, PLACES + 1, PLACES + 1, PLACES + 1, PLACES + 1, PLACES + 1], [0, 1, 2, 3, 4]),
        ("cu_q_lens", [-1, 1, 1, 1, 1, 1], [0]),
        ("cu_q_lens", [2, 2, 1, 2, 2, 2], [1, 2]),
        ("drafts", [0, 0, -1, 2, 0], [2, 3]),
        ("in_flight", [0, -1, 0, 0, 0], [1]),
    ):
        new = batch([[], [], [], [], []])
        pair.state, result = serving.jitted(ROOM)(
            pair.parameters, pair.state, dataclasses.replace(new, **{name: np.int32(values)})
        )
        assert np.flatnonzero(result.status == Status.OUT_OF_RANGE).tolist() == wrong
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, pair.state))
    for _ in range(2):
        assert pair.step([[1] * T, [], [], [], []])[0] == OK
    assert pair.step([[1] * T, [], [], [], []])[0] == Status.ROW_FULL
    roots, prompts = np.zeros((R, 4), np.uint32), np.zeros(R, np.int32)
    state, status = serving.start(pair.state, np.array([0, 1, 99, -1, -1], np.int32), roots, prompts)
    assert status.tolist() == [Status.NOT_WAITING, OK, Status.NO_SUCH_SLOT, OK, OK]
    _, status = serving.finish(state, np.array([2, 99, -1, -1, -1], np.int32))
    assert status.tolist() == [Status.NO_SUCH_SLOT, Status.NO_SUCH_SLOT, OK, OK, OK]


def test_a_row_named_twice_is_taken_once():
    """Given back twice, its blocks would be free while others hold them."""
    pair = Pair(build("full:2", num_blocks=60))
    rows, roots = np.int32([0, 0, 1, -1, -1]), np.tile(np.uint32(ROOT), (R, 1))
    pair.state, status = serving.start(pair.state, rows, roots, np.zeros(R, np.int32))
    assert status.tolist() == [OK, Status.NO_SUCH_SLOT, OK, OK, OK]
    pair.rows.start(0)
    pair.rows.start(1)
    new = batch([[1] * 4, [2] * 4, [], [], []], order=[0, 1, 2, 3, 4])
    new.rows[:] = 0, 0, 1, 1, -1
    new.cu_q_lens[:] = 0, 2, 4, 6, 8, 8
    pair.state, result = serving.jitted(ROOM)(pair.parameters, pair.state, new)
    assert result.status.tolist() == [OK, Status.NO_SUCH_SLOT, OK, Status.NO_SUCH_SLOT, OK]
    assert pair.rows.step([[1] * 2, [2] * 2, [], [], []], [0] * R, [0] * R)[:2] == [OK, OK]
    assert_same(pair.rows, pair.state)
    pair.state, status = serving.finish(pair.state, np.int32([0, 0, 1, -1, -1]))
    assert status.tolist() == [OK, Status.NO_SUCH_SLOT, OK, OK, OK]
    pair.rows.finish(0)
    pair.rows.finish(1)
    assert_same(pair.rows, pair.state)


def test_what_a_small_room_leaves_is_done_by_later_steps():
    config = build("full:2,swa:2:3", num_blocks=60, scheduler_block_size=2)
    wide, narrow = Pair(config), Pair(config, room=SMALL)
    for pair in (wide, narrow):
        pair.start(0)
        pair.start(1)
    wide.step([[1] * 4, [2] * 4, [], [], []])
    wide.step([[1], [2], [], [], []])
    narrow.state, first = serving.jitted(SMALL)(narrow.parameters, narrow.state, batch([[1] * 4, [2] * 4, [], [], []]))
    assert first.status.tolist()[:2] == [Status.OK, Status.STEP_FULL]
    narrow.state, second = serving.jitted(SMALL)(narrow.parameters, narrow.state, batch([[], [2] * 4, [], [], []]))
    narrow.state, third = serving.jitted(SMALL)(narrow.parameters, narrow.state, batch([[1], [2], [], [], []]))
    assert not second.status.any()
    assert not third.status.any()
    for name in ("requests", "chains", "hashing"):
        np.testing.assert_array_equal(getattr(narrow.state, name), getattr(wide.state, name))
    assert np.array_equal(np.asarray(narrow.state.rows) > 0, np.asarray(wide.state.rows) > 0)
    keys = [np.asarray(pair.state.keys)[np.asarray(pair.state.refs) % 2 == 1, :5] for pair in (wide, narrow)]
    assert sorted(keys[0].tolist()) == sorted(keys[1].tolist())


def test_giving_back_waits_for_room():
    pair = Pair(build("swa:2:3", num_blocks=60))
    for row in range(R):
        pair.start(row)
    pair.step([[1] * T] * R)
    state, result = serving.jitted(SMALL)(pair.parameters, pair.state, batch([[1]] * R))
    assert result.deferred.tolist() == [2 * R - SMALL, 0]
    _, result = serving.jitted(SMALL)(pair.parameters, state, batch([[1]] * R))
    assert result.deferred.tolist() == [0, 0]


def test_of_two_blocks_under_a_key_the_one_registered_first_is_found_though_its_id_is_higher():
    """Row 0 fills block 2 before row 1 fills block 1: what is found is handed to a new request, and outlives row 1."""
    pair = Pair(build("full:2", num_blocks=30))
    pair.start(0)
    pair.start(1)
    pair.step([[], [1], [], [], []])
    pair.step([[1, 2], [], [], [], []])
    pair.step([[], [2], [], [], []])
    request = pair.rows.request(0)
    (first,), (later,) = (pair.rows.manager.rows(pair.rows.names[row])[0] for row in (0, 1))
    assert first > later
    keys = np.array(request.keys, np.uint32)
    assert serving.find(pair.state, np.int32(0), keys).tolist() == [first]
    pair.finish(1)
    assert serving.find(pair.state, np.int32(0), keys).tolist() == [first]
    pair.finish(0)
    assert serving.find(pair.state, np.int32(0), keys).tolist() == [first]


@pytest.mark.parametrize("groups", ["full:2", "full:2,swa:2:5", "swa:2:5", "full:2,opaque:2"])
def test_drafts_beyond_the_longest_request_need_no_blocks(groups):
    """A row that just holds the longest request takes drafts to the last token, and is refused only after it."""
    pair = Pair(build(groups, num_blocks=60, max_model_len=2 * W))
    pair.start(0)
    for computed in range(0, 2 * W, 5):
        assert pair.step([[computed % 7] * 5, [], [], [], []], [L, 0, 0, 0, 0])[0] == OK
    assert pair.rows.request(0).num_computed == 2 * W
    assert pair.step([[1], [], [], [], []])[0] == Status.ROW_FULL
    pair.finish(0)
    pair.start(0)
    assert pair.step([[1] * 5, [], [], [], []], [L, 0, 0, 0, 0])[0] == OK


def test_room_for_bounds_steady_decoding():
    config = build("full:2,swa:4:5", num_blocks=60)
    assert serving.room_for(config, queries=2, tokens=2) == SMALL
    pair = Pair(config, SMALL)
    for row in range(R):
        pair.start(row)
    for first in range(8 * R):
        served = first % R, (first + 1) % R
        assert pair.step([[1] if row in served else [] for row in range(R)]) == [OK] * R
