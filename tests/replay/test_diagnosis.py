"""Blocks missing beyond a hit: told by hand, through the reference engine, and by definition; known boundaries."""

import threading

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hkv.dialects.vllm.schedule.run import cache_config
from hkv.dialects.vllm.schedule.schedule import Diagnosis
from hkv.errors import EngineFailure
from hkv.replay.observed import HAD, NOTHING, RETIRED, Boundaries
from hkv.replay.schedule import Schedule
from hkv.spec import spec_from_text


class ToldCache:
    """`cached` per group: keys that are there; `others` per group: what became of the rest."""

    def __init__(self, cached, others=None):
        self.cached = cached
        self.others = others or [{} for _ in cached]

    def absence(self, group, key):
        return "cached" if key in self.cached[group] else self.others[group].get(key, "never seen")

    def eviction(self, group, key):
        return None


def config(groups, **options):
    specs = [spec_from_text(text) for text in groups.split(",")]
    return cache_config(specs, 100, Schedule(step_tokens=64, max_model_len=256), **options)


def reasons(groups, cached, others, hit, asked, **options):
    told = Diagnosis(config(groups, **options), ToldCache(cached, others)).miss_reasons(list(range(64)), hit, asked)
    return told[0], [each.reason for each in told[1]]


def keys(*ranges):
    return {key for first, last in ranges for key in range(first, last)}


def test_a_state_is_needed_where_the_hit_ends():
    passed = {0: "retired", **dict.fromkeys(range(2, 6), "retired")}
    assert reasons("full:4,mamba:4", [keys((0, 6)), {1}], [{}, passed], 8, 24) == (24, [HAD, RETIRED])
    told = reasons("full:4,mamba:4", [keys((0, 2)), {4}], [{2: "evicted", 3: "evicted", 4: "evicted"}, passed], 8, 20)
    assert told == (20, ["evicted", HAD])


def test_states_inside_blocks():
    """Blocks of 16 of a recurrent group among blocks of 4: a state inside a block that is known was not kept."""
    assert config("full:4,mamba:16").partial_hits
    told = reasons("full:4,mamba:16", [keys((0, 8)), set()], [{}, {3: "evicted"}], 0, 4)
    assert told == (4, [HAD, "not retained"])
    assert reasons("full:4,mamba:16", [keys((0, 8)), {5}], None, 24, 32) == (28, [HAD, "never seen"])


NAMES = {
    "cached": HAD,
    "never seen": "never seen",
    "evicted": "evicted",
    "retired": RETIRED,
    "not retained": "not retained",
}


class RandomCache:
    """Blocks by group and index; beyond its list a group has never seen anything."""

    def __init__(self, config, states):
        self.config, self.states = config, states

    def block(self, group, index):
        return self.states[group][index] if index < len(self.states[group]) else "never seen"

    def eviction(self, group, key):
        return None

    def absence(self, group, key):
        whole, rest = divmod((key + 1) * self.config.hash_block_size, self.config.block_size(group))
        assert not rest
        return self.block(group, whole - 1)


