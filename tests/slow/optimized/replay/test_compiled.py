"""The compiled schedule against the plain one over NumPy: every block, record, reason, and the queue left."""

import dataclasses
import random
import re
import time

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.dialects.vllm.schedule import compiled, run
from hkv.dialects.vllm.schedule.schedule import REASONS, hit_units
from hkv.errors import ConfigError, EngineFailure
from hkv.oracle.engines import engine_factory
from hkv.replay import dispatches
from hkv.replay.agreement import Difference, compare_records
from hkv.replay.dispatches import Sizes
from hkv.replay.observed import Boundaries, OccupancyKind, Sampling
from hkv.replay.run import default_engine
from hkv.replay.schedule import Arrival, Schedule
from hkv.spec import Mamba, spec_from_text
from hkv.state.state import Buckets

ROOM = 1 << 14
STEPS = 64
SIZES = {
    parts: Sizes(Buckets(blocks=256, requests=9, groups=4, row=64, chain=64, keys=4096, parts=parts), 64, 4096)
    for parts in (0, 7)
}
"""Two sets of sizes: with and without keys that end inside a block. All examples share their executables."""

GROUPS = (
    ("full:4", 20, 60),
    ("full:4,swa:4:32,swa:4:8", 40, 130),
    ("full:8,swa:4:20", 40, 100),
    ("full:4,chunked:4:32", 40, 130),
    ("swa:4:12,swa:4:30", 20, 60),
    ("full:12,swa:4:20", 40, 100),
    ("mla:8,swa:8:1", 30, 80),
    ("swa:4:1", 20, 60),
    ("full:4,mamba:4", 30, 90),
    ("mamba:4", 20, 60),
    ("full:4,mamba:16", 30, 90),
    ("full:4,swa:4:20,mamba:16", 40, 130),
    ("full:4,swa:8:40,mamba:8", 40, 130),
    ("full:4,mamba:8:2", 30, 90),
    ("full:4,mamba:16:1:1:8", 30, 90),
)
"""Groups, and pools from one in which little fits to one in which most does.

Of Mamba the states for drafts, those inside chunks, and their alignment follow the block (`specs_of`).
"""

NAMES = ("jax", "numpy")


def specs_of(text):
    return [
        recurrent(part) if part.count(":") > 1 and "mamba" in part else spec_from_text(part) for part in text.split(",")
    ]


def recurrent(text):
    block, drafts, inside, alignment = (*map(int, text.split(":")[1:]), 0, 0)[:4]
    return Mamba(
        block_size=block,
        num_speculative_blocks=drafts,
        num_prefill_checkpoint_blocks=inside,
        prefill_checkpoint_alignment=alignment or None,
    )


def cache(text, num_blocks, schedule, **options):
    return run.cache_config(specs_of(text), num_blocks, schedule, **options)


