"""Requests that fit into RTP-LLM's pools: as many as the reference lets come and decode to their ends."""

from __future__ import annotations

from typing import Any

import pytest

from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import reserve_for_ratio
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning import DescribedModel, RtpOptions
from hkv.dialects.rtp_llm.planning.pools import DECODED, capacity_of
from hkv.model.group_policy import CacheDescription, LayerDescription
from hkv.spec import FullAttention, Mamba, SlidingWindow

BLOCK = 4
FULL = FullAttention(block_size=BLOCK, num_kv_heads=2, head_size=64)
STATE = Mamba(block_size=BLOCK, shapes=((3, 12), (1, 4, 4)), dtypes=("bfloat16", "bfloat16"))
WINDOW = SlidingWindow(block_size=BLOCK, num_kv_heads=2, head_size=64, window=6)


def cache(caches: list[CacheDescription], blocks: int, pools: str, **chosen: Any) -> PlannedCache:
    layers = tuple(LayerDescription(caches=(each,)) for each in caches)
    options = RtpOptions(block_size=BLOCK, pools=pools, **chosen)
    return PlannedCache.of_layers(DescribedModel(layers), options, num_blocks=blocks)


def fitting(planned: PlannedCache, tokens: int, reserve: int, ahead: int = 0) -> int:
    """Requests that come one after the other and decode to their ends, until one finds no room."""
    engine = RtpNumpyEngine(structs.to_rtp_header(planned.config(reserve_blocks=reserve), "core"))
    prompt = max(1, tokens - (DECODED + ahead) * BLOCK)
    for count in range(200):
        grows = structs.MallocOp(id=f"r{count}", device_cache=False, reuse=False)
        engine.perform(structs.RequestOp(id=grows.id, tokens=[count] * prompt, reserve=ahead))
        if engine.perform(grows).verdict != "granted":
            return count
        for _ in range(prompt, tokens):
            engine.perform(structs.AppendOp(id=grows.id, tokens=[[count]]))
            if engine.perform(grows).verdict != "granted":
                return count
    raise AssertionError("more than 200 requests")


MODELS = {
    "full": [CacheDescription(tag="default", spec=FULL)] * 2,
    "states": [
        CacheDescription(tag="full", spec=FULL),
        CacheDescription(tag="linear0", spec=STATE),
        CacheDescription(tag="linear1", spec=STATE),
    ],
    "windows": [
        CacheDescription(tag="full", spec=FULL),
        CacheDescription(tag="swa", spec=WINDOW, state_cache=True, active_tail_blocks=2),
    ],
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("ratio", "drafts"), [(0, 0), (5, 0), (40, 0), (5, 3)])
def test_as_many_requests_fit_as_the_manager_serves(model, ratio, drafts):
    pools = "independent" if model == "windows" else "shared"
    for blocks in (9, 20, 33, 61):
        planned = cache(MODELS[model], blocks, pools)
        usable = [each.num_blocks - 1 for each in planned.plan.groups]
        reserve = reserve_for_ratio(ratio, usable[0] if pools == "shared" else sum(usable))
        for tokens in (1, 3, 8, 9, 16, 19, 21, 30, 41):
            options = RtpOptions(block_size=BLOCK, pools=pools, drafts=drafts)
            found = capacity_of(planned.plan, options, tokens, ratio)
            assert found.requests == fitting(planned, tokens, reserve, drafts + 1 if drafts else 0), (blocks, tokens)
            assert found.requests <= found.concurrency


def test_what_holds_most_and_what_is_wasted() -> None:
    """By hand: of 32 blocks a request takes 4 of full attention and 2 of each group of states, which fill 104 bytes."""
    planned = cache(MODELS["states"], 33, "shared")
    found = capacity_of(planned.plan, RtpOptions(block_size=BLOCK), 16, 0)
    assert (found.concurrency, found.requests, found.limiting, found.limiting_share) == (4, 3, "full", 0.5)
    assert found.limited_by == "the blocks of the pool"
    assert (found.token_bytes, found.tokens, found.num_blocks) == (2048 / BLOCK, 32 * BLOCK, 33)
    assert found.waste == pytest.approx(1 - (4 * 2048 + 4 * 104) / (8 * 2048))
    windows = capacity_of(cache(MODELS["windows"], 33, "independent").plan, RtpOptions(pools="independent"), 8, 0)
    assert (windows.concurrency, windows.limiting, windows.waste) == (16, "full", 0)
    assert windows.limited_by == "the blocks of group full"


def test_a_pool_of_a_chosen_size_has_no_part_of_the_reserve() -> None:
    """Windows of 20 blocks hold 9 requests, whose third block is taken before the first is given back."""
    planned = cache(MODELS["windows"], 33, "independent", explicit_blocks=(("swa", 20),))
    options = RtpOptions(pools="independent")
    assert capacity_of(planned.plan, options, 16, 0).requests == fitting(planned, 16, 0)
    for ratio in (10, 30):
        reserve = reserve_for_ratio(ratio, 32)
        assert capacity_of(planned.plan, options, 16, ratio).requests == fitting(planned, 16, reserve)
