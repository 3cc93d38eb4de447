"""What always holds in a cache under RTP-LLM's rules, as named checks on any engine of its logs."""

from hkv.testing.rtp_invariants import cache, hits, lists, pools
from hkv.testing.rtp_invariants.moment import RTP_INVARIANTS, RtpMoment
from hkv.testing.rtp_invariants.watch import RtpWatch

__all__ = ["RTP_INVARIANTS", "RtpMoment", "RtpWatch", "cache", "hits", "lists", "pools"]
