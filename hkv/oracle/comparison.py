"""Two engines through the same random traffic, seed after seed: how `hkv diff` finds differences."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from hkv.cluster import in_cluster
from hkv.contract import registry
from hkv.contract.answer import EngineFactory, Mismatch
from hkv.contract.bugs import bugs_of_part
from hkv.contract.case import Case
from hkv.errors import ConfigError, EngineFailure, EngineProcessError, HKVError, UnsupportedConfigError
from hkv.oracle.broken_invariant import Broken, first_broken, on_its_own
from hkv.oracle.check import fewest_defects, reproducing
from hkv.oracle.diagnosis import FURTHER_SEEDS, Diagnosis, SeedTraffic, diagnosed, smaller
from hkv.oracle.engine import flags_for, make_engine
from hkv.oracle.engines import ProcessFactory, trusted_first
from hkv.oracle.found_difference import DiffResult, FoundDifference
from hkv.oracle.record import Only, Recording, differ, draw, features_of
from hkv.oracle.shrink import Shrinker, repaired
from hkv.oracle.verbs import EngineLike, named_engine


@dataclasses.dataclass(frozen=True)
class Compared:
    """Counts over seeds of one feature before the one on which two engines differ, `parted`; fields as in
    `DiffResult`."""

    seeds: int
    not_implemented: int
    reason: str
    operations: int
    failed: int
    failure: str
    known: dict[str, int]
    parted: int | None


def _defined(pair: Sequence[EngineLike], definition: EngineLike) -> tuple[EngineLike, EngineLike]:
    """The engine that was declared the definition, and the other."""
    if definition not in pair:
        raise ConfigError("definition", definition, f"one of the engines: {' and '.join(map(str, pair))}")
    first, second = pair
    return (second, first) if second == definition else (first, second)


class Comparison:
    """Compares two engines on one seed after the other; other arguments as of `diff`.

    Where one of the engines is declared the `definition`, the other is in doubt; else, where one is HKV's own, the
    other (`trusted_first`); else the first. None for the dialect's default. `engines` are their names then, the one in
    doubt first. Differences under `known` defects of the engine in doubt are counted, and the next seed is taken.
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
        known: Sequence[str] = (),
        definition: EngineLike | None = None,
    ) -> None:
        rules = registry.dialect_of(only.dialect)
        pair = engines or rules.default_pair
        counts, doubted = trusted_first(pair, only.dialect) if definition is None else _defined(pair, definition)
        (tested, self._tested), (right, self._right) = (named_engine(engine, timeout) for engine in (doubted, counts))
        self.engines = tested, right
        self.features = features_of(only, version)
        self._only, self._steps, self._ids = only, steps, ids
        self._versions = rules.drawn_versions(only.kinds) if version is None else (version,)
        self._bugs = bugs_of_part(bugs, "manager", rules.title, rules.bugs)
        self._known = dict.fromkeys(bugs_of_part(known, "manager", rules.title, rules.bugs, "known"), 0)
        self._defined = definition is not None
        self._operations = self._unsupported = self._compared = self._failed = 0
        self._reason = self._failure = ""
        self._not_compared: dict[str, str] = {}
        self._parted: dict[str, tuple[int, Case, tuple[str, ...]]] = {}

    def factories(self, found: FoundDifference) -> tuple[tuple[str, EngineFactory], tuple[str, EngineFactory]]:
        """Both engines by name as they differ, the one in doubt first."""
        return (self.engines[0], self._tested), (self.engines[1], reproducing(self._right, found.known))

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
        """Compares the engines on one seed; whether they differ in more than is known."""
        try:
            recording, parted = self._differ(feature, seed, ())
            if parted is not None and sum(engine.restart() for engine in self._programs()):
                recording, parted = self._differ(feature, seed, ())
                if parted is None:
                    said = "an engine that answers as in a fresh process, as it takes another header"
                    raise EngineProcessError("engines", f"{', '.join(self.engines)}, {feature} seed {seed}", said)
        except UnsupportedConfigError as error:
            self._unsupported += 1
            self._reason = self._reason or str(error.value if error.argument == "header" else error)
            return False
        names: tuple[str, ...] = ()
        if parted is not None and self._known:
            names, recording, parted = self._beyond_known(feature, seed, recording, parted)
        self._compared += 1
        self._operations += len(recording.operations)
        self._failed += recording.failed is not None
        self._failure = self._failure or recording.failed or ""
        if parted is not None:
            self._parted[feature] = seed, recording.case(parted), names
        else:
            self._known |= {name: self._known[name] + 1 for name in names}
        return parted is not None

    def _differ(self, feature: str, seed: int, known: Sequence[str]) -> tuple[Recording, Mismatch | None]:
        """The traffic of a seed up to the first difference from the right engine as it is with some known defects."""
        pair = self._tested, reproducing(self._right, known)
        version = self._version(seed)
        return differ(*pair, feature, seed, version, self._steps, self._ids, self._only, self._bugs)

    def _programs(self) -> list[ProcessFactory]:
        return [factory for factory in (self._tested, self._right) if isinstance(factory, ProcessFactory)]

    def _beyond_known(
        self, feature: str, seed: int, recording: Recording, parted: Mismatch | None
    ) -> tuple[tuple[str, ...], Recording, Mismatch | None]:
        """Known defects that make a difference, and the first difference beyond them, if there is one: of all of them
        where it is as far on then, as what the engine in doubt breaks is not to be laid to one that it is known for."""
        runs: dict[tuple[str, ...], tuple[Recording, Mismatch | None]] = {(): (recording, parted)}

        def reached(names: tuple[str, ...]) -> float:
            recording, parted = runs[names] = self._differ(feature, seed, names)
            return math.inf if parted is None else len(recording.operations)

        every = tuple(self._known)
        names, place = fewest_defects(every, len(recording.operations), reached)
        with contextlib.suppress(HKVError):
            names = every if place < math.inf and place <= reached(every) < math.inf else names
        return names, *runs[names]

    def stretch(self, feature: str, seeds: Iterable[int]) -> Compared:
        """Compares the engines, of which nothing was compared yet, on seeds one after the other, until they differ."""
        for seed in seeds:
            before = self._counts()
            if self.seed(feature, seed):
                return dataclasses.replace(before, parted=seed)
        return self._counts()

    def _counts(self) -> Compared:
        return Compared(*self._counted(), dict(self._known), None)

    def _counted(self) -> tuple[int, int, str, int, int, str]:
        return self._compared, self._unsupported, self._reason, self._operations, self._failed, self._failure

    def add(self, feature: str, compared: Compared) -> bool:
        """Counts what was compared elsewhere as if it had been here; whether the engines differ. EngineFailure if they
        do there, but not here.
        """
        self._compared += compared.seeds
        self._unsupported += compared.not_implemented
        self._reason = self._reason or compared.reason
        self._operations += compared.operations
        self._failed += compared.failed
        self._failure = self._failure or compared.failure
        self._known = {name: count + compared.known[name] for name, count in self._known.items()}
        if compared.parted is None:
            return False
        if not self.seed(feature, compared.parted):
            raise EngineFailure("seed", compared.parted, f"the same difference here as elsewhere, in feature {feature}")
        return True

    def differences(
        self, shrink: bool, shrinking: Callable[[Shrinker, Case], Case] = Shrinker.shrink, hurried: bool = False
    ) -> Iterator[FoundDifference]:
        """The differences so far, one a feature, made small by `shrinking` if `shrink`.

        `hurried` leaves out the traffic of further seeds, in which an invariant may be broken. An interrupt is raised
        again once every difference was yielded, as small as it was by then.
        """
        interrupt: KeyboardInterrupt | None = None
        for feature, (seed, case, known) in self._parted.items():
            right = reproducing(self._right, known)
            shrinker = Shrinker(self._tested, right, self._ids)
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
            other = on_its_own(right, case.header, repaired(case.header, case.operations))[1]
            if isinstance(other, Broken) and isinstance(found.broken, Broken) and other.name == found.broken.name:
                other = f"both engines break {other.name}: it may itself be wrong, or the operations"
                found = dataclasses.replace(found, broken=other)
            said = (self.engines, found.broken, other, shrinker.problem)
            yield FoundDifference(feature, found.seed, case.header.oplog, case, whole, *said, known, self._defined)
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
        lacks, known = dict(self._not_compared), dict(self._known)
        return DiffResult(self.engines, tuple(found), *self._counted(), not_compared=lacks, known=known)

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
    known: Sequence[str] = (),
    definition: EngineLike | None = None,
) -> DiffResult:
    """Drives two engines through the same random traffic and compares every answer (`hkv diff`).

    Stops at the first difference of each feature that is not known, makes the case small, and names the first invariant
    that either engine breaks on it. Where one of them is the definition, or else HKV's own, the other is in doubt, in
    whichever order they are given.

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
      known: names of upstream defects that the engine in doubt has: seeds that differ in nothing else are counted.
      definition: whichever of the two engines is right by declaration.

    Raises:
      ConfigError: no such dialect, engine, feature, kind or defect; no configuration that both engines implement.
      EngineProcessError, MissingExtraError: an engine cannot start.
    """
    only = Only(frozenset(kinds), max_groups, dialect)
    comparison = Comparison((tested, right), only, version, steps, ids, bugs, timeout, known, definition)
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
