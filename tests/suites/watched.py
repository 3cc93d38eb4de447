"""vLLM 0.33's manager under watch: every invariant of the log, and what may be asked of it next."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from hkv.contract.invariant import InvariantError
from hkv.dialects.vllm.engines.engine import Engine
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.invariants import INVARIANTS, Watch
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.log.structs import Answer, Header, Hit, Operation
from hkv.dialects.vllm.traffic.headers import copies_states
from hkv.errors import EngineFailure
from tests.suites.history import Broken, Setting
from tests.suites.suite import TOTALITY


class WatchedRun:
    """One engine under watch, of one invariant or, with None, of all."""

    def __init__(
        self, header: Header, only: str | None = None, make_engine: Callable[[Header], Engine] = NumpyEngine
    ) -> None:
        self.header = header
        chosen = [invariant for name, invariant in INVARIANTS.items() if only in (None, name)]
        self.watch = Watch(make_engine(header), header, chosen)

    def perform(self, operation: Operation) -> Answer:
        """Performs one operation; see `tests.suites.history.Run`."""
        try:
            return self.watch.perform(operation)
        except EngineFailure as error:
            if self.header.bugs:
                raise
            raise InvariantError(TOTALITY, f"EngineFailure: {error}") from error


class WatchedLegal:
    """Operations that may be asked next, by those so far; the run's ledger has the state of every request."""

    def __init__(self, header: Header, run: WatchedRun) -> None:
        self._num_blocks = header.num_blocks
        self._ledger = run.watch.ledger
        self._watch = run.watch
        self._copies = copies_states(to_config(header))
        self._served: set[str] = set()
        self._found: tuple[str, int] | None = None
        self._owed: tuple[str, int] | None = None
        self._granted: dict[str, int] = {}

    def in_order(self, operation: Operation) -> bool:
        """True if no step owes anything: tokens granted last are computed at once, as their keys stand for content.

        Where blocks are copied, nobody is granted blocks twice in a step, and copies are made before the next one.
        """
        if self._copies and isinstance(operation, oplog.AllocateOp) and operation.id in self._served:
            return False
        if isinstance(operation, oplog.StepOp) and self._watch.copies_pending:
            return False
        return self._owed is None or getattr(operation, "id", None) == self._owed[0]

    def fit(self, operation: Operation) -> Operation | None:
        """The operation, made to fit what came before; None when it cannot be asked now."""
        change = msgspec.structs.replace
        id = getattr(operation, "id", None)
        record = self._ledger.requests.get(id) if id is not None else None
        match operation:
            case oplog.RequestOp():
                return operation if record is None else None
            case oplog.LookupOp() | oplog.DropOp():
                return operation if record is not None and not record.running else None
            case oplog.AppendOp():
                return operation if record is not None else None
            case oplog.FreeOp():
                return operation if record is not None and record.running else None
            case oplog.EvictOp():
                return change(operation, blocks=[block for block in operation.blocks if block < self._num_blocks])
            case oplog.AdvanceOp():
                if record is None or not record.running:
                    return None
                owed = self._owed[1] - record.computed if self._owed is not None else 0
                tokens = min(max(operation.tokens, owed), self._granted[operation.id] - record.computed)
                return change(operation, tokens=tokens) if tokens >= 0 else None
            case oplog.CommitOp():
                if record is None or not record.running:
                    return None
                return change(operation, tokens=min(operation.tokens, record.computed, len(record.tokens)))
            case oplog.AllocateOp():
                return None if record is None else self._fit_allocate(operation, record.running, len(record.tokens))
            case _:
                return operation

    def _fit_allocate(self, operation: oplog.AllocateOp, running: bool, length: int) -> Operation | None:
        change = msgspec.structs.replace
        record = self._ledger.requests[operation.id]
        in_flight = min(operation.in_flight, record.computed)
        if running:
            fitted = change(operation, hit=0, external=0, in_flight=in_flight)
        else:
            hit = self._found[1] if self._found is not None and self._found[0] == operation.id else 0
            external = max(0, operation.hit + operation.external - hit) if operation.external else 0
            new = min(operation.new + operation.hit + operation.external, length) - hit - external
            if operation.delay and not operation.new:
                new = 0
            fitted = change(operation, hit=hit, external=external, new=max(0, new), in_flight=in_flight)
        return fitted if fitted.new + fitted.hit + fitted.external else None

    def note(self, operation: Operation, answer: Answer) -> None:
        """Takes note of an answer."""
        if isinstance(operation, oplog.StepOp):
            self._served.clear()
        if isinstance(operation, oplog.LookupOp) and isinstance(answer, Hit):
            self._found = (operation.id, answer.hit)
        elif isinstance(operation, oplog.AllocateOp):
            if isinstance(answer, oplog.Allocation) and answer.blocks is not None:
                record = self._ledger.requests[operation.id]
                self._served.add(operation.id)
                self._granted[operation.id] = self._ledger.main(operation)
                self._owed = (operation.id, min(self._granted[operation.id], len(record.tokens)))
            self._found = None
        elif isinstance(operation, oplog.AdvanceOp):
            self._owed = None
        elif not isinstance(operation, oplog.StepOp | oplog.RequestOp | oplog.AdvanceOp | oplog.AppendOp):
            self._found = None


def simpler(broken: Broken[Header, Operation]) -> Iterator[tuple[Header, list[Operation]]]:
    """Chunks of a prompt joined, shorter and plainer prompts, calm allocations, smaller pools."""
    header, operations = broken.header, list(broken.operations)
    for position, operation in enumerate(operations):
        before, after = operations[:position], operations[position + 1 :]
        if isinstance(operation, oplog.AllocateOp):
            yield header, _joined(before, operation, after)
        for plainer in _plainer(operation):
            yield header, [*before, plainer, *after]
    for blocks in sorted({2, header.num_blocks // 2, header.num_blocks - 4, header.num_blocks - 1}):
        if 2 <= blocks < header.num_blocks:
            yield msgspec.structs.replace(header, num_blocks=blocks), operations


def _joined(before: list[Operation], operation: oplog.AllocateOp, after: list[Operation]) -> list[Operation]:
    """The operations with one chunk that takes in the next one of the same request."""
    for position, later in enumerate(after):
        if isinstance(later, oplog.FreeOp) and later.id == operation.id:
            break
        if isinstance(later, oplog.AllocateOp) and later.id == operation.id:
            longer = msgspec.structs.replace(operation, new=operation.new + later.new)
            return [*before, longer, *after[:position], *after[position + 1 :]]
    return [*before, operation, *after]


def _plainer(operation: Operation) -> Iterator[Operation]:
    change = msgspec.structs.replace
    match operation:
        case oplog.RequestOp():
            tokens = operation.tokens
            yield change(operation, extra=None)
            for length in (len(tokens) // 2, len(tokens) - 1):
                if length > 0:
                    yield change(operation, tokens=tokens[:length])
            yield change(operation, tokens=[0] * len(tokens))
        case oplog.AllocateOp():
            plain = {"lookahead": 0, "must_fit": False, "reserved": 0, "in_flight": 0, "shared_prefix": None}
            yield change(operation, **plain)
        case oplog.EvictOp() if len(operation.blocks) > 1:
            for block in operation.blocks:
                yield change(operation, blocks=[other for other in operation.blocks if other != block])
        case _:
            return


WATCHED: Setting[Header, Operation] = Setting(WatchedRun, WatchedLegal, simpler)  # type: ignore[arg-type]
"""vLLM 0.33's rules, by the reference."""
