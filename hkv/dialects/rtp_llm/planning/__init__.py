"""RTP-LLM's memory plan: bytes of blocks, groups, shared and independent pools."""

from hkv.dialects.rtp_llm.planning.blocks import blocks_for_budget
from hkv.dialects.rtp_llm.planning.descriptions import DescribedModel, describe_model
from hkv.dialects.rtp_llm.planning.options import RtpOptions
from hkv.dialects.rtp_llm.planning.planner import plan_described, plan_rtp_llm, served_options
from hkv.dialects.rtp_llm.planning.pools import PoolGroup, PoolPlan

__all__ = [
    "DescribedModel",
    "PoolGroup",
    "PoolPlan",
    "RtpOptions",
    "blocks_for_budget",
    "describe_model",
    "plan_described",
    "plan_rtp_llm",
    "served_options",
]
