"""vLLM's own managers and schedulers under observation. Skipped where it is absent."""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest

from hkv.contract import registry
from hkv.contract.log import Log
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import ExtraKeys, Header
from hkv.errors import ConfigError
from hkv.oracle.attach.attach import AttachSettings, Session
from hkv.oracle.check import check_log
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import find_logs, read_log
from hkv.oracle.record import Only, draw
from tests.oracle import sample

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

RUNS = 12
"""Runs of schedulers; `benchmarks/attach_schedulers.py --runs 500` is the whole."""


def manager_of(header: Header) -> Any:
    from hkv.dialects.vllm.engines import vllm_objects
    from hkv.dialects.vllm.log.configuration import to_config

    return vllm_objects.manager(to_config(header))


def request_of(id: str, tokens: list[int], extra: ExtraKeys | None = None, size: int = 2) -> Any:
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    from hkv.dialects.vllm.engines import vllm_objects

    init_none_hash(sha256_cbor)
    return vllm_objects.request(id, tokens, extra, get_request_block_hasher(size, sha256_cbor))


@pytest.fixture
def header() -> Header:
    return sample.header(oplog=3, num_blocks=12)


WITH_STATES = [{"kind": "mamba", "block_size": 2, "num_speculative_blocks": 0}, *sample.header().groups]


class Observation:
    """One manager under observation."""

    def __init__(self, header: Header, folder: pathlib.Path) -> None:
        from hkv.dialects.vllm.attach.attach import attach

        self.manager = manager_of(header)
        self.session = Session(AttachSettings(folder=str(folder), states="all"))
        self.observed = attach(self.manager, self.session)
        self.folder = folder

    def log(self) -> Log:
        self.session.close()
        (path,) = find_logs([str(self.folder)])
        log = read_log(path)
        assert check_log(log, engine_factory("numpy")) is None
        return log

    def said(self, *kinds: type[oplog.Operation]) -> list[Any]:
        """Operations of these kinds in the log."""
        return [each for each in self.log().operations if isinstance(each, kinds)]


@pytest.fixture
def observation(header: Header, tmp_path: pathlib.Path) -> Observation:
    return Observation(header, tmp_path)


def test_headers_come_from_the_objects() -> None:
    from hkv.dialects.vllm.attach.header import header_from

    for seed in range(40):
        wanted, _ = draw("core", seed, 3, Only())
        manager = manager_of(wanted)
        found = header_from(manager, wanted.max_in_flight_tokens)
        for group in wanted.groups:  # vLLM's spec says nothing of it: more than the pool has, nobody gets
            if "encoder_len" in group:
                group["encoder_len"] = wanted.num_blocks * group["block_size"]
        for name in ("num_blocks", "groups", "scheduler_block_size", "hash_block_size", "caching", "partial_hits"):
            assert getattr(found, name) == getattr(wanted, name), name
        assert int(found.watermark * found.num_blocks) == int(wanted.watermark * wanted.num_blocks)
        derived = header_from(manager)
        caps = [group.max_admission_blocks_per_request for group in manager.coordinator.single_type_managers]
        again = manager_of(derived)
        assert [group.max_admission_blocks_per_request for group in again.coordinator.single_type_managers] == caps


def test_an_encoders_tokens_are_said(tmp_path: pathlib.Path) -> None:
    groups = [
        {"kind": "full_attention", "block_size": 2},
        {"kind": "cross_attention", "block_size": 2, "encoder_len": 9},
    ]
    observation = Observation(sample.header(oplog=3, num_blocks=12, groups=groups, caching=False), tmp_path)
    manager, request = observation.manager, request_of("a", [1, 2, 3])
    manager.new_step_starts()
    manager.allocate_slots(request, 3, num_encoder_tokens=5)
    request.num_computed_tokens = 3
    manager.allocate_slots(request, 1)
    manager.free(request)
    assert [each.encoder for each in observation.said(oplog.AllocateOp)] == [5, None]
    assert observation.log().header.groups[1]["encoder_len"] == 24


def test_prefill_context_parallelism_changes_no_block(
    header: Header, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core import kv_cache_manager

    parallel = functools.partial(kv_cache_manager.KVCacheManager, pcp_world_size=2)
    monkeypatch.setattr(kv_cache_manager, "KVCacheManager", parallel)
    header.groups[0]["cp_sharded"] = True
    observation = Observation(header, tmp_path)
    manager, hits = observation.manager, []
    assert manager.coordinator.single_type_managers[0].pcp_world_size == 2
    for name in "ab":
        request = request_of(name, [1, 2, 3, 4, 5])
        manager.new_step_starts()
        blocks, hit, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, 5 - hit, hit, blocks)
        hits.append(hit)
    assert (hits, observation.log().header.context_parallel) == ([0, 4], 1)


