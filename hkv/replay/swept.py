"""Sweeps: replays of one trace that differ in their options, bounds of them, results kept in a file, and answers."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import fcntl
import functools
import hashlib
import multiprocessing
import multiprocessing.process
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from hkv.cluster import in_cluster
from hkv.contract import registry
from hkv.errors import ConfigError, FileError
from hkv.files import decode_json
from hkv.machine import native_loops
from hkv.replay import run, sweep
from hkv.replay.command import StudiedCache
from hkv.replay.optimal import Reuse, optimal_hits, reuse
from hkv.replay.result import ReplayResult, result_of, totals
from hkv.replay.run import COMPILED, ReplayedCache, Timing, default_engine, replay, warmup_requests
from hkv.replay.sweep import COLUMNS, OPTIMAL, TIER, TIERED, Row, line_of, size_name, size_of, tier_size
from hkv.replay.traces.interned import InternedTrace
from hkv.version import __version__

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
    found = totals(outcome)
    tiered = TIERED if "tier_stored" in found else ()
    return {"options": dict(point.labels), **{name: found[name] for name in (*COLUMNS, *tiered)}}


def _infinite(studied: StudiedCache, trace: InternedTrace) -> ReplayedCache:
    changed = run.without_evictions(trace, studied.cache, studied.schedule)
    if changed is None:
        raise ConfigError("bounds", studied.name, "a dialect that can make a pool so large, and prefix caching")
    return changed


def with_room(points: Sequence[Point], trace: InternedTrace) -> list[Point]:
    """The points, those that differ in size alone with room for the largest, so that they share a program.

    Their prefixes are interned on the way, before processes get the trace.
    """
    most: dict[str, int] = {}
    for point in points:
        studied, line = point.studied(), line_of(point.labels)
        most[line] = max(most.get(line, 0), studied.cache.blocks + 1)
        trace.keys(studied.cache.key_tokens, studied.schedule.max_model_len)
        trace.shared(studied.schedule.max_model_len)
    return [dataclasses.replace(point, room=most[line_of(point.labels)]) for point in points]


def swept(
    points: Sequence[Point],
    trace: InternedTrace,
    *,
    jobs: int,
    ray: str | None = None,
    with_bounds: bool = False,
    results: str | None = None,
    progress: Callable[[], None] = lambda: None,
) -> tuple[list[Row], dict[str, Row]]:
    """Replays all points.

    Returns:
      The rows in the order of the points; and of each line the row of a pool that evicts nothing, if that is wanted.
    """
    file = ResultsFile(results, trace)
    points = with_room(points, trace)
    rows: list[Row] = _rows(points, trace, jobs, ray, file, progress)
    if any("tier_stored" in row for row in rows):  # one without a second tier has nothing of it in it
        rows = [{**dict.fromkeys(TIERED, 0), **row} for row in rows]
    if not with_bounds:
        return rows, {}
    infinite = without_evictions(points, rows, lambda left: _rows(left, trace, jobs, ray, file, lambda: None))
    return with_optimal(points, rows, trace), infinite


def _rows(
    points: Sequence[Point],
    trace: InternedTrace,
    jobs: int,
    ray: str | None,
    file: ResultsFile,
    progress: Callable[[], None],
) -> list[Row]:
    rows = {place: row for place, point in enumerate(points) if (row := file.row(point)) is not None}
    for _ in rows:
        progress()
    left = [place for place in range(len(points)) if place not in rows]
    asked = [points[place] for place in left]
    if ray is None or not asked:
        found = at_once(measured, asked, trace, jobs)
    else:
        found = in_cluster(measured, asked, trace, ray)
    for number, row in found:
        rows[left[number]] = row
        file.add(points[left[number]], row)
        progress()
    return [rows[place] for place in range(len(points))]


def described(points: Sequence[Point]) -> dict[str, dict[str, str]]:
    """Of each line what its sizes count, and all that its options came to be but for the size of the pool, in the
    engine's own words; over sizes of a second tier with the largest."""
    first: dict[str, Point] = {}
    for point in sorted(points, key=lambda point: -tier_size(point.labels.get(TIER, "0"))):
        first.setdefault(line_of(point.labels), point)
    return {
        line: {
            "size": size_name(point.labels, point.options["model"] is not None),
            "resolved": point.studied().resolved,
        }
        for line, point in first.items()
    }


def warned(points: Sequence[Point], trace: InternedTrace) -> dict[str, str]:
    """Sentences on what the points are about to run into, each with the options of the first of which it holds."""
    found: dict[str, str] = {}
    for point in points:
        for text in point.studied().warnings(trace):
            found.setdefault(text, " ".join(f"{name} {value}" for name, value in point.labels.items()))
    return found


