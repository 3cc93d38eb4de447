"""Two things to hold a replay's hits against: a pool that evicts nothing, and the best that evictions could do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from hkv.replay.occupancy import Reuse, reuse
from hkv.replay.optimal import optimal_hits
from hkv.replay.points import Point
from hkv.replay.run import warmup_requests
from hkv.replay.sweep import OPTIMAL, Row, line_of, size_of
from hkv.replay.traces.interned import InternedTrace


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


def infinite_points(points: Sequence[Point], rows: Sequence[Row]) -> dict[str, Point]:
    """Of each line, its point with a pool that evicts nothing; lines that reuse nothing have none."""
    largest = _largest(points, rows)
    return {
        line: dataclasses.replace(point, infinite=True, room=0)
        for line, (point, _) in largest.items()
        if point.studied().cache.reuses
    }


def without_evictions(points: Sequence[Point], rows: Sequence[Row]) -> dict[str, Row]:
    """Of each line whose largest pool evicted nothing, that row: no larger one finds anything else."""
    return {line: row for line, (_, row) in _largest(points, rows).items() if row["evictions"] == 0}


def _largest(points: Sequence[Point], rows: Sequence[Row]) -> Mapping[str, tuple[Point, Row]]:
    found: dict[str, tuple[Point, Row]] = {}
    for point, row in sorted(zip(points, rows, strict=True), key=lambda pair: size_of(pair[0].labels)):
        found[line_of(point.labels)] = point, row
    return found
