"""Kinds that are drawn only where they are asked for, sinks beside a window and a chunk with the one before it.

Reads, hits beside their definition, engines, plans, commands; of the sinks whole steps and forks besides.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.cache.state import replace
from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.kinds import layer
from hkv.dialects.vllm.planning.plan import PlanOptions
from hkv.dialects.vllm.planning.residency import simulate
from hkv.dialects.vllm.planning.vllm import plan_vllm
from hkv.dialects.vllm.traffic.headers import draw_header
from hkv.dialects.vllm.traffic.hit_comparison import HitCase, causes, make_config
from hkv.errors import PlanError, SpecError
from hkv.oracle.record import Only, draw
from hkv.spec import (
    FullAttention,
    LayerSpec,
    RequestLimits,
    SlidingWindow,
    spec_from_log,
    spec_from_text,
    spec_to_log,
    spec_to_text,
)
from hkv.spec.chunked_local import ChunkPair
from hkv.spec.sliding_window import SinkWindow
from tests.cache.test_fork import forked, grow
from tests.cache.test_lockstep import lockstep
from tests.reference.build import config as build
from tests.replay.test_diagnosis import reasons_are_what_they_say
from tests.step.sample import assert_same
from tests.step.test_arrivals import arrive, drive
from tests.step.test_step import Pair, T


def test_a_query_reads_the_sinks_and_its_window():
    spec = spec_from_text("sink_window:2:3:4")
    assert spec == SinkWindow(block_size=2, sink_len=3, window=4) == spec_from_log(spec_to_log(spec))
    assert spec_to_text(spec) == "sink_window:2:3:4"
    assert [spec.reads(n) for n in (0, 1, 6)] == [(), (range(1),), (range(6),)]
    assert spec.reads(7) == (range(3), range(4, 7))
    assert SinkWindow(block_size=2, sink_len=3, window=1).reads(7) == (range(3),)
    assert [layer(spec).retired(n, 2) for n in (6, 8, 9, 13)] == [range(2, 2), range(2, 2), range(2, 3), range(2, 5)]
    with pytest.raises(SpecError, match="sink_len"):
        SinkWindow(block_size=4, sink_len=0, window=4)
    with pytest.raises(SpecError, match="sink_window:block_size:sink_len:window"):
        spec_from_text("sink_window:4:4")


def test_a_query_reads_its_own_chunk_and_the_one_before():
    spec = spec_from_text("chunk_pair:2:4")
    assert spec == ChunkPair(block_size=2, chunk=4) == spec_from_log(spec_to_log(spec))
    assert [spec.readable(n).start for n in range(13)] == [0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 8]
    assert spec.reads(0) == ()
    assert spec.reads(9) == (range(4, 9),)
    with pytest.raises(SpecError, match="multiple of the block"):
        ChunkPair(block_size=4, chunk=6)


KINDS = ("sink_window", "chunk_pair")


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_drawn_only_where_they_are_asked_for(kind):
    asked = Only(frozenset({kind, "full_attention"}))
    kinds = {group["kind"] for seed in range(30) for group in draw("core", seed, 2, asked)[0].groups}
    assert kinds == {kind, "full_attention"}
    kinds = {group["kind"] for seed in range(60) for group in draw("core", seed, 2)[0].groups}
    assert kind not in kinds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(40))
def test_hits_are_what_the_definition_says(seed, kind):
    """Sixty drawn caches and prompts; where the iteration leaves the definition, a named cause has to apply."""
    choices = RandomChoices(seed)
    size = choices.pick((1, 2, 4))
    if kind == "chunk_pair":
        specs: list[LayerSpec] = [ChunkPair(block_size=size, chunk=size * choices.integer(1, 4))]
    else:
        specs = [
            SinkWindow(block_size=size, sink_len=choices.integer(1, 3 * size), window=choices.integer(1, 4 * size))
        ]
    others = [FullAttention(block_size=size), SlidingWindow(block_size=2 * size, window=5)]
    if kind == "sink_window":
        others.append(SinkWindow(block_size=2 * size, sink_len=3, window=3))
    if choices.chance(60):
        specs.append(choices.pick(others))
    config = make_config(specs, [0] if choices.chance(40) else [], size, 0, 1)
    for _ in range(60):
        tokens = choices.integer(1, 14 * size)
        entries = {
            (group, end)
            for group, spec in enumerate(specs)
            for end in range(spec.block_size, tokens + 4 * size, spec.block_size)
            if choices.chance(80)
        }
        case = HitCase(config, tokens, frozenset(entries))
        assert case.by_iteration() == case.by_definition() or causes(config, tokens)


@settings(max_examples=20)
@given(
    text=st.sampled_from(
        ("sink_window:2:3:4", "sink_window:2:2:7,full:2", "sink_window:4:1:5,swa:2:6", "sink_window:2:5:1,mamba:4")
    ),
    num_blocks=st.integers(20, 60),
    data=st.data(),
)
def test_whole_steps_and_arrivals_are_the_sequential_operations(text, num_blocks, data):
    drive(Pair(build(text, num_blocks=num_blocks, max_model_len=48)), data, 30)


def test_arrivals_resume_nowhere_without_the_sinks():
    pair, prompt = Pair(build("sink_window:2:3:4", num_blocks=30, max_model_len=48)), list(range(14))
    arrive(pair, {0: prompt})
    for first in range(0, len(prompt), T):
        pair.step([prompt[first : first + T], [], [], [], []])
    assert arrive(pair, {1: [*prompt, 1]}) == [14]
    lost = pair.rows.manager.rows(pair.rows.names[0])[0][1]
    pair.rows.manager.pool.evict([lost])
    pair.state = replace(pair.state, refs=pair.state.refs.at[lost].add(-1))
    assert arrive(pair, {2: [*prompt, 1]}) == [2]
    assert_same(pair.rows, pair.state)


@settings(max_examples=200)
@given(
    text=st.sampled_from(
        ("sink_window:2:3:5", "full:2,sink_window:2:4:6", "sink_window:2:5:1,swa:2:3", "full:4,sink_window:2:6:5")
    ),
    eagle=st.sampled_from((None, (0,))),
    data=st.data(),
)
def test_reasons_of_misses_are_what_they_say(text, eagle, data):
    reasons_are_what_they_say(text, eagle, data)


def traffic(feature: str, *kinds: str) -> None:
    """Both engines under random traffic of these kinds."""
    asked = frozenset({"sink_window", *kinds})
    for seed in range(8):
        choices = RandomChoices(seed)
        lockstep(draw_header(choices, feature, 2, asked), choices)


@pytest.mark.parametrize(
    ("feature", "kinds"),
    [
        ("core", ("full_attention", "mamba")),
        ("eagle", ("sliding_window",)),
        ("external", ()),
        ("retention", ("sliding_window",)),
        ("lookahead_hash", ("full_attention",)),
        ("context_parallel", ("full_attention",)),
    ],
)
def test_both_engines_answer_alike(feature, kinds):
    traffic(feature, *kinds)


SHAPE = (SinkWindow(block_size=4, sink_len=6, window=9), FullAttention(block_size=4))


@settings(max_examples=40)
@given(tokens=st.integers(1, 60), lookahead=st.integers(0, 9), data=st.data())
def test_a_fork_shares_the_sinks(tokens, lookahead, data):
    pair = forked(SHAPE, tokens, 60, lookahead)
    for _ in range(data.draw(st.integers(0, 4))):
        if not grow(pair, data.draw(st.sampled_from("ab")), data.draw(st.integers(1, 9))):
            break


def planned(spec: LayerSpec, **changes):
    layers = {"a": FullAttention(**GEOMETRY), "b": spec}
    limits = RequestLimits(max_model_len=1000, max_in_flight_tokens=256)
    plan = plan_vllm((layers,), (100_000_000,), PlanOptions(limits=limits, layout="LBNHC", **changes))
    assert [group.spec for group in plan.groups] == list(layers.values())
    return simulate(plan.groups, 400, limits).full_length_blocks


GEOMETRY = {"block_size": 16, "num_kv_heads": 2, "head_size": 64}


def test_they_are_planned():
    assert planned(SinkWindow(**GEOMETRY, sink_len=4, window=100)) == (63, 1 + 63 - 900 // 16)
    assert planned(ChunkPair(**GEOMETRY, chunk=64)) == (63, 63 - (999 // 64 - 1) * 4)
    with pytest.raises(PlanError, match="like full attention"):
        planned(ChunkPair(**GEOMETRY, chunk=64), hybrid=False)


@given(
    sink_len=st.integers(1, 40),
    window=st.integers(1, 60),
    block=st.sampled_from((1, 3, 16)),
    start=st.integers(0, 999),
    chunk=st.integers(1, 100),
)
def test_blocks_held_are_those_that_can_still_be_read(sink_len, window, block, start, chunk):
    spec, end = SinkWindow(block_size=block, sink_len=sink_len, window=window), min(start + chunk, 1000)
    limits = RequestLimits(max_model_len=1000, max_in_flight_tokens=100)
    read = {place // block for n in range(start, end) for place in (*itertools.chain(*spec.reads(n)), n)}
    assert layer(spec).held_blocks(start, end, limits) == len(read) <= layer(spec).max_request_blocks(limits)