def test_calls_and_answers_are_said(observation: Observation) -> None:
    manager = observation.manager
    request = request_of("a", [1, 2, 3, 4, 5])
    manager.new_step_starts()
    blocks, hit, _ = manager.get_computed_blocks(request)
    manager.allocate_slots(request, 5, hit, blocks)
    request.num_computed_tokens = 5
    request.append_output_token_ids([6])
    manager.allocate_slots(request, 1)
    manager.free(request)
    again = request_of("a", [1, 2, 3, 4, 5])
    blocks, hit, _ = manager.get_computed_blocks(again)
    assert hit == 4
    manager.allocate_slots(again, 1, hit, blocks)
    taken = manager.pop_blocks_for_free(again)
    manager.block_pool.free_blocks(reversed(taken))
    operations = observation.log().operations
    names = [type(operation).__name__ for operation in operations if not isinstance(operation, oplog.StateOp)]
    assert names.count("AllocateOp") == 3
    assert {"StepOp", "ComputedOp", "AppendOp", "FreeOp", "DropOp", "PopOp", "ReleaseOp"} <= set(names)
    assert [each.id for each in observation.said(oplog.RequestOp)] == ["a", "a#2"]


def test_events_say_whose_blocks_they_are(observation: Observation) -> None:
    manager = observation.manager
    request = request_of("a", [1, 2, 3, 4, 5], ExtraKeys(lora=["x", "/x"], salt="s"))
    request.session_id = "talk"
    manager.allocate_slots(request, 5)
    manager.take_events()
    ((event,),) = (each.want for each in observation.said(oplog.EventsOp))
    assert (event.lora_name, event.session, event.medium, event.spec_kind) == ("x", "talk", "GPU", "full_attention")
    assert event.extra_keys == [["x", "s"], ["x"]]


def test_a_hit_that_is_published_is_said(observation: Observation) -> None:
    manager = observation.manager
    manager.allocate_slots(request_of("a", [1, 2, 3, 4, 5]), 5)
    request = request_of("b", [1, 2, 3, 4, 5])
    request.kv_cache_report_mode = "full"
    assert manager.get_computed_blocks(request)[1] == 4
    assert len(manager.take_events()) == 2
    assert [each.report for each in observation.said(oplog.RequestOp)] == [None, "full"]
    assert not observation.said(oplog.EndOp)


def test_a_streaming_session_goes_on(observation: Observation) -> None:
    manager = observation.manager
    request = request_of("a", [1, 2, 3, 4, 5])
    request.resumable = True
    manager.allocate_slots(request, 5)
    request.num_computed_tokens = 5
    request.append_output_token_ids([6])
    manager.cache_blocks(request, 5)
    del request._all_token_ids[5:], request.block_hashes[2:]
    request._output_token_ids.clear()
    request._all_token_ids.extend([7, 8, 9])
    request.prompt_token_ids.extend([7, 8, 9])
    request.num_prompt_tokens = 8
    request.update_block_hashes()
    manager.allocate_slots(request, 3)
    (said,) = observation.said(oplog.ResumeOp)
    assert (said.keep, said.tokens, said.prompt) == (5, [7, 8, 9], 8)
    assert not observation.said(oplog.EndOp)


def test_blocks_to_be_zeroed_are_said(tmp_path: pathlib.Path) -> None:
    observation = Observation(sample.header(oplog=3, num_blocks=12, zeroing=True), tmp_path)
    manager = observation.manager
    request = request_of("a", [1, 2, 3, 4, 5])
    manager.allocate_slots(
        request, 0, num_external_computed_tokens=4, delay_cache_blocks=True, skip_zeroing_group_ids=(0,)
    )
    manager.record_blocks_for_zeroing("a", 2)
    assert manager.take_new_block_ids() == [2]
    kinds = [oplog.AllocateOp, oplog.UnwrittenOp, oplog.ZerosOp]
    assert [type(each) for each in observation.said(*kinds)] == kinds
    assert observation.log().header.zeroing


