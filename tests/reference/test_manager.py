"""The verbs: what they change, what they refuse, and what they say of what is not there."""

from __future__ import annotations

import copy
import random

import pytest

from hkv.errors import ConfigError, EngineFailure, OperationError
from hkv.spec import FullAttention, Mamba
from reference.dialects.vllm.dialect import VLLM
from reference.state.events import Cleared, Removed, Stored
from tests.reference.build import admit, cached, config, finish, manager, picture


def test_a_refused_step_has_retired_what_it_outgrew():
    cache = manager("swa:4:5", num_blocks=5)
    admit(cache, "a", range(16))
    cache.append("a", range(64))
    assert cache.allocate("a", 64) is None
    assert cache.rows("a") == [[0, 0, 0, 4]]


def test_reserved_blocks_and_the_watermark_stay_free():
    cache = manager("full:4", num_blocks=10, watermark=0.3)
    cache.request("a", range(4))
    assert cache.allocate("a", 4, reserved=9) is None
    assert cache.allocate("a", 4, reserved=8) == [[1]]
    cache.advance("a", 4)
    cache.request("b", range(24))
    assert cache.allocate("b", 24) is None
    assert cache.allocate("b", 20) == [[2, 3, 4, 5, 6]]
    cache.append("a", range(12))
    assert cache.allocate("a", 12) == [[7, 8, 9]]


def test_the_watermark_does_not_hold_when_nothing_runs():
    cache = manager("full:4", num_blocks=5, watermark=0.9)
    cache.request("a", range(16))
    assert cache.allocate("a", 16, must_fit=True) == [[1, 2, 3, 4]]


def test_external_tokens_get_blocks_and_are_registered_on_commit():
    cache = manager("full:4", num_blocks=12)
    cache.request("a", range(13))
    assert cache.allocate("a", 0, external=12, delay=True) == [[]]
    assert cache.rows("a") == [[1, 2, 3]]
    assert cached(cache) == {}
    cache.advance("a", 12)
    cache.commit("a", 12)
    assert cached(cache) == {1: (0, 4), 2: (0, 8), 3: (0, 12)}


def test_all_groups_adopt_before_any_takes_external_blocks():
    cache = manager("full:4,full:4", num_blocks=9)
    admit(cache, "a", range(9))
    finish(cache, "a")
    cache.request("b", range(17))
    found = cache.lookup("b")
    assert found.hit == 8
    assert cache.allocate("b", 0, hit=8, external=8) == [[], []]
    assert [row[:2] for row in cache.rows("b")] == found.blocks


def test_drafts_get_slots_but_no_keys():
    cache = manager("full:4", num_blocks=12)
    cache.request("a", range(6))
    assert cache.allocate("a", 9, lookahead=2) == [[1, 2, 3]]
    assert cached(cache) == {1: (0, 4)}


def test_a_partly_filled_block_is_copied_before_the_request_writes_on():
    specs = [FullAttention(block_size=8), Mamba(block_size=8)]
    fields = {"hash_block_size": 4, "scheduler_block_size": 8, "partial_hits": True}
    cache = manager(specs, num_blocks=20, **fields)
    cache.step()
    cache.request("a", range(14))
    cache.allocate("a", 12)
    cache.advance("a", 12)
    assert cached(cache)[2] == (0, 12)
    cache.step()
    cache.request("b", range(14))
    assert cache.lookup("b").hit == 12
    row, state = cache.lookup("b").blocks
    answer = cache.allocate("b", 2, hit=12)
    assert answer is not None
    (target,), (state_target,) = answer
    assert cache.copies() == [(row[1], target), (state[1], state_target)]
    assert cache.rows("b") == [[row[0], target], [0, state_target]]
    assert cache.pool.refs[target] == 1
    assert cache.copies() == []


def test_the_owner_of_a_cached_state_leaves_a_copy_to_the_cache():
    specs = [FullAttention(block_size=8), Mamba(block_size=8)]
    cache = manager(specs, num_blocks=20, hash_block_size=4, scheduler_block_size=8, partial_hits=True)
    cache.request("a", range(14))
    cache.allocate("a", 12)
    cache.advance("a", 12)
    old = cache.rows("a")[1][1]
    cache.step()
    assert cache.allocate("a", 2) == [[], []]
    ((source, copied),) = cache.copies()
    assert (source, cache.rows("a")[1][1]) == (old, old)
    assert cached(cache)[copied] == (1, 12)
    assert old not in cached(cache)


