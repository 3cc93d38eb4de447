"""The cache of a model, as its plan lays it out in a memory, for a replay to study."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.planning.cache_plan import ServedPlan, cache_config, serve
from hkv.errors import PlanError
from hkv.model.huggingface import Model
from hkv.model.topology import Topology


def planned_cache(
    model: Model,
    memory: int,
    step_tokens: int,
    *,
    max_model_len: int | None = None,
    draft: Model | None = None,
    caching: bool = True,
    eagle: Sequence[int] | None = None,
    retention_interval: int | None = None,
) -> tuple[ServedPlan, VllmConfig]:
    """A model's plan under vLLM 0.33's rules, and the cache that it leads to.

    Groups, block sizes and the number of blocks are the plan's; tokens in flight are those of one step. `max_model_len`
    0 is the longest that fits; no `eagle` groups are all; `retention_interval` None is dense.
    """
    longest = max_model_len or model.max_model_len
    in_flight = min(step_tokens, longest)
    served = serve(
        model, memory, draft=draft, max_model_len=max_model_len, max_in_flight_tokens=in_flight, caching=caching
    )
    if not served.plan.groups:
        raise PlanError("model", model.model_type, "a model that caches something")
    config = cache_config(served.plan, served.limits, caching=caching)
    config = dataclasses.replace(config, retention_interval=retention_interval)
    return served, config if eagle is None else _with_eagle(config, eagle)


def _with_eagle(config: VllmConfig, eagle: Sequence[int]) -> VllmConfig:
    """The same cache with the drop rule on for these groups, or for all when there are none."""
    Topology.of_specs(config.topology.specs, eagle)
    groups = tuple(
        dataclasses.replace(group, eagle=index in eagle) for index, group in enumerate(config.topology.groups)
    )
    return dataclasses.replace(config, topology=Topology(groups), eagle=True)


# Defaults that vLLM 0.33's server takes from the device it runs on.
#
# `EngineArgs.get_batch_defaults` (vLLM 0.33 `engine/arg_utils.py`), for `vllm serve`
# (`UsageContext.OPENAI_API_SERVER`): devices of 160 GiB or more, of 70 GiB or more but no A100, and all others.

LARGEST, LARGE, OTHER = (16384, 1024), (8192, 1024), (2048, 256)
"""`max_num_batched_tokens` and `max_num_seqs` of the three."""

DEVICES = {
    "b200": LARGEST,
    "b300": LARGEST,
    "mi300x": LARGEST,
    "mi325x": LARGEST,
    "mi355x": LARGEST,
    "h100": LARGE,
    "h200": LARGE,
    "h20": LARGE,
    "gh200": LARGE,
    "a100": OTHER,
    "a10g": OTHER,
    "l4": OTHER,
    "l40s": OTHER,
    "gb10": OTHER,
}
"""Most tokens of a step and most requests running, by device."""
