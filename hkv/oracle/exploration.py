"""Breadth-first search through every state that a small cache can reach, in Python, for any dialect.

Each state is expanded once and judged on every way to it, so the first broken invariant has a shortest sequence of
operations. Two states are one where the dialect's canonical state says so (`hkv.contract.explore_command.World.name`).
A dialect with compiled rules may bring a search of its own; one without anything but an engine says which operations
may come next and what its canonical state is (`Dialect.next_operations`, `Dialect.canonical`).
"""

from __future__ import annotations

import contextlib
import io
import pickle
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from hkv.contract import registry
from hkv.contract.answer import EngineFactory, Failure
from hkv.contract.dialect import Dialect
from hkv.contract.explore_command import (
    Counterexample,
    ExploreCommand,
    Progress,
    Report,
    Search,
    Space,
    World,
    check_small,
    space_of,
)
from hkv.contract.invariant import Invariant, InvariantError
from hkv.contract.log import PooledHeader
from hkv.errors import ConfigError
from hkv.oracle.engine import attempt
from hkv.oracle.engines import REFERENCE
from hkv.spec import spec_to_log

TOTALITY = "totality"
"""Invariant that is broken where a legal operation is not performed: the engine raises an error."""


def explore_command_of(dialect: Dialect) -> ExploreCommand:
    """A dialect's part of `hkv explore`, its own or that of its engine alone."""
    own = dialect.explore_command()
    if own is not None:
        return own
    if type(dialect).next_operations is Dialect.next_operations:
        raise dialect.unsupported("an explorer")
    return PlainExploreCommand(dialect)


def search_of(command: ExploreCommand, options: dict[str, Any]) -> Search:
    """The search that a command's options ask for."""
    own = command.search(options)
    if own is not None:
        return own
    header, world = command.world(options)
    return BreadthFirst(header, world, limit_states=options["limit_states"], seconds=options["seconds"])


