"""Replays under RTP-LLM's rules: the text lowered, beside the plain schedule over the reference; records and keys."""

import collections
import dataclasses
import json
import random

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hkv.dialects.rtp_llm.engines.numpy import VERDICTS
from hkv.dialects.rtp_llm.schedule import run as rtp_run
from hkv.dialects.rtp_llm.schedule.agreement import REASONS
from hkv.dialects.rtp_llm.schedule.compiled import REPLAY, RtpCompiledReplay
from hkv.errors import ConfigError
from hkv.replay import dispatches
from hkv.replay.agreement import Difference
from hkv.replay.lowered import program
from hkv.replay.run import default_engine
from hkv.spec import spec_from_text
from reference.replay import run as run_text
from tests.cli.commands import run
from tests.rtp_llm.test_replay import draw
from tests.slow.optimized.replay.test_compiled import large_copies

LOOPS, SEGMENTS = 130, 120
"""Most loops, and conditional segments, of a replay's program: call sites make compile time."""


def example_of(seed, tree=False):
    config, schedule, arrivals = draw(random.Random(seed))
    return dataclasses.replace(config, prefix_tree=tree), schedule, arrivals


def compiled(config, schedule, arrivals, *, caching=True):
    """A compiled replay that has run, and what it left."""
    prepared = dispatches.incoming(arrivals, schedule.max_model_len)
    running = RtpCompiledReplay(config, schedule, prepared, caching=caching)
    studied = rtp_run.RtpReplayedCache(config, caching=caching)
    return running, studied.ran(running, schedule, running.run(), 0.0)


@given(seed=st.integers(0, 1 << 30), caching=st.sampled_from((True, True, True, False)), tree=st.booleans())
@example(seed=3, caching=False, tree=False)
@settings(max_examples=60)
def test_decides_as_the_plain_schedule_does(seed, caching, tree):
    config, schedule, arrivals = example_of(seed, tree)
    running, outcome = compiled(config, schedule, arrivals, caching=caching)
    outcome.cache.verify(running, outcome, schedule, arrivals)


def test_the_traffic_meets_every_outcome():
    """Every verdict of admissions, refusals of growth, preemptions, both refusals for good, and all reasons but one."""
    seen, reasons = collections.Counter(), collections.Counter()
    for seed in range(30):
        running, outcome = compiled(*example_of(seed))
        records = outcome.recorder.requests.values()
        seen.update(record.outcome for record in records)
        seen.update({"preemptions": sum(record.preemptions for record in records), "evictions": running.evictions})
        seen.update({"hits": sum(record.hit for record in records), "duplicates": running.duplicates})
        for kind, counts in outcome.extra["verdicts"].items():
            seen.update({f"{kind} {name}": count for name, count in counts.items()})
        reasons.update(each.reason for record in records for each in record.miss_reasons)
    wanted = {"finished", "never fits", "preemptions", "evictions", "hits", "duplicates", "growth internal_error"}
    wanted |= {f"admission {name}" for name in VERDICTS}
    assert wanted <= {name for name, count in seen.items() if count}, seen
    assert set(reasons) >= set(REASONS) - {"never shared", "caching is off"}, reasons


@pytest.mark.parametrize("field", ["evictions", "duplicates", "cached_peak", "reasons", "verdicts", "order"])
def test_a_wrong_count_is_noticed(field):
    config, schedule, arrivals = example_of(2)
    running, outcome = compiled(config, schedule, arrivals)
    if field == "cached_peak":
        outcome.extra["blocks_cached_peak"] += 1
    elif field == "reasons":
        outcome.recorder.requests[0].miss_reasons = ()
    elif field == "verdicts":
        outcome.extra["verdicts"]["growth"]["granted"] += 1
    elif field == "duplicates":
        outcome.extra["blocks_not_cached_twice"] += 1
    elif field == "order":
        state = running.state()
        running.state = lambda: msgspec.structs.replace(state, cached=state.cached[1:] + state.cached[:1])
    else:
        outcome = dataclasses.replace(outcome, evictions=outcome.evictions + 1)
    with pytest.raises(Difference):
        outcome.cache.verify(running, outcome, schedule, arrivals)


@pytest.mark.parametrize("tree", [False, True], ids=["order of use", "tree"])
def test_no_array_is_copied(tree):
    config, schedule, arrivals = example_of(0, tree)
    replay = RtpCompiledReplay(config, schedule, dispatches.incoming(arrivals, schedule.max_model_len))
    text = program(REPLAY, run_text, replay._known).lower(replay.resident).compile().as_text()
    assert large_copies(text, 64) == []
    assert text.count(" while(") <= LOOPS
    assert text.count(" conditional(") <= SEGMENTS


def test_what_the_compiled_schedule_has_not_is_refused():
    config, _, _ = example_of(0)
    tree = dataclasses.replace(config, prefix_tree=True)
    assert default_engine(rtp_run.RtpReplayedCache(tree)) == ("jax", "")
    assert default_engine(rtp_run.RtpReplayedCache(config)) == ("jax", "")
    dealt = dataclasses.replace(rtp_run.rtp_cache("rtp-llm/single", [spec_from_text("full:4")], [20]), cp_size=2)
    with pytest.raises(ConfigError, match="cp_size"):
        rtp_run.RtpReplayedCache(dealt).require_compiled()


def test_the_command_compiles_by_default_and_checks(monkeypatch, capsys, trace):
    path = trace((0, [0, 1], 8, 4), (1, [0, 1], 8, 1), (9, [0, 1], 8, 1))
    groups = ("--dialect", "rtp-llm/single", "--groups", "full:2", "--num-blocks", "40", "--max-running", "4")
    code, out, err = run(monkeypatch, capsys, "replay", path, "--tokens-per-id", "4", *groups, "--check", "--json", "-")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["options"]["engine"], found["requests"]["hit"]) == ("jax", [0, 0, 6])
    assert (found["totals"]["blocks_cached_peak"], found["totals"]["blocks_not_cached_twice"]) == (5, 5)
    more = ("--prefix-tree", "--check", "--json", "-")
    code, out, err = run(monkeypatch, capsys, "replay", path, "--tokens-per-id", "4", *groups, *more)
    assert (code, err) == (0, "")
    assert json.loads(out)["options"]["engine"] == "jax"