def test_events_tell_of_every_span_and_every_key():
    cache = manager("full:4", num_blocks=4)
    admit(cache, "a", range(9))
    first, second = cache.requests["a"].keys
    (stored,) = cache.events()
    assert stored == Stored(0, (first, second), 4, list(range(8)), None, (4, 8), ((), ()))
    cache.append("a", [9, 10, 11])
    cache.allocate("a", 3)
    (stored,) = cache.events()
    assert isinstance(stored, Stored)
    assert (stored.parent, stored.tokens) == (second, [8, 9, 10, 11])
    cache.free("a")
    cache.request("b", [5])
    cache.allocate("b", 1)
    assert cache.events() == [Removed(0, stored.chains[0])]
    cache.free("b")
    assert cache.reset()
    assert cache.events() == [Cleared()]


def test_why_a_key_is_absent():
    cache = manager("full:4,swa:4:5", num_blocks=12)
    cache.request("a", range(17))
    cache.allocate("a", 16, delay=True)
    cache.advance("a", 16)
    cache.allocate("a", 1)
    keys = list(cache.requests["a"].keys)
    assert [cache.absence(1, key) for key in keys] == ["retired", "retired", "retired", "cached"]
    assert cache.absence(0, keys[0]) == "cached"
    cache.evict([1])
    assert cache.absence(0, keys[0]) == "evicted"
    assert cache.absence(0, b"other") == "never seen"


