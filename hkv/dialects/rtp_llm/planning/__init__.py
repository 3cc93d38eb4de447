"""RTP-LLM's memory plan: bytes of blocks, groups, shared and independent pools, and the split of a GPU's memory."""

from hkv.dialects.rtp_llm.planning.budget import blocks_for_budget, cache_memory
from hkv.dialects.rtp_llm.planning.planner import RtpOptions, plan_rtp_llm
from hkv.dialects.rtp_llm.planning.pools import PoolGroup, PoolPlan

__all__ = ["PoolGroup", "PoolPlan", "RtpOptions", "blocks_for_budget", "cache_memory", "plan_rtp_llm"]
