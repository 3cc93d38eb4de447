"""Reasons against their definition: every boundary tried, with what `reads` says a query there needs."""

from hypothesis import event, given, settings
from hypothesis import strategies as st

from hkv.dialects.vllm.schedule.diagnosis import FELL_SHORT, Diagnosis
from hkv.dialects.vllm.schedule.run import cache_config
from hkv.replay.reasons import RETIRED, WAITING, WHOLE_PROMPT
from hkv.replay.schedule import Schedule
from hkv.spec import spec_from_text

NAMES = {"never seen": "never seen", "evicted": "evicted", "retired": RETIRED, "not retained": "not retained"}


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


def fits(config, boundary, tokens):
    """True if a hit may end there: before the last token, with room for a draft's proof in whole hash blocks."""
    proofs = [config.block_size(g) for g in config.eagle_group_ids if not config.topology.specs[g].snapshot]
    whole = tokens // config.hash_block_size * config.hash_block_size
    return boundary < tokens and all(boundary + proof <= whole for proof in proofs)


def named(lacking, reads_all, sinks):
    """The block that the reason is about: the first of the sinks', or where all is read; else the last."""
    return lacking[0] if reads_all or lacking[0] < sinks else lacking[-1]


def by_definition(config, cache, tokens, hit):
    groups = range(len(config.topology.groups))
    grid = config.scheduler_block_size if len(groups) > 1 else config.block_size(0)
    whole = tokens // config.hash_block_size * config.hash_block_size
    proofs = [config.block_size(g) * (g in config.eagle_group_ids) for g in groups]
    further = [n for n in range(hit + 1, tokens) if n % grid == 0 and all(n + proof <= whole for proof in proofs)]
    if not further:
        return [WHOLE_PROMPT for _ in groups]
    can = [{n for n in further if all(cache.block(g, i) == "cached" for i in needed(config, g, n))} for g in groups]
    if set.intersection(*can):
        return [FELL_SHORT for _ in groups]
    told = []
    for g in groups:
        lacking = [i for i in needed(config, g, further[0]) if cache.block(g, i) != "cached"]
        spec, size = config.topology.specs[g], config.block_size(g)
        reads_all = spec.readable(further[0]).start == 0
        told.append(WAITING if can[g] else NAMES[cache.block(g, named(lacking, reads_all, -(-spec.sinks // size)))])
    return told


STATE = st.sampled_from(["cached"] * 6 + ["evicted", "retired", "not retained"])


def reasons_are_what_they_say(text, eagle, data):
    """Draws what a cache of these groups holds, and a hit, and compares."""
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
    told = Diagnosis(config, cache).reasons(list(range(64)), tokens, hit)
    assert told == by_definition(config, cache, tokens, hit)
    for group, search in enumerate(Diagnosis(config, cache).searches(list(range(64)), tokens, tokens, hit)):
        top = max((n for n in boundaries if n > hit and fits(config, n, tokens)), default=hit)
        further = [n for n in boundaries if hit < n <= top]
        lacks = {n: [cache.block(group, i) for i in needed(config, group, n)] for n in further}
        can = [n for n in further if set(lacks[n]) <= {"cached"}]
        assert search.resumes == max(can, default=hit)
        size, proof = config.block_size(group), config.block_size(group) * (len(needed(config, group, 0)) > 0)
        whole = [
            n
            for n in further
            if all(cache.block(group, i) != "never seen" for i in range(hit // size, (n + proof) // size))
        ]
        assert search.computed == (max(whole, default=hit) if further else hit)
        ends = lacks.get(search.resumes + grid)
        assert search.reason == WHOLE_PROMPT if ends is None else search.reason in {NAMES.get(why) for why in ends}
    for reason in set(told):
        event(reason)


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