def test_states_that_are_offered_are_said(tmp_path: pathlib.Path) -> None:
    observation = Observation(sample.header(oplog=3, num_blocks=12, groups=WITH_STATES), tmp_path)
    manager = observation.manager
    request = request_of("a", [1, 2, 3, 4, 5])
    manager.allocate_slots(request, 2)
    offered = manager.take_boundary_state_offloads()
    request.num_computed_tokens = 2
    assert manager.finalize_partial_tail_offloads(request) == []
    assert [each.want for each in observation.said(oplog.OffloadsOp, oplog.FinalizeOp)] == [offered, []]
    assert observation.log().header.offloads
    assert offered == {"a": [(0, 1, 2)]}


def test_the_end_of_a_prompt_that_is_offered_is_said(tmp_path: pathlib.Path) -> None:
    groups = [{"kind": "mamba", "block_size": 4, "num_speculative_blocks": 0}]
    groups.append({"kind": "full_attention", "block_size": 4, "cp_sharded": False})
    fields = {"num_blocks": 12, "groups": groups, "scheduler_block_size": 4, "partial_hits": True}
    observation = Observation(sample.header(oplog=3, **fields), tmp_path)
    manager, request = observation.manager, request_of("a", [1, 2, 3, 4, 5, 6, 7])
    manager.allocate_slots(request, 6)
    request.num_computed_tokens = 6
    tails = manager.finalize_partial_tail_offloads(request)
    assert [each.want for each in observation.said(oplog.FinalizeOp)] == [tails]
    assert [(group, tokens) for group, _, tokens in tails] == [(0, 6)]


def test_offers_that_are_taken_past_the_manager_end_the_log(tmp_path: pathlib.Path) -> None:
    observation = Observation(sample.header(oplog=3, num_blocks=12, groups=WITH_STATES), tmp_path)
    observation.manager.allocate_slots(request_of("a", [1, 2, 3]), 2)
    observation.manager.coordinator.single_type_managers[0].take_pending_boundary_state_offloads()
    (end,) = observation.said(oplog.EndOp)
    assert "take_pending_boundary_state_offloads was called, not by the manager" in end.reason


def test_calls_past_the_manager_are_said_too(observation: Observation) -> None:
    manager = observation.manager
    request = request_of("a", [1, 2, 3, 4, 5])
    manager.cache_blocks(request, 1)
    manager.allocate_slots(request, 5)
    manager.block_pool.evict_blocks({1})
    manager.block_pool.touch([manager.block_pool.blocks[2]])
    manager.block_pool.free_blocks(iter([manager.block_pool.blocks[2]]))
    said = [each for each in observation.log().operations if not isinstance(each, oplog.StateOp)]
    assert [type(each).__name__ for each in said[-3:]] == ["EvictOp", "HoldOp", "ReleaseOp"]
    assert not observation.said(oplog.CommitOp)


def test_a_cut_hit_is_given(observation: Observation) -> None:
    manager = observation.manager
    first = request_of("a", [1, 2, 3, 4, 5])
    manager.allocate_slots(first, 5)
    manager.free(first)
    request = request_of("b", [1, 2, 3, 4, 5])
    blocks, _, _ = manager.get_computed_blocks(request, 4)
    manager.allocate_slots(request, 3, 2, manager.truncate_computed_blocks(blocks, 2))
    last = observation.said(oplog.AllocateOp)[-1]
    assert (last.hit, last.rows) == (2, [[1]])


def test_what_a_connector_looks_up_is_said_and_judged(tmp_path: pathlib.Path) -> None:
    """Full attention has four tokens and the state of them is gone: the hit diverges, and a load brings the state."""
    observation = Observation(sample.header(oplog=3, num_blocks=12, groups=WITH_STATES), tmp_path)
    manager = observation.manager
    first = request_of("a", [1, 2, 3, 4, 5])
    for computed, new in ((0, 2), (2, 2), (4, 1)):
        first.num_computed_tokens = computed
        manager.allocate_slots(first, new)
    state = manager.get_block_ids("a")[0][1]
    manager.free(first)
    manager.evict_blocks({state})
    request = request_of("b", [1, 2, 3, 4, 5, 6, 7])
    blocks, hit, _, diverged = manager.get_computed_blocks_for_connector(request)
    assert (hit, diverged) == (4, True)
    cut = manager.truncate_computed_blocks(blocks, 2)
    manager.allocate_slots(request, 1, 2, cut, num_external_computed_tokens=4)
    (found,) = observation.said(oplog.ConnectorLookupOp)
    assert (found.want.hit, found.want.diverged, found.want.hits) == (4, True, [2, 4])
    (truncated,) = observation.said(oplog.TruncateOp)
    assert (truncated.tokens, truncated.want.blocks) == (2, [list(row) for row in cut.get_block_ids()])
    taken = observation.said(oplog.AllocateOp)[-1]
    assert (taken.hit, taken.external, taken.rows) == (2, 4, [list(row) for row in cut.get_block_ids()])


