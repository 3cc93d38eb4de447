"""The definition of a hit, and where vLLM 0.33's iteration finds another one: the cases that `docs/hits.md` tells."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.plain import PlainEngine
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.traffic.headers import FEATURES
from hkv.dialects.vllm.traffic.hit_comparison import Cause, HitCase, causes, has_entry, make_config, small_cases
from hkv.dialects.vllm.traffic.live import drive
from hkv.spec import ChunkedLocal, FullAttention, Mamba, OpaqueState, SlidingWindow
from hkv.testing.strategies import headers, hit_cases
from reference.hits import can_read, connector_hit_by_definition, longest_hit_by_definition

assert settings.default is not None
EXAMPLES = settings.default.max_examples


def case(specs, eagle, num_tokens, entries, **settings):
    held = frozenset((group, end) for group, ends in enumerate(entries) for end in ends)
    return HitCase(make_config(specs, eagle, **settings), num_tokens, held)


def full(size):
    return FullAttention(block_size=size)


def swa(size, window):
    return SlidingWindow(block_size=size, window=window)


def mamba(size):
    return Mamba(block_size=size)


# The definition, kind by kind.


@pytest.mark.parametrize(
    ("specs", "entries", "num_tokens", "hit"),
    [
        ([full(4)], [[4, 8, 16]], 17, 8),
        ([full(4)], [[4, 8]], 8, 4),
        ([swa(4, 5)], [[12]], 17, 12),
        ([swa(4, 6)], [[12]], 17, 0),
        ([swa(4, 6)], [[4, 16]], 17, 4),
        ([swa(4, 6)], [[12, 16]], 17, 16),
        ([ChunkedLocal(block_size=4, chunk=8)], [[12]], 17, 16),
        ([ChunkedLocal(block_size=4, chunk=8)], [[12]], 16, 12),
        ([mamba(4)], [[8]], 17, 8),
        ([full(4), mamba(8)], [[4, 8, 12, 16], [8]], 17, 8),
        ([full(8), mamba(8)], [[8, 12], [12]], 17, 12),
        ([full(8), mamba(8)], [[8, 16], [12]], 17, 12),
        ([full(8), mamba(8)], [[8], [12]], 17, 0),
        ([full(4), OpaqueState(block_size=4)], [[4, 8], []], 17, 8),
    ],
)
def test_the_definition(specs, entries, num_tokens, hit):
    inside = 4 if any(spec.block_size == 8 for spec in specs) else None
    assert case(specs, [], num_tokens, entries, hash_block_size=inside).by_definition() == hit


def test_a_draft_module_needs_the_block_after_the_hit():
    specs = [full(4), swa(4, 6)]
    held = [[4, 8, 12, 16], [8, 12, 16]]
    assert case(specs, [], 18, held).by_definition() == 16
    assert case(specs, [0], 18, held).by_definition() == 12
    assert case(specs, [1], 18, held).by_definition() == 12
    assert case(specs, [1], 18, [[4, 8, 12, 16], [8, 12]]).by_definition() == 0


def test_without_caching_nothing_is_hit():
    config = make_config([full(4)], [])
    off = type(config)(**{**vars(config), "caching": False})
    assert longest_hit_by_definition(off, lambda group, end: True, 17) == 0


# The iteration.


@given(found=hit_cases())
@settings(max_examples=EXAMPLES * 6)
def test_the_iteration_finds_the_definition_unless_a_named_cause_applies(found):
    check(found)


def check(found: HitCase) -> None:
    iteration, definition = found.by_iteration(), found.by_definition()
    directions = {cause.direction for cause in causes(found.config, found.num_tokens)}
    if iteration != definition:
        assert ("less" if iteration < definition else "more") in directions, f"{found}: {iteration}, not {definition}"


@given(found=hit_cases())
@settings(max_examples=EXAMPLES * 3)
def test_what_the_iteration_finds_can_be_read(found):
    """Whatever it finds, every position the next query reads is there; off-grid chunks are the one exception."""
    if Cause.CHUNK_OFF_GRID in causes(found.config, found.num_tokens):
        return
    hit = found.by_iteration()
    for group, spec in enumerate(found.config.topology.specs):
        assert not spec.prefix_cacheable or can_read(found.config, found.has_entry, group, hit), f"{found}: {hit}"


@given(found=hit_cases())
@settings(max_examples=EXAMPLES * 3)
def test_what_each_group_finds_alone_is_the_definition_unless_a_named_cause_applies(found):
    """Alone, an EAGLE window proves its own end, so that `DROP_NOT_REPEATED` makes nothing longer."""
    own = connector_hit_by_definition(found.config, found.has_entry, found.num_tokens).own
    named = causes(found.config, found.num_tokens)
    for group, (told, best) in enumerate(zip(found.each_by_iteration(), own, strict=True)):
        allowed = {Cause.CHUNK_OFF_GRID} if told > best else {*Cause} - {Cause.CHUNK_OFF_GRID}
        assert told == best or named & allowed, f"{found}: group {group} finds {told}, not {best}"


@pytest.mark.parametrize(
    ("entries", "hit", "own", "lagging"),
    [
        ([[4, 8, 12, 16], [8, 16], [12, 16]], 16, (16, 16, 16), ()),
        ([[4, 8, 12, 16], [8], [12, 16]], 16, (16, 8, 16), (1,)),  # a load brings the state after 16 tokens
        ([[4, 8, 12, 16], [], [4, 8]], 16, (16, 0, 8), (1, 2)),
        ([[4, 8], [8, 16], [4, 8, 12, 16]], 8, (8, 16, 16), ()),  # values of full attention were lost
        ([[4, 8], [16], [4, 8, 12, 16]], 0, (8, 16, 16), ()),
    ],
)
def test_what_a_connector_is_told(entries, hit, own, lagging):
    found = case([full(4), mamba(4), swa(4, 6)], [], 17, entries)
    assert connector_hit_by_definition(found.config, found.has_entry, 17) == (hit, own, lagging)


def test_without_states_a_connector_is_told_the_common_hit():
    found = case([full(4), swa(4, 6)], [], 17, [[4, 8, 12, 16], [4, 8]])
    assert connector_hit_by_definition(found.config, found.has_entry, 17) == (8, (16, 8), ())


def test_every_small_cache_agrees_unless_a_named_cause_applies():
    sizes = [(1, tokens) for tokens in range(1, 5)] + [(2, 1), (2, 2)]
    count = 0
    for found in itertools.chain.from_iterable(small_cases(*size) for size in sizes):
        check(found)
        count += 1
    assert count > 10_000


SMALLEST = {
    Cause.SHARED_DROP: (case([full(1), full(1)], [1], 2, [[1], [1, 2]]), 0, 1),
    Cause.LONE_DROP: (case([full(1)], [0], 2, [[1, 2]]), 0, 1),
    Cause.SHORT_PREFIX_DROP: (case([full(2), swa(1, 4)], [1], 3, [[2], [1, 2, 3]]), 0, 2),
    Cause.LONGER_ENTRY: (case([full(2), mamba(2)], [], 2, [[2], [1]], hash_block_size=1), 0, 1),
    Cause.UNREAD_WINDOW: (case([swa(1, 1)], [], 2, [[]], hash_lookahead=2), 0, 1),
    Cause.DROP_NOT_REPEATED: (case([swa(1, 1), mamba(1)], [0, 1], 3, [[3], [1]]), 1, 0),
    Cause.CHUNK_OFF_GRID: (case([ChunkedLocal(block_size=2, chunk=3)], [], 4, [[]]), 2, 0),
}


@pytest.mark.parametrize("cause", Cause)
def test_each_cause_has_a_smallest_example(cause):
    found, iteration, definition = SMALLEST[cause]
    assert causes(found.config, found.num_tokens) == {cause}
    assert (found.by_iteration(), found.by_definition()) == (iteration, definition)


def test_filling_the_cache_can_shorten_a_hit_that_was_not_proven():
    """With one entry more the last window shortens the hit in a later round, and the others have to prove it anew."""
    specs, fewer, more = [swa(1, 3), swa(1, 2), swa(1, 1)], [1, 2, 4, 5], [1, 2, 3, 4, 5]
    others = [[1, 3, 4, 5], [1, 2, 3, 5]]
    found = [case(specs, [0, 1, 2], 5, [*others, held]) for held in (fewer, more)]
    assert [each.by_iteration() for each in found] == [1, 0]
    assert [each.by_definition() for each in found] == [0, 0]


def test_an_unproven_hit_needs_no_window_of_one_token():
    found = case([swa(1, 2), mamba(1)], [0, 1], 4, [[1, 3, 4], [1]])
    assert causes(found.config, found.num_tokens) == {Cause.DROP_NOT_REPEATED}
    assert (found.by_iteration(), found.by_definition()) == (1, 0)


# Real traffic: what the pool really holds, keys besides the primary ones included.


@given(data=st.data())
@settings(max_examples=EXAMPLES)
def test_hits_under_traffic_are_the_definition_unless_a_named_cause_applies(data):
    header, steps = data.draw(headers(FEATURES)), data.draw(st.integers(1, 16))
    engine = PlainEngine(header)
    config = engine.config

    def perform(operation):
        answer = apply(engine, operation)
        if isinstance(operation, oplog.LookupOp):
            assert isinstance(answer, oplog.Hit)
            num_tokens = engine.record(operation.id).tokens
            best = longest_hit_by_definition(config, has_entry(engine, operation.id), num_tokens)
            directions = {cause.direction for cause in causes(config, num_tokens)}
            assert answer.hit == best or ("less" if answer.hit < best else "more") in directions
        return answer

    drive(header, RandomChoices(data.draw(st.integers(0, 1 << 32))), perform, steps)
