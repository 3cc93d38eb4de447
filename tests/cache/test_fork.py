"""Forking, and hits on what this very step writes: the compiled form against its twin over the reference."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.contract.traffic import RandomChoices
from hkv.errors import OperationError
from hkv.spec import ChunkedLocal, FullAttention, Mamba, OpaqueState, SlidingWindow
from reference.dialects.vllm.kinds.full_attention import FullAttentionKind
from tests.cache.build import config
from tests.cache.pair import Pair
from tests.cache.test_lockstep import engines_in_step
from tests.suites import tails

SHAPES = [
    (FullAttention(block_size=8), SlidingWindow(block_size=4, window=9), Mamba(block_size=8)),
    (FullAttention(block_size=4),),
    (SlidingWindow(block_size=4, window=1), FullAttention(block_size=4)),
    (ChunkedLocal(block_size=4, chunk=8), FullAttention(block_size=4), OpaqueState(block_size=4)),
    (FullAttention(block_size=8), Mamba(block_size=8, num_speculative_blocks=1)),
]


def forked_after(specs, tokens: int, num_blocks: int, processed: int) -> list[list[tuple[int, int]]] | None:
    """Copies of each group that a fork wants of a request that has given back what `processed` does not read."""
    pair = Pair(config(*specs, num_blocks=num_blocks))
    pair.request("a", tokens, range(100))
    assert pair.allocate("a", tokens)
    pair.advance("a", tokens)
    pair.retire("a", processed)
    return pair.fork("a", "b")


@settings(max_examples=60)
@given(st.sampled_from(SHAPES), st.integers(1, 60), st.integers(20, 60), st.integers(0, 70))
def test_both_forms_agree(specs, tokens: int, num_blocks: int, behind: int) -> None:
    needed = sum(-(-tokens // spec.block_size) for spec in specs)
    forked_after(specs, tokens, max(num_blocks, needed + 2), max(0, tokens - behind))


@pytest.mark.parametrize("num_blocks", [10, 11])
def test_it_is_refused_whole_without_room(num_blocks: int) -> None:
    assert (forked_after(SHAPES[1], 33, num_blocks, 33) is None) == (num_blocks == 10)


@pytest.mark.parametrize("processed", [44, 90])
def test_it_is_refused_when_a_block_is_missing(processed: int) -> None:
    assert forked_after(SHAPES[0], 40, 40, processed) is None


PARTS = (FullAttention(block_size=8), Mamba(block_size=8))
"""Groups whose blocks may be found partly filled."""

ACTIONS = ("grow", "grow", "grow", "again", "evict", "other", "fork", "end")


def forked(specs, tokens: int, num_blocks: int, lookahead: int = 0, **changes) -> Pair:
    """A request "a" whose tokens are computed, and "b", its fork; others' keys come first, so that none is called 0."""
    pair = Pair(config(*specs, num_blocks=num_blocks, **changes))
    pair.request("first", 8, range(900, 1000))
    pair.drop("first")
    pair.request("a", tokens, range(100))
    assert pair.allocate("a", tokens, lookahead=lookahead)
    pair.advance("a", tokens)
    pair.step()
    assert pair.fork("a", "b") is not None
    return pair


def grow(pair: Pair, id: str, tokens: int) -> bool:
    """Generated tokens are appended, computed and registered, if there is room."""
    request = pair.reference.manager.requests[id]
    if request.num_computed == request.num_tokens:
        pair.extend(id, min(tokens, 100 - request.num_tokens))
    new = min(tokens, request.num_tokens - request.num_computed)
    if not new or not pair.allocate(id, new):
        return False
    pair.advance(id, new)
    pair.commit(id, request.num_computed)
    return True


def come_back(pair: Pair, id: str) -> None:
    """A waiting request is looked up and goes on where its hit ends."""
    found = pair.lookup(id)
    request = pair.reference.manager.requests[id]
    new = request.num_tokens - found
    if pair.allocate(id, new, hit=found):
        pair.advance(id, found + new)