def test_keyed_requests_decide_as_those_with_tokens_do():
    rng = random.Random(5)
    by_tokens = manager("full:4,swa:4:9,mamba:8", num_blocks=40)
    by_keys = manager("full:4,swa:4:9,mamba:8", num_blocks=40)
    names: dict[bytes, int] = {}
    for turn in range(60):
        id, prompt = str(turn), [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
        by_tokens.request(id, prompt)
        keys = [names.setdefault(key, len(names)) for key in by_tokens.requests[id].keys]
        by_keys.request_keyed(id, len(prompt), keys)
        found = by_tokens.lookup(id)
        assert by_keys.lookup(id) == found
        answers = []
        for cache in (by_tokens, by_keys):
            cache.step()
            answers.append(cache.allocate(id, len(prompt) - found.hit, hit=found.hit))
        assert answers[0] == answers[1]
        for cache in (by_tokens, by_keys):
            if answers[0] is not None:
                cache.advance(id, len(prompt))
                if cache is by_keys:
                    cache.extend(id, 2)
                else:
                    cache.append(id, [7, 7])
                if turn % 3:
                    finish(cache, id)
            else:
                cache.drop(id)
                for other in list(cache.requests):
                    if cache.requests[other].running:
                        finish(cache, other)
    assert list(by_tokens.pool.free) == list(by_keys.pool.free)
    assert by_keys.events() == []


@pytest.mark.parametrize(
    ("misuse", "named"),
    [
        (lambda cache: cache.request("run", [1]), "id"),
        (lambda cache: cache.request("new", []), "tokens"),
        (lambda cache: cache.request("new", range(99)), "tokens"),
        (lambda cache: cache.request_keyed("run", 4, [1]), "id"),
        (lambda cache: cache.lookup("run"), "id"),
        (lambda cache: cache.lookup("nobody"), "id"),
        (lambda cache: cache.drop("run"), "id"),
        (lambda cache: cache.free("wait"), "id"),
        (lambda cache: cache.free("nobody"), "id"),
        (lambda cache: cache.advance("wait", 1), "id"),
        (lambda cache: cache.advance("run", 1), "tokens"),
        (lambda cache: cache.advance("run", -1), "tokens"),
        (lambda cache: cache.append("run", range(60)), "tokens"),
        (lambda cache: cache.extend("run", 1), "id"),
        (lambda cache: cache.commit("run", -1), "tokens"),
        (lambda cache: cache.commit("run", 10), "tokens"),
        (lambda cache: cache.commit("wait", 0), "id"),
        (lambda cache: cache.evict([1, 12]), "blocks"),
        (lambda cache: cache.evict([-1]), "blocks"),
        (lambda cache: cache.allocate("nobody", 1), "id"),
        (lambda cache: cache.allocate("wait", 0), "new"),
        (lambda cache: cache.allocate("wait", -1), "new"),
        (lambda cache: cache.allocate("wait", 1, lookahead=-1), "lookahead"),
        (lambda cache: cache.allocate("wait", 1, reserved=-1), "reserved"),
        (lambda cache: cache.allocate("wait", 1, in_flight=-1), "in_flight"),
        (lambda cache: cache.allocate("wait", 1, shared_prefix=-1), "shared_prefix"),
        (lambda cache: cache.allocate("wait", 1, external=-1), "external"),
        (lambda cache: cache.allocate("wait", 1, hit=-4), "hit"),
        (lambda cache: cache.allocate("wait", 1, hit=4), "hit"),
        (lambda cache: cache.allocate("run", 1, hit=4), "hit"),
        (lambda cache: cache.allocate("run", 1, external=4), "external"),
    ],
)
def test_misuse_is_named_and_changes_nothing(misuse, named):
    cache = manager("full:4", num_blocks=12, max_model_len=64)
    admit(cache, "run", range(9))
    cache.request("wait", range(9))
    before = picture(cache)
    with pytest.raises(OperationError) as caught:
        misuse(cache)
    assert caught.value.argument == named
    assert picture(cache) == before


def test_a_keyed_request_takes_no_tokens():
    cache = manager("full:4", num_blocks=12)
    cache.request_keyed("a", 4, [1])
    with pytest.raises(OperationError, match="tokens"):
        cache.append("a", [1])
    with pytest.raises(OperationError, match="tokens"):
        cache.extend("a", -1)


def test_a_lookup_can_be_adopted_only_at_once():
    cache = manager("full:4", num_blocks=12)
    admit(cache, "a", range(9))
    cache.request("b", range(9))
    cache.lookup("b")
    cache.evict([2])
    with pytest.raises(OperationError, match="hit"):
        cache.allocate("b", 1, hit=8)
    cache.lookup("b")
    with pytest.raises(OperationError, match="hit"):
        cache.allocate("b", 1, hit=8)
    assert cache.allocate("b", 5, hit=4) == [[4, 5]]
    assert cache.rows("b") == [[1, 4, 5]]


def test_a_manager_can_be_copied():
    cache = manager("full:4,swa:4:5", num_blocks=12)
    admit(cache, "a", range(9))
    other = copy.deepcopy(cache)
    cache.free("a")
    assert other.rows("a") == [[1, 2, 3], [4, 5, 6]]


def test_an_unknown_kind_or_defect_is_named():
    with pytest.raises(ConfigError, match="bugs"):
        manager("full:4", bugs=frozenset({"no-such-defect"}))
    with pytest.raises(ConfigError, match="hash_block_size"):
        config("full:4", hash_block_size=2)
    assert VLLM.name == "vllm-0.33"


# Defects, each only by name.


def sound(bug, match, ask, groups, num_blocks, **fields):
    """Answer of a manager to what is asked of it; with the defect it fails instead."""
    with pytest.raises(EngineFailure, match=match):
        ask(manager(groups, num_blocks, bugs=frozenset({bug}), **fields))
    return ask(manager(groups, num_blocks, **fields))


@pytest.mark.parametrize(("groups", "tokens"), [("swa:4:8", 9), ("chunked:4:16", 5), ("mamba:4", 5)])
def test_finders_do_not_look_beyond_the_last_key(groups, tokens):
    def ask(cache):
        cache.request("a", range(tokens))
        return cache.lookup("a").hit

    assert sound("finder-index-error", "keys", ask, groups, 12, hash_lookahead=2) == 0


def test_a_state_for_external_tokens_is_counted():
    def ask(cache):
        cache.request("a", range(16))
        return cache.allocate("a", 12, external=4), cache.num_free()

    assert sound("external-state-not-counted", "free", ask, "mamba:4", 2) == (None, 1)


def test_rejected_drafts_give_nothing_back():
    def ask(cache):
        cache.request("a", range(2))
        assert cache.allocate("a", 2) == [[1, 2], [3, 4]]
        cache.advance("a", 2)
        cache.append("a", [1])
        assert cache.allocate("a", 3) == [[5, 6, 7], [4, 8]]
        cache.advance("a", 1)
        cache.append("a", [1])
        return cache.allocate("a", 1, lookahead=3)

    specs = [FullAttention(block_size=1), Mamba(block_size=2, num_speculative_blocks=1)]
    assert sound("negative-estimate", "free", ask, specs, 9) is None


def test_no_state_is_registered_at_unverified_tokens():
    def ask(cache):
        cache.request("a", range(2))
        return cache.allocate("a", 8), cached(cache)

    states = Mamba(block_size=2, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=2)
    found = sound("checkpoint-beyond-keys", "checkpoint", ask, [FullAttention(block_size=2), states], 20)
    assert found == ([[1, 2, 3, 4], [0, 0, 5, 6]], {1: (0, 2)})


def test_a_window_of_one_token_can_be_resumed_anywhere():
    for bugs, hit in ((frozenset(), 16), (frozenset({"window-one-never-hits"}), 0)):
        cache = manager("full:4,swa:4:1", num_blocks=20, bugs=bugs)
        admit(cache, "a", range(17))
        assert all(group == 0 for group, _ in cached(cache).values())
        cache.request("b", range(17))
        assert cache.lookup("b").hit == hit


def test_a_state_at_a_junction_off_the_grid_is_kept_when_asked_for():
    specs = [FullAttention(block_size=8), Mamba(block_size=8)]
    fields = {"hash_block_size": 2, "scheduler_block_size": 8, "partial_hits": True}
    for junctions, states in ((False, []), (True, [10])):
        cache = manager(specs, num_blocks=20, eagle=[0], shared_prefix_checkpoint=junctions, **fields)
        cache.request("a", range(30))
        cache.allocate("a", 10, shared_prefix=10)
        assert [tokens for group, tokens in cached(cache).values() if group == 1] == states


def test_a_registered_tail_is_not_registered_twice():
    cache = manager("full:8,full:4", num_blocks=20)
    cache.request("a", range(14))
    cache.allocate("a", 14)
    cache.advance("a", 14)
    cache.append("a", [14, 15, 16])
    cache.allocate("a", 3)
    cache.advance("a", 3)
    tails = [event for event in cache.events() if isinstance(event, Stored) and event.block_size == 4]
    assert [event.tokens for event in tails if event.group == 0] == [[8, 9, 10, 11]]
    assert cached(cache)[2] == (0, 16)
    cache.commit("a", 17)
    assert cache.events() == []


def _siblings():
    """A cache in which 12 tokens are cached, and 16 more tokens of the same text are being filled in this step."""
    specs = [FullAttention(block_size=16), Mamba(block_size=32)]
    cache = manager(specs, num_blocks=20, hash_block_size=4, scheduler_block_size=32, partial_hits=True)
    cache.step()
    cache.request("a", range(14))
    cache.allocate("a", 12)
    cache.advance("a", 12)
    cache.step()
    cache.copies()
    return cache


def test_a_hit_inside_a_block_of_this_step_waits():
    cache = _siblings()
    cache.request("b", range(24))
    assert cache.allocate("b", 16) is not None
    cache.advance("b", 16)
    before = picture(cache)
    cache.request("c", range(20))
    assert cache.lookup("c").hit == 12
    assert cache.lookup("c").blocks[0] == cache.rows("b")[0]
    assert cache.allocate("c", 8, hit=12) is None
    cache.drop("c")
    assert picture(cache) == before
    cache.step()
    cache.request("c", range(20))
    assert cache.lookup("c").hit == 12
    assert cache.allocate("c", 8, hit=12) is not None


def test_a_hit_on_what_was_written_before_this_step_does_not_wait():
    cache = _siblings()
    cache.request("b", range(24))
    cache.allocate("b", 13)
    cache.advance("b", 13)
    cache.step()
    cache.allocate("b", 3)
    cache.advance("b", 3)
    cache.request("c", range(20))
    assert cache.lookup("c").hit == 12
    assert cache.lookup("c").blocks[0] == cache.rows("b")[0]
    assert cache.allocate("c", 8, hit=12) is not None


def test_a_hit_inside_a_copy_of_this_step_waits():
    cache = _siblings()
    for id in ("b", "c"):
        cache.request(id, range(20))
        assert cache.lookup(id).hit == 12
        assert (cache.allocate(id, 8, hit=12) is None) == (id == "c")
        if id == "b":
            cache.advance("b", 20)
    assert cache.lookup("c").blocks[0] == cache.rows("b")[0][:1]
    assert cache.copies()
