"""An engine under watch: every operation passes through, and every invariant is asked after it."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from hkv.contract.invariant import Invariant, Unknown, UnknownError
from hkv.contract.log import Log
from hkv.dialects.vllm.engines.engine import Engine, ProcessEngine, apply
from hkv.dialects.vllm.invariants.moment import INVARIANTS, KeyBook, Ledger, Moment, Snapshot
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.log.structs import Answer, CacheState, Header, Hit, Operation

PROBES = 2
"""Waiting requests whose hit is compared before and after an operation that fills the cache."""


class Watch:
    """Performs operations on an engine and checks invariants after each.

    Args:
      engine: the engine; `lookup` and `state` must change nothing, but for the events of a request that reports hits.
      header: its configuration.
      invariants: those to check; all by default.

    Attributes:
      ledger: requests as the operations so far tell them.
    """

    def __init__(self, engine: Engine, header: Header, invariants: Iterable[Invariant] | None = None) -> None:
        self._engine = engine
        # A program in a process of its own need not know the question.
        self._num_free = None if isinstance(engine, ProcessEngine) else getattr(engine, "num_free", None)
        self._config = to_config(header)
        chosen = INVARIANTS.values() if invariants is None else invariants
        # What a state names must exist before anything else can be asked of it.
        ordered = sorted(chosen, key=lambda invariant: invariant.name != "form")
        self._invariants = tuple(invariant.begin(self._config) for invariant in ordered)
        self._probes = any(invariant.name == "monotonicity" for invariant in self._invariants)
        self._book = KeyBook()
        self._limit: int | None = None
        self._held: collections.Counter[int] = collections.Counter()
        self._state = self._read()
        self.ledger = Ledger(self._config)

    @property
    def copies_pending(self) -> bool:
        """True if blocks are referenced by more than rows: copies that were not made yet."""
        rows = sum(block != 0 for groups in self._state.rows.values() for row in groups for block in row)
        return sum(self._state.refs.values()) > rows

    def perform(self, operation: Operation) -> Answer:
        """Performs one operation and returns the engine's answer.

        Raises:
          InvariantError: an invariant does not hold after it.
        """
        self.ledger.before(operation)
        hits = self._probe(operation)
        answer = self._apply(operation)
        again = self._again(operation)
        self._limit = operation.limit if isinstance(operation, oplog.LookupOp) else self._limit
        self._hold(operation, answer)
        before, self._state = self._state, self._read()
        self.ledger.after(operation, answer)
        self._learn(before)
        found = {id: (hit, self._engine.lookup(id).hit) for id, hit in hits.items() if self._waits(id)}
        moment = Moment(self._config, self.ledger, self._book, operation, answer, before, self._state, again, found)
        for invariant in self._invariants:
            self._ask(invariant, moment)
        return answer

    def _apply(self, operation: Operation) -> Answer:
        return apply(self._engine, operation)

    def _read(self) -> Snapshot:
        return Snapshot(self._engine.state(), self._held, None if self._num_free is None else self._num_free())

    def _ask(self, invariant: Invariant, moment: Moment) -> None:
        invariant(moment)

    def _again(self, operation: Operation) -> Hit | None:
        """The answer to a lookup that is asked once more; not where the lookup is an event."""
        if not isinstance(operation, oplog.LookupOp) or self.ledger.requests[operation.id].reports:
            return None
        found = apply(self._engine, operation)
        return found if isinstance(found, Hit) else None

    def _hold(self, operation: Operation, answer: Answer) -> None:
        """Follows references that neither rows nor pending copies explain."""
        match operation:
            case oplog.PopOp():
                rows = self._state.rows.get(operation.id, [])
                self._held.update(block for row in rows for block in row if block)
            case oplog.HoldOp():
                self._held.update(operation.blocks)
            case oplog.CopiesOp(hold=True):
                self._held.update(block for copy in answer or () for block in copy)  # type: ignore[union-attr]
            case oplog.ReleaseOp():
                self._held.subtract(operation.blocks)

    def _probe(self, operation: Operation) -> dict[str, int]:
        """Hits of some waiting requests; the last lookup is that of the operation's own request, which may adopt it."""
        if not self._probes or not isinstance(operation, oplog.AllocateOp | oplog.CommitOp):
            return {}
        requests = self.ledger.requests
        if requests[operation.id].reports:
            return {}
        others = [id for id in requests if self._waits(id) and id != operation.id and not requests[id].reports]
        others = others[-PROBES:]
        hits = {id: self._engine.lookup(id).hit for id in others}
        if others and isinstance(operation, oplog.AllocateOp) and operation.hit:
            found = apply(self._engine, oplog.LookupOp(id=operation.id, limit=self._limit))
            assert isinstance(found, Hit)
            assert found.hit == operation.hit or operation.rows is not None
        return hits

    def _waits(self, id: str) -> bool:
        return not self.ledger.requests[id].running

    def _learn(self, before: Snapshot) -> None:
        for block, entry in self._state.cached.items():
            if before.cached.get(block) == entry:
                continue
            _, tokens, key = entry
            for id, _, _ in self._state.owners.get(block, ()):
                prefix = self.ledger.prefix(id, tokens)
                if prefix is not None:
                    self._book.learn(key, prefix)


# A log under watch: every invariant is asked wherever the log says what it asks about.

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