@settings(max_examples=60)
@given(st.data(), st.sampled_from([*SHAPES, PARTS]), st.integers(1, 50), st.integers(0, 30))
def test_what_was_forked_goes_on(data: st.DataObject, specs, tokens: int, more: int) -> None:
    """Forks and what they came from grow, are preempted, found, evicted and end, in both forms alike."""
    lookahead = data.draw(st.sampled_from((0, 0, 4, 12)))
    needed = sum(-(-(tokens + lookahead) // spec.block_size) + 2 for spec in specs)
    pair = forked(specs, tokens, needed + more + 4, lookahead, partial_hits=specs is PARTS)
    forks = 1
    for _ in range(data.draw(st.integers(2, 9))):
        pair.step()
        running = [id for id in pair.slots if pair.reference.manager.requests[id].running]
        waiting = [id for id in pair.slots if id not in running]
        action = data.draw(st.sampled_from(ACTIONS))
        if action == "grow" and running:
            grow(pair, data.draw(st.sampled_from(running)), data.draw(st.integers(1, 9)))
        elif action == "again" and running:
            id = data.draw(st.sampled_from(running))
            pair.free(id)
            come_back(pair, id)
        elif action == "evict":
            blocks = st.integers(1, pair.reference.manager.config.num_blocks - 1)
            pair.evict(sorted(data.draw(st.sets(blocks, min_size=1, max_size=3))))
        elif action == "other" and "c" not in pair.slots:
            pair.request("c", data.draw(st.integers(1, 60)), range(100))
            come_back(pair, "c")
        elif action == "fork" and running and forks < 4:
            forks += pair.fork(data.draw(st.sampled_from(running)), f"f{forks}") is not None
        elif action == "end" and (running or waiting):
            id = data.draw(st.sampled_from(running or waiting))
            if id in running:
                pair.free(id)
            pair.drop(id)


def test_a_fork_takes_the_blocks_that_its_parent_has_ahead() -> None:
    """The parent has a block for drafts, which the fork neither shares nor copies: it takes one of its own."""
    pair = forked(SHAPES[1], 8, 60, lookahead=4)
    assert grow(pair, "b", 1)
    assert grow(pair, "a", 1)
    row, parents = (pair.reference.manager.rows(name)[0] for name in "ba")
    assert len(row) == len(parents) == 3
    assert row[2] != parents[2]


def test_a_fork_may_compute_no_more_than_it_was_granted() -> None:
    pair = Pair(config(*SHAPES[1], num_blocks=60))
    pair.request("a", 40, range(100))
    assert pair.allocate("a", 40)
    pair.advance("a", 17)
    assert pair.fork("a", "b") is not None
    with pytest.raises(OperationError, match="tokens"):
        pair.advance("b", 1)
    pair.advance("a", 1)


SIBLINGS = range(60)


def siblings_in_step(seed: int) -> None:
    header, play = tails.SIBLINGS.begin(RandomChoices(seed), "partial")
    play(engines_in_step(header)[2])


def test_siblings_are_answered_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    asked = FullAttentionKind.waits

    def waits(self: FullAttentionKind, hit: Any, demand: Any) -> bool:
        waited.append(asked(self, hit, demand))
        return waited[-1]

    monkeypatch.setattr(FullAttentionKind, "waits", waits)
    for seed in SIBLINGS:
        siblings_in_step(seed)
    assert sum(waited) > 3


def many_seeds() -> None:
    """Seeds by which planted defects are judged (`tests/mutants`)."""
    for seed in range(600):
        siblings_in_step(seed)


def test_what_a_fork_copies_is_not_written_either() -> None:
    sizes = {"hash_block_size": 4, "scheduler_block_size": 32, "partial_hits": True}
    pair = Pair(config(FullAttention(block_size=16), Mamba(block_size=32), **sizes))
    pair.request("a", 16, range(4))
    assert pair.allocate("a", 12)
    pair.advance("a", 12)
    pair.step()
    assert pair.fork("a", "b")
    assert pair.allocate("b", 4)
    pair.advance("b", 4)
    granted = []
    for id in ("c", "d"):
        pair.request(id, 19, range(4))
        assert pair.lookup(id) == 12
        granted.append(pair.allocate(id, 7, hit=12))
        pair.step()
    assert granted == [False, True]