def random_arrivals(seed, config, schedule):
    """Forty requests that share prefixes, some too long, in bursts."""
    source = random.Random(seed)
    size, step, arrivals, prompts, fresh = config.hash_block_size, 0, [], [[]], 0
    served = set()
    for index in range(source.randint(1, 40)):
        step += source.choice((0, 0, 0, 1, 5, 40))
        old = source.choice(prompts)
        prompt = old[: source.randint(0, len(old))]
        while len(prompt) < source.randint(0, 200 // size):
            prompt.append(fresh)
            fresh += 1
        tokens = max(1, len(prompt) * size + source.randint(0, size - 1))
        output = source.choice((0, 1, 3, 20, 60))
        keys = list(prompt)
        while len(keys) < (tokens + output) // size:
            keys.append(fresh)
            fresh += 1
        keys = keys[: (tokens + output) // size]
        prompts.append(keys)
        known = next((place for place, key in enumerate(keys) if key not in served), len(keys))
        seen = min(known * size, tokens)
        asked = int(hit_units(config).boundaries(tokens, seen)[-1])
        arrivals.append(Arrival(index, step, tokens, output, lambda keys=keys: keys, seen, asked))
        if tokens + output <= schedule.max_model_len:
            served.update(keys)
    return arrivals


def sizes_for(config):
    return SIZES[
        7 if any(config.block_size(g) > config.hash_block_size for g in range(len(config.topology.groups))) else 0
    ]


def compiled_replay(config, schedule, arrivals, **more):
    """A compiled replay that has not run, with room for ids and steps that most examples share."""
    prepared, sizes = dispatches.incoming(arrivals, schedule.max_model_len), sizes_for(config)
    return compiled.CompiledReplay(config, schedule, prepared, **{"sizes": sizes, "ids": ROOM, "steps": STEPS, **more})


def both(config, schedule, arrivals):
    """Replays on both, compares everything as it goes, every group's blocks among it, and returns the compiled one."""
    sampling, studied = Sampling(1), run.VllmReplayedCache(config)
    studied.sampling = sampling.every
    mine = compiled_replay(config, schedule, arrivals, sampling=sampling)
    steps = mine.run()
    outcome = studied.ran(mine, schedule, steps, 0.0)
    studied.verify(mine, outcome, schedule, arrivals)
    silent = compiled_replay(config, schedule, arrivals, diagnose=False)
    assert silent.run() == steps
    assert np.array_equal(np.concatenate(silent.ids), np.concatenate(mine.ids)), "notes for reasons change blocks"
    assert silent.free_queue() == mine.free_queue()
    if not schedule.closed_loop:
        unaware = [dataclasses.replace(arrival, asked=0) for arrival in arrivals]
        waiting = compiled_replay(config, schedule, unaware)
        assert waiting.run(asks=told_in_pieces([arrival.asked for arrival in arrivals])) == steps
        assert np.array_equal(waiting.resident.request_results, mine.resident.request_results), (
            "boundaries came too late"
        )
    return outcome


def told_in_pieces(hits):
    """Boundaries of another replay that become known one by one, each a moment after the one before was taken up."""
    found = Boundaries(len(hits))

    def work():
        for known in range(0, len(hits), 3):
            found.tell(np.array(hits), known)
            time.sleep(0.001)
        found.tell(np.array(hits), len(hits))
        return hits

    found.begin(work)
    return found


@st.composite
def replays(draw):
    text, least, most = draw(st.sampled_from(GROUPS))
    schedule = Schedule(
        step_tokens=draw(st.sampled_from((4, 7, 24, 64, 300))),
        decode_tokens=draw(st.integers(1, 4)),
        max_running=draw(st.integers(1, 8)),
        lookahead=draw(st.sampled_from((0, 0, 1, 5))),
        max_model_len=draw(st.sampled_from((100, 200, 240))),
        closed_loop=draw(st.sampled_from((0, 0, 1, 3, 12))),
    )
    groups = range(text.count(",") + 1)
    chunked = "chunked" in text
    eagle = None if chunked else draw(st.sampled_from([None, None, (), *((group,) for group in groups)]))
    caching, num_blocks = draw(st.integers(0, 5)) > 0, draw(st.integers(least, most))
    config = cache(text, num_blocks, schedule, caching=caching, eagle=eagle)
    multiple = draw(st.sampled_from((None, None, 0, 1, 2, 3)))
    if multiple == 0 or (multiple and caching and ("swa" in text or "mamba" in text)):
        config = dataclasses.replace(config, retention_interval=multiple * config.scheduler_block_size)
    return config, schedule, random_arrivals(draw(st.integers(0, 1 << 30)), config, schedule)


@pytest.fixture(scope="module")
def compiled_before():
    """Number of executables that other modules of this process left: a checked replay may have had the same room."""
    return compiled.program(ROOM).compilations()


@given(example=replays())
@settings(max_examples=100)
def test_decides_as_the_plain_schedule_does(compiled_before, example):
    both(*example)
    assert compiled.program(ROOM).compilations() - compiled_before <= len(SIZES), "an example was compiled for itself"


def test_the_traffic_meets_every_outcome():
    """Preemptions, postponements, both refusals, evictions, hits, seven of the reasons, blocks of every kind."""
    seen, reasons = {"preemptions": 0, "put_off": 0, "evictions": 0, "hits": 0}, set()
    outcomes = set()
    for seed in range(2 * len(GROUPS)):
        text, least, most = GROUPS[seed % len(GROUPS)]
        schedule = Schedule(
            step_tokens=64, decode_tokens=1 + seed % 2, max_running=8, max_model_len=110 + 65 * (seed % 3)
        )
        config = cache(
            text, least if seed % 3 else most, schedule, retention_interval=0 if seed >= len(GROUPS) else None
        )
        outcome = both(config, schedule, random_arrivals(seed, config, schedule))
        records = outcome.recorder.requests.values()
        outcomes |= {record.outcome for record in records}
        seen["preemptions"] += sum(record.preemptions for record in records)
        seen["hits"] += sum(record.hit for record in records)
        seen["put_off"] += sum(outcome.recorder.steps.put_off)
        seen["evictions"] += outcome.evictions
        for kind in OccupancyKind:
            seen[kind] = seen.get(kind, 0) + int(outcome.occupancy.blocks[kind].sum())
        reasons |= {each.reason for record in records for each in record.miss_reasons}
    assert all(seen.values()), seen
    assert outcomes == {"finished", "never fits", "too long"}
    assert reasons >= set(REASONS) - {"never shared", "caching is off"}, reasons


def test_a_wrong_block_is_named():
    schedule = Schedule(step_tokens=64, max_running=8, max_model_len=200)
    config = cache("full:4", 60, schedule)
    arrivals = random_arrivals(3, config, schedule)
    mine = compiled_replay(config, schedule, arrivals)
    mine.run()
    ids = np.concatenate(mine.ids)
    ids[len(ids) // 2] += 1
    reference = run.VllmReplayedCache(config).engine("numpy", engine_factory("numpy"))
    compared = run.ComparedEngine(reference, ids, NAMES)
    with pytest.raises(Difference, match="blocks differs"):
        run.VllmReplayedCache(config).plain(schedule, arrivals, compared, reference, lambda: None)


@pytest.mark.parametrize("field", ["step_tokens", "decode_tokens", "max_running"])
def test_a_wrong_number_is_noticed(field):
    """The comparison fails when the compiled side follows another schedule."""
    schedule = Schedule(step_tokens=64, decode_tokens=2, max_running=3, max_model_len=200)
    config = cache("full:4,swa:4:32,swa:4:8", 130, schedule)
    arrivals = random_arrivals(5, config, schedule)
    mine = compiled_replay(config, dataclasses.replace(schedule, **{field: getattr(schedule, field) - 1}), arrivals)
    mine.run()
    engine = run.VllmReplayedCache(config).engine("numpy", engine_factory("numpy"))
    plain = run.VllmReplayedCache(config).plain(schedule, arrivals, engine, engine, lambda: None)
    with pytest.raises(Difference):
        compare_records(mine.recorder(), plain.recorder, NAMES)


def test_progress_is_told_between_dispatches():
    schedule = Schedule(step_tokens=64, max_running=8, max_model_len=240)
    config = cache("full:4", 60, schedule)
    arrivals = random_arrivals(1, config, schedule)
    mine = compiled_replay(config, schedule, arrivals)
    told = []
    mine.run(lambda: told.append(None))
    assert len(told) == len(arrivals)
    assert len(mine.ids) > 1, "one dispatch only"


def test_nothing_of_a_pools_size_is_copied_in_a_step():
    buckets = Buckets(blocks=4096, requests=9, groups=4, row=64, chain=64, keys=8192)
    schedule = Schedule(step_tokens=64, max_running=8, max_model_len=240)
    config = cache("full:4,swa:4:32", 4000, schedule)
    mine = compiled_replay(
        config, schedule, random_arrivals(1, config, schedule), sizes=Sizes(buckets, 64, 4096), ids=0
    )
    lowered = compiled.program(0).lower(mine._parameters, mine._inputs, mine.resident)
    assert large_copies(lowered.compile().as_text(), 1024) == []


def large_copies(text, size):
    """Instructions of optimised HLO that copy at least so many integers."""
    found = []
    for line in text.splitlines():
        match = re.search(r"= \w+\[([\d,]*)\][^=]* copy(?:-start)?\(", line)
        if match and np.prod([int(n) for n in match[1].split(",") if n] or [1]) >= size:
            found.append(line.strip())
    return found


def test_a_copy_would_be_found():
    def doubled(x):
        return jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1][::-1] + c[1].at[3].set(c[0])), (0, x))

    text = jax.jit(doubled).lower(jax.ShapeDtypeStruct((5000,), "int32")).compile().as_text()
    assert large_copies(text, 1024)


