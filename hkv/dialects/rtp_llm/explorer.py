"""State space to explore: a small configuration, the requests and their lengths, and the operations they may see."""

from __future__ import annotations

import dataclasses
import io
import itertools
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import numpy as np

from hkv.contract.explore_command import MOST, Report
from hkv.contract.invariant import Invariant, InvariantError
from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.invariants.moment import RtpWatch
from hkv.dialects.rtp_llm.log import structs
from hkv.dialects.rtp_llm.log.configuration import to_rtp_header
from hkv.dialects.rtp_llm.log.structs import RtpAnswer, RtpHeader, RtpOp
from hkv.errors import ConfigError, HKVError
from hkv.model.group_policy import GroupPolicy
from hkv.model.topology import Topology

TOKENS = (0, 1)
"""The different tokens that there are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RtpSpace:
    """All that can happen to a small cache. Lengths are in tokens.

    Attributes:
      config: the cache.
      requests: requests at the same time, of one sequence each.
      prompt: longest prompt; every string of that many tokens or fewer arrives.
      max_model_len: longest request.

    Raises:
      ConfigError: something is too large.
    """

    config: RtpConfig
    requests: int = 2
    prompt: int = 2
    max_model_len: int = 2

    def __post_init__(self) -> None:
        sizes = {"requests": self.requests, "max_model_len": self.max_model_len}
        pools = [("num_blocks", count) for count in self.config.num_blocks]
        for name, value in (*pools, *sizes.items()):
            if type(value) is not int or not 1 <= value <= MOST[name]:
                raise ConfigError(name, value, f"1 to {MOST[name]}, so that there is an end")
        if type(self.prompt) is not int or not 1 <= self.prompt <= self.max_model_len:
            raise ConfigError("prompt", self.prompt, f"1 to max_model_len {self.max_model_len} tokens")

    def operations(
        self, lengths: dict[str, int], running: frozenset[str], grown: Set[str], *, cached: bool
    ) -> Iterator[RtpOp]:
        """The operations that may come next; a free name is a new request's, so that names recur.

        Args:
          lengths: tokens of each request that arrived and was not dropped.
          running: those of them that have blocks.
          grown: those whose new tokens no `malloc` has seen; their keys are old, and they are not entered.
          cached: whether anything is.
        """
        names = (f"r{number}" for number in range(1, self.requests + 1))
        free = next((name for name in names if name not in lengths), None)
        if free is not None:
            for length in range(1, self.prompt + 1):
                for tokens in itertools.product(TOKENS, repeat=length):
                    yield structs.RequestOp(id=free, tokens=list(tokens))
        for id, length in lengths.items():
            yield structs.MallocOp(id=id)
            if id not in running:
                yield structs.MallocOp(id=id, device_cache=False)
                yield structs.DropOp(id=id)
                continue
            if length < self.max_model_len:
                yield from (structs.AppendOp(id=id, tokens=[[token]]) for token in TOKENS)
            if id not in grown:
                yield structs.InsertOp(id=id)
            yield structs.FreeOp(id=id)
        if cached:
            yield structs.EvictOp(least=1)


# A cache under watch at one point of an exploration: copies of it, and its name.

CONSTANT = (RtpConfig, Topology, GroupPolicy, Invariant)
"""Objects that no operation changes: copies share them, and names leave them out."""

NAMELESS = frozenset({"mapper", "kinds", "kind", "pool", "_evictable", "version", "evictions", "_clock", "access"})
"""Attributes that say nothing of what comes next: rules, second references, counters. Names have the order of use."""


class World:
    """The reference and all that its watch remembers.

    Args:
      space: the cache and its operations.
    """

    def __init__(self, space: RtpSpace) -> None:
        header = to_rtp_header(space.config, "core")
        self._engine = RtpNumpyEngine(header)
        self._watch = RtpWatch(self._engine, header)
        self._grown: set[str] = set()

    @property
    def evictions(self) -> int:
        """Blocks that were evicted so far."""
        return self._engine.evictions

    def perform(self, operation: RtpOp) -> RtpAnswer:
        """Performs one operation and asks every invariant.

        Raises:
          InvariantError: one does not hold after it.
          Exception: whatever the engine raises.
        """
        if isinstance(operation, structs.AppendOp):
            self._grown.add(operation.id)
        elif isinstance(operation, structs.MallocOp | structs.FreeOp):
            self._grown.discard(operation.id)
        return self._watch.perform(operation)

    def operations(self, space: RtpSpace) -> Iterator[RtpOp]:
        """The operations that may come next."""
        lengths = {id: len(record.tokens[0]) for id, record in sorted(self._watch.ledger.requests.items())}
        state = self._watch.state
        return space.operations(lengths, frozenset(state.lists), self._grown, cached=bool(state.cached))

    def name(self) -> tuple[Any, ...]:
        """All that a rule or an invariant can read; requests are in an order of their own, whatever they are called.

        Blocks have their numbers, as the smallest free one is handed out first. Of what keys were entered behind, only
        that of cached ones is read.
        """
        manager, ledger = self._engine.manager, self._watch.ledger
        seen: dict[int, Any] = {}
        requests = [
            (_named(request, seen), _named(ledger.requests.get(id), seen), id in self._grown)
            for id, request in manager.requests.items()
        ]
        cached = manager.allocator.cache.items
        parents = tuple(sorted((key, str(parent)) for key, parent in ledger.parents.items() if key in cached))
        kept = [_named(each, seen) for each in (ledger.held, ledger.exported, ledger.resident, ledger.unsure)]
        return (*sorted(requests, key=repr), _named(manager.allocator, seen), parents, *kept)


class Copies:
    """Worlds as bytes, but for what none of them changes."""

    def __init__(self) -> None:
        self._constants: dict[int, Any] = {}

    def save(self, world: World) -> bytes:
        """A world as bytes."""
        constants = self._constants

        class Saver(pickle.Pickler):
            def persistent_id(self, obj: Any) -> int | None:
                if not isinstance(obj, CONSTANT):
                    return None
                constants[id(obj)] = obj
                return id(obj)

        buffer = io.BytesIO()
        Saver(buffer, pickle.HIGHEST_PROTOCOL).dump(world)
        return buffer.getvalue()

    def load(self, saved: bytes) -> World:
        """A world of its own from bytes."""
        constants = self._constants

        class Loader(pickle.Unpickler):
            def persistent_load(self, pid: int) -> Any:
                return constants[pid]

        return Loader(io.BytesIO(saved)).load()


def _named(value: Any, seen: dict[int, Any]) -> Any:
    """A value as tuples that are equal if and only if the values are; attributes of objects but for `NAMELESS`."""
    if value is None or isinstance(value, int | str | bool):
        return value
    if id(value) not in seen:
        seen[id(value)] = (value, _new_name(value, seen))  # the value too, so that no other one gets its id
    return seen[id(value)][1]


def _new_name(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, CONSTANT):
        return None
    if isinstance(value, np.ndarray):
        return tuple(value.tolist())
    if isinstance(value, Counter):
        return tuple(sorted((tuple(sorted(key)), count) for key, count in value.items() if count))
    if isinstance(value, set | frozenset):
        return tuple(sorted(_named(each, seen) for each in value))
    if isinstance(value, Mapping):
        return tuple((_named(key, seen), _named(each, seen)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(_named(each, seen) for each in value)
    fields = dict(vars(value))
    if "_dependencies" in fields:
        fields["_dependencies"] = value.dependencies  # computed when they are first asked for
    if "nodes" in fields:
        fields["nodes"] = dict(sorted(value.nodes.items(), key=lambda named: named[1].access))
    return tuple(_named(each, seen) for name, each in fields.items() if name not in NAMELESS)


# Breadth-first search over the states of a space: each is expanded once, and judged on every way to it.

TOTALITY = "totality"
"""Invariant that is broken where a legal operation is not performed: the engine raises an error."""


@dataclasses.dataclass(frozen=True)
class RtpCounterexample:
    """The shortest way to a broken invariant: no shorter sequence of operations breaks any.

    Attributes:
      invariants: the one that the last operation breaks.
      header: the configuration.
      operations: the operations.
    """

    invariants: tuple[str, ...]
    header: RtpHeader
    operations: tuple[RtpOp, ...]

    def with_answers(self) -> tuple[tuple[RtpOp, ...], tuple[RtpAnswer, ...]]:
        """The operations and a `state` after them, with the reference's answers; they end before one that it fails."""
        engine, performed, answers = RtpNumpyEngine(self.header), [], []
        for operation in self.operations:
            try:
                answers.append(engine.perform(operation))
            except HKVError:
                break
            performed.append(operation)
        last = structs.StateOp()
        return (*performed, last), (*answers, engine.perform(last))


