"""Reasons why hits ended: by a cache whose every block is told by hand, and through the reference engine."""

import pytest

from hkv.dialects.vllm.log.structs import AllocateOp
from hkv.dialects.vllm.schedule.diagnosis import FELL_SHORT, Diagnosis, MissDiagnosis
from hkv.dialects.vllm.schedule.run import cache_config, keyed_engine
from hkv.replay.reasons import CACHING_OFF, NOT_SHARED, RETIRED, WAITING, WHOLE_PROMPT
from hkv.replay.schedule import Schedule
from hkv.spec import spec_from_text


class ToldCache:
    """`cached` per group: keys that are there; `others` per group: what became of the rest."""

    def __init__(self, cached, others=None):
        self.cached = cached
        self.others = others or [{} for _ in cached]

    def absence(self, group, key):
        return "cached" if key in self.cached[group] else self.others[group].get(key, "never seen")


def config(groups, **options):
    specs = [spec_from_text(text) for text in groups.split(",")]
    return cache_config(specs, 100, Schedule(step_tokens=64, max_model_len=256), **options)


def reasons(groups, cached, others, tokens, hit, **options):
    return Diagnosis(config(groups, **options), ToldCache(cached, others)).reasons(list(range(64)), tokens, hit)


def keys(*ranges):
    return {key for first, last in ranges for key in range(first, last)}


def test_nothing_was_missing():
    assert reasons("full:4,swa:4:8", [keys((0, 4)), keys((0, 4))], None, 17, 16) == [WHOLE_PROMPT] * 2
    assert reasons("full:4,swa:4:8", [keys((0, 4)), keys((0, 4))], None, 16, 12) == [WHOLE_PROMPT] * 2
    assert reasons("full:4,swa:4:8", [set(), set()], None, 4, 0) == [WHOLE_PROMPT] * 2


def test_the_prefix_is_new():
    assert reasons("full:4,swa:4:8", [keys((0, 2)), keys((0, 2))], None, 30, 8) == ["never seen"] * 2


@pytest.mark.parametrize(
    ("absence", "reason"),
    [("evicted", "evicted"), ("retired", RETIRED), ("not retained", "not retained"), ("never seen", "never seen")],
)
def test_a_window_that_lacks_a_block_holds_up_the_full_group(absence, reason):
    cached = [keys((0, 6)), keys((0, 2), (3, 4))]
    others = [{}, {2: absence, 4: absence, 5: absence}]
    assert reasons("full:4,swa:4:8", cached, others, 30, 8) == [WAITING, reason]


def test_a_window_further_on_waits_for_the_full_group():
    cached = [keys((0, 1)), keys((3, 6))]
    others = [dict.fromkeys(range(1, 6), "evicted"), dict.fromkeys(range(3), "evicted")]
    assert reasons("full:4,swa:4:8", cached, others, 30, 4) == ["evicted", WAITING]


def test_a_window_names_the_last_block_it_lacks_and_a_full_group_the_first():
    cached = [set(), set()]
    others = [{0: "evicted", 1: "not retained"}, {0: "evicted", 1: "not retained"}]
    assert reasons("full:4,swa:8:16", cached, [others[0], {1: "retired"}], 30, 0) == ["evicted", RETIRED]


def test_each_can_go_on_but_not_to_the_same_place():
    cached = [keys((0, 2)), keys((3, 5))]
    others = [{2: "evicted", 3: "evicted"}, dict.fromkeys(range(3), "evicted")]
    told = reasons("full:4,swa:4:8", cached, others, 30, 4)
    assert told == [WAITING, WAITING]


def test_all_could_go_on_together_and_the_lookup_did_not():
    assert reasons("full:4,swa:4:8", [keys((0, 6)), keys((0, 6))], None, 30, 8) == [FELL_SHORT] * 2


def test_a_draft_needs_its_proof_block():
    assert reasons("full:4,swa:4:8", [keys((0, 4))] * 2, None, 17, 12, eagle=()) == [WHOLE_PROMPT] * 2
    told = reasons("full:4,swa:4:8", [keys((0, 4))] * 2, [{4: "evicted"}, {}], 21, 12, eagle=(0,))
    assert told == ["evicted", WAITING]


def test_a_state_is_needed_where_the_hit_ends():
    cached = [keys((0, 6)), {1}]
    others = [{}, {0: "retired", **dict.fromkeys(range(2, 6), "retired")}]
    assert reasons("full:4,mamba:4", cached, others, 30, 8) == [WAITING, RETIRED]
    assert reasons("full:4,mamba:4", [keys((0, 2)), {4}], [{2: "evicted"}, others[1]], 30, 8) == ["evicted", WAITING]


def test_states_inside_blocks():
    """Blocks of 16 of a recurrent group among blocks of 4: a state inside a block that is known was not kept."""
    assert config("full:4,mamba:16").partial_hits
    told = reasons("full:4,mamba:16", [keys((0, 8)), set()], [{}, {3: "evicted"}], 40, 0)
    assert told == [WAITING, "not retained"]
    assert reasons("full:4,mamba:16", [keys((0, 8)), {5}], None, 33, 24) == [WAITING, "never seen"]
    assert reasons("full:4,mamba:16", [keys((0, 4)), {5}], None, 33, 16) == ["never seen", WAITING]


def test_a_chunk_boundary_needs_nothing_of_the_chunk_before():
    cached = [keys((0, 3)), set()]
    told = reasons("full:4,chunked:4:16", cached, [{3: "evicted"}, {}], 30, 0)
    assert told == [WAITING, WAITING]  # the full group could go to 12, the chunked one to 16


def test_groups_that_share_nothing_and_caches_that_are_off():
    assert reasons("full:4,opaque:4", [keys((0, 2)), set()], None, 30, 8) == ["never seen", NOT_SHARED]
    assert reasons("full:4,swa:4:8", [set(), set()], None, 30, 0, caching=False) == [CACHING_OFF] * 2


def test_the_reference_engine_tells():
    cache = config("full:4,swa:4:8")
    engine = keyed_engine("numpy", cache)
    assert isinstance(engine, MissDiagnosis)
    diagnosis = Diagnosis(cache, engine)

    def serve(id, length, prefix):
        prompt_keys = prefix + [100 * int(id) + i for i in range(16 - len(prefix))]
        engine.request_keyed(id, length, prompt_keys)
        hit = engine.lookup(id)
        told = diagnosis.reasons(prompt_keys, length, hit.hit)
        operation = AllocateOp(
            id=id, new=length - hit.hit, hit=hit.hit, lookahead=0, external=0, delay=False, must_fit=True, reserved=0,
            in_flight=0, shared_prefix=hit.shared_prefix,
        )  # fmt: skip
        assert engine.allocate(operation).blocks is not None
        engine.advance(id, length)
        engine.free(id)
        return hit.hit, told

    prefix = list(range(7, 11))
    assert serve("1", 17, prefix) == (0, ["never seen", "never seen"])
    assert serve("2", 17, prefix) == (16, [WHOLE_PROMPT, WHOLE_PROMPT])
    assert serve("3", 30, prefix) == (16, ["never seen", "never seen"])
    engine.evict([block for block in range(1, 100) if engine.manager.pool.primary[block] == (1, 8)])
    assert serve("4", 13, [*prefix[:2], 55, 56])[1] == [WAITING, "evicted"]
