"""Breadth-first search over the worlds of a space: each is expanded once, and judged on every way to it."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from hkv.contract.explore_command import Counterexample, Report
from hkv.dialects.vllm.explorer.moves import LOOKED_UP, Fact, all_moves, to_log
from hkv.dialects.vllm.explorer.space import Space
from hkv.dialects.vllm.explorer.transition import LANES, REFUSED, Outcome, Program, names_of, start, unpack
from hkv.dialects.vllm.log.configuration import to_header
from hkv.dialects.vllm.log.structs import Operation
from hkv.dialects.vllm.rules.operations import Code

CHUNK = 4096
"""Worlds stepped in one dispatch."""


@dataclasses.dataclass
class Frontier:
    """Worlds at one distance from the empty cache that are to be expanded.

    Attributes:
      worlds: int16[n, w], packed.
      enabled: bool[n, moves].
      first: number of the first of them; the others follow.
    """

    worlds: np.ndarray
    enabled: np.ndarray
    first: int

    def __len__(self) -> int:
        return len(self.worlds)


Progress = Callable[[Report, int, float], None]
"""Called after each dispatch with the report so far, the depth, and how much of that level is done, from 0 to 1."""

Observe = Callable[[np.ndarray], None]
"""Called with the packed worlds of states that are new, int16[n, w]."""


def explore(
    space: Space,
    *,
    form: str = LANES,
    chunk: int = CHUNK,
    workers: int = 2,
    limit_states: int | None = None,
    seconds: float | None = None,
    progress: Progress = lambda report, depth, share: None,
    observe: Observe = lambda worlds: None,
    report: Report | None = None,
) -> Report:
    """Performs every operation in every state that can be reached, until one breaks an invariant.

    Args:
      space: the configuration and the operations.
      form: way in which worlds are stepped together (`hkv.dialects.vllm.explorer.transition.FORMS`).
      chunk: worlds in one dispatch.
      workers: dispatches at the same time.
      limit_states: most distinct states; None for no limit.
      seconds: time after which no further dispatch is started; None for no limit.
      progress: called after each dispatch.
      observe: called with the states found, the empty cache excepted.
      report: filled while the search goes on, so that it is known what was explored when an exception ends it.

    Returns:
      The report.
    """
    report = Report() if report is None else report
    program = Program(space, form)
    return _Exploration(program, chunk, workers, limit_states, seconds, progress, observe, report).run()


@dataclasses.dataclass
class _Exploration:
    """One exploration, with what `explore` was given."""

    program: Program
    chunk: int
    workers: int
    limit_states: int | None
    seconds: float | None
    progress: Progress
    observe: Observe
    report: Report

    def __post_init__(self) -> None:
        self._moves = all_moves(self.program.space)
        self._root = start(self.program.space)
        self._visited = Visited()
        self._parents = [np.array([-1])]
        self._taken = [np.array([-1], np.int32)]
        self._cut = False
        self._started = 0.0

    def run(self) -> Report:
        """Explores, and reports."""
        began = time.perf_counter()
        frontier = self._begin()
        self._started = time.perf_counter()
        self.report.compiling = self._started - began
        depth = 0
        while len(frontier) and self.report.counterexample is None:
            if self._ended():
                break
            depth += 1
            frontier = self._level(frontier, depth)
        self.report.seconds = time.perf_counter() - self._started
        self.report.exhausted = not len(frontier) and self.report.counterexample is None and not self._cut
        return self.report

    def _begin(self) -> Frontier:
        """The empty cache; an operation that changes nothing is performed on it, which compiles the program."""
        step = np.array([Code.STEP, 0, 0, 0], np.int32)
        worlds = np.broadcast_to(self._root, (self.chunk, len(self._root)))
        outcome = jax.device_get(self.program(worlds, np.broadcast_to(step, (self.chunk, 4))))
        self._visited.add(outcome.name[:1])
        return Frontier(self._root[None], outcome.enabled[:1], 0)

    def _ended(self) -> bool:
        late = self.seconds is not None and time.perf_counter() - self._started >= self.seconds
        self._cut = late or (self.limit_states is not None and self.report.states >= self.limit_states)
        return self._cut

    def _level(self, frontier: Frontier, depth: int) -> Frontier:
        """Performs every enabled operation in every world of a frontier, and returns the worlds that are new."""
        worlds, enabled, first, done = [], [], self.report.states, 0
        total = max(1, int(frontier.enabled.sum()))
        for world, move, outcome in self._outcomes(frontier):
            count = len(world)
            done += count
            self._count(self._moves[move], outcome, count)
            broken = np.flatnonzero(outcome.broken[:count])
            if len(broken):
                self._fail(frontier, int(world[broken[0]]), int(move[broken[0]]), int(outcome.broken[broken[0]]))
                break
            new = np.flatnonzero(self._visited.add(outcome.name[:count]))
            worlds.append(outcome.world[new])
            enabled.append(outcome.enabled[new])
            self._parents.append(frontier.first + world[new])
            self._taken.append(move[new].astype(np.int32))
            self.report.states += len(new)
            if len(new):
                self.report.depth = depth
                self.observe(outcome.world[new])
            self.report.seconds = time.perf_counter() - self._started
            self.progress(self.report, depth, done / total)
        if not worlds:
            return Frontier(frontier.worlds[:0], frontier.enabled[:0], first)
        return Frontier(np.concatenate(worlds), np.concatenate(enabled), first)

    def _outcomes(self, frontier: Frontier) -> Iterator[tuple[np.ndarray, np.ndarray, Outcome]]:
        """Outcomes of each dispatch, with the worlds of the frontier and the operations that they are of."""
        world, move = np.nonzero(frontier.enabled)
        pending: collections.deque[tuple[np.ndarray, np.ndarray, Future[Outcome]]] = collections.deque()
        pool = ThreadPoolExecutor(self.workers)
        try:
            for begin in range(0, len(world), self.chunk):
                if self._ended():
                    break
                part = slice(begin, begin + self.chunk)
                pending.append(
                    (world[part], move[part], pool.submit(self._dispatch, frontier, world[part], move[part]))
                )
                if len(pending) > self.workers:
                    yield self._done(pending.popleft())
            while pending:
                yield self._done(pending.popleft())
        finally:
            pool.shutdown(
                cancel_futures=True
            )  # an interrupt waits for the dispatches that run, not for those that wait

    def _dispatch(self, frontier: Frontier, world: np.ndarray, move: np.ndarray) -> Any:
        fill = self.chunk - len(world)
        worlds = frontier.worlds[np.pad(world, (0, fill), mode="edge")]
        moves = self._moves[np.pad(move, (0, fill), mode="edge")]
        return jax.device_get(self.program(worlds, moves))

    @staticmethod
    def _done(item: tuple[np.ndarray, np.ndarray, Future[Outcome]]) -> tuple[np.ndarray, np.ndarray, Outcome]:
        return item[0], item[1], item[2].result()

    def _count(self, moves: np.ndarray, outcome: Outcome, count: int) -> None:
        status = outcome.status[:count]
        self.report.transitions += count
        self.report.evictions += int(np.count_nonzero(outcome.evictions[:count]))
        self.report.refusals += int(np.isin(status, REFUSED).sum())
        for code, times in zip(*np.unique(moves[:, 0], return_counts=True), strict=True):
            name = Code(int(code)).name.lower()
            self.report.by_operation[name] = self.report.by_operation.get(name, 0) + int(times)

    def _fail(self, frontier: Frontier, world: int, move: int, broken: int) -> None:
        parents, taken = np.concatenate(self._parents), np.concatenate(self._taken)
        path, state = [move], frontier.first + world
        while state > 0:
            path.append(int(taken[state]))
            state = int(parents[state])
        moves = self._moves[np.array(path[::-1])]
        operations = _written(self.program, moves, self.chunk)
        header = to_header(self.program.space.config, FEATURE)
        self.report.counterexample = Counterexample(tuple(names_of(broken)), header, tuple(operations))


# A set of 128-bit names in one NumPy table with open addressing: thousands are looked up and entered at once.

FREE = -1
"""Value of `_owners` for an empty place."""


class Visited:
    """Names that were seen.

    Args:
      places: size of the table at first, a power of two; it doubles when it is half full.
    """

    def __init__(self, places: int = 1 << 16) -> None:
        self._names = np.zeros((places, 2), np.uint64)
        self._owners = np.full(places, FREE, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, names: np.ndarray) -> np.ndarray:
        """Enters names, and says which of them are new; of equal ones, the first.

        Args:
          names: uint32[n, 4].

        Returns:
          bool[n].
        """
        while 2 * (self._count + len(names)) > len(self._owners):
            self._grow()
        return self._enter(np.ascontiguousarray(names).view(np.uint64).reshape(-1, 2))

    def _enter(self, words: np.ndarray) -> np.ndarray:
        mask = np.uint64(len(self._owners) - 1)
        new = np.zeros(len(words), bool)
        left = np.arange(len(words))
        place = ((words[:, 0] ^ (words[:, 1] >> np.uint64(17))) & mask).astype(np.int64)
        while len(left):
            at = place[left]
            empty = self._owners[at] == FREE
            claims = left[empty][::-1]
            self._owners[place[claims]] = claims  # of several claims on a place, the last written is the first of them
            won = claims[self._owners[place[claims]] == claims]
            self._names[place[won]] = words[won]
            new[won] = True
            known = np.all(self._names[at] == words[left], axis=1)
            left = left[~known]
            place[left[~empty[~known]]] += 1
            place[left] &= np.int64(mask)
        self._count += int(new.sum())
        return new

    def _grow(self) -> None:
        words = self._names[self._owners != FREE]
        places = 2 * len(self._owners)
        self._names = np.zeros((places, 2), np.uint64)
        self._owners = np.full(places, FREE, np.int64)
        self._count = 0
        self._enter(words)


# A way to a broken invariant, as a log.

FEATURE = "core"
"""Feature that the logs are marked with, for statistics."""


def _written(program: Program, moves: np.ndarray, chunk: int) -> list[Operation]:
    """Operations from the empty cache on, int32[n, 4], as the log format writes them.

    Args:
      program: of the space.
      moves: the operations.
      chunk: worlds that the program takes.
    """
    space, world = program.space, start(program.space)
    names, arrived, operations = [""] * space.requests, 0, []
    hits = np.zeros(space.requests, np.int32)
    for move in moves:
        ledger = np.asarray(unpack(space, world).ledger)
        if move[0] == Code.REQUEST:
            arrived += 1
            names[move[1]] = f"r{arrived}"
        looked = move[0] == Code.ALLOCATE and ledger[move[1], Fact.FOCUS] == LOOKED_UP
        operations.append(to_log(move, ledger, int(hits[move[1]]) if looked else 0, names))
        worlds = np.broadcast_to(world, (chunk, len(world)))
        outcome = program(worlds, np.broadcast_to(move, (chunk, 4)))
        world, hits = np.asarray(outcome.world[0]), np.asarray(outcome.hits[0])
    return operations