class PlainExploreCommand(ExploreCommand):
    """The reference engine of a dialect that has no more, under its invariants if it has some."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def world(self, options: dict[str, Any]) -> tuple[Any, World]:
        if options["watermark"]:
            raise ConfigError("--watermark", options["watermark"], f"0 under {options['dialect']}")
        space, blocks = space_of(options), options["num_blocks"]
        check_small("num_blocks", blocks)
        groups = [spec_to_log(spec) for spec in options["groups"]]
        pools = len(groups) if issubclass(self._dialect.log.header, PooledHeader) else 1
        header = self._dialect.header_of(options["dialect"], groups, (blocks,) * pools)
        return header, PlainWorld(self._dialect, header, space)


class PlainWorld:
    """An engine, under watch if its dialect has invariants."""

    def __init__(self, dialect: Dialect, header: Any, space: Space) -> None:
        factory = dialect.engine(dialect.default_recorded)
        assert factory is not None
        self._dialect, self._header, self._space, self._engine = dialect, header, space, factory(header)
        if not hasattr(self._engine, "evictions"):
            raise dialect.unsupported("an engine that counts its evictions, which an exploration tells of")
        self._watch = dialect.watch(self._engine, header) if dialect.invariants else None

    @property
    def evictions(self) -> int:
        return self._engine.evictions

    def perform(self, operation: Any) -> Any:
        if self._watch is not None:
            return self._watch.perform(operation)
        return self._dialect.perform(self._engine, operation)

    def refused(self, answer: Any) -> bool:
        return self._dialect.refuses(answer)

    def operations(self) -> Iterator[Any]:
        return self._dialect.next_operations(self._engine, self._space)

    def name(self) -> Hashable:
        return self._dialect.canonical(self._engine)

    def copies(self) -> Callable[[], World]:
        # Pickled, a state is smaller than its objects, and copied several times as fast as by `deepcopy`.
        shared = [type(self._dialect), type(self._header), Space]
        if all(invariant.start is None for invariant in self._dialect.invariants.values()):  # none remembers anything
            shared.append(Invariant)
        pickler = pickle.Pickler(buffer := io.BytesIO(), pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = dict.fromkeys(shared, _share)
        pickler.dump(self)
        held = buffer.getvalue()
        return lambda: pickle.loads(held)


_SHARED: dict[int, Any] = {}
"""Values that no operation changes, by their ids; worlds share them."""


def _share(value: Any) -> tuple[Callable[[int], Any], tuple[int]]:
    _SHARED[id(value)] = value
    return _of_id, (id(value),)


def _of_id(id: int) -> Any:
    return _SHARED[id]


def answered(found: Counterexample) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The operations of a counterexample, and a look at the state where there is one, with the reference's answers.

    A defect may have led where the reference does not follow, to a hit that it does not find; the operations then end
    before that.
    """
    dialect = registry.dialect_of(found.header.dialect)
    factory = dialect.engine(REFERENCE) or dialect.engine(dialect.default_recorded)
    assert factory is not None
    engine, look = factory(found.header), dialect.log.operations.get("state")

    def pairs(operations: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        for operation in operations:
            if isinstance(answer := attempt(dialect, engine, operation), Failure):
                return
            yield operation, answer

    done = [*pairs(found.operations), *pairs([look()] if look else ())]
    return tuple(operation for operation, _ in done), tuple(answer for _, answer in done)


class BreadthFirst(Search):
    """One search; `report` is its result so far."""

    def __init__(
        self, header: Any, world: World, *, limit_states: int | None = None, seconds: float | None = None
    ) -> None:
        self._header, self._root, self._limit, self._allowed = header, world, limit_states, seconds
        self._ways: list[tuple[int, Any]] = [(-1, None)]
        self._began = 0.0
        self.report = Report()

    def run(self, progress: Progress = lambda text, share: None) -> None:
        """Performs every operation in every state that can be reached, until one breaks an invariant."""
        self._began, report = time.perf_counter(), self.report
        visited, level, depth = {self._root.name()}, [(0, self._root.copies())], 0
        while level:
            depth += 1
            deeper: list[tuple[int, Callable[[], World]]] = []
            for place, (state, copies) in enumerate(level):
                if self._ended() or not self._expand(state, copies, visited, deeper):
                    return
                report.depth = depth if deeper else report.depth
                rate = f"{report.rate(report.states):,.0f} states/s"
                said = f"depth {depth}: {report.states:,} states, {report.transitions:,} transitions, {rate}"
                progress(said, (place + 1) / len(level))
            level = deeper
        report.exhausted = True

    def explored(self) -> contextlib.AbstractContextManager[tuple[str, EngineFactory]]:
        dialect = registry.dialect_of(self._header.dialect)
        factory = dialect.engine(dialect.default_recorded)  # of which worlds are made
        assert factory is not None
        return contextlib.nullcontext((dialect.default_recorded, factory))

    def way(self, state: int) -> tuple[Any, ...]:
        """The operations of a shortest way to a state; they are numbered as they were found, the empty cache 0."""
        operations: list[Any] = []
        while state > 0:
            state, operation = self._ways[state]
            operations.append(operation)
        return tuple(reversed(operations))

    def _ended(self) -> bool:
        self.report.seconds = time.perf_counter() - self._began
        late = self._allowed is not None and self.report.seconds >= self._allowed
        return late or (self._limit is not None and self.report.states >= self._limit)

    def _expand(
        self,
        state: int,
        copies: Callable[[], World],
        visited: set[Hashable],
        deeper: list[tuple[int, Callable[[], World]]],
    ) -> bool:
        """Performs every operation in a state; False if an invariant is broken."""
        world = copies()
        for place, operation in enumerate(list(world.operations())):
            world = copies() if place else world
            evictions = world.evictions
            try:
                answer = world.perform(operation)
            except InvariantError as error:
                return self._fail(error.name, state, operation)
            except Exception:
                return self._fail(TOTALITY, state, operation)
            self._count(operation, world.refused(answer), world.evictions > evictions)
            name = world.name()
            if name not in visited:
                visited.add(name)
                deeper.append((self.report.states, world.copies()))
                self._ways.append((state, operation))
                self.report.states += 1
        return True

    def _count(self, operation: Any, refused: bool, evicts: bool) -> None:
        report, name = self.report, str(type(operation).__struct_config__.tag)
        report.transitions += 1
        report.evictions += evicts
        report.refusals += refused
        report.by_operation[name] = report.by_operation.get(name, 0) + 1

    def _fail(self, invariant: str, state: int, operation: Any) -> bool:
        operations = (*self.way(state), operation)
        self.report.counterexample = Counterexample((invariant,), self._header, operations)
        self.report.seconds = time.perf_counter() - self._began
        return False
