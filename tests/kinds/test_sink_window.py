"""Attention sinks plus a window: what is read, hits beside their definition, engines, whole steps, commands."""

from __future__ import annotations

import itertools

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.cache.state import replace
from hkv.cli import cli
from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.kinds import layer
from hkv.dialects.vllm.planning.plan import PlanOptions
from hkv.dialects.vllm.planning.residency import simulate
from hkv.dialects.vllm.planning.vllm import plan_vllm
from hkv.dialects.vllm.traffic.headers import draw_header
from hkv.dialects.vllm.traffic.hit_comparison import Case, make_config
from hkv.errors import SpecError
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
from hkv.spec.sliding_window import SinkWindow
from tests.cache.test_fork import forked, grow
from tests.cache.test_lockstep import lockstep
from tests.kinds.drawn_hits import assert_hits_are_defined
from tests.reference.build import admit, manager
from tests.reference.build import config as build
from tests.replay.test_diagnosis import reasons_are_what_they_say
from tests.step.sample import assert_same
from tests.step.test_arrivals import P, arrive, turnover, two_texts
from tests.step.test_step import NO_ROOM, OK, Pair, T, drawn_tokens


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


def test_it_is_drawn_only_where_it_is_asked_for():
    asked = Only(frozenset({"sink_window", "full_attention"}))
    kinds = {group["kind"] for seed in range(30) for group in draw("core", seed, 2, asked)[0].groups}
    assert kinds == {"sink_window", "full_attention"}
    kinds = {group["kind"] for seed in range(60) for group in draw("core", seed, 2)[0].groups}
    assert "sink_window" not in kinds


@pytest.mark.parametrize("seed", range(40))
def test_hits_are_what_the_definition_says(seed):
    choices = RandomChoices(seed)
    size = choices.pick((1, 2, 4))
    specs: list[LayerSpec] = [
        SinkWindow(block_size=size, sink_len=choices.integer(1, 3 * size), window=choices.integer(1, 4 * size))
    ]
    others = (
        FullAttention(block_size=size),
        SlidingWindow(block_size=2 * size, window=5),
        SinkWindow(block_size=2 * size, sink_len=3, window=3),
    )
    if choices.chance(60):
        specs.append(choices.pick(others))
    assert_hits_are_defined(specs, size, choices)


@pytest.mark.parametrize(
    ("held", "hit"),
    [
        ({1, 2, 3, 4, 5, 6, 7}, 14),
        ({1, 2, 6, 7}, 14),
        ({1, 2, 5, 6}, 12),
        ({1, 2, 3, 5, 6, 7}, 14),
        ({1, 2, 4, 5, 7}, 10),
        ({1, 2}, 4),
        ({1, 3, 4, 5, 6, 7}, 2),
        ({2, 3, 4, 5, 6, 7}, 0),
    ],
)
def test_a_hit_needs_the_sinks_and_the_window_and_nothing_between(held, hit):
    config = make_config([SinkWindow(block_size=2, sink_len=3, window=4)], [])
    case = Case(config, 15, frozenset((0, 2 * end) for end in held))
    assert (case.by_iteration(), case.by_definition()) == (hit, hit)


def test_the_sinks_stay_while_what_lies_between_is_given_back():
    cache = manager("sink_window:2:3:4", num_blocks=12)
    admit(cache, "a", range(10))
    first = cache.rows("a")[0]
    cache.append("a", [0])
    cache.allocate("a", 1)
    (row,) = cache.rows("a")
    assert row[:2] == first[:2]
    assert row[2] == 0
    assert row[3:5] == first[3:5]
    cache.free("a")
    assert cache.num_free() == 11


def test_tokens_from_elsewhere_bring_the_sinks_too():
    cache = manager("sink_window:2:3:4", num_blocks=12)
    cache.request("a", list(range(14)))
    cache.lookup("a")
    cache.allocate("a", 2, external=12)
    (row,) = cache.rows("a")
    assert [block > 0 for block in row] == [True, True, False, False, True, True, True]


@settings(max_examples=20)
@given(
    text=st.sampled_from(
        ("sink_window:2:3:4", "sink_window:2:2:7,full:2", "sink_window:4:1:5,swa:2:6", "sink_window:2:5:1,mamba:4")
    ),
    num_blocks=st.integers(20, 60),
    data=st.data(),
)
def test_whole_steps_and_arrivals_are_the_sequential_operations(text, num_blocks, data):
    pair = Pair(build(text, num_blocks=num_blocks, max_model_len=48))
    texts = two_texts(data, 30)
    for _ in range(data.draw(st.integers(3, 8))):
        new, _ = turnover(pair, data, texts, st.integers(1, min(P, 30)))
        arrive(pair, new)
        assert_same(pair.rows, pair.state)
        for _ in range(data.draw(st.integers(1, 4))):
            tokens = drawn_tokens(data, pair)
            for row, prompt in new.items():
                request = pair.rows.request(row)
                tokens[row] = prompt[request.num_computed if request else 0 :][:T] or tokens[row]
            status = pair.step(tokens)
            new = {row: prompt for row, prompt in new.items() if status[row] in (OK, NO_ROOM)}


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


@pytest.mark.parametrize(
    "line",
    [
        "diff --engines numpy,numpy --kinds sink_window,full_attention --seeds 3 --feature core --version 2",
        "layout --spec sink_window:16:4:64 --num-layers 2",
    ],
)
def test_commands_take_it(line):
    done = CliRunner().invoke(cli, line.split())
    assert done.exit_code == 0, done.output


def test_it_is_recorded_checked_explained_and_replayed(tmp_path):
    log, trace = str(tmp_path / "log.jsonl"), tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(f'{{"timestamp": {n}, "tokens": {list(range(60))}, "output_length": 9}}\n' for n in range(6))
    )
    replay = f"replay {trace} --groups sink_window:4:6:9,full:4 --num-blocks 60"
    for line, said in (
        (f"record --engine numpy --feature core --seed 3 --kinds sink_window,full_attention -o {log}", "operations"),
        (f"check {log}", "1 of 1 logs agree"),
        (f"explain {log} --line 164", "sink_window:8"),
        (f"{replay} --engine numpy", "sink_window:4:6:9"),
    ):
        done = CliRunner().invoke(cli, line.split())
        assert (done.exit_code, said in done.output) == (0, True), done.output


def test_it_is_planned():
    geometry = {"block_size": 16, "num_kv_heads": 2, "head_size": 64}
    layers = {"a": FullAttention(**geometry), "b": SinkWindow(**geometry, sink_len=4, window=100)}
    options = PlanOptions(limits=RequestLimits(max_model_len=1000, max_in_flight_tokens=256), layout="LBNHC")
    plan = plan_vllm((layers,), (100_000_000,), options)
    assert [group.spec for group in plan.groups] == list(layers.values())
    assert simulate(plan.groups, 400, options.limits).full_length_blocks == (63, 1 + 63 - 900 // 16)


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