def needed(config, group, boundary):
    """Indices of the blocks that hold what the query at `boundary` reads, and of a draft's proof."""
    spec, size = config.topology.specs[group], config.block_size(group)
    indices = sorted({position // size for positions in spec.reads(boundary) for position in positions})
    if group in config.eagle_group_ids and not spec.snapshot:
        indices.append(boundary // size)
    return indices


def named(lacking, reads_all, sinks):
    """The block that the reason is about: the first of the sinks', or where all is read; else the last."""
    return lacking[0] if reads_all or lacking[0] < sinks else lacking[-1]


def whole(config, cache, group, hit, boundary):
    """States of the whole blocks of a group between a hit and a boundary, a draft's proof among them."""
    size = config.block_size(group)
    proof = size * (group in config.eagle_group_ids and not config.topology.specs[group].snapshot)
    return [cache.block(group, index) for index in range(hit // size, (boundary + proof) // size)]


def by_definition(config, cache, hit, asked, boundaries):
    """The furthest boundary whose blocks somebody computed in every group, and what each group lacks there."""
    groups = range(len(config.topology.groups))
    further = [n for n in boundaries if hit < n <= asked]
    seen = [
        [n for n in further if all(state != "never seen" for state in whole(config, cache, g, hit, n))] for g in groups
    ]
    boundary = min((max(each, default=hit) for each in seen), default=hit)
    if boundary == hit:
        return hit, [NOTHING for _ in groups]
    told = []
    for g in groups:
        lacking = [i for i in needed(config, g, boundary) if cache.block(g, i) != "cached"]
        spec, size = config.topology.specs[g], config.block_size(g)
        reads_all = spec.readable(boundary).start == 0
        state = cache.block(g, named(lacking, reads_all, -(-spec.sinks // size))) if lacking else "cached"
        told.append(NAMES[state])
    return boundary, told


STATE = st.sampled_from(["cached"] * 6 + ["evicted", "retired", "not retained"])


def reasons_are_what_they_say(text, eagle, data):
    """Draws what a cache of these groups holds, a hit, and a boundary that is asked about, and compares."""
    specs = [spec_from_text(part) for part in text.split(",")]
    config = cache_config(specs, 100, Schedule(max_model_len=64, step_tokens=16), eagle=eagle)
    tokens = data.draw(st.integers(2, 48), label="tokens")
    states = [data.draw(st.lists(STATE, max_size=48 // size), label="states") for size in config.block_sizes]
    cache = RandomCache(config, states)
    grid = config.scheduler_block_size if len(specs) > 1 else config.block_size(0)
    boundaries = [0, *range(grid, tokens, grid)]
    possible = [
        n
        for n in boundaries
        if not n or all(cache.block(g, i) == "cached" for g in range(len(specs)) for i in needed(config, g, n))
    ]
    hit = data.draw(st.sampled_from(possible), label="hit")
    asked = data.draw(st.sampled_from(boundaries), label="asked")
    computed, told = Diagnosis(config, cache).miss_reasons(list(range(64)), hit, asked)
    assert (computed, [each.reason for each in told]) == by_definition(config, cache, hit, asked, boundaries)
    for each in told:
        event(each.reason)


@settings(max_examples=500)
@given(data=st.data())
def test_reasons_are_what_they_say(data):
    text, eagle = data.draw(
        st.sampled_from(
            [
                ("full:2", None),
                ("full:2,swa:2:3", None),
                ("full:2,swa:2:6,swa:2:12", None),
                ("full:4,swa:2:5", None),
                ("full:8,swa:2:5", None),
                ("full:8,swa:2:3,swa:4:9", None),
                ("full:2,chunked:2:8", None),
                ("swa:2:4,swa:2:9", None),
                ("full:2,swa:2:6", ()),
                ("full:2,swa:2:6", (1,)),
                ("full:4,swa:2:5", (0,)),
            ]
        )
    )
    reasons_are_what_they_say(text, eagle, data)


def test_hits_become_known_in_order_and_final():
    found, taken_up = Boundaries(4), threading.Semaphore(0)

    def work():
        found.tell(np.array([16, 0, 99, 99]), 2)
        taken_up.acquire()
        found.tell(np.array([16, 0, 32, 99]), 3)
        taken_up.acquire()
        found.hits[:] = [16, 0, 32, 48]
        return "the replay"

    found.begin(work)
    assert found.known(lambda count: count > 0) == 2
    assert found.hits.tolist() == [16, 0, 0, 0]
    taken_up.release()
    assert found.known(lambda count: count > 2) == 3
    assert found.hits.tolist() == [16, 0, 32, 0]
    taken_up.release()
    assert found.known(lambda _: False) == 4, "all are known once it ended, however many it told"
    assert found.found() == "the replay"


def test_a_replay_that_fails_fails_where_somebody_waits():
    found = Boundaries(4)

    def work():
        found.tell(np.zeros(4, int), 1)
        raise EngineFailure("operation", "refused", "one that is not")

    found.begin(work)
    for wait in (lambda: found.known(lambda count: count > 1), found.found):
        with pytest.raises(EngineFailure, match="refused"):
            wait()
