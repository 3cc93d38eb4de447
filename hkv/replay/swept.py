"""A whole sweep: all points, bounds where they are wanted, and what follows for each line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hkv.cluster import in_cluster
from hkv.replay import bounds, sweep
from hkv.replay import points as point_work
from hkv.replay.points import Point
from hkv.replay.results_file import ResultsFile
from hkv.replay.sweep import Row
from hkv.replay.traces.interned import InternedTrace


def with_room(points: Sequence[Point], trace: InternedTrace) -> list[Point]:
    """The points, those that differ in size alone with room for the largest, so that they share a program.

    Their prefixes are interned on the way, before processes get the trace.
    """
    most: dict[str, int] = {}
    for point in points:
        studied, line = point.studied(), sweep.line_of(point.labels)
        most[line] = max(most.get(line, 0), studied.cache.blocks + 1)
        trace.keys(studied.cache.key_tokens, studied.schedule.max_model_len)
        trace.shared(studied.schedule.max_model_len)
    return [dataclasses.replace(point, room=most[sweep.line_of(point.labels)]) for point in points]


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
    infinite: dict[str, Row] = bounds.without_evictions(points, rows)
    left = {line: point for line, point in bounds.infinite_points(points, rows).items() if line not in infinite}
    infinite |= dict(zip(left, _rows(list(left.values()), trace, jobs, ray, file, lambda: None), strict=True))
    return bounds.with_optimal(points, rows, trace), infinite


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
        first.setdefault(sweep.line_of(point.labels), point)
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
