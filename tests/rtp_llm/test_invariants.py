"""RTP-LLM's invariants under random traffic, and proof that planted defects break them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.dialects.rtp_llm.config import NULL
from reference.dialects.rtp_llm import eviction, forks, hybrid, joint_reuse, shared_cache
from reference.dialects.rtp_llm.allocator import Allocator
from reference.dialects.rtp_llm.estimates import batch_peak
from reference.dialects.rtp_llm.kinds.full import FullKind
from reference.dialects.rtp_llm.kinds.kind import Kind
from reference.dialects.rtp_llm.kinds.linear import LinearKind
from reference.dialects.rtp_llm.manager import ALLOCATORS
from reference.dialects.rtp_llm.pool import BlockPool
from reference.dialects.rtp_llm.prefix_tree import PrefixTree
from reference.state.id_bitmap import IdBitmap
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


def availability_is_counted_by_occurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    """RTP-LLM 04e47d7b1."""

    def available(self: BlockPool) -> int:
        return self.total - sum(self.refs.total(block, ("request", "connector")) for block in range(self.num_blocks))

    monkeypatch.setattr(BlockPool, "available", property(available))


def linear_groups_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """RTP-LLM 909b469ad."""
    entry = Allocator.entry

    def without_linear(self: Allocator, blocks: dict[int, int]) -> list[int]:
        kept = {group: block for group, block in blocks.items() if not isinstance(self.kinds[group], LinearKind)}
        return entry(self, kept)

    monkeypatch.setattr(Allocator, "entry", without_linear)


def a_refused_request_keeps_its_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """RTP-LLM 13ad03d00."""
    monkeypatch.setattr(Allocator, "_abandon", lambda self, resource: None)


def block_zero_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """RTP-LLM 8757b219f."""
    bitmap = IdBitmap.__init__
    monkeypatch.setattr(IdBitmap, "__init__", lambda self, size, reserved=0: bitmap(self, size, 0))
    monkeypatch.setattr(BlockPool, "_check", lambda self, block: None)


def every_group_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """RTP-LLM 42060b158."""
    monkeypatch.setattr(Kind, "match", lambda self, key: self.cache.match_group(key, 0))


def a_copied_block_stays_referenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """RTP-LLM 7f86169b5."""
    assemble = forks._assemble

    def leaky(allocator, *arguments):
        with monkeypatch.context() as inside:
            inside.setattr(Kind, "free", lambda self, blocks: None)
            inside.setattr(FullKind, "free", lambda self, blocks: None)
            return assemble(allocator, *arguments)

    monkeypatch.setattr(forks, "_assemble", leaky)


def the_groups_of_a_key_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """RTP-LLM 0a6395d7d."""
    release = shared_cache.SharedBlockCache.release

    def first_only(self: shared_cache.SharedBlockCache, blocks) -> None:
        first = next((group for group, block in enumerate(blocks) if block != NULL), None)
        release(self, [block if group == first else NULL for group, block in enumerate(blocks)])

    monkeypatch.setattr(shared_cache.SharedBlockCache, "release", first_only)


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
    availability_is_counted_by_occurrence,
    linear_groups_are_not_cached,
    a_refused_request_keeps_its_hit,
    block_zero_is_handed_out,
    every_group_is_the_first,
    a_copied_block_stays_referenced,
    the_groups_of_a_key_part,
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
