"""The reference manager under random traffic: every invariant of the log, shadow tags, events, nothing that fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import msgspec

from hkv.errors import EngineFailure, OperationError
from hkv.oracle import oplog
from hkv.oracle.configuration import to_config
from hkv.oracle.engine import Engine
from hkv.oracle.engines.numpy import NumpyEngine
from hkv.oracle.oplog import Answer, Header, Hit, Operation
from hkv.testing.choices import RandomChoices
from hkv.testing.headers import FEATURES, draw_header
from hkv.testing.invariants import INVARIANTS, InvariantError, Watch
from hkv.testing.invariants.event_index import EventIndex
from hkv.testing.invariants.hit_admission import HitAdmission
from hkv.testing.invariants.invariant import Invariant
from hkv.testing.invariants.shadow import Shadow
from hkv.testing.suites.suite import TOTALITY, Failure, failure_of
from hkv.testing.traffic import drive

STEPS = 10
"""Scheduling steps of one example."""

TRIALS = 1000
"""Smaller cases that a search for the smallest may try."""


class Run:
    """One engine under watch, and what was asked of it.

    Args:
      header: the configuration.
      only: name of the one invariant to check, None for all.
      make_engine: makes the engine.
    """

    def __init__(
        self, header: Header, only: str | None = None, make_engine: Callable[[Header], Engine] = NumpyEngine
    ) -> None:
        config = to_config(header)
        stateful = (Shadow(config).invariant(), EventIndex(config).invariant(), HitAdmission(config).invariant())
        every = {**INVARIANTS, **{invariant.name: invariant for invariant in stateful}}
        self.header = header
        self.operations: list[Operation] = []
        self.watch = Watch(make_engine(header), header, _chosen(every, only))

    def perform(self, operation: Operation) -> Answer:
        """Performs one operation.

        Raises:
          InvariantError: an invariant does not hold, or a legal operation failed.
        """
        self.operations.append(operation)
        try:
            return self.watch.perform(operation)
        except InvariantError:
            raise
        except Exception as error:
            if len(self.operations) == 1 or (isinstance(error, EngineFailure) and self.header.bugs):
                raise
            raise InvariantError(TOTALITY, f"{type(error).__name__}: {error}") from error


def _chosen(every: dict[str, Invariant], only: str | None) -> Iterable[Invariant]:
    if only is None:
        return every.values()
    return [every[only]] if only in every else []


@dataclasses.dataclass(frozen=True)
class TrafficSuite:
    """Random lock-step traffic over small pools, prefixes that come back, lengths around every modulus."""

    name: str = "traffic"
    about: str = "the reference manager under random traffic, A then B then A again, over tiny pools"
    topics: tuple[str, ...] = FEATURES
    pace: int = 1

    def run(self, seed: int, topics: Sequence[str] = ()) -> Failure | None:
        """Runs one example; None when every invariant holds."""
        found = self._play(seed, topics)
        return None if found is None else found[1]

    def _play(self, seed: int, topics: Sequence[str]) -> tuple[Run, Failure] | None:
        topics = topics or self.topics
        choices = RandomChoices(seed)
        run = Run(draw_header(choices, topics[seed % len(topics)], version=2))
        try:
            drive(run.header, choices, run.perform, STEPS)
        except InvariantError as error:
            return run, failure_of(error, len(run.operations), describe_all(run.operations))
        except EngineFailure:
            return None
        return None

    def shrink(self, seed: int, failure: Failure, topics: Sequence[str] = ()) -> Failure:
        """Leaves out operations, shortens prompts and calms allocations for as long as the same invariant breaks."""
        played = self._play(seed, topics)
        if played is None:
            return failure
        run, first = played
        return shrink(run.header, run.operations, first)


def shrink(header: Header, operations: Sequence[Operation], failure: Failure) -> Failure:
    """A greedy search for fewer operations that break the same invariant.

    Args:
      header: the configuration.
      operations: those that break it, the last one included.
      failure: what they broke.
    """
    search = _Search(header, failure)
    best = search.fails(list(operations)) or list(operations)
    size = max(1, len(best) // 2)
    while size:
        before = len(best)
        position = len(best)
        while position > 0:
            start = max(0, position - size)
            made = search.fails(best[:start] + best[position:])
            if made is not None and len(made) < len(best):
                best = made
            position = min(start, len(best))
        if size > 1 or len(best) == before:
            size //= 2
    for position in range(len(best)):
        for simpler in _simpler(best[position]) if position < len(best) else ():
            made = search.fails([*best[:position], simpler, *best[position + 1 :]])
            if made is not None and len(made) <= len(best):
                best = made
    return Failure(failure.invariant, search.failure.problem, len(best), tuple(describe_all(best)))


class _Search:
    """Tries operations, a limited number of times.

    Args:
      header: the configuration.
      failure: what must break.
    """

    def __init__(self, header: Header, failure: Failure) -> None:
        self._header = header
        self._left = TRIALS
        self.failure = failure

    def fails(self, trial: list[Operation]) -> list[Operation] | None:
        """The operations up to the one that breaks the invariant; None when none does."""
        if not trial or self._left <= 0:
            return None
        self._left -= 1
        found = replay(self._header, trial, self.failure.invariant)
        if found is None:
            return None
        self.failure = found[1]
        return found[0]


def _simpler(operation: Operation) -> Iterable[Operation]:
    match operation:
        case oplog.RequestOp():
            tokens, change = operation.tokens, msgspec.structs.replace
            yield change(operation, extra=None)
            for length in (len(tokens) // 2, len(tokens) - 1):
                if length > 0:
                    yield change(operation, tokens=tokens[:length])
            yield change(operation, tokens=[0] * len(tokens))
        case oplog.AllocateOp():
            plain = {"lookahead": 0, "must_fit": False, "reserved": 0, "in_flight": 0, "shared_prefix": None}
            yield msgspec.structs.replace(operation, **plain)
        case _:
            return


def replay(header: Header, operations: Sequence[Operation], invariant: str) -> tuple[list[Operation], Failure] | None:
    """Performs what is still legal of some operations, until `invariant` breaks.

    Returns:
      The operations performed, and what broke; None when nothing did, or something else.
    """
    run = Run(header, invariant)
    legal = Legal(run)
    try:
        for operation in operations:
            if not legal.in_order(operation):
                return None
            if (fitted := legal.fit(operation)) is not None:
                legal.note(fitted, run.perform(fitted))
    except InvariantError as error:
        if error.name != invariant:
            return None
        return run.operations, failure_of(error, len(run.operations), describe_all(run.operations))
    except (EngineFailure, OperationError):
        return None
    return None


class Legal:
    """What may be asked next, by the operations so far.

    Args:
      run: the run whose ledger says where every request stands.
    """

    def __init__(self, run: Run) -> None:
        self._ledger = run.watch.ledger
        self._found: tuple[str, int] | None = None
        self._owed: tuple[str, int] | None = None

    def in_order(self, operation: Operation) -> bool:
        """Whether what was granted last is computed before anything else happens: its keys stand for content."""
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
            case oplog.AdvanceOp():
                if record is None or not record.running:
                    return None
                owed = self._owed[1] - record.computed if self._owed is not None else 0
                tokens = min(max(operation.tokens, owed), record.main - record.computed)
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
        if isinstance(operation, oplog.LookupOp) and isinstance(answer, Hit):
            self._found = (operation.id, answer.hit)
        elif isinstance(operation, oplog.AllocateOp):
            if isinstance(answer, oplog.Allocation) and answer.blocks is not None:
                record = self._ledger.requests[operation.id]
                self._owed = (operation.id, min(record.main, len(record.tokens)))
            self._found = None
        elif isinstance(operation, oplog.AdvanceOp):
            self._owed = None
        elif not isinstance(operation, oplog.StepOp | oplog.RequestOp | oplog.AdvanceOp | oplog.AppendOp):
            self._found = None


def describe_all(operations: Iterable[Operation]) -> list[str]:
    """Operations as lines of a log."""
    return [msgspec.json.encode(operation).decode() for operation in operations]
