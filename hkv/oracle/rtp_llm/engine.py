"""The protocol by which HKV drives a cache under RTP-LLM's rules, its own or anybody else's."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from hkv.oracle.engine import Failure, failure_of
from hkv.oracle.rtp_llm.structs import RtpAnswer, RtpOp


@runtime_checkable
class RtpEngine(Protocol):
    """A cache that performs the operations of `hkv.oracle.rtp_llm.structs`, as `docs/oplog.md` explains them."""

    def perform(self, operation: RtpOp) -> RtpAnswer:
        """Perform one operation and answer it, with the operation's `answer_type`; None where that is None."""
        ...


def attempt_rtp(engine: object, operation: RtpOp) -> RtpAnswer | Failure:
    """Performs one operation; an error, or an answer of the wrong type, stands as a Failure in the answer's place."""
    if not isinstance(engine, RtpEngine):
        return Failure(f"{type(engine).__name__} performs no operations of RTP-LLM's logs")
    try:
        answer = engine.perform(operation)
    except Exception as error:
        return failure_of(error)
    wanted = operation.answer_type
    if (answer is not None) if wanted is None else not isinstance(answer, wanted):
        return Failure(f"answered {answer!r}, where {wanted.__name__ if wanted else None} was to come")
    return answer