class RtpExplorer:
    """One search.

    Args:
      space: the cache and its operations.
      limit_states: most distinct states; None for no limit.
      seconds: time after which no further state is expanded; None for no limit.

    Attributes:
      report: result so far.
    """

    def __init__(self, space: RtpSpace, *, limit_states: int | None = None, seconds: float | None = None) -> None:
        self._space, self._limit, self._allowed = space, limit_states, seconds
        self._copies = Copies()
        self._ways: list[tuple[int, RtpOp | None]] = [(-1, None)]
        self._began = 0.0
        self.report = Report()

    def run(self, progress: Callable[[Report, int, float], None] = lambda report, depth, share: None) -> Report:
        """Performs every operation in every state that can be reached, until one breaks an invariant.

        Args:
          progress: called after each state with the report, the depth, and how much of that level is done, 0 to 1.
        """
        self._began = time.perf_counter()
        root = World(self._space)
        visited, level, depth = {root.name()}, [(0, self._copies.save(root))], 0
        while level:
            depth += 1
            deeper: list[tuple[int, bytes]] = []
            for place, (state, saved) in enumerate(level):
                if self._ended() or not self._expand(state, saved, visited, deeper):
                    return self.report
                self.report.depth = depth if deeper else self.report.depth
                progress(self.report, depth, (place + 1) / len(level))
            level = deeper
        self.report.exhausted = True
        return self.report

    def way(self, state: int) -> tuple[RtpOp, ...]:
        """The operations of a shortest way to a state; they are numbered as they were found, the empty cache 0."""
        operations: list[RtpOp] = []
        while state > 0:
            state, operation = self._ways[state]
            assert operation is not None
            operations.append(operation)
        return tuple(reversed(operations))

    def _ended(self) -> bool:
        self.report.seconds = time.perf_counter() - self._began
        late = self._allowed is not None and self.report.seconds >= self._allowed
        return late or (self._limit is not None and self.report.states >= self._limit)

    def _expand(self, state: int, saved: bytes, visited: set[tuple[Any, ...]], deeper: list[tuple[int, bytes]]) -> bool:
        """Performs every operation in a state; False if an invariant is broken."""
        for operation in list(self._copies.load(saved).operations(self._space)):
            world = self._copies.load(saved)
            evictions = world.evictions
            try:
                answer = world.perform(operation)
            except InvariantError as error:
                return self._fail(error.name, state, operation)
            except Exception:
                return self._fail(TOTALITY, state, operation)
            self._count(operation, answer, world.evictions > evictions)
            name = world.name()
            if name not in visited:
                visited.add(name)
                deeper.append((self.report.states, self._copies.save(world)))
                self._ways.append((state, operation))
                self.report.states += 1
        return True

    def _count(self, operation: RtpOp, answer: RtpAnswer, evicts: bool) -> None:
        report, name = self.report, type(operation).__struct_config__.tag
        report.transitions += 1
        report.evictions += evicts
        report.refusals += isinstance(answer, structs.Malloc) and answer.verdict != "granted"
        report.by_operation[str(name)] = report.by_operation.get(str(name), 0) + 1

    def _fail(self, invariant: str, state: int, operation: RtpOp) -> bool:
        header = to_rtp_header(self._space.config, "core")
        self.report.counterexample = RtpCounterexample((invariant,), header, (*self.way(state), operation))
        self.report.seconds = time.perf_counter() - self._began
        return False
