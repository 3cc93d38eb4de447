"""Requests that fit into RTP-LLM's pools: as many as the reference's manager lets come and decode to their ends."""

from __future__ import annotations

import dataclasses

import pytest

from hkv.dialects.rtp_llm.config import reserve_for_ratio
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning import DescribedModel, RtpOptions
from hkv.dialects.rtp_llm.planning.concurrency import DECODED, capacity_of
from hkv.model.layer_description import CacheDescription, LayerDescription
from hkv.spec import FullAttention, Mamba, SlidingWindow
from reference.dialects.rtp_llm.manager import Manager

BLOCK = 4
FULL = FullAttention(block_size=BLOCK, num_kv_heads=2, head_size=64)
STATE = Mamba(block_size=BLOCK, shapes=((3, 12), (1, 4, 4)), dtypes=("bfloat16", "bfloat16"))
WINDOW = SlidingWindow(block_size=BLOCK, num_kv_heads=2, head_size=64, window=6)


def cache(caches: dict, blocks: int, pools: str) -> PlannedCache:
    layers = tuple(LayerDescription(caches=(each,)) for each in caches)
    options = RtpOptions(block_size=BLOCK, pools=pools)
    return PlannedCache.of_layers(DescribedModel(layers), options, num_blocks=blocks)


def fitting(planned: PlannedCache, tokens: int, reserve: int) -> int:
    """Requests that come one after the other and decode to their ends, until one finds no room."""
    manager, prompt = Manager(planned.config(reserve_blocks=reserve)), max(1, tokens - DECODED * BLOCK)
    for count in range(200):
        name = f"r{count}"
        manager.request(name, [count] * prompt)
        if not manager.malloc(name, device_cache=False, reuse=False).success:
            return count
        for _ in range(prompt, tokens):
            manager.append(name, [[count]])
            if not manager.malloc(name, device_cache=False, reuse=False).success:
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
@pytest.mark.parametrize("ratio", [0, 5, 40])
def test_as_many_requests_fit_as_the_manager_serves(model, ratio):
    pools = "independent" if model == "windows" else "shared"
    for blocks in (9, 20, 33, 61):
        planned = cache(MODELS[model], blocks, pools)
        usable = [each.num_blocks - 1 for each in planned.plan.groups]
        reserve = reserve_for_ratio(ratio, usable[0] if pools == "shared" else sum(usable))
        for tokens in (1, 3, 8, 9, 16, 19, 21, 30):
            found = capacity_of(planned.plan, RtpOptions(block_size=BLOCK, pools=pools), tokens, ratio)
            assert found.requests == fitting(planned, tokens, reserve), (blocks, tokens)
            assert found.requests <= found.concurrency


def test_drafts_are_held_beside_a_request():
    planned = cache(MODELS["full"], 33, "shared")
    options = RtpOptions(block_size=BLOCK)
    assert capacity_of(planned.plan, options, 16, 0).requests == 8
    assert capacity_of(planned.plan, dataclasses.replace(options, drafts=3), 16, 0).requests == 32 // 5
