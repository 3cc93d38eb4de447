"""Random traffic is legal, repeatable, and full of what matters."""

from __future__ import annotations

import collections

import pytest

from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.lifecycle import Lifecycle
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config, to_header
from hkv.dialects.vllm.log.structs import Hit
from hkv.dialects.vllm.traffic.headers import MANAGER_BUGS
from hkv.dialects.vllm.traffic.traffic import FEATURES, RandomChoices, draw_header
from hkv.errors import ConfigError
from hkv.oracle.record import Recording, differ, record

SEEDS = range(24)


def recordings(feature: str, version: int) -> list[Recording]:
    return [record(NumpyEngine, feature, seed, version, 12) for seed in SEEDS]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("feature", FEATURES)
def test_headers_keep_to_their_feature(feature: str, version: int) -> None:
    for seed in range(80):
        header = draw_header(RandomChoices(seed), feature, version)
        config = to_config(header)
        assert to_config(to_header(config, feature, version)) == config
        kinds = {group["kind"] for group in header.groups}
        assert 1 <= len(kinds) <= 5
        assert header.num_blocks in range(3, 161)
        assert (header.context_parallel > 1) == (feature == "context_parallel")
        assert (header.hash_lookahead > 0) == (feature == "lookahead_hash")
        assert header.partial_hits or feature != "partial"
        assert not header.partial_hits or feature in ("partial", "speculative_state")
        assert header.retention_interval is None or feature not in FEATURES[:4]
        if header.eagle and feature not in ("eagle", "retention"):
            assert header.shared_prefix_checkpoint
        if version == 1:
            assert not header.bugs
            assert header.watermark == 0
            assert kinds <= {"full_attention", "sliding_window", "chunked_local", "mamba"}
            assert all(group.get("window") != 1 for group in header.groups)


def test_headers_vary() -> None:
    headers = [draw_header(RandomChoices(seed), feature, 2) for seed in range(60) for feature in FEATURES]
    assert {len(header.groups) for header in headers} >= {1, 2, 3, 4, 5}
    assert {group["kind"] for header in headers for group in header.groups} >= {"mla", "opaque", "chunked_local"}
    assert {header.context_parallel for header in headers} == {1, 2, 3, 4}
    windows = {group["window"] for header in headers for group in header.groups if "window" in group}
    assert {1, 2, 500} <= windows
    assert any(header.watermark for header in headers)
    assert any(header.shared_prefix_checkpoint for header in headers)
    assert any(set(header.bugs) == set(MANAGER_BUGS) for header in headers)
    assert any(len({group["block_size"] for group in header.groups}) > 1 for header in headers)
    assert any(group.get("cache_mode") == "none" for header in headers for group in header.groups)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("feature", FEATURES)
def test_traffic_is_legal_and_eventful(feature: str, version: int) -> None:
    happened: collections.Counter[str] = collections.Counter()
    for recording in recordings(feature, version):
        happened.update(events_of(recording))
    for event in ("hit", "eviction", "refusal", "preemption"):
        assert happened[event] >= len(SEEDS) // 10 + 1, (event, happened)


def events_of(recording: Recording) -> set[str]:
    """Kinds of events in a recording, after every operation has been found to be in order."""
    lifecycle = Lifecycle(recording.header)
    found: set[str] = set()
    evicting = False
    for operation, answer in zip(recording.operations, recording.answers, strict=True):
        lifecycle.follow(operation)
        lifecycle.answered(operation, answer)
        match operation, answer:
            case oplog.LookupOp(id=id), Hit(hit=hit):
                found |= {"hit"} if hit else set()
                found |= {"preemption"} if lifecycle.requests[id].returned else set()
            case oplog.AllocateOp(), oplog.Allocation(blocks=None):
                found.add("refusal")
            case oplog.EvictOp(), _:
                evicting = True
            case oplog.EventsOp(), list():
                removed = any(isinstance(event, oplog.CacheEvent) and event.type == "removed" for event in answer)
                found |= {"eviction"} if removed and not evicting else set()
                evicting = False
    return found


def test_same_seed_same_traffic() -> None:
    assert record(NumpyEngine, "eagle", 3, 2, 8) == record(NumpyEngine, "eagle", 3, 2, 8)
    assert record(NumpyEngine, "eagle", 3, 2, 8) != record(NumpyEngine, "eagle", 4, 2, 8)


class Forgetful(NumpyEngine):
    """Gives up the wrong block once the third request is freed."""

    frees = 0

    def free(self, id: str) -> None:
        super().free(id)
        self.frees += 1
        if self.frees == 3:
            self.manager.evict([1])


def test_a_planted_defect_is_found() -> None:
    found = []
    for seed in range(8):
        recording, parted = differ(Forgetful, NumpyEngine, "core", seed, 1, 16)
        if parted is not None:
            found.append(parted)
            assert len(recording.operations) == len(recording.answers)
    assert found


def test_unknown_feature_and_version() -> None:
    with pytest.raises(ConfigError, match=r"one of .*core"):
        record(NumpyEngine, "none", 1, 1, 1)
    with pytest.raises(ConfigError, match="version"):
        record(NumpyEngine, "core", 1, 5, 1)
