"""Invariants of a cache under RTP-LLM's rules, as named checks on any engine of its logs."""

from hkv.dialects.rtp_llm.invariants import cache, lists
from hkv.dialects.rtp_llm.invariants.moment import RTP_INVARIANTS, RtpMoment, RtpWatch

__all__ = ["RTP_INVARIANTS", "RtpMoment", "RtpWatch", "cache", "lists"]
