"""Two engines through the same random traffic, seed after seed: what `hkv diff` finds, as typed values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hkv.cluster import in_cluster
from hkv.columns import Columns, columns
from hkv.contract import registry
from hkv.contract.answer import EngineFactory
from hkv.contract.bugs import bugs_of_part
from hkv.contract.case import Case
from hkv.contract.log import describe
from hkv.errors import ConfigError, EngineFailure, UnsupportedConfigError
from hkv.oracle.broken_invariant import Broken, first_broken, on_its_own
from hkv.oracle.diagnosis import FURTHER_SEEDS, Diagnosis, SeedTraffic, diagnosed, smaller
from hkv.oracle.engine import flags_for, make_engine
from hkv.oracle.engines import trusted_first
from hkv.oracle.log_file import write_log
from hkv.oracle.record import Only, differ, draw, features_of
from hkv.oracle.shrink import Shrinker, repaired
from hkv.oracle.verbs import EngineLike, Path, named_engine

_LONG = re.compile(r"\[((?:\d+, ){6})(?:\d+, )+(\d+)\]")
"""A list of more than eight numbers; the first six and the last are shown."""


@dataclasses.dataclass(frozen=True)
class FoundDifference:
    """Traffic on which two engines differ.

    Attributes:
      feature: feature of the traffic.
      seed: of the configuration and the traffic.
      version: of the log format.
      case: the operations up to the one that is answered differently, or on to the broken invariant, made small if
        that was wanted.
      operations_before_shrinking: number of operations before.
      engines: names of the engine in doubt and of the one that counts.
      broken: the first invariant that the engine in doubt breaks on the case, or why none is known, in words.
      broken_by_other: the same of the engine that counts.
      shrinking_problem: the error that ended shrinking too early, or None.
    """

    feature: str
    seed: int
    version: int
    case: Case
    operations_before_shrinking: int
    engines: tuple[str, str]
    broken: Broken | str
    broken_by_other: Broken | str
    shrinking_problem: str | None

    @property
    def line(self) -> int:
        """Line of the log that `write` writes, 1 for the configuration itself."""
        return len(self.case.answers) + 1

    @property
    def operation(self) -> str:
        """The operation that is answered differently, on one line."""
        return describe(self.case.differing[-1]) if self.case.operations else "header"

    @property
    def headline(self) -> str:
        """First line of a report: the broken invariant, how, and by whom if not by the engine in doubt; or what is
        wrong with the answer."""
        if isinstance(self.broken, Broken):
            return _problem(self.broken)
        if isinstance(self.broken_by_other, Broken):
            return f"{self.engines[1]} itself breaks {_problem(self.broken_by_other)}"
        said = registry.dialect_of(self.case.header.dialect).difference(self.case) if self.case.operations else ""
        mismatch = self.case.mismatch
        wrong = mismatch.got if self.case.fails else f"{mismatch.field} is {mismatch.got}, not {mismatch.want}"
        return said or f"{self.operation}: {wrong}"

    @property
    def invariant(self) -> str | None:
        """Name of the broken invariant, or None."""
        return self.broken.name if isinstance(self.broken, Broken) else None

    def write(self, path: Path) -> None:
        """Writes the case as a log, with the answers of the engine that counts, whole or not at all."""
        write_log(path, self.case.header, self.case.differing, self.case.answers)

    def record(self) -> dict[str, Any]:
        """Record in plain values, for `hkv diff --json`."""
        return {
            "seed": self.seed,
            "version": self.version,
            "line": self.line,
            "headline": self.headline,
            "operation": self.operation,
            "field": self.case.mismatch.field,
            "want": self.case.mismatch.want,
            "got": self.case.mismatch.got,
            "operations": len(self.case.operations),
            "operations_before_shrinking": self.operations_before_shrinking,
            "invariant": self.invariant,
            "invariant_problem": self.broken.problem if isinstance(self.broken, Broken) else self.broken,
            "in_doubt": self.engines[0],
            "invariant_of_other": self.broken_by_other.name if isinstance(self.broken_by_other, Broken) else None,
            **({} if self.shrinking_problem is None else {"shrinking_problem": self.shrinking_problem}),
        }


def _problem(broken: Broken) -> str:
    """A broken invariant on one line, long lists of blocks shortened."""
    return f"{broken.name}: " + _LONG.sub(r"[\1..., \2]", " ".join(broken.problem.split()))


@dataclasses.dataclass(frozen=True)
class DiffResult:
    """Result of comparing two engines.

    Attributes:
      engines: names of the engine in doubt and of the one that counts.
      found: the first difference of each feature that has one.
      seeds: seeds that both engines implement.
      not_implemented: seeds that one of them says it does not implement.
      reason: reason given, the first time; "" where they all are.
      operations: operations performed.
      not_compared: what one of the engines says it lacks, with its meaning.
      hint: options under which both engines implement what is drawn, in words, where they implement little; else "".
    """

    engines: tuple[str, str]
    found: tuple[FoundDifference, ...]
    seeds: int
    not_implemented: int
    reason: str
    operations: int
    hint: str = ""
    not_compared: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    @property
    def agrees(self) -> bool:
        """True if no difference was found."""
        return not self.found

    @property
    def differences(self) -> Columns:
        """One entry a difference: `feature`, `seed`, `version`, `line`, `operation`, `field`, `invariant`."""
        return columns(
            self.found,
            {
                "feature": (lambda found: found.feature, str),
                "seed": (lambda found: found.seed, int),
                "version": (lambda found: found.version, int),
                "line": (lambda found: found.line, int),
                "operation": (lambda found: found.operation, str),
                "field": (lambda found: found.case.mismatch.field, str),
                "invariant": (lambda found: found.invariant or "", str),
            },
        )


@dataclasses.dataclass(frozen=True)
class Compared:
    """Counts over seeds of one feature before the one on which two engines differ, `parted`; fields as in
    `DiffResult`."""

    seeds: int
    not_implemented: int
    reason: str
    operations: int
    parted: int | None


def _shrink(shrinker: Shrinker, case: Case) -> Case:
    return shrinker.shrink(case)


class Comparison:
    """Compares two engines on one seed after the other; other arguments as of `diff`.

    Where one of the engines is HKV's own, the other is in doubt (`trusted_first`), else the first; None for the
    dialect's default. `engines` are their names then, the one in doubt first.
    """

    def __init__(
        self,
        engines: tuple[EngineLike, EngineLike] | None,
        only: Only,
        version: int | None = None,
        steps: int = 16,
        ids: str = "exact",
        bugs: Sequence[str] = (),
        timeout: float | None = None,
    ) -> None:
        rules = registry.dialect_of(only.dialect)
        counts, doubted = trusted_first(engines or rules.default_pair, only.dialect)
        (tested, self._tested), (right, self._right) = (named_engine(engine, timeout) for engine in (doubted, counts))
        self.engines = tested, right
        self.features = features_of(only, version)
        self._only, self._steps, self._ids = only, steps, ids
        self._versions = rules.drawn_versions(only.kinds) if version is None else (version,)
        self._bugs = bugs_of_part(bugs, "manager", rules.title, rules.bugs)
        self._operations = self._unsupported = self._compared = 0
        self._reason = ""
        self._not_compared: dict[str, str] = {}
        self._parted: dict[str, tuple[int, Case]] = {}

    @property
    def factories(self) -> tuple[tuple[str, EngineFactory], tuple[str, EngineFactory]]:
        """Both engines by name, the one in doubt first."""
        return (self.engines[0], self._tested), (self.engines[1], self._right)

    def require(self, features: Sequence[str]) -> None:
        """Makes sure that there is traffic about each feature, and that both engines can start."""
        for feature in features:
            draw(feature, 0, self._versions[0], self._only)
        rules = registry.dialect_of(self._only.dialect)
        for factory in (self._tested, self._right):
            try:
                lacks = rules.missing_capabilities(
                    make_engine(factory, draw(features[0], 0, self._versions[0], self._only)[0])
                )
                self._not_compared |= {name: each for name, each in rules.capabilities.items() if name in lacks}
            except UnsupportedConfigError:  # it may implement the next one
                continue

    def seed(self, feature: str, seed: int) -> bool:
        """Compares the engines on one seed; whether they differ."""
        version = self._version(seed)
        try:
            recording, parted = differ(
                self._tested, self._right, feature, seed, version, self._steps, self._ids, self._only, self._bugs
            )
        except UnsupportedConfigError as error:
            self._unsupported += 1
            self._reason = self._reason or str(error.value if error.argument == "header" else error)
            return False
        self._compared += 1
        self._operations += len(recording.operations)
        if parted is not None:
            self._parted[feature] = seed, recording.case(parted)
        return parted is not None

    def stretch(self, feature: str, seeds: Iterable[int]) -> Compared:
        """Compares the engines, of which nothing was compared yet, on seeds one after the other, until they differ."""
        for seed in seeds:
            before = self._counts()
            if self.seed(feature, seed):
                return dataclasses.replace(before, parted=seed)
        return self._counts()

    def _counts(self) -> Compared:
        return Compared(self._compared, self._unsupported, self._reason, self._operations, None)

    def add(self, feature: str, compared: Compared) -> bool:
        """Counts what was compared elsewhere as if it had been here; whether the engines differ. EngineFailure if they
        do there, but not here.
        """
        self._compared += compared.seeds
        self._unsupported += compared.not_implemented
        self._reason = self._reason or compared.reason
        self._operations += compared.operations
        if compared.parted is None:
            return False
        if not self.seed(feature, compared.parted):
            raise EngineFailure("seed", compared.parted, f"the same difference here as elsewhere, in feature {feature}")
        return True

    def differences(
        self, shrink: bool, shrinking: Callable[[Shrinker, Case], Case] = _shrink, hurried: bool = False
    ) -> Iterator[FoundDifference]:
        """The differences so far, one a feature, made small by `shrinking` if `shrink`.

        `hurried` leaves out the traffic of further seeds, in which an invariant may be broken. An interrupt is raised
        again once every difference was yielded, as small as it was by then.
        """
        interrupt: KeyboardInterrupt | None = None
        for feature, (seed, case) in self._parted.items():
            shrinker = Shrinker(self._tested, self._right, self._ids)
            found = Diagnosis(case, seed, "the engines disagree about the configuration itself")
            further = FURTHER_SEEDS if interrupt is None and not hurried else 0
            traffic = SeedTraffic(feature, self._only, self._version, self._steps, bool(self._bugs), further)
            whole, small = len(case.operations), False
            try:
                if case.operations:
                    found = diagnosed(shrinker, found, traffic)
                    whole = len(found.case.operations)
                if case.operations and shrink and interrupt is None:
                    found = dataclasses.replace(found, case=shrinking(shrinker, found.case))
                    small = True
                    found = smaller(shrinker, found, traffic, shrinking)
            except KeyboardInterrupt as pressed:
                interrupt = pressed
                if not small and shrinker.best is not None:
                    found = dataclasses.replace(found, case=shrinker.best)
            broken = first_broken(self._tested, found.case.header, found.case.operations)
            if small and not isinstance(broken, Broken) and interrupt is None:
                found = dataclasses.replace(found, case=shrinker.seen_before(found.case))
            if shrinker.keeps is not None or isinstance(broken, Broken):
                found = dataclasses.replace(found, broken=broken)
            case = found.case
            other = on_its_own(self._right, case.header, repaired(case.header, case.operations))[1]
            if isinstance(other, Broken) and isinstance(found.broken, Broken) and other.name == found.broken.name:
                other = f"both engines break {other.name}: the operations are to blame for that, not an engine"
                found = dataclasses.replace(found, broken=other)
            said = (self.engines, found.broken, other, shrinker.problem)
            yield FoundDifference(feature, found.seed, case.header.oplog, case, whole, *said)
        if interrupt is not None:
            raise interrupt

    def result(self, found: Sequence[FoundDifference]) -> DiffResult:
        """Result of the comparison; ConfigError if the engines implement no configuration in common."""
        hint = self._hint() if self._unsupported > self._compared else ""
        if self._unsupported and not self._compared:
            expected = "one configuration at least that both engines implement"
            raise ConfigError("engines", self._reason, f"{expected}; {hint}" if hint else expected)
        return dataclasses.replace(self.so_far(found), hint=hint)

    def so_far(self, found: Sequence[FoundDifference]) -> DiffResult:
        """Result so far, however little was compared."""
        counts = (self._compared, self._unsupported, self._reason, self._operations)
        return DiffResult(self.engines, tuple(found), *counts, not_compared=dict(self._not_compared))

    def _hint(self) -> str:
        flags = flags_for(lambda header: (self._tested(header), self._right(header)), self._only.dialect)
        return f"configurations that are can be drawn with {flags}" if flags else ""

    def _version(self, seed: int) -> int:
        return self._versions[seed % len(self._versions)]


def diff(
    tested: EngineLike,
    right: EngineLike = "numpy",
    *,
    dialect: str = registry.DEFAULT,
    features: Sequence[str] = (),
    seeds: int = 50,
    first_seed: int = 0,
    kinds: Iterable[str] = (),
    max_groups: int | None = None,
    version: int | None = None,
    steps: int = 16,
    ids: str = "exact",
    bugs: Sequence[str] = (),
    shrink: bool = True,
    timeout: float | None = None,
) -> DiffResult:
    """Drives two engines through the same random traffic and compares every answer (`hkv diff`).

    Stops at the first difference of each feature, makes the case small, and names the first invariant that either
    engine breaks on it. Where one of them is HKV's own, the other is in doubt, in whichever order they are given.

    Args:
      tested: the engine in doubt.
      right: the engine whose answers count.
      dialect: name of the dialect, as headers give it.
      features: features of the traffic; none for every feature of the dialect.
      seeds: number of seeds a feature.
      first_seed: the first of them.
      kinds: only groups of these kinds; none for all.
      max_groups: most groups; None for any number.
      version: of the log format; None for all in turn.
      steps: scheduling steps a seed.
      ids: `exact`, or `isomorphic`: block ids may differ by a renaming.
      bugs: names of upstream defects that both reproduce.
      shrink: whether to make failing cases small.
      timeout: seconds that an engine in a process of its own may take for one answer; None for the default.

    Raises:
      ConfigError: no such dialect, engine, feature, kind or defect; no configuration that both engines implement.
      EngineProcessError, MissingExtraError: an engine cannot start.
    """
    only = Only(frozenset(kinds), max_groups, dialect)
    comparison = Comparison((tested, right), only, version, steps, ids, bugs, timeout)
    chosen = tuple(features) or comparison.features
    comparison.require(chosen)
    for feature in chosen:
        any(comparison.seed(feature, seed) for seed in range(first_seed, first_seed + seeds))
    return comparison.result(list(comparison.differences(shrink)))


# A comparison of two engines by the machines of a Ray cluster: stretches of seeds, counted as one process would.

STRETCH = 25
"""Seeds that one processor compares at a time."""

Stretch = tuple[str, range]
"""A feature, and seeds."""


def compare_in_cluster(
    comparison: Comparison,
    arguments: Sequence[Any],
    features: Sequence[str],
    seeds: range,
    address: str,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Compares two engines on all seeds of each feature, up to the first on which they differ.

    That one is compared here once more, so that it can be made small here. The comparison gets the counts and
    differences that one process would, going through the seeds in order; `arguments` are those that it was made from.
    """
    places = range(0, len(seeds), STRETCH)
    stretches = [(feature, seeds[place : place + STRETCH]) for feature in features for place in places]
    found: dict[int, Compared] = {}
    for place, compared in in_cluster(_compared, stretches, tuple(arguments), address):
        found[place] = compared
        for _ in stretches[place][1]:
            progress()
    parted: set[str] = set()
    for place, (feature, _) in enumerate(stretches):
        if feature not in parted and comparison.add(feature, found[place]):
            parted.add(feature)


def _compared(stretch: Stretch, arguments: tuple[Any, ...]) -> Compared:
    return Comparison(*arguments).stretch(*stretch)
