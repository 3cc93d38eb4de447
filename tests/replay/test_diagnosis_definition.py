"""Lacking blocks against their definition: what `reads` says a query at the boundary needs."""

from hypothesis import event, given, settings
from hypothesis import strategies as st

from hkv.dialects.vllm.schedule.diagnosis import Diagnosis
from hkv.dialects.vllm.schedule.run import cache_config
from hkv.replay.reasons import HAD, NOTHING, RETIRED
from hkv.replay.schedule import Schedule
from hkv.spec import spec_from_text

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
    computed, told = Diagnosis(config, cache).lacking(list(range(64)), hit, asked)
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
