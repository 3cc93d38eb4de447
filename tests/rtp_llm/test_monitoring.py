"""Figures for operators: pools and keys against the allocator's own counters, recent keys against a plain window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.contract.traffic import RandomChoices
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import NAMES
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.log import to_rtp_config
from hkv.dialects.rtp_llm.monitoring import cache_info, pool_snapshots, recent_hits
from hkv.dialects.rtp_llm.traffic import draw_rtp_header, drive_rtp, rtp_features
from hkv.errors import ConfigError


@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_snapshots_are_the_pools_own_counters(dialect: str, seed: int) -> None:
    choices = RandomChoices(seed)
    header = draw_rtp_header(choices, rtp_features(dialect)[seed % len(rtp_features(dialect))], dialect)
    engine, config = RtpNumpyEngine(header), to_rtp_config(header)
    seen = 0

    def perform(operation: structs.RtpOp) -> structs.RtpAnswer:
        nonlocal seen
        answer = engine.perform(operation)
        if isinstance(answer, structs.RtpState):
            pools = engine.manager.allocator.pools
            for snapshot, pool in zip(pool_snapshots(config, answer), pools, strict=True):
                assert snapshot.total == pool.total
                assert (snapshot.free, snapshot.available, snapshot.not_in_use) == (
                    pool.free,
                    pool.available,
                    pool.not_in_use,
                )
                assert 0 <= snapshot.used_percent <= 100
                seen += snapshot.request
            info = cache_info(config, answer, [1, 2, 1])
            assert set(info.cached_keys) == {key for key, _ in answer.cached} | {1, 2}
            assert 0 <= info.available_tokens <= info.total_tokens
            assert info.version == answer.version
        return answer

    drive_rtp(header, choices, perform, 25)
    assert seen


REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 6), max_size=5)), max_size=20)


@given(REQUESTS, st.integers(1, 60))
def test_recent_keys_are_those_of_a_plain_window(requests: list[tuple[int, list[int]]], window: int) -> None:
    timed = [(sum(wait for wait, _ in requests[: index + 1]), keys) for index, (_, keys) in enumerate(requests)]
    known, hits = [], 0
    for index, (now, keys) in enumerate(timed):
        known = [key for time, old in timed[:index] if now - time < window for key in old]
        hits += sum(key in known for key in keys)
        known += keys
    found = recent_hits(timed, window)
    assert (found.keys, found.hits) == (sum(len(keys) for _, keys in timed), hits)
    assert (found.retained, found.retained_unique) == (len(known), len(set(known)))


def test_rtp_llms_own_example() -> None:
    requests = [(0, [1, 2, 3]), (10, [2, 3, 4])]
    assert recent_hits(requests[:1], 1000).hit_ratio == 0.0
    second = recent_hits(requests, 1000)
    assert (second.keys, second.hits, second.retained, second.retained_unique) == (6, 2, 6, 4)
    assert recent_hits([*requests, (1010, [2, 3, 4])], 1000).hits == 2
    assert recent_hits([], 1000).hit_ratio == 0.0
    with pytest.raises(ConfigError, match="the time of the one before"):
        recent_hits([*requests, (9, [1])])
    with pytest.raises(ConfigError, match="positive number of milliseconds"):
        recent_hits(requests, 0)
