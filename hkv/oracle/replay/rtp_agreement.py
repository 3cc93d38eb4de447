"""Two engines under RTP-LLM's rules side by side, for a replay that is checked."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.oracle.check import describe
from hkv.oracle.compare import compare
from hkv.oracle.replay.lockstep import Difference
from hkv.oracle.rtp_llm.engine import KeyedRtpEngine
from hkv.oracle.rtp_llm.structs import RtpAnswer, RtpOp


class RtpLockstep:
    """A `KeyedRtpEngine` that performs everything on two engines and stops at the first answer that differs.

    Answers are the first engine's.

    Args:
      engine: the engine in question.
      reference: the engine it is held against, empty too.
      names: of both.
    """

    def __init__(self, engine: KeyedRtpEngine, reference: KeyedRtpEngine, names: tuple[str, str]) -> None:
        self._engine, self._reference, self._names = engine, reference, names
        self._number = 0

    def perform(self, operation: RtpOp) -> RtpAnswer:
        """Perform one operation on both."""
        self._number += 1
        got, want = self._engine.perform(operation), self._reference.perform(operation)
        mismatch = compare(want, got)
        if mismatch is not None:
            name, *_ = describe(operation).split()
            answers = dict(zip(self._names, (mismatch.got, mismatch.want), strict=True))
            raise Difference(self._number, name, getattr(operation, "id", ""), mismatch.field, answers)
        return got

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int], reserve: int) -> None:
        """A request arrives at both."""
        self._number += 1
        for engine in (self._engine, self._reference):
            engine.request_keyed(id, num_tokens, keys, reserve)

    def extend(self, id: str, tokens: int) -> None:
        """Tokens are appended in both."""
        self._number += 1
        for engine in (self._engine, self._reference):
            engine.extend(id, tokens)

    def num_available(self) -> int:
        """Blocks that nobody but the caches hold."""
        mine, theirs = self._engine.num_available(), self._reference.num_available()
        if mine != theirs:
            answers: dict[str, object] = dict(zip(self._names, (mine, theirs), strict=True))
            raise Difference(self._number, "num_available", "", "blocks", answers)
        return mine
