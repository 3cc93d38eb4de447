"""An engine of RTP-LLM's logs under watch: every operation passes through, and every invariant is asked after it."""

from __future__ import annotations

from collections.abc import Iterable

from hkv.dialects.rtp_llm.engines.engine import RtpEngine
from hkv.dialects.rtp_llm.invariants.moment import RTP_INVARIANTS, RtpLedger, RtpMoment
from hkv.dialects.rtp_llm.log import structs
from hkv.dialects.rtp_llm.log.configuration import to_rtp_config
from hkv.dialects.rtp_llm.log.structs import RtpAnswer, RtpHeader, RtpOp, RtpState
from hkv.errors import OperationError
from hkv.oracle.invariant import Invariant


class RtpWatch:
    """Performs operations on an engine and checks invariants after each.

    Args:
      engine: the engine; `state` must change nothing.
      header: its configuration.
      invariants: those to check; all by default.

    Attributes:
      ledger: requests as the operations so far tell them.
      state: the cache as it is.
    """

    def __init__(self, engine: RtpEngine, header: RtpHeader, invariants: Iterable[Invariant] | None = None) -> None:
        self._engine = engine
        self._config = to_rtp_config(header)
        self._invariants = tuple(RTP_INVARIANTS.values() if invariants is None else invariants)
        self.ledger = RtpLedger(self._config)
        self.state = self._read()

    def perform(self, operation: RtpOp) -> RtpAnswer:
        """Performs one operation and returns the engine's answer.

        Raises:
          InvariantError: an invariant does not hold after it.
        """
        answer = self._engine.perform(operation)
        self.ledger.follow(operation, answer, self.state.lists)
        before, self.state = self.state, self._read()
        moment = RtpMoment(self._config, self.ledger, operation, answer, before, self.state)
        for invariant in self._invariants:
            invariant(moment)
        return answer

    def _read(self) -> RtpState:
        state = self._engine.perform(structs.StateOp())
        if not isinstance(state, RtpState):
            raise OperationError("state", state, "a state")
        return state
