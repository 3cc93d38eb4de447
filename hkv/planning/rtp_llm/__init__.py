"""RTP-LLM's memory plan: bytes of blocks, groups, shared and independent pools, and the split of a GPU's memory."""

from hkv.planning.rtp_llm.budget import blocks_for_budget, cache_memory
from hkv.planning.rtp_llm.planner import RtpOptions, plan_rtp_llm
from hkv.planning.rtp_llm.pools import PoolGroup, PoolPlan

__all__ = ["PoolGroup", "PoolPlan", "RtpOptions", "blocks_for_budget", "cache_memory", "plan_rtp_llm"]
