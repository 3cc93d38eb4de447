"""Two engines under RTP-LLM's rules side by side: one in doubt, one that counts."""

from __future__ import annotations

from hkv.dialects.rtp_llm.engines.engine import attempt_rtp
from hkv.dialects.rtp_llm.log.structs import RtpAnswer, RtpOp
from hkv.errors import ConfigError
from hkv.oracle.compare import Mismatch, compare
from hkv.oracle.engine import Failure


class RtpPair:
    """Performs every operation on both engines and compares what they answer, exactly.

    Args:
      tested: the engine in doubt.
      right: the engine whose answers count.
      ids: `exact`; no other way of comparing, for the rules hand out the smallest id.

    Attributes:
      timed_out: whether the engine in doubt was silent, at any operation, for as long as it may be.

    Raises:
      ConfigError: another way.
    """

    def __init__(self, tested: object, right: object, ids: str = "exact") -> None:
        if ids != "exact":
            raise ConfigError("ids", ids, "exact: RTP-LLM's rules say which block is handed out, the smallest free id")
        self.tested, self.right = tested, right
        self.timed_out = False

    def perform(self, operation: RtpOp) -> tuple[RtpAnswer | Failure, Mismatch | None]:
        """The right engine's answer, and where the tested one's differs from it."""
        got, want = attempt_rtp(self.tested, operation), attempt_rtp(self.right, operation)
        self.timed_out |= isinstance(got, Failure) and got.timed_out
        return want, compare(want, got)
