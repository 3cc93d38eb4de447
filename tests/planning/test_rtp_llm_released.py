"""Every released model under RTP-LLM with nothing but a size: planned, or refused for what RTP-LLM has no size for."""

from __future__ import annotations

import re

import pytest

from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning import RtpOptions, served_options
from hkv.errors import PlanError
from hkv.model.huggingface import load_config, read_model
from hkv.model.released import released_models

UNSIZED = (
    "states = .* RTP-LLM sizes no other",
    "layers.* one cache, and an indexer at most",
    "indexers = .* one for every layer or none",
    "head_size_v = .* keys and values of one size",
)


@pytest.mark.parametrize("name", [released.name for released in released_models()])
def test_a_released_model_is_planned_or_has_no_size(name):
    """5 of those with gated delta nets were refused for float32 states, and others for blocks of 64 tokens."""
    model, refused = read_model(load_config(name)), ""
    try:
        options, _ = served_options(model, RtpOptions(), ())
        cache = PlannedCache.of_model(model, options, memory=80 << 30)
    except PlanError as error:
        refused = str(error)
    if refused:
        assert any(re.search(reason, refused) for reason in UNSIZED)
        return
    states = [group for group in cache.plan.groups if group.block.kind == "linear"]
    assert {group.block.spec.state_tensors[0][1] for group in states} <= {"bfloat16"}
    if states and cache.plan.shared:
        fewer = RtpOptions(block_size=max(1, options.block_size - 64))
        if options.block_size > 64:
            with pytest.raises(PlanError, match="not padded"):
                PlannedCache.of_model(model, fewer, memory=80 << 30)
