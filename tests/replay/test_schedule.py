"""The schedule of docs/replay.md, by small replays worked out by hand, and by what must hold of every replay."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.dialects.vllm.schedule.schedule import Chunking, Replay
from hkv.errors import ConfigError
from hkv.replay.schedule import FINISHED, NEVER_FITS, TOO_LONG, Arrival, Recorder, Schedule
from tests.replay.counting_engine import CountingEngine


def arrivals(*rows):
    return [Arrival(index, step, prompt, output, list) for index, (step, prompt, output) in enumerate(rows)]


def run(engine, rows, **schedule):
    schedule = Schedule(**{"step_tokens": 8, "decode_tokens": 1, "max_running": 4, **schedule})
    recorder = Recorder(engine.free_blocks + 1, None, lambda: None)
    steps = Replay(engine, schedule, Chunking(schedule.step_tokens), arrivals(*rows), recorder).run()
    return steps, recorder


def test_one_request_is_computed_in_chunks_and_never_computes_its_last_token():
    engine = CountingEngine(10)
    steps, recorder = run(engine, [(0, 10, 3)])
    # 8 of 10, then 2 and the 1st token, then the 2nd token after computing the 1st, then the 3rd: 12 tokens computed.
    assert engine.operations() == "| +0:8 | +0:2 | +0:1 | +0:1 .0"
    assert steps == 4
    assert recorder.steps.in_use == [2, 3, 3, 3]
    record = recorder.requests[0]
    assert (record.outcome, record.admitted, record.ended) == (FINISHED, 0, 3)


@pytest.mark.parametrize(
    ("blocks", "rows", "schedule", "operations"),
    [
        (10, [(0, 8, 0)], {}, "| +0:8 .0"),
        (10, [(0, 4, 4)], {"decode_tokens": 4}, "| +0:4 .0"),
        (10, [(0, 4, 5)], {"decode_tokens": 4}, "| +0:4 | +0:4 .0"),
        (10, [(0, 4, 8)], {"decode_tokens": 4}, "| +0:4 | +0:4 .0"),
        (10, [(0, 4, 9)], {"decode_tokens": 4}, "| +0:4 | +0:4 | +0:4 .0"),
        (20, [(0, 6, 3), (0, 10, 1)], {}, "| +0:6 +1:2 | +0:1 +1:7 | +0:1 +1:1 .0 .1"),
        (3, [(0, 8, 2), (0, 8, 1), (0, 1, 1)], {}, "| +0:8 | +0:1 -1:7 .0 | +1:8 .1 | +2:1 .2"),
    ],
    ids=[
        "a request that generates nothing ends with its prompt",
        *(f"{output} tokens, 4 a step, each computed in the next" for output in (4, 5, 8, 9)),
        "running requests come before waiting ones and share the budget",
        "a refused request holds up those behind it",
    ],
)
def test_small_schedules(blocks, rows, schedule, operations):
    engine = CountingEngine(blocks)
    run(engine, rows, **schedule)
    assert engine.operations() == operations


def test_steps_without_work_are_skipped():
    engine = CountingEngine(10)
    steps, recorder = run(engine, [(3, 4, 1), (100, 4, 1)])
    assert recorder.steps.step == [3, 100]
    assert steps == 101


def test_a_hit_is_not_computed_again():
    engine = CountingEngine(10, hits={"0": 4})
    _, recorder = run(engine, [(0, 10, 1)])
    assert engine.operations() == "| +0:6 .0"
    assert ("advance", "0", 10) in engine.log
    assert recorder.requests[0].hit == 4
    assert (recorder.steps.prompt_tokens, recorder.steps.hit_tokens) == ([10], [4])


def test_the_last_running_request_is_preempted_and_returns_first_with_what_it_generated():
    # Pool of 4 blocks of 4. After step 4 both hold two blocks, full. In step 5, 0 needs a third: 1, admitted last,
    # gives both back with its 9 tokens, and 0 goes on. 1 needs 3 blocks and waits, before 2, until 0 has ended.
    engine = CountingEngine(4)
    _, recorder = run(engine, [(0, 4, 10), (0, 4, 6), (0, 4, 1)], max_running=2)
    assert engine.operations() == (
        "| +0:4 +1:4 | +0:1 +1:1 | +0:1 +1:1 | +0:1 +1:1 | +0:1 +1:1 | -0:1 .1 +0:1 "
        "| +0:1 -1:7 | +0:1 -1:7 | +0:1 -1:7 | +0:1 -1:7 .0 | +1:8 | +1:1 +2:4 .1 .2"
    )
    assert [recorder.requests[i].preemptions for i in range(3)] == [0, 1, 0]
    assert recorder.requests[1].recomputed == 9
    assert recorder.steps.put_off == [0] * 6 + [1] * 4 + [0] * 2
    assert recorder.steps.preemptions == [0] * 5 + [1] + [0] * 6


def test_a_request_preempts_itself_when_it_was_admitted_last():
    # 0 takes the last block in step 1; 1 then needs one more, gives its own back, and no one is admitted in that step.
    engine = CountingEngine(3)
    _, recorder = run(engine, [(0, 4, 2), (0, 4, 2), (0, 1, 1)], max_running=3, step_tokens=9)
    assert engine.operations() == "| +0:4 +1:4 +2:1 .2 | +0:1 -1:1 .1 .0 | +1:5 .1"
    assert recorder.requests[1].preemptions == 1


def test_a_request_that_can_never_fit_is_refused_for_good():
    engine = CountingEngine(2)
    _, recorder = run(engine, [(0, 9, 1), (0, 8, 1), (0, 4, 20)])
    assert engine.operations() == "| -0:8 +1:8 .1 | +2:4 | +2:1 | +2:1 | +2:1 | +2:1 | -2:1 .2"
    assert [recorder.requests[i].outcome for i in range(3)] == [NEVER_FITS, FINISHED, NEVER_FITS]
    assert engine.free_blocks == 2


def test_too_long_requests_never_reach_the_engine():
    engine = CountingEngine(10)
    _, recorder = run(engine, [(0, 9, 8), (5, 9, 7)], max_model_len=16)
    assert [recorder.requests[i].outcome for i in range(2)] == [TOO_LONG, FINISHED]
    assert ("request", "0", 9) not in engine.log


def test_closed_loop_keeps_so_many_in_the_system_whatever_the_time():
    _, recorder = run(CountingEngine(100), [(1000 * i, 4, 3) for i in range(10)], closed_loop=2, step_tokens=100)
    assert recorder.steps.step[0] == 0
    both = [running + waiting for running, waiting in zip(recorder.steps.running, recorder.steps.waiting, strict=True)]
    assert set(both) == {2}


@given(
    rows=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40), st.integers(0, 12)), min_size=1, max_size=12),
    blocks=st.integers(2, 24),
    step_tokens=st.integers(4, 32),
    decode_tokens=st.integers(1, 4),
    max_running=st.integers(1, 5),
    closed_loop=st.integers(0, 3),
)
def test_every_request_ends_and_every_token_is_accounted_for(
    rows, blocks, step_tokens, decode_tokens, max_running, closed_loop
):
    rows = sorted(rows)
    settings = {
        "step_tokens": step_tokens,
        "decode_tokens": decode_tokens,
        "max_running": max_running,
        "max_model_len": 48,
        "closed_loop": closed_loop,
    }
    engine = CountingEngine(blocks)
    _, recorder = run(engine, rows, **settings)
    assert engine.free_blocks == blocks
    assert not engine.rows
    assert len(recorder.requests) == len(rows)
    for index, (arrived, prompt, output) in enumerate(rows):
        record = recorder.requests[index]
        assert (record.arrived, record.prompt, record.output) == (arrived, prompt, output)
        assert (record.outcome == TOO_LONG) == (prompt + output > 48)
        assert record.outcome == NEVER_FITS or record.outcome in (FINISHED, TOO_LONG)
        if -(-(prompt + output) // 4) <= blocks and prompt + output <= 48:
            assert record.outcome == FINISHED
        if record.outcome == FINISHED:
            _check_tokens(engine.log, str(index), prompt, output, decode_tokens, record.preemptions)
    assert sum(recorder.steps.preemptions) == sum(record.preemptions for record in recorder.requests.values())
    assert max(recorder.steps.in_use, default=0) <= blocks
    _check_budget(engine.log, step_tokens, max_running)
    again = CountingEngine(blocks)
    _, repeated = run(again, rows, **settings)
    assert again.log == engine.log
    assert dataclasses.asdict(repeated.steps) == dataclasses.asdict(recorder.steps)


def _check_tokens(log, id, prompt, output, decode_tokens, preemptions):
    """All tokens but those of the last step are computed in the last stay, and each stay but the last was cut short."""
    extended = sum(entry[2] for entry in log if entry[:2] == ("extend", id))
    stays, computed = [], 0
    for entry in log:
        if entry[:2] == ("advance", id):
            computed += entry[2]
        elif entry[:2] == ("free", id):
            stays.append(computed)
            computed = 0
    assert len(stays) == preemptions + 1
    assert stays[-1] == prompt + extended
    assert 0 <= output - extended <= decode_tokens


def _check_budget(log, step_tokens, max_running):
    running, budget = set(), 0
    for name, *rest in log:
        if name == "step":
            budget = step_tokens
        elif name == "allocate" and rest[2]:
            running.add(rest[0])
            budget -= rest[1]
        elif name == "free":
            running.discard(rest[0])
        assert budget >= 0
        assert len(running) <= max_running


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_tokens", 0),
        ("decode_tokens", 0),
        ("max_running", 0),
        ("lookahead", -1),
        ("closed_loop", 1.5),
        ("decode_tokens", 9),
    ],
)
def test_impossible_schedules_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        Schedule(**{"step_tokens": 8, name: value})
