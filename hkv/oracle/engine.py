"""Calls of an engine, HKV's own or another's, whatever the dialect."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hkv.contract import registry
from hkv.contract.answer import BatchEngine, EngineFactory, Failure, Mismatch, SameNames, attempt_with, failure_of
from hkv.contract.dialect import Dialect
from hkv.contract.traffic import RandomChoices
from hkv.errors import EngineProcessError, HKVError, MissingExtraError, UnsupportedConfigError


def make_engine(factory: EngineFactory, header: Any) -> Any:
    """An engine of a header's configuration; UnsupportedConfigError if it has no methods for what logs of its version
    ask for.
    """
    engine = factory(header)
    if missing := registry.dialect_of(header.dialect).missing_methods(engine, header):
        expected = f"an engine that has {', '.join(missing)}, which version {header.oplog} of the log asks for"
        raise UnsupportedConfigError("engine", type(engine).__name__, expected)
    return engine


def attempt(dialect: Dialect, engine: Any, operation: Any) -> Any:
    """Performs one operation; an error, or an answer of the wrong type, stands as a Failure in the answer's place."""
    return attempt_with(dialect.perform, engine, operation)


def answers(dialect: Dialect, engine: Any, operations: Sequence[Any], again: Callable[[], Any]) -> Iterator[Any]:
    """Answers of an engine to each operation, in order; an engine that takes batches gets them all at once.

    An error of the engine is yielded as a Failure, and ends the run. An engine that fails in a batch does not
    say where: engines that `again` makes are given ever closer prefixes of it.
    """
    if isinstance(engine, BatchEngine):
        got, failure = _run(engine, operations)
        if failure is not None:
            right, wrong = 0, len(operations)
            while wrong - right > 1:
                middle = (right + wrong) // 2
                found = _run(again(), operations[:middle])
                right, wrong = (right, middle) if found[1] else (middle, wrong)
                got, failure = (got, found[1]) if found[1] else (found[0], failure)
        yield from got
        if failure is not None:
            yield failure
        return
    for operation in operations:
        answer = attempt(dialect, engine, operation)
        yield answer
        if isinstance(answer, Failure):
            return


def _run(engine: Any, operations: Sequence[Any]) -> tuple[Sequence[Any], Failure | None]:
    try:
        return engine.run(operations), None
    except HKVError as error:
        return (), failure_of(error)


def compare(dialect: Dialect, want: Any, got: Any, version: int, lacks: frozenset[str]) -> Mismatch | None:
    """`Dialect.compare` of what both answers have."""
    if lacks:
        want, got = dialect.without(want, lacks), dialect.without(got, lacks)
    return dialect.compare(want, got, version)


# Configurations that an engine implements, found by making it.

DRAWS = 300
"""Configurations of a feature and a version that are looked at for those of one group."""

TRIES = 3
"""Configurations of one kind of group that an engine is made of before it counts as not implemented."""


def flags_for(factory: EngineFactory, dialect: str) -> str:
    """Options of `hkv diff` under which an engine implements what is drawn; "" when it implements no group by
    itself."""
    rules = registry.dialect_of(dialect)
    versions, features = rules.drawn_versions(frozenset()), rules.short_features(dialect)
    found = [
        (kind, version, feature)
        for version in versions
        for feature in features
        for kind in _kinds(factory, feature, version, dialect)
    ]
    if not found:
        return ""
    kinds, taken, about = (list(dict.fromkeys(column)) for column in zip(*found, strict=True))
    flags = [f"--kinds {','.join(kinds)}", "--max-groups 1"]
    flags += [f"--version {taken[-1]}"] if len(taken) < len(versions) else []
    flags += [f"--feature {feature}" for feature in about] if len(about) < len(features) else []
    return " ".join(flags)


def _kinds(factory: EngineFactory, feature: str, version: int, dialect: str) -> list[str]:
    """Kinds of groups that the engine implements alone."""
    found: list[str] = []
    for kind, header in _alone(feature, version, dialect):
        if kind not in found and _implements(factory, header):
            found.append(kind)
    return found


@functools.cache
def _alone(feature: str, version: int, dialect: str) -> tuple[tuple[str, Any], ...]:
    """Configurations of one group, a few of each kind that is drawn; kept, as drawing them is most of the work."""
    rules, choices, tries = registry.dialect_of(dialect), RandomChoices(0), collections.Counter[str]()
    found: list[tuple[str, Any]] = []
    for _ in range(DRAWS):
        header = rules.draw_header(choices, feature, version, dialect)
        (kind, *more) = [kind for kind, _ in rules.groups(header)]
        if not more and tries[kind] < TRIES:
            tries[kind] += 1
            found.append((kind, header))
    return tuple(found)


def _implements(factory: EngineFactory, header: Any) -> bool:
    try:
        make_engine(factory, header)
    except Exception:  # some engines refuse in their own words
        return False
    return True


# Two engines side by side: one in doubt, one that counts.


class Pair:
    """Performs every operation on both engines and compares what they answer.

    `timed_out`: the engine in doubt was silent, at any operation, for as long as it may be.
    """

    def __init__(self, dialect: Dialect, tested: Any, right: Any, version: int, names: SameNames) -> None:
        self.tested = tested
        self.right = right
        self.timed_out = False
        self._dialect, self._version, self._names = dialect, version, names
        self._lacks = dialect.missing_capabilities(tested) | dialect.missing_capabilities(right)

    def perform(self, operation: Any) -> tuple[Any, Mismatch | None]:
        """The right engine's answer, or the Failure in its place, and where the tested one's differs from it."""
        got = attempt(self._dialect, self.tested, self._names.operation(operation, self._both))
        self.timed_out |= isinstance(got, Failure) and got.timed_out
        want = attempt(self._dialect, self.right, operation)
        mismatch = compare(self._dialect, want, self._names.answer(want, got), self._version, self._lacks)
        self._names.learn(operation, self._both)
        return want, mismatch

    def _both(self, operation: Any) -> tuple[Any, Any]:
        return attempt(self._dialect, self.right, operation), attempt(self._dialect, self.tested, operation)


def make_pair(tested: EngineFactory, right: EngineFactory, header: Any, ids: str = "exact") -> Pair | Mismatch:
    """Both engines, empty, or how they disagree about the configuration itself."""
    dialect = registry.dialect_of(header.dialect)
    names = dialect.renaming(ids, header)
    made: list[Any] = []
    for factory in (tested, right):
        try:
            made.append(make_engine(factory, header))
        except (UnsupportedConfigError, EngineProcessError, MissingExtraError):
            raise
        except Exception as error:
            made.append(failure_of(error))
    got, want = made
    if isinstance(got, Failure) or isinstance(want, Failure):
        said = [engine.message if isinstance(engine, Failure) else "accepted" for engine in (want, got)]
        return Mismatch("header", *said)
    return Pair(dialect, got, want, header.oplog, names)
