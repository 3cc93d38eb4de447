"""Logs under RTP-LLM's rules: what a line must hold beyond its types."""

from __future__ import annotations

from hkv.contract.log import LogFormat
from hkv.dialects.rtp_llm.log.configuration import to_rtp_config
from hkv.dialects.rtp_llm.log.structs import OPERATIONS, RtpHeader

SMALLEST_TOKEN = -(2**31)
"""Tokens are hashed as int32, so a log may hold negative ones."""

FORMAT = LogFormat(RtpHeader, tuple(OPERATIONS.values()), to_rtp_config, {"tokens": SMALLEST_TOKEN}, "rtp_")
"""Header and operations, by name."""
