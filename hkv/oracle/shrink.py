"""Makes a failing log small: as few requests, operations, tokens and blocks as still make two engines disagree."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from hkv.contract import registry
from hkv.contract.answer import EngineFactory, Failure, Mismatch, failure_of
from hkv.contract.case import Best, Candidates, Case, LifecycleRepair, ShrinkRules
from hkv.errors import HKVError
from hkv.oracle.broken_invariant import Broken, FoundTraffic, driven, on_its_own
from hkv.oracle.engine import Pair, make_pair

CANDIDATES = 3000
"""Most candidates that are tried, unless told otherwise."""

TIMEOUTS = 20
"""Candidates after which an engine that is silent until its timeout, at each of them, is not asked again."""


class Shrinker:
    """Shrinks a failing case.

    Every candidate is first repaired: operations that can no longer follow are left out, numbers that no longer fit are
    cut, so that what is left is legal traffic whichever part was taken away. It counts if the engines still disagree,
    wherever, a wrong answer does not turn into a failure, nor a failure into another, and the invariant that is to be
    kept is still the first that the engine in doubt breaks; what comes after both is dropped.

    What bounds the search is the number of candidates, never the time, so that a case is as small on a busy machine.

    Attributes:
      progress: called after each attempt with the number of operations left.
      keeps: name of the invariant that is to be broken still; None for any or none.
      attempts: candidates tried so far; `timeouts`: of these, the ones in which an engine was silent until its timeout.
      best: the smallest case so far of the last `shrink`; None before the first.
      problem: error for which the last `shrink` gave up before its time; None if it met none.
    """

    def __init__(
        self,
        tested: EngineFactory,
        right: EngineFactory,
        ids: str = "exact",
        progress: Callable[[int], None] = lambda left: None,
        candidates: int = CANDIDATES,
    ) -> None:
        self.tested, self._right, self._ids, self._candidates = tested, right, ids, candidates
        self.progress = progress
        self.keeps: str | None = None
        self.attempts = self.timeouts = 0
        self.best: Case | None = None
        self.problem: str | None = None

    def failing(self, header: Any, operations: Sequence[Any]) -> Case | None:
        """The case up to the first disagreement, after repairs, and on to the broken invariant that is to be kept.

        None if the engines agree, or the right one fails, or another invariant is broken first, or by the right one
        too: then it tells neither engine from the other.
        """
        try:
            pair = make_pair(self.tested, self._right, header, self._ids)
        except HKVError:
            return None
        if isinstance(pair, Mismatch):
            return None
        found = _up_to_disagreement(pair, header, operations)
        self.timeouts += pair.timed_out
        if found is None or self.keeps is None:
            return found
        performed, broken = on_its_own(self.tested, header, repaired(header, operations))
        if not isinstance(broken, Broken) or broken.name != self.keeps:
            return None
        of_right = on_its_own(self._right, header, repaired(header, operations))[1]
        if isinstance(of_right, Broken) and of_right.name == self.keeps:
            return None
        return dataclasses.replace(found, operations=found.operations + performed[len(found.operations) :])

    def diagnosed(self, case: Case, operations: Sequence[Any], header: Any = None) -> tuple[Case, Broken | str]:
        """The case on to the first invariant that is broken, which is kept from now on, and what is broken.

        `operations` are its own, or others under another header, that may go on from there on the answers of the engine
        in doubt; where no invariant is broken, `case` is returned.
        """
        header = case.header if header is None else header
        broken = on_its_own(self.tested, header, repaired(header, operations))[1]
        self.keeps = broken.name if isinstance(broken, Broken) else None
        found = self.failing(header, operations) if isinstance(broken, Broken) else None
        if found is None and isinstance(broken, Broken):
            self.keeps, broken = None, "the engines agree on what breaks an invariant"
        return found or case, broken

    def shrink(self, case: Case) -> Case:
        """The smallest case found: no single step makes it smaller, unless candidates ran out.

        A case is returned whatever happens: where an error ends the search, `problem` says which, and the smallest case
        up to there is returned; where the user interrupts it, `best` holds that case.
        """
        best, self.problem = Best(case), None
        self.best = case
        try:
            self._search(best)
        except Exception as error:
            self.problem = failure_of(error).message
        return best.case

    def seen_before(self, case: Case) -> Case:
        """The case ended by a question that shows the difference before the operation that does; else as it is."""
        *before, last = case.differing
        for question in shrink_rules(case.header).questions(last):
            found = self.failing(case.header, [*before, question])
            if found is not None and not found.fails and len(found.operations) == len(case.operations):
                return found
        return case

    def _search(self, best: Best) -> None:
        failure, tried = best.case.failure, set[bytes]()
        before = None
        while before != best.case.size:
            before = best.case.size
            for header, operations in _candidates(best):
                if self.attempts >= self._candidates or self.timeouts >= TIMEOUTS:
                    return
                name = hashlib.sha256(msgspec.json.encode((header, operations))).digest()
                if name in tried:
                    continue
                tried.add(name)
                self.attempts += 1
                found = self.failing(header, operations)
                if found is not None and found.size < best.case.size and found.failure == failure:
                    best.case = self.best = found
                self.progress(len(best.case.operations))


class LoneShrinker(Shrinker):
    """Shrinks traffic under which an engine breaks an invariant, or fails, with no other engine beside it."""

    def __init__(self, factory: EngineFactory, keeps: str) -> None:
        super().__init__(factory, factory)
        self.keeps = keeps

    def failing(self, header: Any, operations: Sequence[Any]) -> Case | None:
        """The case up to the broken invariant that is to be kept, after repairs; None where another breaks first."""
        performed = list[Any]()
        try:
            watch = registry.dialect_of(header.dialect).watch(self.tested(header), header)
        except Exception:  # no such configuration is implemented
            return None
        self.broken, self.error = driven(watch, header, repaired(header, operations), performed)
        if self.broken is None or self.broken.name != self.keeps:
            return None
        mismatch = Mismatch(self.broken.name, self.broken.promise, self.broken.problem)
        return Case(header, tuple(performed), (None,) * len(performed), mismatch)

    def found(self, traffic: FoundTraffic, shrink: Callable[[Shrinker, Case], Case]) -> FoundTraffic:
        """The same on operations that are made small; as it is where the engine does not break it again."""
        case = self.failing(traffic.header, traffic.operations)
        if case is None:
            return traffic
        case = shrink(self, case)
        again = self.failing(case.header, case.operations)
        if again is None or self.broken is None or self.error is None:
            return traffic
        return dataclasses.replace(
            traffic, header=case.header, operations=again.operations, broken=self.broken, error=self.error
        )


def _candidates(best: Best) -> Candidates:
    """Everything that may make a case smaller, in the order in which it is tried."""
    rules = shrink_rules(best.case.header)

    def simpler(header: Any, operation: Any) -> Iterator[tuple[Any, Any]]:
        for changed in rules.operations(operation):
            yield header, changed

    yield from without_runs(best)
    yield from smaller_header(best, rules)
    yield from without_requests(best)
    yield from without_runs(best)
    yield from one_simpler(best, simpler)
    yield from one_simpler(best, rules.pairs)
    for rewrite in rules.rewrites:
        yield from rewrite(best)


def _up_to_disagreement(pair: Pair, header: Any, operations: Sequence[Any]) -> Case | None:
    """The case up to the first disagreement; None if the engines agree, or if the right one fails.

    Operations that cannot follow are repaired or left out.
    """
    repair = shrink_rules(header).repair(header)
    performed: list[Any] = []
    answers: list[Any] = []
    for wanted in operations:
        operation = repair.fitted(wanted)
        if operation is None:
            continue
        want, mismatch = pair.perform(operation)
        if isinstance(want, Failure):
            return None
        performed.append(operation)
        answers.append(want)
        if mismatch is not None:
            return Case(header, tuple(performed), tuple(answers), mismatch)
        repair.answered(operation, want)
    return None


def repaired(header: Any, operations: Sequence[Any]) -> Callable[[Callable[[Any], Any]], None]:
    """Drives operations on, whatever is answered: those that cannot follow are cut to what can, or left out."""
    repair = shrink_rules(header).repair(header)

    def drive(perform: Callable[[Any], Any]) -> None:
        for wanted in operations:
            operation = repair.fitted(wanted)
            if operation is not None:
                repair.answered(operation, perform(operation))

    return drive


# The ways of making a case smaller that know no dialect's rules.


def shrink_rules(header: Any) -> ShrinkRules:
    """Rules of a header's dialect; where it has none, fewer operations, shorter lists, fewer blocks."""
    dialect = registry.dialect_of(header.dialect)
    return dialect.shrink_rules or ShrinkRules(
        lambda header: LifecycleRepair(dialect.lifecycle(header)),
        headers=fewer_blocks,
        check=dialect.log.check,
        operations=shorter_lists,
    )


