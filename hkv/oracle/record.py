"""Random traffic on one engine, written down, or on two at once, compared."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from hkv.contract import registry
from hkv.contract.answer import EngineFactory, Failure, Mismatch, taken
from hkv.contract.case import Case
from hkv.contract.traffic import STEERED, KeptTraffic, RandomChoices
from hkv.errors import ConfigError
from hkv.oracle.check import with_bugs
from hkv.oracle.engine import make_pair

DRAWS = 2_000
"""Configurations of one seed that are looked at for one that is wanted."""


@dataclasses.dataclass
class Recording:
    """A configuration, operations, and the answers to them so far: of one that ended the run, where it gave any, the
    last; `failed`, the error with which both of two engines ended it, or None."""

    header: Any
    operations: list[Any] = dataclasses.field(default_factory=list)
    answers: list[Any] = dataclasses.field(default_factory=list)
    failed: str | None = None

    def case(self, mismatch: Mismatch) -> Case:
        """The failing case that it is."""
        return Case(self.header, tuple(self.operations), tuple(self.answers), mismatch)


class _Parted(Exception):  # noqa: N818
    """The first difference between two answers is its argument; None where both engines ended alike."""


@dataclasses.dataclass(frozen=True)
class Only:
    """Selection among the configurations of a feature: kinds of groups, all if empty, most groups, and the dialect's
    name."""

    kinds: frozenset[str] = frozenset()
    max_groups: int | None = None
    dialect: str = registry.DEFAULT

    def __post_init__(self) -> None:
        known = registry.dialect_of(self.dialect).kinds
        for kind in sorted(self.kinds - set(known)):
            raise ConfigError("kinds", kind, f"one of {', '.join(known)}")

    def __contains__(self, header: object) -> bool:
        groups = registry.dialect_of(self.dialect).groups(header)
        few = self.max_groups is None or len(groups) <= self.max_groups
        return few and (not self.kinds or {kind for kind, _ in groups} <= self.kinds)


ALL = Only()
"""No restriction."""


@functools.cache
def features_of(only: Only, version: int | None = None) -> tuple[str, ...]:
    """Features that have configurations in a selection, of that version, or of all that are drawn in turn."""
    dialect = registry.dialect_of(only.dialect)
    versions = dialect.drawn_versions(only.kinds) if version is None else (version,)

    def has(feature: str) -> bool:
        try:
            return all(draw(feature, 0, each, only) for each in versions)
        except ConfigError as error:
            if error.argument != "feature":
                raise
            return False

    features = dialect.features(only.dialect)
    if only == Only(dialect=only.dialect):
        return features
    if not (found := tuple(feature for feature in features if has(feature))):
        raise ConfigError("kinds", ",".join(sorted(only.kinds)), "kinds that make up a configuration, in few groups")
    return found


def draw(feature: str, seed: int, version: int, only: Only = ALL) -> tuple[Any, RandomChoices]:
    """The configuration of a seed, and the choices that its traffic goes on with."""
    dialect = registry.dialect_of(only.dialect)
    features = dialect.features(only.dialect)
    if feature not in features:
        raise ConfigError("feature", feature, f"one of {', '.join(features)} for {only.dialect}")
    if version not in dialect.versions:
        raise ConfigError("version", version, f"one of {dialect.versions} for {only.dialect}")
    kept = _kept(version, only) if feature == STEERED else []
    if kept:
        return draw_kept(kept, seed, version, dialect.drawn_versions(only.kinds))
    choices = RandomChoices(seed)
    for _ in range(DRAWS if feature != STEERED else 0):
        header = dialect.draw_header(choices, feature, version, only.dialect, only.kinds)
        if header in only:
            return header, choices
    kinds = ", ".join(sorted(only.kinds)) or "any"
    groups = "" if only.max_groups is None else f", at most {only.max_groups} groups"
    raise ConfigError("feature", feature, f"a feature that has configurations of these kinds: {kinds}{groups}")


def _kept(version: int, only: Only) -> list[KeptTraffic]:
    """Kept configurations of a version that are selected."""
    return [each for each in registry.dialect_of(only.dialect).kept(version, only.dialect) if each.header in only]


def record(factory: EngineFactory, feature: str, seed: int, version: int, steps: int, only: Only = ALL) -> Recording:
    """Drives an engine through the traffic of a seed."""
    header, choices = draw(feature, seed, version, only)
    dialect = registry.dialect_of(only.dialect)
    engine = factory(header)
    recording = Recording(header)

    def perform(operation: Any) -> Any:
        answer = dialect.perform(engine, operation)
        recording.operations.append(operation)
        recording.answers.append(taken(answer))
        return answer

    dialect.drive(header, choices, perform, steps)
    return recording


def differ(
    tested: EngineFactory,
    right: EngineFactory,
    feature: str,
    seed: int,
    version: int,
    steps: int,
    ids: str = "exact",
    only: Only = ALL,
    bugs: Sequence[str] = (),
) -> tuple[Recording, Mismatch | None]:
    """Drives two engines through the traffic of a seed, both with defects of `bugs`, and compares every answer.

    What happened, and where they parted, or None if they agreed to the end. An engine that does not implement the
    configuration, or cannot start, raises an error of its own.
    """
    header, choices = draw(feature, seed, version, only)
    header = with_bugs(header, bugs)
    recording = Recording(header)
    pair = make_pair(tested, right, header, ids)
    if isinstance(pair, Mismatch):
        return recording, pair

    def perform(operation: Any) -> Any:
        want, mismatch = pair.perform(operation)
        recording.operations.append(operation)
        recording.answers.append(None if isinstance(want, Failure) else taken(want))
        if mismatch is not None:
            raise _Parted(mismatch)
        if isinstance(want, Failure):
            # Both failed, and there is no answer to go on from; a defect that was asked for by name had to end them.
            recording.failed = None if want.named else want.message
            raise _Parted(None)
        return want

    try:
        registry.dialect_of(only.dialect).drive(header, choices, perform, steps)
    except _Parted as parted:
        return recording, parted.args[0]
    return recording, None


# Traffic steered by what the reference does: configurations under which seeds reached what hardly any other does.


TIMES = 3
"""Kept configurations that everything is to be reached by, where so many seeds reach it."""

EACH = 2
"""Kept configurations of each feature, at least."""

Name = TypeVar("Name", bound=Hashable)


def choose(reached: Mapping[Name, frozenset[Hashable]], count: int, sort: Callable[[Name], Hashable]) -> list[Name]:
    """Names whose sets together hold as much as possible, elements of few sets first.

    Each element counts by the inverse of the number of sets that hold it, half as much each time that one is chosen
    which holds it, until `TIMES` are. The first name wins among equals. The first names are one of each kind, `EACH`
    times over, the others of any.
    """
    often = collections.Counter(element for elements in reached.values() for element in elements)
    worth = {element: 1 / times for element, times in often.items()}
    had = dict.fromkeys(often, 0)
    left, chosen = dict(reached), list[Name]()
    sorts = list(dict.fromkeys(map(sort, reached)))
    for wanted in itertools.islice(itertools.chain(EACH * sorts, itertools.repeat(None)), count):
        names = [name for name in left if wanted is None or sort(name) == wanted]
        if names:
            best = max(names, key=lambda name: sum(worth[element] for element in left[name]))
            for element in left.pop(best):
                had[element] += 1
                worth[element] = worth[element] / 2 if had[element] < TIMES else 0.0
            chosen.append(best)
    return chosen


def draw_kept(
    kept: Sequence[KeptTraffic], seed: int, version: int, versions: tuple[int, ...]
) -> tuple[Any, RandomChoices]:
    """The kept configuration of a seed, and the choices of its traffic.

    The first time that seeds go through them, with the versions in turn, traffic is as it was when a configuration was
    chosen; later, and under another version, it is the seed's own.
    """
    again, place = divmod(seed // len(versions), len(kept))
    header, own = kept[place]
    as_kept = not again and versions[seed % len(versions)] == version
    return header, RandomChoices(own if as_kept else seed)