def test_arrivals_that_cannot_be_counted_are_refused():
    late = Arrival(0, dispatches.LATEST, 4, 1, lambda: [])
    with pytest.raises(ConfigError, match="step-ms"):
        dispatches.incoming([late], 100)


def test_the_traffic_meets_hits_inside_blocks():
    """Copies of states that a hit ends in and of states that a request left behind, in every step that owes some."""
    for text in ("full:4,mamba:16", "full:4,swa:4:20,mamba:16", "full:4,mamba:16:1:1:8"):
        inside = 0
        for seed in range(6):
            schedule = Schedule(step_tokens=24, decode_tokens=2, max_running=8, max_model_len=240)
            config = cache(text, 120, schedule)
            assert config.partial_hits
            outcome = both(config, schedule, random_arrivals(seed, config, schedule))
            block = max(config.block_size(group) for group in range(len(config.topology.groups)))
            inside += sum(record.hit % block > 0 for record in outcome.recorder.requests.values())
        assert inside, text


def inside_blocks():
    """The same, for planted defects: a difference is a failure of the test."""
    try:
        test_the_traffic_meets_hits_inside_blocks()
    except (Difference, EngineFailure) as error:
        raise AssertionError(str(error)) from error


def test_what_the_compiled_cache_has_not_is_refused():
    schedule = Schedule(step_tokens=64, max_running=8, max_model_len=240)
    config = cache("full:4,chunked:4:32", 100, schedule, eagle=())
    with pytest.raises(ConfigError, match=r"groups\[1\].eagle"):
        run.VllmReplayedCache(config).require_compiled()
    assert default_engine(run.VllmReplayedCache(config))[0] == "numpy"
