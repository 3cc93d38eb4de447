"""Two replays under RTP-LLM's rules held against each other: engines side by side, or one after a compiled replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hkv.contract.answer import compare
from hkv.contract.log import describe
from hkv.dialects.rtp_llm.config import NULL
from hkv.dialects.rtp_llm.engines.engine import KeyedRtpEngine
from hkv.dialects.rtp_llm.log.structs import Malloc, MallocOp, RtpAnswer, RtpOp, RtpState
from hkv.dialects.rtp_llm.schedule.record import RtpRecorder
from hkv.replay.difference import Difference, compare_records
from hkv.replay.difference import compare as compare_values


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


class ComparedRtpEngine:
    """A `KeyedRtpEngine` that compares every allocation with those that a compiled replay reported.

    Args:
      engine: an empty engine.
      ids: integers that the compiled replay reported: of each allocation its verdict's place in `verdicts`, the tokens
        reused, and for each group the length of the request's list and its blocks, 0 for holes.
      verdicts: names of verdicts, by the numbers reported.
      names: of the compiled engine and of this one.
    """

    def __init__(
        self, engine: KeyedRtpEngine, ids: np.ndarray, verdicts: dict[int, str], names: tuple[str, str]
    ) -> None:
        self._engine, self._ids, self._verdicts, self._names = engine, ids, verdicts, names
        self._place = 0
        self._number = 0

    def perform(self, operation: RtpOp) -> RtpAnswer:
        """Performs an operation on the engine, and compares the answer to an allocation."""
        answer = self._engine.perform(operation)
        self._number += 1
        if isinstance(operation, MallocOp) and isinstance(answer, Malloc):
            theirs = self._next(len(answer.lists[0]))
            mismatch = compare(answer, theirs)
            if mismatch is not None:
                answers = dict(zip(self._names, (mismatch.got, mismatch.want), strict=True))
                raise Difference(self._number, "malloc", operation.id, mismatch.field, answers)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _next(self, groups: int) -> Malloc:
        lists = []
        verdict, reused = self._read(2) or (-1, -1)
        for _ in range(groups):
            (length,) = self._read(1) or (0,)
            lists.append([block or NULL for block in self._read(length)])
        return Malloc(self._verdicts.get(verdict, "nothing"), reused, [lists])

    def _read(self, count: int) -> list[int]:
        found = self._ids[self._place : self._place + count].tolist()
        self._place += count
        return found

    def check_all_compared(self) -> None:
        """Raises where the compiled replay reported more, or less.

        Raises:
          Difference: some ids are left, or were missing.
        """
        if self._place != len(self._ids):
            answers: dict[str, object] = dict(zip(self._names, (len(self._ids), self._place), strict=True))
            raise Difference(self._number, "replay", "", "integers reported", answers)


def compare_rtp_records(mine: RtpRecorder, other: RtpRecorder, names: tuple[str, str]) -> None:
    """Compares every request's fate, every step, every reason, all verdicts, and what the cache held.

    Raises:
      Difference: names the first one.
    """
    compare_records(mine, other, names)
    for kind, counts in mine.verdicts.items():
        compare_values(f"verdicts of {kind}", dict(counts), dict(other.verdicts[kind]), names)
    compare_values("most blocks cached", mine.cached_peak, other.cached_peak, names)


def compare_states(mine: RtpState, other: RtpState, names: tuple[str, str]) -> None:
    """Compares two caches, their free sets, references and keys in order of use.

    Raises:
      Difference: names the first place where they differ.
    """
    mismatch = compare(other, mine)
    if mismatch is not None:
        answers = dict(zip(names, (mismatch.got, mismatch.want), strict=True))
        raise Difference(0, "replay", "", f"{mismatch.field} at the end", answers)
