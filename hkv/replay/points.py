"""Points of a sweep: replays of one trace that differ in their options, several at once."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import multiprocessing.process
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from hkv.contract import registry
from hkv.errors import ConfigError
from hkv.machine import native_loops
from hkv.replay import summary
from hkv.replay.command import StudiedCache
from hkv.replay.result import ReplayResult, result_of
from hkv.replay.run import COMPILED, ReplayedCache, Timing, default_engine, replay, without_evictions
from hkv.replay.sweep import COLUMNS, Row
from hkv.replay.traces.interned import InternedTrace

Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One replay of a sweep.

    Attributes:
      labels: the options that vary, as the command line would take them.
      options: all options, as `hkv.replay.command.ReplayCommand.studied` takes them.
      timing: conversion of time stamps to steps.
      engine: name of the engine; None for the compiled one, where it has the cache's rules, else the NumPy engine.
      room: blocks that its compiled program has room for, so that the points of a line share one.
      infinite: whether the pool is replaced by one that evicts nothing.
      warmup: requests at the beginning that do not count, as `hkv.replay.run.warmup_requests` takes them.
    """

    labels: Mapping[str, str]
    options: Mapping[str, Any]
    timing: Timing
    engine: str | None = None
    room: int = 0
    infinite: bool = False
    warmup: str = "0"

    def studied(self) -> StudiedCache:
        """The cache that it is about, without `infinite`."""
        return registry.dialect_of(self.options["dialect"]).replay_command().studied(dict(self.options))

    @property
    def compiled(self) -> bool:
        """True if the compiled engine replays it."""
        return (default_engine(self.studied().cache)[0] if self.engine is None else self.engine) == COMPILED


def replayed(point: Point, trace: InternedTrace) -> ReplayResult:
    """Replays one point, and finds out why hits ended."""
    studied = point.studied()
    engine = default_engine(studied.cache)[0] if point.engine is None else point.engine
    outcome = replay(trace, studied.cache, studied.schedule, point.timing, engine=engine, warmup=point.warmup)
    return result_of(outcome, engine)


def measured(point: Point, trace: InternedTrace) -> Row:
    """Replays one point. Nothing is found out about why hits ended."""
    studied = point.studied()
    cache = _infinite(studied, trace) if point.infinite else studied.cache
    cache.room = point.room
    engine = default_engine(cache)[0] if point.engine is None else point.engine
    outcome = replay(trace, cache, studied.schedule, point.timing, engine=engine, causes=False, warmup=point.warmup)
    totals = summary.totals(outcome)
    prompts = sum(each.input_length for each in trace.requests[outcome.warmup :])
    totals |= {"prompt_tokens": prompts, "hit_rate": totals["hit_tokens"] / prompts if prompts else 0.0}
    return {"options": dict(point.labels), **{name: totals[name] for name in COLUMNS}}


def _infinite(studied: StudiedCache, trace: InternedTrace) -> ReplayedCache:
    changed = without_evictions(trace, studied.cache, studied.schedule)
    if changed is None:
        raise ConfigError("bounds", studied.name, "a dialect that can make a pool so large, and prefix caching")
    return changed


def at_once(
    work: Callable[[Point, InternedTrace], Found], points: Sequence[Point], trace: InternedTrace, jobs: int
) -> Iterator[tuple[int, Found]]:
    """Has work done on so many points at once. Yields a point's place and what was found, as they come.

    Compiled replays run in threads, which share the trace and the program; others, in Python, in processes.
    """
    if jobs == 1 or len(points) < 2:
        for place, point in enumerate(points):
            yield place, work(point, trace)
        return
    if all(point.compiled for point in points):
        with concurrent.futures.ThreadPoolExecutor(min(jobs, len(points))) as pool:
            yield from _as_completed(pool, {pool.submit(work, each, trace): i for i, each in enumerate(points)})
        return
    spawned = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="hkv-sweep-") as folder,
        concurrent.futures.ProcessPoolExecutor(min(jobs, len(points)), spawned, _begin) as pool,
    ):
        path = os.path.join(folder, "trace")
        with open(path, "wb") as file:
            pickle.dump(trace, file, pickle.HIGHEST_PROTOCOL)
        yield from _as_completed(pool, {pool.submit(_in_process, work, each, path): i for i, each in enumerate(points)})


def _as_completed(
    pool: concurrent.futures.Executor, waiting: Mapping[concurrent.futures.Future[Found], int]
) -> Iterator[tuple[int, Found]]:
    try:
        for future in concurrent.futures.as_completed(waiting):
            yield waiting[future], future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _begin() -> None:
    """Prepares a process: it ends with the one that started it, however that ended, and leaves Ctrl-C to it."""
    native_loops.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _in_process(work: Callable[[Point, InternedTrace], Found], point: Point, path: str) -> Found:
    return work(point, _trace(path))


@functools.lru_cache(maxsize=1)
def _trace(path: str) -> InternedTrace:
    """The trace of the sweep that this process works for: read once, interned already."""
    with open(path, "rb") as file:
        return pickle.load(file)
