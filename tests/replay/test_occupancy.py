"""Blocks by group over time: which steps are sampled, and the counts in a replay that can be followed by hand."""

import numpy as np
import pytest

from hkv.dialects.vllm.schedule.run import VllmReplayedCache, cache_config
from hkv.replay.observed import MOST, OccupancyKind, Sampling
from hkv.replay.run import Timing, replay
from hkv.replay.schedule import Schedule
from hkv.replay.traces.reader import TraceRequest
from hkv.spec import spec_from_text


@pytest.mark.parametrize(("every", "steps"), [(1, 5), (1, 10 * MOST), (3, 1000), (7, 40 * MOST), (500, 499)])
def test_samples_are_evenly_spaced_and_few(every, steps):
    sampling = Sampling(every)
    for done in range(1, steps + 1):
        if sampling.due(done):
            sampling.add(done - 1, np.zeros((len(OccupancyKind), 1), np.int64))
    taken = [step for step, _ in sampling.samples]
    assert taken == list(range(sampling.every - 1, steps, sampling.every))
    assert len(taken) < MOST
    assert len(taken) >= min(MOST // 2 - 1, steps // every), "fewer than could be drawn"
    assert (sampling.taken() is None) == (steps < every)


def test_counts_of_two_requests():
    """A prompt of four blocks in two steps, its answer, and the same prompt again, which hits three blocks.

    The window reads one block back: its first block is given back in the second step. The last block of the second
    prompt is computed once more, and cached next to the first one.
    """
    schedule = Schedule(step_tokens=8, decode_tokens=2, max_running=2, max_model_len=64)
    specs = [spec_from_text(text) for text in ("full:4", "swa:4:4")]
    cache = VllmReplayedCache(cache_config(specs, 24, schedule))
    trace = [
        TraceRequest(line=line, timestamp=time, input_length=16, output_length=4, tokens=list(range(16)))
        for line, time in enumerate((0, 200), 1)
    ]
    outcome = replay(trace, cache, schedule, Timing(), engine="numpy", sampled=True)
    assert outcome.occupancy is not None
    assert {name: column.tolist() for name, column in outcome.occupancy.columns().items()} == {
        "step": [0, 1, 2, 4, 5],
        "held_0": [2, 4, 0, 4, 0],
        "cached_0": [2, 4, 4, 5, 5],
        "evictable_0": [0, 0, 4, 1, 5],
        "held_1": [2, 3, 0, 2, 0],
        "cached_1": [2, 4, 4, 5, 5],
        "evictable_1": [0, 1, 4, 3, 5],
    }