def without_requests(best: Best) -> Candidates:
    """One request less."""
    for id in dict.fromkeys(getattr(operation, "id", None) for operation in best.case.operations):
        if id is not None:
            yield best.case.header, [other for other in best.case.operations if getattr(other, "id", None) != id]


def without_runs(best: Best) -> Candidates:
    """A run of operations less: half of them, then quarters, down to one; from the end, on which nothing depends."""
    size = len(best.case.operations) // 2
    while size:
        start = len(best.case.operations) - size
        while start >= 0:
            operations = list(best.case.operations)
            yield best.case.header, operations[:start] + operations[start + size :]
            start = min(start, len(best.case.operations)) - size
        size //= 2


def legal_headers(rules: ShrinkRules, header: Any) -> Iterator[Any]:
    """The configurations smaller than one that the dialect allows."""
    for smaller in rules.headers(header):
        with contextlib.suppress(HKVError):
            rules.check(smaller)
            yield smaller


def smaller_header(best: Best, rules: ShrinkRules) -> Candidates:
    """A smaller configuration; once one is taken, what is smaller than that."""
    taken = True
    while taken:
        asked, taken = best.case.header, False
        for header in legal_headers(rules, asked):
            yield header, list(best.case.operations)
            taken = best.case.header != asked
            if taken:
                break


