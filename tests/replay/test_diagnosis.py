"""Blocks lacking beyond a hit: by a cache whose every block is told by hand, and through the reference engine."""

from hkv.dialects.vllm.schedule.diagnosis import Diagnosis, MissDiagnosis
from hkv.dialects.vllm.schedule.run import cache_config, keyed_engine
from hkv.oracle.engines import engine_factory
from hkv.replay.reasons import CACHING_OFF, HAD, NOT_SHARED, NOTHING, RETIRED
from hkv.replay.schedule import Schedule
from hkv.spec import spec_from_text
from tests.reference.build import allocation


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


def lacking(groups, cached, others, hit, asked, **options):
    told = Diagnosis(config(groups, **options), ToldCache(cached, others)).lacking(list(range(64)), hit, asked)
    return told[0], [each.reason for each in told[1]]


def keys(*ranges):
    return {key for first, last in ranges for key in range(first, last)}


def test_a_state_is_needed_where_the_hit_ends():
    passed = {0: "retired", **dict.fromkeys(range(2, 6), "retired")}
    assert lacking("full:4,mamba:4", [keys((0, 6)), {1}], [{}, passed], 8, 24) == (24, [HAD, RETIRED])
    told = lacking("full:4,mamba:4", [keys((0, 2)), {4}], [{2: "evicted", 3: "evicted", 4: "evicted"}, passed], 8, 20)
    assert told == (20, ["evicted", HAD])


def test_states_inside_blocks():
    """Blocks of 16 of a recurrent group among blocks of 4: a state inside a block that is known was not kept."""
    assert config("full:4,mamba:16").partial_hits
    told = lacking("full:4,mamba:16", [keys((0, 8)), set()], [{}, {3: "evicted"}], 0, 4)
    assert told == (4, [HAD, "not retained"])
    assert lacking("full:4,mamba:16", [keys((0, 8)), {5}], None, 24, 32) == (28, [HAD, "never seen"])


def test_a_chunk_boundary_needs_nothing_of_the_chunk_before():
    told = lacking(
        "full:4,chunked:4:16", [keys((0, 3)), set()], [{3: "evicted"}, dict.fromkeys(range(4), "evicted")], 0, 16
    )
    assert told == (16, ["evicted", HAD])


def test_groups_that_share_nothing_and_caches_that_are_off():
    told = lacking("full:4,opaque:4", [keys((0, 2)), set()], [{2: "evicted"}, {}], 8, 12)
    assert told == (12, ["evicted", NOT_SHARED])
    assert lacking("full:4,swa:4:8", [set(), set()], None, 0, 16, caching=False) == (0, [CACHING_OFF] * 2)


def test_the_reference_engine_tells():
    cache = config("full:4,swa:4:8")
    engine = keyed_engine("numpy", engine_factory("numpy"), cache)
    assert isinstance(engine, MissDiagnosis)
    diagnosis = Diagnosis(cache, engine)

    def serve(id, length, prefix, asked):
        prompt_keys = prefix + [100 * int(id) + i for i in range(16 - len(prefix))]
        engine.request_keyed(id, length, prompt_keys)
        hit = engine.lookup(id)
        told = diagnosis.lacking(prompt_keys, hit.hit, asked)[1]
        operation = allocation(id, length - hit.hit, hit.hit, must_fit=True, shared_prefix=hit.shared_prefix)
        assert engine.allocate(operation).blocks is not None
        engine.advance(id, length)
        engine.free(id)
        return hit.hit, [each.reason for each in told]

    prefix = list(range(7, 11))
    assert serve("1", 17, prefix, 0) == (0, [NOTHING, NOTHING])
    assert serve("2", 17, prefix, 16) == (16, [NOTHING, NOTHING])
    engine.evict([block for block in range(1, 100) if engine.manager.pool.primary[block] == (1, 8)])
    assert serve("4", 13, [*prefix[:2], 55, 56], 8)[1] == [HAD, "evicted"]
