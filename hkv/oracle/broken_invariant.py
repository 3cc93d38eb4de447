"""First invariant that an engine breaks on its own, without another engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from hkv.contract import registry
from hkv.contract.answer import EngineFactory, failure_of
from hkv.contract.dialect import WatchedEngine
from hkv.contract.invariant import InvariantError, judged
from hkv.contract.log import describe
from hkv.errors import ConfigError, HKVError, UnsupportedConfigError
from hkv.oracle.engine import make_engine
from hkv.oracle.record import Only, draw


@dataclasses.dataclass(frozen=True)
class Broken:
    """The first invariant that does not hold.

    Attributes:
      name: of the dialect's `invariants`.
      line: of the operation after which it does not hold, 1-based in the log that the operations would be.
    """

    name: str
    line: int
    operation: str
    problem: str
    promise: str


Drive = Callable[[Callable[[Any], Any]], None]
"""Has operations performed by the function that it takes, and goes on from its answers."""


def first_broken(factory: EngineFactory, header: Any, operations: Sequence[Any]) -> Broken | str:
    """The first invariant that a fresh engine breaks on some operations, or why there is nothing to say."""

    def drive(perform: Callable[[Any], Any]) -> None:
        for operation in operations:
            perform(operation)

    return on_its_own(factory, header, drive)[1]


def on_its_own(factory: EngineFactory, header: Any, drive: Drive) -> tuple[tuple[Any, ...], Broken | str]:
    """Lets an engine run on its own answers, every invariant asked after each operation, and stops at the first broken.

    A wrong answer need not break anything by itself; what the engine does next on the strength of it may. `drive` takes
    the function that performs an operation. Returned are the operations performed, and what is broken after the last,
    or why there is nothing to say.
    """
    dialect, performed = registry.dialect_of(header.dialect), list[Any]()
    if not dialect.invariants:
        return (), f"{dialect.title} has no invariants"
    try:
        watch = dialect.watch(factory(header), header)
    except Exception as error:
        return (), f"the engine cannot be watched: {failure_of(error).message}"
    broken, _ = driven(watch, header, drive, performed)
    if broken is None:
        return tuple(performed), f"no invariant is broken up to operation {len(performed)}"
    if broken.name != FAILURE:
        return tuple(performed), broken
    last, before = describe(performed[-1], 60) if performed else "the header", max(0, len(performed) - 1)
    said = f"no invariant is broken up to operation {before}; then the engine fails at {last}: {broken.problem}"
    return tuple(performed), said


FAILURE = "failure"
"""Name, as of an invariant, of what an engine breaks that raises an error."""


def driven(
    watch: WatchedEngine, header: Any, drive: Drive, performed: list[Any]
) -> tuple[Broken, Exception] | tuple[None, None]:
    """The first invariant that an engine under watch breaks as it is driven, or its failure, and the error itself.

    Operations are added to `performed`, that one last.
    """

    def perform(operation: Any) -> Any:
        performed.append(operation)
        return watch.perform(operation)

    try:
        drive(perform)
    except Exception as error:
        name, problem, promise = FAILURE, failure_of(error).message, "An engine answers every operation."
        if isinstance(error, InvariantError):
            rules = registry.dialect_of(header.dialect).invariants
            name, problem, promise = error.name, error.problem, rules[error.name].promise
        said = describe(performed[-1]) if performed else "header"
        return Broken(name, len(performed) + 1, said, problem, promise), error
    return None, None


# An engine by itself, under random traffic and every invariant of its dialect: what `hkv watch` finds.


@dataclasses.dataclass(frozen=True)
class FoundTraffic:
    """Traffic under which an engine broke an invariant.

    Attributes:
      feature: feature of the traffic, or name of the log that it is of.
      seed: of the configuration and the traffic; None for a log's.
      operations: everything up to the operation after which it does not hold.
      broken: the invariant; `FAILURE` where the engine raised an error instead.
      whole: number of operations before the case was made small.
    """

    feature: str
    seed: int | None
    version: int
    header: Any
    operations: tuple[Any, ...]
    broken: Broken
    error: Exception
    whole: int = 0

    @property
    def name(self) -> str:
        """Feature, seed and version in words; the log's name."""
        return self.feature if self.seed is None else f"{self.feature} seed {self.seed} version {self.version}"


class Watching:
    """Drives an engine through the traffic of one seed after the other, every invariant asked after each operation.

    Attributes:
      seeds: seeds that the engine implements.
      not_implemented: seeds that it says it does not implement, and `reason`, what it said the first time.
      lacks: capabilities that it lacks, with their meanings; `not_asked`: the invariants not asked for that.
      current: feature, seed, version, header and operations so far of the traffic that goes on, or did last.
    """

    def __init__(self, factory: EngineFactory, only: Only, version: int | None = None, steps: int = 16) -> None:
        self._factory, self._only, self._steps = factory, only, steps
        self._rules = registry.dialect_of(only.dialect)
        self._versions = self._rules.drawn_versions(only.kinds) if version is None else (version,)
        self.seeds = self.not_implemented = self.performed = 0
        self.reason = ""
        self.lacks: dict[str, str] = {}
        self.not_asked: tuple[str, ...] = ()
        self.current: tuple[str, int | None, int, Any, list[Any]] | None = None

    def seed(self, feature: str, seed: int) -> FoundTraffic | None:
        """The first invariant that the engine breaks under one seed's traffic, or None."""
        version = self._versions[seed % len(self._versions)]
        header, choices = draw(feature, seed, version, self._only)
        drive = functools.partial(self._rules.drive, header, choices, steps=self._steps)
        return self.along(feature, seed, header, lambda perform: drive(perform=perform))

    def along(self, feature: str, seed: int | None, header: Any, drive: Drive) -> FoundTraffic | None:
        """The same of any traffic under a header, which `drive` has performed."""
        self._rules, version = registry.dialect_of(header.dialect), header.oplog
        try:
            engine = make_engine(self._factory, header)
        except UnsupportedConfigError as error:
            self.not_implemented += 1
            self.reason = self.reason or str(error)
            return None
        except HKVError:
            raise
        except Exception as error:
            raise ConfigError("engine", failure_of(error).message, "an engine that takes this header") from error
        self._note_missing(engine)
        watch = self._rules.watch(engine, header)
        self.seeds += 1
        operations: list[Any] = []
        self.current = feature, seed, version, header, operations

        try:
            broken, error = driven(watch, header, drive, operations)
        finally:
            self.performed += len(operations)
        if broken is None or error is None:
            return None
        return FoundTraffic(feature, seed, version, header, tuple(operations), broken, error, len(operations))

    def _note_missing(self, engine: Any) -> None:
        lacks = self._rules.missing_capabilities(engine)
        invariants = self._rules.invariants.values()
        asked = {each.name for each in judged(invariants, lacks)}
        self.lacks = {name: each for name, each in self._rules.capabilities.items() if name in lacks}
        self.not_asked = tuple(each.name for each in invariants if each.name not in asked)

    def require_some(self) -> None:
        """Raises ConfigError if the engine implements nothing of what was drawn."""
        if self.not_implemented and not self.seeds:
            wanted = f"an engine that implements one of the {self.not_implemented} configurations that were drawn"
            raise ConfigError("engine", self.reason, f"{wanted}; --kinds and --feature draw others")
