"""Refusals of the verbs, which change nothing, and the reference as an engine beside recorded logs.

What the verbs do is held to the compiled rules (`tests/cache`) and to invariants (`tests/suites`).
"""

from __future__ import annotations

import copy
import random

import pytest

from hkv.dialects.vllm.engines import numpy
from hkv.dialects.vllm.log.structs import ExtraKeys, Header
from hkv.errors import ConfigError, OperationError
from hkv.spec import Mamba
from reference.dialects.vllm.dialect import VLLM
from reference.state.pool import Pool
from tests.oracle import sample
from tests.reference.build import admit, allocation, finish, manager, picture


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
        (lambda cache: cache.request("new", range(99)), "tokens"),
        (lambda cache: cache.request_keyed("run", 4, [1]), "id"),
        (lambda cache: cache.lookup("nobody"), "id"),
        (lambda cache: cache.free("nobody"), "id"),
        (lambda cache: cache.advance("wait", 1), "id"),
        (lambda cache: cache.append("run", range(60)), "tokens"),
        (lambda cache: cache.extend("run", 1), "id"),
        (lambda cache: cache.commit("run", -1), "tokens"),
        (lambda cache: cache.allocate("wait", 1, lookahead=-1), "lookahead"),
        (lambda cache: cache.allocate("wait", 1, reserved=-1), "reserved"),
        (lambda cache: cache.allocate("wait", 1, shared_prefix=-1), "shared_prefix"),
        (lambda cache: cache.allocate("wait", 1, external=-1), "external"),
        (lambda cache: cache.allocate("wait", 1, hit=-4), "hit"),
        (lambda cache: cache.allocate("wait", 1, hit=4), "hit"),
    ],
)
def test_misuse_is_named_and_changes_nothing(misuse, named):
    """Beside what `tests.suites.misuse` asks for."""
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
    assert VLLM.name == "vllm-0.33"


@pytest.mark.parametrize(
    ("groups", "fields", "named"),
    [
        ("full:4", {"hash_block_size": 2}, "hash_block_size"),
        ("chunked:4:8", {"eagle": [0]}, "eagle"),
        ("full:8,chunked:4:8", {}, "block_size"),
        ("opaque:4,opaque:8", {}, "cached"),
        ([Mamba(block_size=64, cache_mode="none")], {}, "cache_mode"),
    ],
)
def test_configurations_that_no_rule_is_for_are_named(groups, fields, named):
    with pytest.raises(ConfigError, match=named):
        manager(groups, **fields)


def test_taking_too_many_blocks_changes_nothing():
    pool = Pool(3)
    with pytest.raises(OperationError, match="2 blocks that are free"):
        pool.take(3)
    assert list(pool.free) == [1, 2]


def header(version: int = 2) -> Header:
    groups = [{"kind": "full_attention", "block_size": 4}]
    return sample.header(oplog=version, num_blocks=6, groups=groups, hash_block_size=4, scheduler_block_size=4)


def test_given_keys_are_shown_as_8_bytes():
    engine = numpy.NumpyEngine(header())
    engine.request_keyed("a", 9, [10, 0xABCDEF])
    engine.allocate(allocation("a", 9))
    assert [entry[2] for entry in engine.state().cached.values()] == ["000000000000000a", "0000000000abcdef"]
    assert engine.num_free() == 2
    assert engine.events() == []


@pytest.mark.parametrize("extra", [ExtraKeys(lora=["name"]), ExtraKeys(embeds=["0g"])])
def test_ill_formed_identities_are_named(extra):
    with pytest.raises(ConfigError, match="extra"):
        numpy.NumpyEngine(header()).request("a", range(5), extra)
