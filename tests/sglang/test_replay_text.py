"""The text of a replay under SGLang's rules, run plainly: as the plain schedule over the engine's operations fares."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import BUGS
from hkv.dialects.sglang.plain import settings
from hkv.dialects.sglang.schedule import REPLAY, SGLangCompiledReplay
from hkv.dialects.sglang.scheduler import SGLangLoop
from hkv.errors import ConfigError
from hkv.oracle.engines import engine_factory
from hkv.replay.dispatches import incoming
from hkv.replay.lowered import OUTCOMES, RECORDED
from hkv.replay.schedule import Arrival, Recorder, Schedule
from reference.dialects.sglang.replay import SGLangReplay
from reference.replay import Live, Outcome, Phase, run
from tests.sglang.test_dialect import header
from tests.sglang.test_schedule import arrivals


def case(seed: int) -> tuple[structs.Header, Schedule, list[Arrival]]:
    """A cache of a few dozen pages, of one token or eight, with a window, states or neither, and sixty requests."""
    drawn = random.Random(seed)
    size, window, states = drawn.choice((1, 8)), drawn.choice((None, 20, 33)), drawn.random() < 0.3
    pages = drawn.randint(36, 150) * (8 if size == 1 else 1)
    given = header(pages, window, size, bugs=sorted(BUGS), tracked=states)
    if states:
        given = msgspec.structs.replace(
            given,
            groups=[*given.groups, {"kind": "mamba", "block_size": size}],
            num_blocks=[*given.num_blocks, drawn.randint(12, 40)],
        )
    schedule = Schedule(
        step_tokens=drawn.choice((48, 64, 200)),
        decode_tokens=drawn.choice((1, 2)),
        max_running=drawn.choice((8, 12, 30)),
        max_model_len=drawn.choice((120, 1000)),
        closed_loop=drawn.choice((0, 0, 6)),
    )
    coming = arrivals(60, seed)
    return given, schedule, [of_tokens(each) for each in coming] if size == 1 else coming


def of_tokens(arrival: Arrival) -> Arrival:
    """The same request with a key for each of its tokens."""
    given = arrival.keys()
    keys = [8 * key + place for key in given for place in range(8)]
    return dataclasses.replace(arrival, keys=lambda: keys[: arrival.prompt + arrival.output])


def plain(given: structs.Header, schedule: Schedule, coming: Sequence[Arrival]) -> SGLangReplay:
    """The text over plain objects, at the beginning."""
    config = structs.to_config(given)
    made = SGLangCompiledReplay(config, schedule, incoming(coming, schedule.max_model_len))
    static = {f"cache.{name}": np.int32(value) for name, value in settings(config).items()}
    return REPLAY.restored({**static, **made.resident})


def outcome(replay: SGLangReplay) -> dict[str, Any]:
    """Every request's result, every step, and the evictions."""
    assert replay.phase == Phase.DONE
    requests = replay.arrivals[1 : replay.count + 1]
    steps = [dict(vars(step)) for step in replay.steps[1 : replay.recorded + 1]]
    found = [
        {"outcome": OUTCOMES[Outcome(each.outcome)], **{name: getattr(each, name) for name in RECORDED}}
        for each in requests
    ]
    return {"requests": found, "steps": steps, "evictions": replay.cache.evictions, "end": replay.step}


@pytest.mark.parametrize("seed", range(8))
def test_it_fares_as_the_plain_schedule_does(seed: int) -> None:
    given, schedule, coming = case(seed)
    engine = engine_factory("numpy")(given)
    replay = plain(given, schedule, coming)
    pages = replay.rhythm.pages
    loop = SGLangLoop(engine, given.groups[0]["block_size"], schedule, coming, Recorder(pages + 1, None, lambda: None))
    end, recorder = loop.run(), loop.left()["recorder"]
    names = ("outcome", *RECORDED)
    requests = [{name: getattr(recorder.requests[each.index], name) for name in names} for each in coming]
    steps = [dict(zip(vars_of(recorder), row, strict=True)) for row in zip(*columns(recorder), strict=True)]
    run(replay)
    assert outcome(replay) == {"requests": requests, "steps": steps, "evictions": engine.evictions, "end": end}


def vars_of(recorder: Recorder) -> list[str]:
    return [field.name for field in dataclasses.fields(recorder.steps)]


def columns(recorder: Recorder) -> list[list[int]]:
    return [getattr(recorder.steps, name) for name in vars_of(recorder)]


@pytest.mark.parametrize("seed", range(4))
def test_tokens_that_are_passed_over_need_nothing(seed: int) -> None:
    """Asking the cache for every decoded token changes nothing."""
    given, schedule, coming = case(seed)
    passing, asking = (plain(given, schedule, coming) for _ in range(2))
    asked = 0

    class Asking(SGLangReplay):
        def needs(self, live: Live, new: int) -> bool:
            nonlocal asked
            asked += 1
            return True

    asking.__class__ = Asking
    for replay in (passing, asking):
        run(replay)
    assert asked > 0
    assert outcome(passing) == outcome(asking)


def test_states_for_no_request_are_refused_by_name() -> None:
    given = header(40, bugs=sorted(BUGS))
    given.groups.append({"kind": "mamba", "block_size": 1})
    given.num_blocks.append(1)
    with pytest.raises(ConfigError, match="states at least"):
        plain(given, Schedule(), arrivals(2, 0))
