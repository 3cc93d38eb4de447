"""SGLang's schedule in replays: on any machine, and held pass by pass against its own admission and policies."""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import BUGS
from hkv.dialects.sglang.replay_command import REPLAY
from hkv.dialects.sglang.scheduler import INIT_RATIO, POLICIES, Budget, SGLangScheduler
from hkv.errors import ConfigError, OperationError
from hkv.oracle.engines import engine_factory
from hkv.replay.schedule import Arrival, LiveRequest, Recorder, Schedule
from hkv.replay.verb import replay_trace
from hkv.spec import FullAttention, spec_from_text
from tests.sglang.test_dialect import CACHE, CHATS, header, replayed


def arrivals(count: int, seed: int) -> list[Arrival]:
    """Requests that begin as one of three conversations, in keys of 8 tokens."""
    drawn = random.Random(seed)
    made = []
    for index in range(count):
        talk, length = drawn.randrange(3), drawn.randint(1, 12)
        keys = [talk * 1000 + place for place in range(length - 1)]
        keys += [10_000 + 20 * index + place for place in range(17)]
        prompt, output = 8 * length - drawn.randint(0, 7), drawn.randint(1, 120)
        made.append(Arrival(index, index // 3, prompt, output, lambda keys=tuple(keys): keys))
    return made


def scheduler(
    policy: str, seed: int, engine: str = "numpy", kind: type[SGLangScheduler] = SGLangScheduler, **changes: Any
) -> SGLangScheduler:
    window, pages = (None, 20, 33)[seed % 3], (36, 60, 150)[seed % 3]
    given = {"pages": pages * 8, "size": 1} if seed % 2 else {"pages": pages, "size": 8}
    made = (Both if engine == "both" else engine_factory(engine))(header(window=window, bugs=sorted(BUGS), **given))
    schedule = Schedule(step_tokens=(48, 64, 200)[seed % 3], decode_tokens=1, max_running=(12, 8, 30)[seed % 3])
    return kind(policy, made, 8, schedule, arrivals(30, seed), Recorder(0, None, lambda: None))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_and_everything_is_given_back(policy: str) -> None:
    preemptions = 0
    for seed in range(6):
        made = scheduler(policy, seed)
        made.run()
        records = made.left()["recorder"].requests.values()
        assert len(records) == 30
        preemptions += sum(record.preemptions for record in records)
        state = made._engine.perform(structs.StateOp())
        assert not state.requests
        assert not any(lock for node in state.nodes for lock in node.locks)
    assert preemptions > 0


def test_a_policy_decides_hits_of_a_trace() -> None:
    totals = {policy: replayed(600, schedule_policy=policy).totals["hit_tokens"] for policy in (REPLAY, *POLICIES)}
    assert len(set(totals.values())) > 1
    assert replayed(600).totals["hit_tokens"] == totals[POLICIES[0]]


def test_the_default_is_sglang_s_own_schedule() -> None:
    """As its engine has it; but for states, of which its scheduler is not ruled, and the compiled schedule."""
    own, every = replayed(300), replayed(300, schedule_policy=REPLAY)
    assert own.totals["preemptions"] < every.totals["preemptions"]
    assert list(own.requests["hit"]) == list(replayed(300, schedule_policy="fcfs").requests["hit"])
    with pytest.raises(ConfigError, match="--schedule-policy replay has one"):
        replayed(300, "jax")
    shape = {"num_kv_heads": 1, "head_size": 64, "dtype": "bfloat16"}
    groups = [FullAttention(block_size=16, **shape), spec_from_text("mamba:16")]
    given = {"dialect": structs.NAME, "engine": "numpy", "limit": 5}
    assert replay_trace(CHATS, groups, [600, 60], **given).totals["hit_tokens"] >= 0
    with pytest.raises(OperationError, match="states"):
        replay_trace(CHATS, groups, [600, 60], dialect_options={"schedule_policy": "fcfs"}, **given)


def test_one_prompt_at_a_time_is_computed_in_parts() -> None:
    """A small window's pool cuts prompts short of the chunk: a second that it would cut waits for the first."""
    options = {"swa_full_tokens_ratio": 0.1}
    found = replay_trace(CHATS, CACHE, 600, dialect="sglang-0.5.23", dialect_options=options, engine="numpy")
    assert set(found.requests["outcome"]) == {"finished"}


def test_states_are_refused_by_name() -> None:
    given = header(20, bugs=sorted(BUGS))
    given.groups.append({"kind": "mamba", "block_size": 1})
    given.num_blocks.append(20)
    with pytest.raises(OperationError, match="states"):
        SGLangScheduler("fcfs", engine_factory("numpy")(given), 8, Schedule(), [], None)


class Judged(SGLangScheduler):
    """SGLang's own `SchedulePolicy` and `PrefillAdder` decide beside it, over the same cache, pass by pass."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        from sglang.srt.managers.schedule_policy import SchedulePolicy

        self.compared = 0
        self._cache = self._engine._cache
        self._theirs = SchedulePolicy(self._policy, self._cache, False, False, False)

    def decide(self, step: int) -> list[tuple[LiveRequest, int]]:
        expected = self._by_sglang()
        batch = super().decide(step)
        if expected is not None:
            assert [(live.id, length) for live, length in batch] == expected
            self.compared += len(batch)
        return batch

    def _by_sglang(self) -> list[tuple[str, int]] | None:
        """Requests that SGLang would compute in this pass, and up to where; None where it makes no pass."""
        from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

        full = self._full and self._config.window is None and bool(self._running)
        room = self._schedule.max_running - len(self._running)
        if ((full or not self._waiting) or room <= 0) and self._chunked is None:
            return None
        waiting = [self._req(live) for live in self._waiting]
        running = SimpleNamespace(reqs=[self._req(live) for live in self._running], batch_size=lambda: 0)
        self._theirs.calc_priority(waiting, running)
        given = (self._ratio, 16384, self._schedule.step_tokens)

        class Adder(PrefillAdder):
            def _account_prefill_cache_admission(self, req: Any, prefix_len: int) -> None:
                """The tier that hits came from is reported to no one."""

        adder = Adder(self._config.page_size, self._cache, self._engine._allocator, running, *given)
        if self._chunked is not None:
            chunked = self._req(self._chunked)
            chunked.prefix_len = self._chunked.computed
            adder.add_chunked_req(chunked)
        for req in waiting:
            if adder.budget_state() == AddReqResult.OTHER or full or len(adder.can_run_list) >= room:
                break
            req.match()
            if adder.add_one_req(req, self._chunked is not None, None) != AddReqResult.CONTINUE:
                break
        for req in adder.can_run_list:
            if req.lock is not None:
                self._cache.unlock(req.lock)
        return [(req.rid, req.extend_end) for req in adder.can_run_list]

    def _req(self, live: LiveRequest) -> Any:
        from sglang.srt.mem_cache.common import match_kv_cache

        tokens, prompt = self._named(live, 0), live.arrival.prompt

        class Req(SimpleNamespace):
            @property
            def extend_len(self) -> int:
                return self.extend_end - self.prefix_len

            def _compute_max_prefix_len(self, length: int) -> int:
                return length - 1

            def match(self) -> None:
                match_kv_cache(self, cache)

        cache = self._cache
        return Req(
            rid=live.id,
            sampling_params=SimpleNamespace(max_new_tokens=live.arrival.output, ignore_eos=False),
            origin_input_ids=array("q", tokens[:prompt]),
            output_ids=array("q", tokens[prompt:]),
            full_untruncated_fill_ids=array("q", tokens),
            prefix_len=0,
            extend_end=0,
            extra_key=None,
            cache_salt=None,
            retracted_stain=False,
            lock=None,
            session=None,
            dllm_config=None,
            return_logprob=False,
            is_dllm=lambda: False,
            auxiliary_swa_host_hit_length=0,
            kv=SimpleNamespace(holds_mamba=False, req_pool_idx=None),
            needs_host_load_back=lambda: False,
            time_stats=SimpleNamespace(wait_queue_entry_time=0.0),
        )


class Both:
    """The reference and an installed SGLang, which are asked the same and answer alike."""

    def __init__(self, header: structs.Header, name: str = "sglang") -> None:
        self.header, self.alone = header, False
        self.reference, self.installed = (engine_factory(each)(header) for each in ("numpy", name))

    def perform(self, operation: structs.Operation) -> Any:
        """Both, or the reference alone."""
        answer = self.reference.perform(operation)
        assert self.alone or answer == self.installed.perform(operation), operation
        return answer

    def num_available(self) -> int:
        return self.reference.num_available()


class Retracting(SGLangScheduler):
    """SGLang's own `retract_decode` sends requests back from the installed cache, and the schedule's from the other."""

    retractions = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker

        self._tracker = NewTokenRatioTracker.from_config()

    def _rest(self, step: int) -> None:
        super()._rest(step)
        self._tracker.reset()

    def _budget(self) -> Budget:
        """With nothing held free for tokens to come, so that more are let in than can stay."""
        return dataclasses.replace(super()._budget(), total=0.0)

    def _decode(self, step: int) -> None:
        self._tracker.decay_step()
        super()._decode(step)
        assert self._ratio == pytest.approx(self._tracker.current)

    def _fits(self, running: list[LiveRequest]) -> bool:
        fits = super()._fits(running)
        assert self._engine.alone or fits == self._batch(running).check_decode_mem()
        return fits

    def _retract(self, step: int) -> None:
        batch, before = self._batch(self._running), list(self._waiting)
        gone, ratio, aborted = batch.retract_decode()
        self._engine.alone = True
        super()._retract(step)
        self._engine.alone = False
        self._tracker.current = ratio
        assert list(self._waiting) == before + [req.live for req in gone]
        assert [req.live for req in batch.reqs] == self._running
        assert len(aborted) == (not self._running)
        assert self._engine.reference.perform(structs.StateOp()) == self._engine.installed.perform(structs.StateOp())
        self.retractions += len(gone)

    def _batch(self, running: list[LiveRequest]) -> Any:
        """Running requests as SGLang's scheduler has them, over the installed cache."""
        from sglang.srt.environ import envs
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.mem_cache.common import evict_from_tree_cache
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        installed = self._engine.installed

        class Batch(ScheduleBatch):
            def release_req(self, idx: int, remaing_req_count: int, offload_kv: bool = True) -> bool:
                installed.perform(structs.AbortOp(id=self.reqs[idx].live.id))
                evict_from_tree_cache(self.tree_cache, remaing_req_count * envs.SGLANG_RETRACT_DECODE_STEPS.get())
                return True

            def filter_batch(self, keep_indices: list[int]) -> None:
                self.reqs = [self.reqs[index] for index in keep_indices]

        batch = Batch.__new__(Batch)
        batch.reqs = [self._req(live) for live in running]
        batch.tree_cache, batch.token_to_kv_pool_allocator = installed._cache, installed._allocator
        batch.spec_algorithm = SpeculativeAlgorithm.NONE
        return batch

    def _req(self, live: LiveRequest) -> Any:
        return SimpleNamespace(
            live=live,
            rid=live.id,
            beam_group=None,
            priority=None,
            to_finish=None,
            origin_input_ids=range(live.arrival.prompt),
            output_ids=range(live.tokens - live.arrival.prompt),
            sampling_params=SimpleNamespace(max_new_tokens=live.arrival.output),
            kv=SimpleNamespace(kv_committed_len=live.computed, kv_allocated_len=live.computed),
        )


@pytest.mark.sglang
@pytest.mark.parametrize("policy", POLICIES)
def test_requests_are_retracted_as_by_sglang(policy: str) -> None:
    """Requests sent back, in which order, what is left of the cache, and how much is held free from then on."""
    retractions = 0
    for seed in range(3):
        made = scheduler(policy, seed, kind=Retracting, engine="both")
        made.run()
        assert isinstance(made, Retracting)
        retractions += made.retractions
    assert retractions > 15


@pytest.mark.sglang
@pytest.mark.parametrize("engine", ["sglang", "sglang-rust"])
@pytest.mark.parametrize("policy", POLICIES)
def test_passes_are_those_of_sglang(policy: str, engine: str) -> None:
    compared = 0
    for seed in range(6):
        judged = scheduler(policy, seed, engine, Judged)
        judged.run()
        assert isinstance(judged, Judged)
        compared += judged.compared
    assert compared > 150


@pytest.mark.sglang
@pytest.mark.parametrize("policy", POLICIES)
def test_a_schedule_is_the_same_over_the_installed_cache(policy: str) -> None:
    for seed in range(3):
        ends = [scheduler(policy, seed, engine) for engine in ("numpy", "sglang", "sglang-rust")]
        for each in ends:
            each.run()
        reference, *others = [each.left()["recorder"].requests for each in ends]
        assert all(records == reference for records in others)


@pytest.mark.sglang
def test_the_ratio_is_that_of_sglang() -> None:
    from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker

    theirs = NewTokenRatioTracker.from_config()
    assert (theirs.init, theirs.current) == (INIT_RATIO, INIT_RATIO)
