"""The simpler tier: a second pool of blocks with the GPU's rules."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec
import pytest

from hkv.contract import registry
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.config import BUGS
from hkv.dialects.vllm.offload.numpy import engine
from hkv.errors import ConfigError, HKVError
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import read_log

DIALECT = registry.dialect_of(structs.OFFLOAD)
DATA = pathlib.Path(__file__).parents[1] / "data" / "offload"


def header(**options: Any) -> structs.Header:
    fields: dict[str, Any] = {
        "num_blocks": [20, 30],
        "groups": [
            {"kind": "full_attention", "block_size": 4},
            {"kind": "sliding_window", "block_size": 4, "window": 9},
        ],
        "connector": "simple",
        "prompt_only": False,
        "retention_interval": None,
        "bugs": sorted(BUGS),
    }
    return structs.Header(dialect=structs.OFFLOAD, feature="hand", **fields | options)


def a_prompt_that_comes_back(driven: Any) -> list[structs.Stepped]:
    """A prompt, another one that needs most of the GPU, and the first again; jobs are reported with the step after."""
    steps, jobs = list[structs.Stepped](), list[int]()
    for name, tokens in (("a", range(24)), ("b", range(50, 80)), ("c", range(24))):
        driven.perform(structs.RequestOp(id=name, tokens=list(tokens), output=2))
        for _ in range(4):
            steps.append(driven.perform(structs.StepOp(reports=jobs, at_once=True)))
            jobs = [job.job for job in steps[-1].stores]
    return steps


def test_blocks_are_stored_when_a_later_step_sees_them_and_at_the_end() -> None:
    steps = a_prompt_that_comes_back(engine(header()))
    stored = [[len(job.blocks) for job in step.stores] for step in steps[:4]]
    assert stored == [[], [12], [], []]
    (load,) = [job for step in steps for job in step.loads]
    (match,) = [match for step in steps for match in step.matches if match.external]
    assert (match.id, match.local, match.external, match.later) == ("c", 0, 20, True)
    assert load.id == "c"
    assert len(load.chunks) == len(load.blocks)


def test_a_tier_with_less_room_takes_what_it_has_room_for() -> None:
    driven = engine(header(num_blocks=[20, 6]))
    steps = a_prompt_that_comes_back(driven)
    assert next(len(job.blocks) for step in steps[:4] for job in step.stores) == 5


def test_an_emptied_tier_keeps_nothing_of_what_is_on_its_way() -> None:
    driven = engine(header())
    driven.perform(structs.RequestOp(id="a", tokens=list(range(24)), output=4))
    driven.perform(structs.StepOp())
    (job,) = driven.perform(structs.StepOp()).stores
    assert not driven.perform(structs.ResetOp(tier=True)).ok
    driven.perform(structs.StepOp(reports=[job.job]))
    state = driven.perform(structs.StateOp())
    assert (state.pool.chunks, len(state.pool.free)) == ([], 29)


def test_a_lazy_tier_takes_what_is_about_to_be_handed_out() -> None:
    full = [{"kind": "full_attention", "block_size": 4}]
    driven = engine(header(num_blocks=[9, 30], groups=full, lazy=True, step_tokens=8, bugs=[]))
    driven.perform(structs.RequestOp(id="a", tokens=list(range(16)), output=1))
    stored = [[job.blocks for job in driven.perform(structs.StepOp()).stores] for _ in range(4)]
    assert stored == [[]] * 4  # four blocks without keys are handed out first
    driven.perform(structs.RequestOp(id="b", tokens=list(range(50, 58)), output=1))
    assert [job.blocks for job in driven.perform(structs.StepOp()).stores] == [[4, 3]]
    assert driven.perform(structs.StateOp()).scheduler.requests == {}


STATES = {
    "groups": [{"kind": "full_attention", "block_size": 4}, {"kind": "mamba", "block_size": 4}],
    "hash_block_size": 2,
}
"""Two groups whose hits may end inside blocks."""


@pytest.mark.parametrize(("options", "external"), [({}, 6), ({"lazy": True}, 4)])
def test_a_hit_ends_inside_a_block_unless_the_tier_is_lazy(options: dict[str, Any], external: int) -> None:
    driven = engine(header(num_blocks=[9, 30], **STATES, **options))
    matches, jobs = list[structs.Match](), list[int]()
    for name, tokens in (("a", range(7)), ("b", range(50, 70)), ("c", range(7))):
        driven.perform(structs.RequestOp(id=name, tokens=list(tokens), output=1))
        for _ in range(8):
            step = driven.perform(structs.StepOp(reports=jobs, at_once=True))
            matches += step.matches
            jobs = [job.job for job in step.stores]
    assert [(match.local, match.external) for match in matches if match.id == "c"] == [(0, external)]


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"lazy": True}, STATES], ids=["eager", "lazy", "tails"])
def test_the_scheduler_of_vllm_does_so(options: dict[str, Any]) -> None:
    given = header(**options)
    installed = engine_factory("vllm-offload")(given)
    assert a_prompt_that_comes_back(installed) == a_prompt_that_comes_back(engine(given))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"connector": "disk"}, "connector"),
        ({"policy": "arc"}, "policy"),
        ({"prompt_only": True}, "prompt_only"),
        ({"groups": [{"kind": "sliding_window", "block_size": 4, "window": 9}]}, "groups"),
        ({"connector": "native", "prompt_only": True, "lazy": True}, "lazy"),
    ],
)
def test_what_it_does_not_have_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine(msgspec.structs.replace(header(), **changes))
    assert error.value.argument == field


def test_it_is_not_warned_of_what_the_native_one_does() -> None:
    logs = [read_log(path) for path in sorted(DATA.glob("*.jsonl"))]
    assert {log.header.connector for log in logs if DIALECT.warnings(log)} == {"native"}


def test_it_explains_no_hits() -> None:
    with pytest.raises(HKVError, match="explanations"):
        DIALECT.resumptions(engine(header()), structs.StepOp(), "a")
