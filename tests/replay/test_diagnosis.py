"""Blocks lacking beyond a hit: by a cache whose every block is told by hand, and through the reference engine."""

import pytest

from hkv.dialects.vllm.log.structs import AllocateOp
from hkv.dialects.vllm.schedule.diagnosis import Diagnosis, MissDiagnosis
from hkv.dialects.vllm.schedule.run import cache_config, keyed_engine
from hkv.oracle.engines import engine_factory
from hkv.replay.reasons import CACHING_OFF, HAD, NOT_SHARED, NOTHING, RETIRED
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


def lacking(groups, cached, others, hit, asked, **options):
    told = Diagnosis(config(groups, **options), ToldCache(cached, others)).lacking(list(range(64)), hit, asked)
    return told[0], [each.reason for each in told[1]]


def keys(*ranges):
    return {key for first, last in ranges for key in range(first, last)}


def test_nothing_was_asked():
    assert lacking("full:4,swa:4:8", [keys((0, 4)), keys((0, 4))], None, 16, 16) == (16, [NOTHING] * 2)


def test_the_prefix_is_new():
    assert lacking("full:4,swa:4:8", [keys((0, 2)), keys((0, 2))], None, 8, 28) == (8, [NOTHING] * 2)


@pytest.mark.parametrize(("absence", "reason"), [("evicted", "evicted"), ("retired", RETIRED), ("not retained",) * 2])
def test_a_window_lacks_a_block(absence, reason):
    cached = [keys((0, 6)), keys((0, 2), (3, 4))]
    others = [{}, {2: absence, 4: absence, 5: absence}]
    assert lacking("full:4,swa:4:8", cached, others, 8, 24) == (24, [HAD, reason])


def test_every_group_that_lacks_a_block_is_named_in_whatever_order():
    """A boundary further on is asked about, of which one group lacks all, and the other some."""
    told = keys((0, 1)), keys((3, 5))
    others = dict.fromkeys(range(1, 6), "evicted"), {**dict.fromkeys(range(3), "not retained"), 5: "evicted"}
    assert lacking("full:4,swa:4:8", told, others, 4, 20) == (20, ["evicted", HAD])
    assert lacking("full:4,swa:4:8", told, others, 4, 24) == (24, ["evicted", "evicted"])
    assert lacking("swa:4:8,full:4", told[::-1], others[::-1], 4, 20) == (20, [HAD, "evicted"])


def test_a_window_names_the_last_block_it_lacks_and_a_full_group_the_first():
    others = {0: "evicted", 1: "not retained"}
    told = lacking("full:4,swa:8:16", [set(), set()], [others, {1: "retired"}], 0, 8)
    assert told == (8, ["evicted", RETIRED])


def test_what_some_group_has_not_computed_is_not_asked_about():
    cached = [keys((0, 6)), keys((0, 2))]
    assert lacking("full:4,swa:4:8", cached, [{}, dict.fromkeys((2, 3), "retired")], 8, 24) == (16, [HAD, RETIRED])


def test_all_had_it_and_the_lookup_did_not_find_it():
    assert lacking("full:4,swa:4:8", [keys((0, 6)), keys((0, 6))], None, 8, 24) == (24, [HAD] * 2)


def test_a_draft_needs_its_proof_block():
    cached = [keys((0, 4))] * 2
    assert lacking("full:4,swa:4:8", cached, [{4: "evicted"}, {}], 12, 16, eagle=(0,)) == (16, ["evicted", HAD])


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
        operation = AllocateOp(
            id=id, new=length - hit.hit, hit=hit.hit, lookahead=0, external=0, delay=False, must_fit=True, reserved=0,
            in_flight=0, shared_prefix=hit.shared_prefix,
        )  # fmt: skip
        assert engine.allocate(operation).blocks is not None
        engine.advance(id, length)
        engine.free(id)
        return hit.hit, [each.reason for each in told]

    prefix = list(range(7, 11))
    assert serve("1", 17, prefix, 0) == (0, [NOTHING, NOTHING])
    assert serve("2", 17, prefix, 16) == (16, [NOTHING, NOTHING])
    engine.evict([block for block in range(1, 100) if engine.manager.pool.primary[block] == (1, 8)])
    assert serve("4", 13, [*prefix[:2], 55, 56], 8)[1] == [HAD, "evicted"]
