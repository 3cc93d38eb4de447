"""Number of the longest requests that fit: the fast simulation against one that walks, and against the manager."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.dialects.vllm.kinds import layer
from hkv.dialects.vllm.planning import Plan, PlanOptions, plan_vllm
from hkv.dialects.vllm.planning.cache_plan import cache_config, serve
from hkv.dialects.vllm.planning.plan import PlannedGroup
from hkv.dialects.vllm.planning.residency import simulate
from hkv.errors import ConfigError, PlanError
from hkv.model.huggingface import ReadOptions, load_config, read_model
from hkv.model.topology import Topology
from hkv.spec import ChunkedLocal, FullAttention, LayerSpec, Mamba, RequestLimits, SlidingWindow
from reference.dialects.vllm.manager import Manager

KINDS: tuple[LayerSpec, ...] = (
    FullAttention(block_size=4),
    SlidingWindow(block_size=4, window=10),
    ChunkedLocal(block_size=2, chunk=12),
    Mamba(block_size=8, num_speculative_blocks=1),
)


def usage_by_walking(
    groups: list[PlannedGroup], limits: RequestLimits, step_tokens: int, batches: int, requests: int
) -> int:
    """Most blocks in use while `requests` prompts are computed in order of arrival, so many tokens a step.

    Requests take their turns one after the other: those whose turn is to come hold what they held in the step before.
    What the `batches - 1` steps before this one compute is still running, so that its windows are kept.
    """
    prompt, peak = max(limits.max_model_len - 1, 1), 0
    computed: list[list[int]] = [[0] * batches for _ in range(requests)]  # prompt tokens after each of the turns
    holding, turns_at_rest = [0] * requests, [0] * requests

    def held(start: int, end: int) -> int:
        return sum(layer(group.spec).held_blocks(start, end, limits) for group in groups)

    while any(turns < batches for turns in turns_at_rest):
        left = step_tokens
        for index, history in enumerate(computed):
            done, settled = history[-1], min(history[-batches], limits.max_model_len - 1)
            step = min(left, prompt - done)
            if done < prompt and not step:
                continue
            holding[index] = held(settled, done + step if done < prompt else limits.max_model_len)
            turns_at_rest[index] += done == prompt
            history.append(done + step)
            left -= step
            peak = max(peak, sum(holding))
    return peak


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    length=st.integers(2, 60),
    budget=st.integers(1, 90),
    batches=st.integers(1, 3),
    pool=st.integers(0, 150),
)
def test_as_many_fit_as_walking_finds(
    kinds: list[LayerSpec], length: int, budget: int, batches: int, pool: int
) -> None:
    groups = [PlannedGroup.merged([f"layer{i}"], spec) for i, spec in enumerate(kinds)]
    limits = RequestLimits(max_model_len=length, max_in_flight_tokens=budget * batches)
    found = simulate(groups, pool, limits, step_tokens=budget, batches=batches)

    def usage(requests: int) -> int:
        return usage_by_walking(groups, limits, budget, batches, requests)

    assert found.peak_usage == (usage(found.requests) if found.requests else 0) <= pool
    assert usage(found.requests + 1) > pool


@pytest.mark.parametrize(("spec", "full_length"), [(KINDS[0], 25), (KINDS[1], 3), (KINDS[2], 2), (KINDS[3], 3)])
def test_blocks_of_a_request_at_its_last_token(spec: LayerSpec, full_length: int) -> None:
    limits = RequestLimits(max_model_len=100, max_in_flight_tokens=32)
    found = simulate([PlannedGroup.merged(["layer"], spec)], 1000, limits)
    assert found.full_length_blocks == (full_length,)
    assert found.peak_blocks[0] <= layer(spec).max_request_blocks(limits)


def test_a_mixed_group_takes_what_its_neediest_layer_needs() -> None:
    wide = dataclasses.replace(KINDS[0], head_size=8)  # type: ignore[call-arg]
    group = PlannedGroup.of_type({"a": KINDS[0], "b": wide})
    assert simulate([group], 25, RequestLimits(max_model_len=100)).requests == 1
    assert simulate([group], 24, RequestLimits(max_model_len=100)).requests == 0


# As many fit as the reference's manager admits, under the configuration that a plan gives.


MODELS = pathlib.Path(__file__).resolve().parent.parent / "data" / "models"
SMALL: tuple[LayerSpec, ...] = (
    FullAttention(block_size=4, num_kv_heads=2),
    SlidingWindow(block_size=4, num_kv_heads=2, window=10),
    ChunkedLocal(block_size=4, num_kv_heads=2, chunk=12),
)


def fit(plan: Plan, limits: RequestLimits, requests: int) -> bool:
    """True if a manager has room for so many prompts, computed in order of arrival, each then at its last token."""
    manager = Manager(cache_config(plan, limits, caching=False))
    length, prompt = limits.max_model_len, limits.max_model_len - 1
    done = [0] * requests
    for index in range(requests):
        manager.request(str(index), list(range(length)))
    while any(tokens < length for tokens in done):
        manager.step()
        left = limits.max_in_flight_tokens
        for index, tokens in enumerate(done):
            step = 1 if tokens == prompt else min(left, prompt - tokens)
            if tokens == length or not step:
                continue
            if manager.allocate(str(index), step) is None:
                return False
            manager.advance(str(index), step)
            done[index] += step
            left -= step if tokens != prompt else 0
    return True


@given(
    kinds=st.lists(st.sampled_from(SMALL), min_size=1, max_size=3, unique=True),
    length=st.integers(2, 50),
    budget=st.integers(1, 70),
    blocks=st.integers(20, 120),
)
def test_as_many_fit_as_the_manager_admits(kinds: list[LayerSpec], length: int, budget: int, blocks: int) -> None:
    limits = RequestLimits(max_model_len=length, max_in_flight_tokens=budget)
    options = PlanOptions(limits=limits, layout="LBNHC", num_blocks=blocks, caching=False)
    layers = {f"layer{i}": spec for i, spec in enumerate(kinds)}
    try:
        plan = plan_vllm([layers], [1 << 30], options)
    except PlanError:
        return
    found = simulate(plan.groups, plan.usable_blocks, limits)
    assert fit(plan, limits, found.requests)
    assert not fit(plan, limits, found.requests + 1)


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.json")))
def test_every_model_s_plan_can_be_managed(name: str) -> None:
    served = serve(read_model(load_config(MODELS / f"{name}.json")), 80 << 30)
    config = cache_config(served.plan, served.limits)
    assert config.num_blocks == served.plan.num_blocks
    assert len(config.topology.groups) == len(served.plan.groups)
    small = dataclasses.replace(config, num_blocks=served.plan.request_blocks + 1)
    manager = Manager(small)
    manager.request("r", list(range(100)))
    assert manager.allocate("r", 100) is not None


def test_context_parallel_blocks_count_for_all_ranks() -> None:
    model = read_model(load_config(MODELS / "gpt_oss.json"), ReadOptions(context_parallel=2))
    served = serve(model, 80 << 30, context_parallel=2)
    assert sorted(set(cache_config(served.plan, served.limits).block_sizes)) == [16, 32]


def test_a_model_without_a_cache_has_nothing_to_manage() -> None:
    limits = RequestLimits(max_model_len=8)
    empty = plan_vllm([{}], [1 << 20], PlanOptions(limits=limits))
    with pytest.raises(PlanError, match="at least one group"):
        cache_config(empty, limits)


def test_the_manager_takes_one_pool() -> None:
    model = read_model(load_config(MODELS / "gpt_oss.json"), ReadOptions())
    served = serve(model, 80 << 30)
    config = cache_config(served.plan, served.limits)
    apart = Topology(config.topology.groups, pools="independent")
    with pytest.raises(ConfigError, match=r"topology.pools = 'independent': expected shared"):
        dataclasses.replace(config, topology=apart)
