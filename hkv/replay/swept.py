"""A whole sweep: all points, bounds where they are wanted, results kept in a file, and what follows for each line."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from hkv.cluster import in_cluster
from hkv.errors import FileError
from hkv.files import decode_json
from hkv.replay import points as point_work
from hkv.replay import sweep
from hkv.replay.occupancy import Reuse, reuse
from hkv.replay.optimal import optimal_hits
from hkv.replay.points import Point
from hkv.replay.run import warmup_requests
from hkv.replay.sweep import OPTIMAL, Row, line_of, size_of
from hkv.replay.traces.interned import InternedTrace
from hkv.version import __version__


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
    rows = _rows(points, trace, jobs, ray, file, progress)
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
        found = point_work.at_once(point_work.measured, asked, trace, jobs)
    else:
        found = in_cluster(point_work.measured, asked, trace, ray)
    for number, row in found:
        rows[left[number]] = row
        file.add(points[left[number]], row)
        progress()
    return [rows[place] for place in range(len(points))]


def resolved(points: Sequence[Point]) -> dict[str, str]:
    """Of each line, all that its options came to be but for the size of the pool, in the engine's own words."""
    first: dict[str, Point] = {}
    for point in points:
        first.setdefault(line_of(point.labels), point)
    return {line: point.studied().resolved for line, point in first.items()}


def answers(
    rows: Sequence[Row], infinite: dict[str, Row] | None = None, targets: Sequence[float] = ()
) -> list[dict[str, Any]]:
    """Of each line its points, its knee, its highest rate, and the smallest pools that reach the targets."""
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
        more.append({**row, OPTIMAL: int(hits.sum())})
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
        """Writes the row of a point that has just been measured."""
        if self._path is None:
            return
        with open(self._path, "ab") as file:
            file.write(msgspec.json.encode({"key": self._key(point), **row}) + b"\n")

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
