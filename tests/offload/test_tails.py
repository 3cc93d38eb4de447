"""Ends of prompts inside blocks, kept in the tier beside recurrent states; hits on the GPU that drop a block."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.config import BUGS
from hkv.dialects.vllm.offload.numpy import engine
from hkv.errors import ConfigError
from hkv.oracle.engines import engine_factory

PROMPT = list(range(31))


def header(drafts: int, **options: Any) -> structs.Header:
    """Blocks of 8 tokens whose prefixes are named every 2, of full attention and recurrent states."""
    groups = [
        {"kind": "full_attention", "block_size": 8},
        {"kind": "mamba", "block_size": 8, "num_speculative_blocks": drafts},
    ]
    fields: dict[str, Any] = {
        "num_blocks": [60, 40],
        "groups": groups,
        "hash_block_size": 2,
        "drafts": drafts,
        "eagle": [0] * bool(drafts),
        "retention_interval": None,
        "bugs": sorted(BUGS),
    }
    return structs.Header(dialect=structs.OFFLOAD, feature="hand", **fields | options)


def asked_again(driven: Any, times: int) -> list[structs.Stepped]:
    """Steps of a prompt that comes again and again from an empty GPU; jobs are reported with the step after."""
    steps = []
    for number in range(times):
        driven.perform(structs.RequestOp(id=f"r{number}", tokens=PROMPT, output=2))
        jobs: list[int] = []
        for _ in range(9):
            steps.append(driven.perform(structs.StepOp(reports=jobs, at_once=True)))
            jobs = [job.job for job in steps[-1].stores]
        assert driven.perform(structs.ResetOp()).ok
    return steps


def loads(steps: list[structs.Stepped]) -> list[int | None]:
    return [match.external for step in steps for match in step.matches]


def test_a_prompts_end_is_stored_with_the_state_there_and_loaded() -> None:
    steps = asked_again(engine(header(0)), 2)
    tails = [job for step in steps for job in step.stores if job.sizes == [1, 1] and job.starts == [3, 3]]
    assert len(tails) == 1
    assert loads(steps) == [0, 30]
    (load,) = [job for step in steps for job in step.loads]
    assert load.sizes == [4, 1]


def test_a_drafts_tail_is_stored_by_a_request_that_loaded_and_proved_by_the_next_prefix() -> None:
    steps = asked_again(engine(header(1)), 3)
    assert loads(steps) == [0, 16, 28]


def test_a_hit_on_the_gpu_drops_a_block_of_a_draft() -> None:
    found = []
    for drafts in (0, 1):
        driven = engine(header(drafts, groups=[{"kind": "full_attention", "block_size": 8}], hash_block_size=None))
        driven.perform(structs.RequestOp(id="a", tokens=PROMPT, output=1))
        driven.perform(structs.StepOp())
        driven.perform(structs.RequestOp(id="b", tokens=PROMPT, output=1))
        found.append(driven.perform(structs.StepOp()).matches[0].local)
    assert found == [24, 16]


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("drafts", [0, 1, 2])
def test_the_scheduler_of_vllm_does_so(drafts: int) -> None:
    given = header(drafts)
    installed = engine_factory("vllm-offload", structs.OFFLOAD)(given)
    assert asked_again(installed, 4) == asked_again(engine(given), 4)


@pytest.mark.parametrize(
    ("changes", "field"), [({"drafts": -1}, "drafts"), ({"hash_block_size": 3}, "hash_block_size")]
)
def test_a_header_that_vllm_does_not_have_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        engine(msgspec.structs.replace(header(0), **changes))
