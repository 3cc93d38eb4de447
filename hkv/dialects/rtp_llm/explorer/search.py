"""Breadth-first search over the states of a space: each is expanded once, and judged on every way to it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from hkv.dialects.explore_command import Report
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.explorer.space import RtpSpace
from hkv.dialects.rtp_llm.explorer.world import Copies, World
from hkv.dialects.rtp_llm.log import structs
from hkv.dialects.rtp_llm.log.configuration import to_rtp_header
from hkv.dialects.rtp_llm.log.structs import RtpAnswer, RtpHeader, RtpOp
from hkv.errors import HKVError
from hkv.oracle.invariant import InvariantError

TOTALITY = "totality"
"""Invariant that is broken where a legal operation is not performed: the engine raises an error."""


@dataclasses.dataclass(frozen=True)
class RtpCounterexample:
    """The shortest way to a broken invariant: no shorter sequence of operations breaks any.

    Attributes:
      invariants: the one that the last operation breaks.
      header: the configuration.
      operations: the operations.
    """

    invariants: tuple[str, ...]
    header: RtpHeader
    operations: tuple[RtpOp, ...]

    def with_answers(self) -> tuple[tuple[RtpOp, ...], tuple[RtpAnswer, ...]]:
        """The operations and a `state` after them, with the reference's answers; they end before one that it fails."""
        engine, performed, answers = RtpNumpyEngine(self.header), [], []
        for operation in self.operations:
            try:
                answers.append(engine.perform(operation))
            except HKVError:
                break
            performed.append(operation)
        last = structs.StateOp()
        return (*performed, last), (*answers, engine.perform(last))


class RtpExplorer:
    """One search.

    Args:
      space: the cache and its operations.
      limit_states: most distinct states; None for no limit.
      seconds: time after which no further state is expanded; None for no limit.

    Attributes:
      report: result so far.
    """

    def __init__(self, space: RtpSpace, *, limit_states: int | None = None, seconds: float | None = None) -> None:
        self._space, self._limit, self._allowed = space, limit_states, seconds
        self._copies = Copies()
        self._ways: list[tuple[int, RtpOp | None]] = [(-1, None)]
        self._began = 0.0
        self.report = Report()

    def run(self, progress: Callable[[Report, int, float], None] = lambda report, depth, share: None) -> Report:
        """Performs every operation in every state that can be reached, until one breaks an invariant.

        Args:
          progress: called after each state with the report, the depth, and how much of that level is done, 0 to 1.
        """
        self._began = time.perf_counter()
        root = World(self._space)
        visited, level, depth = {root.name()}, [(0, self._copies.save(root))], 0
        while level:
            depth += 1
            deeper: list[tuple[int, bytes]] = []
            for place, (state, saved) in enumerate(level):
                if self._ended() or not self._expand(state, saved, visited, deeper):
                    return self.report
                self.report.depth = depth if deeper else self.report.depth
                progress(self.report, depth, (place + 1) / len(level))
            level = deeper
        self.report.exhausted = True
        return self.report

    def way(self, state: int) -> tuple[RtpOp, ...]:
        """The operations of a shortest way to a state; they are numbered as they were found, the empty cache 0."""
        operations: list[RtpOp] = []
        while state > 0:
            state, operation = self._ways[state]
            assert operation is not None
            operations.append(operation)
        return tuple(reversed(operations))

    def _ended(self) -> bool:
        self.report.seconds = time.perf_counter() - self._began
        late = self._allowed is not None and self.report.seconds >= self._allowed
        return late or (self._limit is not None and self.report.states >= self._limit)

    def _expand(self, state: int, saved: bytes, visited: set[tuple[Any, ...]], deeper: list[tuple[int, bytes]]) -> bool:
        """Performs every operation in a state; False if an invariant is broken."""
        for operation in list(self._copies.load(saved).operations(self._space)):
            world = self._copies.load(saved)
            evictions = world.evictions
            try:
                answer = world.perform(operation)
            except InvariantError as error:
                return self._fail(error.name, state, operation)
            except Exception:
                return self._fail(TOTALITY, state, operation)
            self._count(operation, answer, world.evictions > evictions)
            name = world.name()
            if name not in visited:
                visited.add(name)
                deeper.append((self.report.states, self._copies.save(world)))
                self._ways.append((state, operation))
                self.report.states += 1
        return True

    def _count(self, operation: RtpOp, answer: RtpAnswer, evicts: bool) -> None:
        report, name = self.report, type(operation).__struct_config__.tag
        report.transitions += 1
        report.evictions += evicts
        report.refusals += isinstance(answer, structs.Malloc) and answer.verdict != "granted"
        report.by_operation[str(name)] = report.by_operation.get(str(name), 0) + 1

    def _fail(self, invariant: str, state: int, operation: RtpOp) -> bool:
        header = to_rtp_header(self._space.config, "core")
        self.report.counterexample = RtpCounterexample((invariant,), header, (*self.way(state), operation))
        self.report.seconds = time.perf_counter() - self._began
        return False