def one_simpler(best: Best, simpler: Callable[[Any, Any], Iterator[tuple[Any, Any]]]) -> Candidates:
    """One operation simpler, and maybe the header with it, place after place.

    A candidate that is taken changes the operation, or leaves it out, and what `simpler` said of it is void: the
    operation that stands at the place afterwards is asked about anew.
    """
    place = 0
    while place < len(best.case.operations):
        asked = best.case.header, best.case.operations[place]
        for header, operation in simpler(*asked):
            operations = best.case.operations
            yield header, [*operations[:place], operation, *operations[place + 1 :]]
            if place >= len(best.case.operations) or (best.case.header, best.case.operations[place]) != asked:
                break
        else:
            place += 1


def shorter_lists(operation: Any) -> Iterator[Any]:
    """The operation with a list of numbers halved, then one shorter, then with a number of it halved; never empty."""
    for name in operation.__struct_fields__:
        value = getattr(operation, name)
        if name == "want" or not isinstance(value, list) or not all(type(item) is int for item in value):
            continue
        for length in dict.fromkeys((len(value) // 2, len(value) - 1)):
            if length:
                yield msgspec.structs.replace(operation, **{name: value[:length]})
        for index, item in enumerate(value):
            for smaller in dict.fromkeys((0, item // 2)) if item > 0 else ():
                yield msgspec.structs.replace(operation, **{name: [*value[:index], smaller, *value[index + 1 :]]})


def fewer_blocks(header: Any) -> Iterator[Any]:
    """The configuration with half as many blocks in a pool, and with one less."""
    blocks = header.num_blocks
    pools = blocks if isinstance(blocks, list) else [blocks]
    for place, count in enumerate(pools):
        for fewer in dict.fromkeys((count // 2, count - 1)):
            changed = [*pools[:place], fewer, *pools[place + 1 :]]
            yield msgspec.structs.replace(header, num_blocks=changed if isinstance(blocks, list) else fewer)
