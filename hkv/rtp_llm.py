"""RTP-LLM's cache in bytes: pools planned from layers, pages that move, requests between servers.

A `PlannedCache` says where every layer lies; `write`, `gather`, `attention`, `scatter`, `copy` and `zero` work on its
pools; `plan_moves` says which bytes of a request go from one `Server` to another, and `carry` moves them.
`docs/dialects.md` walks through it.
"""

from __future__ import annotations

from hkv.dialects.rtp_llm.data_plane import attention, copy, gather, on_device, scatter, write, zero
from hkv.dialects.rtp_llm.disaggregation import Server, arrived_tokens, carry, plan_moves
from hkv.dialects.rtp_llm.monitoring import cache_info, pool_snapshots, recent_hits
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning import DescribedModel, RtpOptions
from hkv.dialects.rtp_llm.transfers import store_plan, tensor_parallel_peers
from hkv.model.group_policy import CacheDescription, LayerDescription

__all__ = [
    "CacheDescription",
    "DescribedModel",
    "LayerDescription",
    "PlannedCache",
    "RtpOptions",
    "Server",
    "arrived_tokens",
    "attention",
    "cache_info",
    "carry",
    "copy",
    "gather",
    "on_device",
    "plan_moves",
    "pool_snapshots",
    "recent_hits",
    "scatter",
    "store_plan",
    "tensor_parallel_peers",
    "write",
    "zero",
]
