"""The scheduler with its tier: held against vLLM 0.33.0's own on a CPU, its invariants, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from hkv.contract import registry
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.config import ALL_OR_NOTHING, BUGS, OWN_HEAD, chunk_bytes
from hkv.dialects.vllm.offload.numpy import engine
from hkv.dialects.vllm.offload.traffic import SCHEDULER_FEATURES
from hkv.errors import ConfigError, EngineFailure, HKVError, OperationError
from hkv.oracle.comparison import Comparison
from hkv.oracle.record import Only, record

DIALECT = registry.dialect_of(structs.OFFLOAD)
ONLY = Only(dialect=structs.OFFLOAD)


def header(chunks: int = 20, blocks: int = 40, window: int | None = None, **options: Any) -> structs.Header:
    groups: list[dict[str, Any]] = [{"kind": "full_attention", "block_size": 4}]
    if window is not None:
        groups.append({"kind": "sliding_window", "block_size": 4, "window": window})
    return structs.Header(
        dialect=structs.OFFLOAD, feature="hand", num_blocks=[blocks, chunks], groups=groups, **options
    )


def steps(driven: Any, *reports: list[int], **options: Any) -> list[structs.Stepped]:
    return [driven.perform(structs.StepOp(reports=jobs, **options)) for jobs in reports]


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("feature", SCHEDULER_FEATURES)
def test_reference_agrees_with_vllm(feature: str) -> None:
    compared = Comparison(("vllm-offload", "numpy"), ONLY)
    assert not any(compared.seed(feature, seed) for seed in range(8))


@pytest.mark.parametrize("feature", SCHEDULER_FEATURES)
def test_random_traffic_breaks_no_invariant(feature: str) -> None:
    for seed in range(4):
        record(lambda given: DIALECT.watch(engine(given), given), feature, seed, 2, 10, ONLY)


def test_a_prompt_comes_back_from_the_tier_once_its_store_is_reported() -> None:
    """Without recency on the GPU: the second request waits while the store goes on, then loads all but one token."""
    driven, prompt = engine(header()), list(range(17))
    driven.perform(structs.RequestOp(id="a", tokens=prompt, output=1))
    (stored,) = steps(driven, [])
    assert [job.chunks for job in stored.stores] == [[0, 1, 2, 3]]
    driven.perform(structs.ResetOp())
    driven.perform(structs.RequestOp(id="b", tokens=prompt, output=1))
    waits, loads, runs = steps(driven, [0], [], [], at_once=True)
    assert [match.external for match in waits.matches] == [None]
    assert [match.external for match in loads.matches] == [16]
    assert loads.tokens == {}
    assert runs.tokens == {"b": 1}


def test_an_explanation_says_where_the_tier_alone_could_resume() -> None:
    driven = engine(header(window=6))
    driven.perform(structs.RequestOp(id="a", tokens=list(range(24)), output=2))
    steps(driven, [])
    full, window = DIALECT.resumptions(driven, structs.StepOp(), "a")
    assert (full.largest, full.next, full.lacks) == (24, None, ())
    assert (window.largest, window.next) == (20, 24)
    assert [(lack.first, lack.last) for lack in window.lacks] == [(20, 23)]


def test_a_step_with_more_new_chunks_than_the_tier_stores_nothing_and_tries_again_every_step() -> None:
    for bugs, refused, stored in (([ALL_OR_NOTHING], [1, 2, 3], []), ([], [1, 1, 1], [0, 1, 2])):
        driven = engine(header(chunks=3, bugs=bugs))
        driven.perform(structs.RequestOp(id="a", tokens=list(range(16)), output=4))
        done = steps(driven, [], [], [])
        assert [step.refused for step in done] == refused
        assert [chunk for step in done for job in step.stores for chunk in job.chunks] == stored


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_prompt_longer_than_the_tier_keeps_its_head_without_the_defect_alone(policy: str) -> None:
    found = []
    for bugs in ([OWN_HEAD], []):
        driven = engine(header(chunks=3, step_tokens=4, most_running=4, policy=policy, bugs=bugs))
        driven.perform(structs.RequestOp(id="a", tokens=list(range(21)), output=1))
        for _ in range(8):
            steps(driven, sorted(driven.scheduler.connector.jobs))
        driven.perform(structs.ResetOp())
        driven.perform(structs.RequestOp(id="b", tokens=list(range(21)), output=1))
        found.append(steps(driven, [])[0].matches[0].external)
    assert found[0] < found[1] == 12


def test_a_block_that_is_handed_out_while_a_store_reads_it_has_the_store_finished_first() -> None:
    driven = engine(header(blocks=6))
    driven.perform(structs.RequestOp(id="a", tokens=list(range(16)), output=1))
    driven.perform(structs.RequestOp(id="b", tokens=list(range(50, 66)), output=1))
    first, second = steps(driven, [], [])
    assert ([job.job for job in first.stores], second.flushed) == ([0], [0])


def test_a_block_that_stands_twice_in_a_job_ends_the_engine() -> None:
    """Only under `reset-revives-window-blocks`, where a request gets a block back that it once gave up."""
    groups = [{"kind": "sliding_window", "block_size": 4, "window": 2}]
    given = structs.Header(
        dialect=structs.OFFLOAD,
        feature="hand",
        num_blocks=[5, 16],
        groups=groups,
        retention_interval=None,
        prompt_only=False,
        bugs=["reset-revives-window-blocks"],
    )
    driven = engine(given)
    driven.perform(structs.RequestOp(id="a", tokens=[0] * 12, output=20))
    steps(driven, *([[]] * 12))
    driven.perform(structs.ResetOp(tier=True))
    (twice,) = steps(driven, [])
    (job,) = twice.stores
    assert len(set(job.blocks)) < len(job.blocks)
    with pytest.raises(EngineFailure):
        steps(driven, [job.job])


def test_a_tier_has_as_many_chunks_as_fit_in_pages() -> None:
    assert chunk_bytes(4096, 1, 1) == 4096
    assert chunk_bytes(4097, 1, 1) == 8192
    assert chunk_bytes(1024, 2, 4) == 8192


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"blocks_per_chunk": 0}, "blocks_per_chunk"),
        ({"window": 5, "retention_interval": 6}, "retention_interval"),
        ({"eagle": [1]}, "eagle"),
        ({"bugs": ["x"]}, "bugs"),
        ({"threshold": -1}, "threshold"),
        ({"step_tokens": 4, "most_running": 8}, "step_tokens"),
    ],
)
def test_a_tier_that_vllm_does_not_have_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine(header(**changes))
    assert error.value.argument == field


def test_what_cannot_come_is_refused_and_changes_nothing() -> None:
    driven = engine(header(bugs=sorted(BUGS)))
    driven.perform(structs.RequestOp(id="a", tokens=[1, 2], output=1))
    before = driven.perform(structs.StateOp())
    for operation in (
        structs.RequestOp(id="a", tokens=[1], output=1),
        structs.RequestOp(id="b", tokens=[], output=1),
        structs.StepOp(reports=[0]),
        structs.AbortOp(id="b"),
        structs.BeginOp(id="b"),
    ):
        with pytest.raises(HKVError):
            DIALECT.lifecycle(header()).follow(structs.AbortOp(id="b"))
        with pytest.raises(OperationError):
            driven.perform(operation)
    assert driven.perform(structs.StateOp()) == before
