"""The contract between HKV and a dialect: everything that commands, the oracle, replay and testing ask of one.

A dialect is one folder (or a package of somebody else's) with a subclass of `Dialect`, registered by the names that
log headers use for it (`hkv.contract.registry`). Nothing outside the folder names it. Only `names`, `versions`,
`kinds`, `log` and what `check`, `diff` and `record` need has to be written; what a dialect leaves out is refused with
its name.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from hkv.contract.answer import Mismatch, SameNames, compare
from hkv.contract.bugs import Bugs
from hkv.contract.log import PooledHeader
from hkv.errors import ConfigError, UnsupportedConfigError
from hkv.model.topology import Topology
from hkv.spec import spec_from_log

if TYPE_CHECKING:
    from hkv.contract.attach import Observed, Session
    from hkv.contract.case import Case, ShrinkRules
    from hkv.contract.explanation import Explanation, Resumption
    from hkv.contract.explore_command import ExploreCommand, Space
    from hkv.contract.invariant import Invariant
    from hkv.contract.log import Lifecycle, Log, LogFormat
    from hkv.contract.plan_command import PlanCommand
    from hkv.contract.snapshot import Snapshot
    from hkv.contract.traffic import Choices, KeptTraffic, Moves


class WatchedEngine(Protocol):
    """An engine under watch: every operation passes through, and every invariant is asked after it."""

    def perform(self, operation: Any) -> Any:
        """Performs one operation and returns the engine's answer.

        Raises:
          InvariantError: an invariant does not hold after it.
        """


class LogWatch(WatchedEngine, Protocol):
    """A log under watch; `asked` counts how often each invariant could be asked."""

    asked: Mapping[str, int]


class Process(Protocol):
    """A process that performs operations; what it died of or said wrong is an `EngineProcessError`.

    Attributes:
      lacks: capabilities that it says it lacks.
      perform: has it perform an operation, and reads the answer as the type that the operation declares.
      close: ends it.
      request_keyed: a replay's requests, known by their prefix keys; so do `extend`, `num_free` and `num_available`.
    """

    lacks: tuple[str, ...]
    perform: Callable[[Any], Any]
    close: Callable[[], None]
    request_keyed: Callable[..., None]
    extend: Callable[[str, int], None]
    num_free: Callable[[], int]
    num_available: Callable[[], int]


class Dialect(abc.ABC):
    """The rules of one engine, as far as HKV asks for them. Objects have no state.

    Attributes:
      names: as the `dialect` field of a log's header names it; several where they differ in data alone.
      title: as people call it, its version included.
      versions: of the log format, oldest first.
      kinds: names of the kinds of groups that random configurations may have.
      engines: names of built-in engines to where they live, `module:attribute`; each takes a header.
      engine_versions: of those that drive an installed package, the version that is driven unless another is named.
      default_pair: the engine in doubt and the one that counts, where a command is not told.
      default_recorded: the engine that is recorded where a command is not told.
      bugs: known defects of its engine, by name (`hkv.contract.bugs`).
      move_names: of `moves`; the first begins the traffic.
      planned_as: its name in `hkv plan`; empty where it plans no memory.
    """

    names: tuple[str, ...]
    title: str
    versions: tuple[int, ...] = (2,)
    kinds: tuple[str, ...] = ()
    engines: Mapping[str, str] = MappingProxyType({})
    engine_versions: Mapping[str, str] = MappingProxyType({})
    default_pair: tuple[str, str] = ("jax", "numpy")
    default_recorded: str = "numpy"
    bugs: Bugs = MappingProxyType({})
    planned_as: str = ""
    move_names: tuple[str, ...] = ()

    # Logs

    def drawn_versions(self, kinds: frozenset[str]) -> tuple[int, ...]:
        """Versions of which random traffic about these kinds is drawn, in turn, where none is asked for."""
        return self.versions

    @property
    @abc.abstractmethod
    def log(self) -> LogFormat:
        """Header and operations of its logs, and how lines of them are checked."""

    @abc.abstractmethod
    def lifecycle(self, header: Any) -> Lifecycle:
        """Follows a log from its header on."""

    def header_of(self, name: str, groups: Sequence[Mapping[str, Any]], num_blocks: Sequence[int]) -> Any:
        """Header of a cache that is not drawn: its groups as logs have them, and the blocks of its pool or pools.

        Raises:
          ConfigError: the dialect has no such cache.
        """
        pooled = issubclass(self.log.header, PooledHeader)
        if not pooled and len(num_blocks) != 1:
            raise ConfigError("num_blocks", list(num_blocks), f"one number: {name} has one pool")
        blocks = list(num_blocks) if pooled else num_blocks[0]
        feature = self.features(name)[0]
        header = self.log.header(
            dialect=name, feature=feature, num_blocks=blocks, groups=[dict(each) for each in groups]
        )
        self.log.check(header)
        return header

    # Engines

    def perform(self, engine: Any, operation: Any) -> Any:
        """Performs one operation on an engine and returns its answer, None where the operation has none."""
        return engine.perform(operation)

    def missing_methods(self, engine: Any, header: Any) -> tuple[str, ...]:
        """Methods that a log of this header may ask an engine for and that this one does not have."""
        return () if hasattr(engine, "perform") else ("perform",)

    def process_engine(self, process: Process) -> Any:
        """The engine that a process is which performs operations (`docs/oplog.md`, "The process protocol")."""
        return process

    # Comparing

    def compare(self, want: Any, got: Any, version: int) -> Mismatch | None:
        """The first difference between two answers, or failures in their place; None when they agree.

        Args:
          want: the answer to be met.
          got: the other one.
          version: of the log format.
        """
        return compare(want, got)

    def renaming(self, ids: str, header: Any) -> SameNames:
        """Comparison of two engines' block ids.

        Raises:
          ConfigError: the dialect has no such comparison.
        """
        if ids != "exact":
            raise ConfigError("ids", ids, f"exact: {self.title}'s rules say which block is handed out")
        return SameNames()

    @property
    def shrink_rules(self) -> ShrinkRules | None:
        """Rules by which failing cases are made smaller; None for those that know no dialect."""
        return None

    def summary(self, header: Any) -> str:
        """The cache of a header in a few words: blocks and groups."""
        groups = ", ".join(f"{kind}:{size}" for kind, size in self.groups(header))
        pools = str(header.num_blocks).strip("[]").replace(", ", " and ")
        return f"{pools} blocks, groups {groups}"

    # Random traffic

    def groups(self, header: Any) -> Sequence[tuple[str, int]]:
        """Kind and block size, in tokens, of each group of a header."""
        return [(group["kind"], group["block_size"]) for group in header.groups]

    @abc.abstractmethod
    def features(self, name: str) -> tuple[str, ...]:
        """Features that random logs of the dialect of that name may have."""

    def short_features(self, name: str) -> tuple[str, ...]:
        """Those of them whose logs are short, for properties that draw many."""
        return self.features(name)

    @abc.abstractmethod
    def draw_header(
        self, choices: Choices, feature: str, version: int, name: str, kinds: frozenset[str] = frozenset()
    ) -> Any:
        """A random configuration for a feature; `kinds`: those of groups that are asked for by name."""

    def kept(self, version: int, name: str) -> Sequence[KeptTraffic]:
        """Configurations of a version under which seeds reached what others seldom do (`hkv.oracle.record`); none
        where no such record was made."""
        del version, name
        return ()

    @abc.abstractmethod
    def drive(self, header: Any, choices: Choices, perform: Callable[[Any], Any], steps: int) -> None:
        """Random traffic over some scheduling steps; every operation goes through `perform`, which answers it."""

    def moves(self, header: Any, choices: Choices, perform: Callable[[Any], Any]) -> Moves:
        """Random traffic, move by move; `move_names` says which.

        Raises:
          UnsupportedConfigError: the dialect has no moves.
        """
        raise self.unsupported("moves")

    def topology(self, header: Any) -> Topology:
        """Groups of a header as `hkv.spec` describes them."""
        return Topology.of_specs([spec_from_log(group) for group in header.groups])

    def draw_hit_case(self, choices: Choices) -> Any:
        """A request and a set of cached prefixes of it, on which a hit can be compared with its definition.

        Raises:
          UnsupportedConfigError: the dialect has no such cases.
        """
        raise self.unsupported("cases of hits")

    # Judging

    @property
    def capabilities(self) -> Mapping[str, str]:
        """Parts of answers that an engine may lack, with their meanings; only what it has is compared and judged."""
        return MappingProxyType({})

    def missing_capabilities(self, engine: Any) -> frozenset[str]:
        """Capabilities that an engine says it lacks: those that its attribute `lacks` names, if it has one.

        A program that speaks the process protocol answers the header with `{"lacks": [...]}`.

        Raises:
          ConfigError: the dialect has none of that name.
        """
        names = frozenset(getattr(engine, "lacks", ()))
        if unknown := sorted(names - self.capabilities.keys()):
            known = ", ".join(self.capabilities) or f"none: {self.title}'s engines have all that they answer"
            raise ConfigError("lacks", unknown[0], f"some of {known}")
        return names

    def without(self, answer: Any, lacks: frozenset[str]) -> Any:
        """An answer but for what belongs to these capabilities, in a form that `compare` takes."""
        del lacks
        return answer

    @property
    def invariants(self) -> Mapping[str, Invariant]:
        """Invariants of the dialect's caches, by name."""
        return MappingProxyType({})

    def watch(self, engine: Any, header: Any) -> WatchedEngine:
        """The engine, every invariant that it has the capabilities for asked after each operation.

        Raises:
          UnsupportedConfigError: the dialect has no invariants, or the engine too little for any.
        """
        raise self.unsupported("invariants")

    def watch_log(self, log: Log) -> LogWatch:
        """The cache that a log describes: invariants are checked wherever the log has what they need.

        Raises:
          UnsupportedConfigError: the dialect has no invariants that logs are judged by.
        """
        raise self.unsupported("invariants of logs")

    def explain(self, log: Log, line: int, request: str | None) -> Explanation | None:
        """Account of a request up to a line of a log, and the reason why its hit is not longer; None where
        `resumptions` and the answers of its engine say it."""
        del log, line, request
        return None

    def difference(self, case: Case) -> str:
        """Sentence about the answer at which two engines differ, saying what is wrong; empty where there is no more to
        say than the two values."""
        del case
        return ""

    def resumptions(self, engine: Any, operation: Any, id: str) -> Sequence[Resumption]:
        """Boundaries at which each group alone could resume a request, for dialects without an `explain` of their own.

        Args:
          engine: a built-in engine that has performed everything before an operation.
          operation: the operation, which may be the one that the request comes with.
          id: the request.

        Raises:
          LookupError: there is no such request.
          UnsupportedConfigError: the dialect does not give them.
        """
        raise self.unsupported("explanations")

    def snapshot(self, header: Any, state: Any) -> Snapshot:
        """Blocks at one moment, of what an engine answered to `state`.

        Raises:
          UnsupportedConfigError: the dialect does not give them.
        """
        raise self.unsupported("states that can be drawn")

    @property
    def coverage(self) -> Mapping[str, str]:
        """Rules that logs may exercise, with what it means that one did."""
        return MappingProxyType({})

    def exercised(self, log: Log) -> dict[str, int]:
        """Number of times that a log exercised each rule of `coverage`; those that it did not are left out."""
        return {}

    @property
    def vectors(self) -> Mapping[str, tuple[str, Callable[[], Iterator[dict[str, Any]]]]]:
        """Families of conformance vectors that follow from its rules: what each is about, and its cases."""
        return MappingProxyType({})

    def warnings(self, log: Log) -> Sequence[str]:
        """Sentences on what the cache that a log tells of is about to run into, whether the log agrees or not."""
        return ()

    # Live engines

    def ended(self, log: Log) -> str:
        """Reason why a log ends before the cache did, as its last operation says it; "" where it does not."""
        del log
        return ""

    attached_package: str = ""
    """The package whose live caches can be observed; empty where none can."""

    def attach(self, target: Any, session: Session) -> Observed:
        """Observes one live cache of its engine from now on.

        Raises:
          UnsupportedConfigError: the dialect observes no live caches.
          HKVError: this one cannot be observed.
        """
        raise self.unsupported("live caches that can be observed")

    def attach_all(self, session: Session) -> Callable[[], None]:
        """Observes every cache of its engine that this process makes; calling what it returns ends that.

        Raises:
          UnsupportedConfigError: the dialect observes no live caches.
        """
        raise self.unsupported("live caches that can be observed")

    # Replay and commands

    def plan_command(self) -> PlanCommand:
        """The dialect's part of `hkv plan`.

        Raises:
          UnsupportedConfigError: the dialect plans no memory.
        """
        raise self.unsupported("memory plans")

    def explore_command(self) -> ExploreCommand | None:
        """The dialect's part of `hkv explore`; None where `next_operations` and `canonical` of its engine say it."""
        return None

    def next_operations(self, engine: Any, space: Space) -> Iterator[Any]:
        """The operations that a built-in engine may be asked next, within the traffic that a small cache may see.

        Raises:
          UnsupportedConfigError: the dialect's caches are not explored.
        """
        raise self.unsupported("an explorer")

    def canonical(self, engine: Any) -> Hashable:
        """State of a built-in engine, equal for two that differ in nothing that a rule can read; clocks count as ranks.

        Raises:
          UnsupportedConfigError: the dialect's caches are not explored.
        """
        raise self.unsupported("an explorer")

    def refuses(self, answer: Any) -> bool:
        """True if an answer refuses blocks; an exploration counts them."""
        del answer
        return False

    def replay_command(self) -> Any:
        """The dialect's part of `hkv replay`, a `hkv.replay.command.ReplayCommand`.

        Raises:
          UnsupportedConfigError: the dialect replays no traces.
        """
        raise self.unsupported("replays of request traces")

    def engine(self, name: str) -> Callable[[Any], Any] | None:
        """The factory of a built-in engine; None where the dialect has none of that name."""
        place = self.engines.get(name)
        if place is None:
            return None
        module, _, attribute = place.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def unsupported(self, what: str) -> UnsupportedConfigError:
        """The error that refuses what the dialect has not."""
        return UnsupportedConfigError("dialect", self.names[0], f"a dialect with {what}")
