"""RTP-LLM's invariants under random traffic, that each of them can break, and that estimates are upper bounds."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.contract.traffic import RandomChoices
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import NULL
from hkv.dialects.rtp_llm.invariants import RTP_INVARIANTS
from hkv.testing.planting import Patch, applied
from tests.mutants.catalogue import MUTANTS
from tests.rtp_llm.build import grown, info, lists
from tests.rtp_llm.traffic import draw_config
from tests.rtp_llm.witness.estimates import batch_peak
from tests.rtp_llm.witness.manager import ALLOCATORS
from tests.suites.history import Taped
from tests.suites.rtp import SUITE, TOPICS, begin, open_run

BREAKS = {
    "rtp conservation": "rtp-freed-while-the-cache-holds-it",
    "rtp references": "rtp-copied-block-stays-referenced",
    "rtp order of blocks": "rtp-largest-ids-first",
    "rtp holding": Patch("hkv.dialects.rtp_llm.engines.numpy:RtpNumpyEngine._hold", "blocks[at]", "blocks[at - 1]"),
    "rtp lists": Patch("reference.dialects.rtp_llm.allocating:begin_with", "group.kind != Kind.FULL", "True"),
    "rtp room": "rtp-reserve-not-granted",
    "rtp retention": "rtp-cleanup-takes-the-grid",
    "rtp ownership": "rtp-unfinished-block-is-entered",
    "rtp refusal": "rtp-refused-request-keeps-its-hit",
    "rtp forks": "rtp-first-duplicate-keeps-the-originals",
    "rtp hit": "rtp-linear-groups-do-not-vote",
    "rtp adoption": "rtp-every-group-is-the-first",
    "rtp key life": "rtp-filled-slot-is-overwritten",
    "rtp insertion": "rtp-linear-groups-are-not-cached",
    "rtp eviction": "rtp-most-recently-used-leaves",
    "rtp chains": "rtp-chain-ignores-siblings",
    "rtp version": "rtp-silent-insertion",
}
"""For each invariant a defect that breaks it, asked alone."""


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 30))
def test_invariants_hold_under_random_traffic(seed: int) -> None:
    assert SUITE.run(seed) is None


def test_the_traffic_reaches_hits_forks_refusals_and_evictions() -> None:
    seen: Counter[str] = Counter()
    for seed in range(8 * len(TOPICS)):
        header, play = begin(RandomChoices(seed), TOPICS[seed % len(TOPICS)])
        run = open_run(header, "none")

        def perform(operation: structs.RtpOp, run=run) -> structs.RtpAnswer:
            before = len(run.state.cached)
            answer = run.perform(operation)
            seen["eviction"] += len(run.state.cached) < before
            if isinstance(answer, structs.Malloc):
                seen[answer.verdict] += 1
                seen["hit"] += answer.reused > 0
            if isinstance(answer, structs.Fork):
                seen["copy"] += bool(answer.copies)
            if isinstance(answer, structs.Selected):
                seen["selected"] += answer.keys is not None
            return answer

        play(perform)
    for name in ("eviction", "granted", "retryable", "permanent", "hit", "copy", "selected"):
        assert seen[name] >= 10, (name, seen)


def test_invariants_hold_where_other_than_all_tokens_get_slots() -> None:
    """Every allocation of the traffic asks for slots for fewer or more tokens than there are."""
    asked: Counter[str] = Counter()
    for seed in range(4 * len(TOPICS)):
        rng = random.Random(seed)
        header, play = begin(RandomChoices(seed), TOPICS[seed % len(TOPICS)])
        run = open_run(header, None)
        if any(group.type == "SWA" for group in header.groups):
            continue  # a window may be left without its last blocks, which is an error

        def perform(operation: structs.RtpOp, run=run, rng=rng) -> structs.RtpAnswer:
            if isinstance(operation, structs.MallocOp):
                operation = msgspec.structs.replace(operation, length=rng.randint(1, 40))
            answer = run.perform(operation)
            asked.update([answer.verdict] if isinstance(answer, structs.Malloc) else [])
            return answer

        play(perform)
    assert asked["granted"] > 50, asked


@pytest.mark.parametrize("name", RTP_INVARIANTS)
def test_every_invariant_can_break(name: str) -> None:
    defect = BREAKS[name]
    patches = MUTANTS[defect].edits if isinstance(defect, str) else (defect,)
    topics = (MUTANTS[defect].arguments if isinstance(defect, str) else ()) or TOPICS
    with applied(*patches):
        assert any(breaks(name, seed, topics[seed % len(topics)]) for seed in range(300))


def breaks(name: str, seed: int, topic: str) -> bool:
    """True if the invariant, asked alone, breaks; a defect may also make the engine fail, which proves nothing."""
    header, play = begin(RandomChoices(seed), topic)
    try:
        failure = Taped(open_run(header, name)).judged(play)
    except Exception:
        return False
    return failure is not None and failure.invariant == name


def test_every_invariant_says_what_it_promises() -> None:
    for invariant in RTP_INVARIANTS.values():
        text = invariant.check.__doc__ or ""
        assert "Holds after" in text, invariant.name
        assert "exception" in text.lower(), invariant.name
        assert invariant.promises, invariant.name


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