def answers(
    rows: Sequence[Row], infinite: dict[str, Row] | None = None, targets: Sequence[float] = ()
) -> list[dict[str, Any]]:
    """Of each line its points, its knee, its highest rate, and the smallest sizes that reach the targets."""
    found = []
    for name, line in sweep.lines(rows).items():
        bend, best = sweep.knee(line), max(line, key=lambda row: row["hit_rate"])
        reached = {f"{target:g}%": sweep.first_reaching(line, target / 100) for target in targets}
        each = {"line": name, "points": line, "knee": bend, "highest": best, "reached": reached}
        found.append({**each, "infinite": (infinite or {}).get(name)})
    return found


def with_optimal(points: Sequence[Point], rows: Sequence[Row], trace: InternedTrace) -> list[Row]:
    """The rows of points with hit tokens that no choice of evictions exceeds in a pool of that size."""
    found: dict[tuple[object, int], Reuse] = {}
    more = []
    for point, row in zip(points, rows, strict=True):
        studied = point.studied()
        cache, asked = studied.cache, (studied.cache.hit_units, studied.schedule.max_model_len)
        if not cache.reuses or not cache.hit_units.shared:
            more.append({**row, OPTIMAL: 0})
            continue
        if asked not in found:
            found[asked] = reuse(trace, *asked)
        hits = optimal_hits(_after(found[asked], trace, point), cache.pools, studied.schedule.lookahead)
        more.append({**row, OPTIMAL: int(hits.sum()) + cache.finer * len(hits)})
    return more


def _after(reuse: Reuse, trace: InternedTrace, point: Point) -> Reuse:
    """The reuse of which the requests after the warm-up alone have something."""
    first = warmup_requests(point.warmup, len(trace.requests))
    counts = reuse.requests >= first
    return dataclasses.replace(
        reuse, free=np.where(counts, reuse.free, 0), spans=reuse.spans[counts[reuse.spans[:, 1]]]
    )


def without_evictions(
    points: Sequence[Point], rows: Sequence[Row], replayed: Callable[[list[Point]], list[Row]]
) -> dict[str, Row]:
    """Of each line that reuses anything, what a pool that evicts nothing hits, replayed where its largest evicts."""
    pairs = sorted(zip(points, rows, strict=True), key=lambda pair: size_of(pair[0].labels))
    largest = {line_of(point.labels): (point, row) for point, row in pairs}
    found = {line: row for line, (_, row) in largest.items() if row["evictions"] == 0}
    left = {line: point for line, (point, _) in largest.items() if line not in found and point.studied().cache.reuses}
    infinite = [dataclasses.replace(point, infinite=True, room=0) for point in left.values()]
    return found | dict(zip(left, replayed(infinite) if left else [], strict=True))


NOT_ASKED = ("trace", "json_path", "plot_path", "check", "ceilings")
"""Options that say nothing about what a replay finds; the trace is known by its content."""


class ResultsFile:
    """Rows of points that were measured, by a digest of all that they depend on."""

    def __init__(self, path: str | None, trace: InternedTrace) -> None:
        self._path = path
        self._trace = hashlib.sha256(msgspec.json.encode(trace.requests)).hexdigest() if path else ""
        self._done = {} if path is None else _earlier(path)

    def row(self, point: Point) -> Row | None:
        """The row of a point that was measured before."""
        found = self._done.get(self._key(point))
        return None if found is None else {**found, "options": dict(point.labels)}

    def add(self, point: Point, row: Row) -> None:
        """Writes the row of a point that has just been measured, unless another sweep did meanwhile."""
        if self._path is None:
            return
        line = msgspec.json.encode({"key": self._key(point), **row}) + b"\n"
        with open(self._path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if line.partition(b",")[0] not in file.read():
                file.write(line)

    def _key(self, point: Point) -> str:
        asked = {name: value for name, value in point.options.items() if name not in NOT_ASKED}
        depends = (
            __version__,
            self._trace,
            sorted(asked.items()),
            point.timing,
            point.engine,
            point.infinite,
            point.warmup,
        )
        return hashlib.sha256(repr(depends).encode()).hexdigest()[:16]


def _earlier(path: str) -> dict[str, Row]:
    """Rows of an earlier run by their keys."""
    done: dict[str, Row] = {}
    if not os.path.exists(path):
        return done
    with open(path, "rb") as file:
        lines = file.read().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        row = decode_json(line, path, number, "a point", dict[str, Any])
        if "key" not in row:
            raise FileError(path, number, "key", None, "the key of a point")
        done[row.pop("key")] = row
    if lines[-1]:
        raise FileError(path, len(lines), "", lines[-1][:60].decode("utf-8", "replace"), "a whole line")
    return done


# Several points at once.


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