@pytest.mark.parametrize(
    ("poke", "said"),
    [
        (lambda manager: manager.block_pool.blocks[1].reset_hash(), "keys"),
        (lambda manager: manager.coordinator.free("a"), "coordinator.free was called"),
        (lambda manager: manager.block_pool.get_new_blocks(1), "get_new_blocks was called"),
        (lambda manager: setattr(manager, "watermark_blocks", 3), "watermark_blocks: 0 became 3"),
        (lambda manager: manager.block_pool.kv_event_queue.append(None), "events: 1 became 2"),
    ],
)
def test_a_cache_that_is_changed_from_outside_ends_its_log(observation: Observation, poke: Any, said: str) -> None:
    manager = observation.manager
    request = request_of("a", [1, 2, 3, 4, 5])
    manager.allocate_slots(request, 5)
    poke(manager)
    manager.new_step_starts()
    (end,) = observation.said(oplog.EndOp)
    assert said in end.reason


def test_a_cache_that_is_changed_before_the_first_call_ends_its_log(observation: Observation) -> None:
    observation.manager.block_pool.kv_event_queue.append(None)
    observation.manager.new_step_starts()
    (last,) = observation.log().operations
    assert last.reason == "poked before new_step_starts: events: 0 became 1"


def test_a_manager_in_use_is_refused(header: Header, tmp_path: pathlib.Path) -> None:
    from hkv.dialects.vllm.attach.attach import attach

    manager = manager_of(header)
    manager.allocate_slots(request_of("a", [1, 2, 3]), 3)
    session = Session(AttachSettings(folder=str(tmp_path)))
    with pytest.raises(ConfigError, match="handed out and cached nothing"):
        attach(manager, session)


def test_a_share_of_managers_is_recorded(header: Header, tmp_path: pathlib.Path) -> None:
    from hkv.dialects.vllm.attach.attach import attach_all

    session = Session(AttachSettings(folder=str(tmp_path), share=0.5))
    detach = attach_all(session)
    try:
        managers = [manager_of(header) for _ in range(40)]
    finally:
        detach()
    for manager in managers:
        manager.new_step_starts()
    session.close()
    left_out = (tmp_path / "refused.txt").read_text().splitlines()
    assert {line.split("\t", 1)[1] for line in left_out} == {"KVCacheManager\tnot drawn: share is 0.5"}
    assert 0 < len(find_logs([str(tmp_path)])) == 40 - len(left_out)
    assert sum("new_step_starts" in vars(manager) for manager in managers) == 0  # closed: no hook is left


def test_an_engine_beside_it_sees_a_planted_defect(header: Header, tmp_path: pathlib.Path) -> None:
    from hkv.dialects.vllm.attach.attach import attach

    manager = manager_of(header)
    session = Session(AttachSettings(folder=str(tmp_path), mode="shadow"))
    attach(manager, session)
    manager.coordinator.single_type_managers[0].cache_blocks = lambda *arguments, **named: None
    first, request = request_of("a", [1, 2, 3, 4, 5]), request_of("b", [1, 2, 3, 4, 5])
    manager.allocate_slots(first, 5)
    manager.get_computed_blocks(request)
    (shadow,) = session.shadows
    assert shadow.difference is not None
    assert (shadow.difference.operation, shadow.difference.want, shadow.difference.got) == ("lookup", 4, 0)


def test_schedulers_are_told_whole_and_agree(tmp_path: pathlib.Path) -> None:
    from benchmarks.attach_schedulers import record_runs

    assert record_runs(tmp_path, range(RUNS), 40) == []
    logs = [read_log(path) for path in find_logs([str(tmp_path)])]
    assert len(logs) == RUNS
    for log in logs:
        assert registry.dialect_of(log.header.dialect).ended(log) == "", log.path
        difference = check_log(log, engine_factory("numpy"))
        assert difference is None, difference.describe()
    assert any(isinstance(each, oplog.ComputedOp) for log in logs for each in log.operations)
