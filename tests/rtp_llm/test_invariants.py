"""RTP-LLM's invariants under random traffic, and proof that planted defects break them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.dialects.rtp_llm.config import NULL
from reference.dialects.rtp_llm import eviction, hybrid, joint_reuse, shared_cache
from reference.dialects.rtp_llm.estimates import batch_peak
from reference.dialects.rtp_llm.kinds.kind import Kind
from reference.dialects.rtp_llm.kinds.linear import LinearKind
from reference.dialects.rtp_llm.manager import ALLOCATORS
from reference.dialects.rtp_llm.pool import BlockPool
from reference.dialects.rtp_llm.prefix_tree import PrefixTree
from tests.rtp_llm.build import grown, info, lists
from tests.rtp_llm.traffic import Traffic, draw_config


@settings(max_examples=150)
@given(rng=st.randoms(use_true_random=False))
def test_invariants_hold_under_random_traffic(rng: random.Random) -> None:
    traffic = Traffic(rng)
    for _ in range(40):
        traffic.step()


def test_the_traffic_reaches_hits_forks_and_refusals() -> None:
    hits = forks = granted = arrived = 0
    for seed in range(SEEDS):
        traffic = run(seed)
        hits += traffic.hits
        forks += traffic.forks
        granted += traffic.granted
        arrived += traffic.count
    assert min(hits, forks, granted) > 20
    assert arrived > 100


SEEDS = 150
"""Runs in which a planted defect has to show; without one, nothing shows in any of them."""


def run(seed: int, steps: int = 60) -> Traffic:
    traffic = Traffic(random.Random(seed))
    for _ in range(steps):
        traffic.step()
    return traffic


def largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def malloc(self: BlockPool, count: int) -> list[int]:
        if count <= 0 or count > self.free:
            return []
        blocks = list(self.unheld)[-count:]
        self.reference(blocks)
        return blocks

    monkeypatch.setattr(BlockPool, "malloc", malloc)


def holes_stay_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    undo = Kind.undo
    monkeypatch.setattr(Kind, "undo", lambda self, blocks, length, filled: undo(self, blocks, length, ()))


def cleanup_keeps_references(monkeypatch: pytest.MonkeyPatch) -> None:
    def cleanup(self: LinearKind, blocks, reuse: bool, reserve: int = 0) -> None:
        for position in self._skipped(len(blocks), reserve, reuse):
            blocks.set_at(position, NULL)

    monkeypatch.setattr(LinearKind, "cleanup", cleanup)


def slots_are_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self, item, blocks):
        for group, (pool, block) in enumerate(zip(self.pools, blocks, strict=True)):
            if block != NULL:
                if item.has(group):
                    pool.release([item.blocks[group]], "cache")
                item.blocks[group] = block
                pool.reference([block], "cache")
        return [block != NULL for block in blocks]

    monkeypatch.setattr(shared_cache.SharedBlockCache, "_fill", fill)


def the_last_key_is_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = hybrid.HybridAllocator.canonical_keys
    monkeypatch.setattr(hybrid.HybridAllocator, "canonical_keys", lambda self, row: [*keys(self, row), 0])


def linear_groups_do_not_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    votes = joint_reuse.votes
    monkeypatch.setattr(
        joint_reuse,
        "votes",
        lambda allocator, group: not isinstance(allocator.kinds[group], LinearKind) and votes(allocator, group),
    )


def chains_ignore_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    def chain(self: PrefixTree, leaf):
        return [leaf, *(name for name in self.ancestors(leaf) if not self.nodes[name].resident)]

    monkeypatch.setattr(PrefixTree, "chain", chain)


def evicted_blocks_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    select = eviction.select_for_group
    monkeypatch.setattr(eviction, "select_for_group", lambda *arguments: select(*arguments)[1:])


def the_first_duplicate_keeps_the_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    update = hybrid.HybridAllocator.update

    def reversed_update(self, resource, sources, copy_last):
        pairs = update(self, resource, sources[::-1], copy_last)
        if pairs is not None and sources:
            resource.rows.reverse()
        return pairs

    monkeypatch.setattr(hybrid.HybridAllocator, "update", reversed_update)


DEFECTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    largest_first,
    holes_stay_filled,
    cleanup_keeps_references,
    slots_are_overwritten,
    the_last_key_is_matched,
    linear_groups_do_not_vote,
    chains_ignore_siblings,
    evicted_blocks_leak,
    the_first_duplicate_keeps_the_originals,
]


@pytest.mark.parametrize("plant", DEFECTS, ids=lambda plant: plant.__name__)
def test_planted_defects_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch) -> None:
    def search() -> None:
        for seed in range(SEEDS):
            run(seed)

    plant(monkeypatch)
    with pytest.raises(AssertionError):
        search()


@settings(max_examples=100)
@given(rng=st.randoms(use_true_random=False))
def test_a_sequence_never_holds_more_than_was_estimated(rng: random.Random) -> None:
    """Decoding alone, over pools that are large enough, token by token, with a cleanup after each."""
    config = draw_config(rng, roomy=True)
    allocator = ALLOCATORS[config.name](config)
    start, remaining, reuse = rng.randint(1, 12), rng.randint(0, 20), rng.random() < 0.5
    request = info(allocator, start, reuse=reuse, device_cache=False, cleanup=False)
    fresh = batch_peak(allocator, request.resource, seq=start, common=start, remaining=remaining, reuse=reuse)
    assert allocator.malloc(request).success
    held = _real(request)
    later = batch_peak(allocator, request.resource, seq=start, common=start, remaining=remaining, reuse=reuse)
    most = held
    for seq in range(start + 1, start + remaining + 1):
        assert allocator.malloc(grown(request, seq, cleanup=True)).success
        most = max(most, _real(request))
    assert most <= fresh
    assert most <= held + later


def _real(request) -> int:
    return sum(block != NULL for blocks in lists(request.resource) for block in blocks)
