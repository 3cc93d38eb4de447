"""A log under watch: every invariant is asked wherever the log says what it asks about."""

from __future__ import annotations

import collections

from hkv.dialects.vllm.invariants.moment import INVARIANTS, KeyBook, Moment, Snapshot
from hkv.dialects.vllm.invariants.watch import Watch
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Answer, CacheState, Hit, Operation
from hkv.oracle.invariant import Invariant, Unknown, UnknownError
from hkv.oracle.log_file import Log

ASKS_ENGINES = ("monotonicity",)
"""Invariants that look up what no log has."""


class LogWatch(Watch):
    """Follows a log's operations with the answers that it has.

    The state after an operation is known where the log tells it next. From the first that is not, whatever depends on
    everything that happened before is asked no more: what keys stand for, and invariants that remember.

    Args:
      log: the log; `perform` is given its operations, in order.

    Attributes:
      asked: number of times that each invariant was asked.
    """

    def __init__(self, log: Log) -> None:
        self._operations, self._next, self._gaps = log.operations, 0, False
        self.asked: collections.Counter[str] = collections.Counter()
        super().__init__(
            None,  # type: ignore[arg-type]
            log.header,
            [invariant for name, invariant in INVARIANTS.items() if name not in ASKS_ENGINES],
        )

    def perform(self, operation: Operation) -> Answer:
        self._next += 1
        try:
            return super().perform(operation)
        except UnknownError:  # references that blocks kept cannot be followed from here on
            self._operations = self._operations[: self._next]
            self._lose()
            return None

    def _apply(self, operation: Operation) -> Answer:
        return getattr(operation, "want", None)

    def _again(self, operation: Operation) -> Hit | None:
        answer = self._apply(operation)
        return answer if isinstance(answer, Hit) else None

    def _read(self) -> Snapshot:
        if self._next == 0:
            return Snapshot(CacheState(list(range(1, self._config.num_blocks)), {}, {}, {}))
        for operation in self._operations[max(0, self._next - 1) : self._next + 1]:
            if isinstance(operation, oplog.StateOp) and operation.want is not None:
                return Snapshot(operation.want, self._held)
        self._lose()
        return Unknown()  # type: ignore[return-value]

    def _lose(self) -> None:
        self._state = self._book = Unknown()  # type: ignore[assignment]
        if not self._gaps:
            remembering = {name for name, invariant in INVARIANTS.items() if invariant.start is not None}
            self._invariants = tuple(each for each in self._invariants if each.name not in remembering)
        self._gaps = True

    def _learn(self, before: Snapshot) -> None:
        if isinstance(self._book, KeyBook):
            super()._learn(before)

    def _ask(self, invariant: Invariant, moment: Moment) -> None:
        try:
            invariant(moment)
        except UnknownError:
            return
        if not invariant.after or isinstance(moment.operation, invariant.after):
            self.asked[invariant.name] += 1
