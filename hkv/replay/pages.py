"""Replays as data of a page (`hkv.page`), and as a trace that Perfetto opens.

A page gets whole columns and sums them itself, so that a span of time can be looked into; a trace has a track for each
request that runs next to others, counters of groups and of the pool, and the scheduler's steps.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hkv.replay.attribution import CAUSES
from hkv.replay.compare import CompareResult, Side
from hkv.replay.observed import OccupancyKind
from hkv.replay.result import Ceiling, ReplayResult, advice, groups, result_of
from hkv.replay.run import Outcome
from hkv.replay.sweep import BLOCKS, MEMORY, OPTIMAL, TIER, optimal_rate, refused, size_of


def replay_data(
    outcome: Outcome, engine: str, name: str, title: str, step_ms: int, ceilings: Sequence[Ceiling] = ()
) -> dict[str, Any]:
    """Data of a page of one replay over time.

    Args:
      outcome: the replay of a trace, its occupancy sampled.
      engine: name of the engine.
      name: the cache and the engine, in words.
      title: title of the page.
      step_ms: milliseconds of a step.
      ceilings: replays with something changed, which the advice speaks of.
    """
    result = result_of(outcome, engine)
    causes = [cause for cause in CAUSES if result.requests[cause].any()]
    requests = ("index", "prompt", "admitted", "hit", "evicted_steps_before", "evicted_for", *causes)
    return {
        "kind": "replay",
        "title": title,
        "name": name,
        "steps": outcome.steps,
        "step_ms": step_ms,
        # Not how long it took: the same replay gives the same page.
        "totals": {name: value for name, value in result.totals.items() if name != "seconds"},
        "groups": list(outcome.cache.group_names),
        "causes": causes,
        "requests": {column: result.requests[column] for column in requests},
        "time": dict(result.steps),
        "occupancy": dict(result.occupancy),
        "evicted": [dataclasses.asdict(each) for each in outcome.missed.evicted],
        "advice": advice(outcome, ceilings),
    }


def comparison_data(result: CompareResult, sides: Sequence[Side], title: str) -> dict[str, Any]:
    """Data of a page of replays side by side, request by request."""
    causes = [cause for cause in CAUSES if any(each.requests[cause].any() for _, each in sides)]
    return {
        "kind": "compare",
        "title": title,
        "names": list(result.names),
        "causes": causes,
        "requests": {"prompt": result.requests["prompt"]},
        "hits": [result.requests[name] for name in result.names],
        "by_cause": [{cause: each.requests[cause] for cause in causes} for _, each in sides],
        "totals": {name: column.tolist() for name, column in result.totals.items() if name != "replay"},
    }


def sweep_data(found: Sequence[Mapping[str, Any]], said: Sequence[Sequence[str]], title: str) -> dict[str, Any]:
    """Data of a page of hit rates against sizes, with the bounds that were found and what follows, a line each.

    Args:
      found: as `hkv.replay.swept.answers` gives it, each with `resolved`, the cache in words.
      said: sentences on each line.
      title: title of the page.
    """
    size = found[0]["size"]
    lines = [
        _line(each, sentences, 2**30 if "memory" in size else 1) for each, sentences in zip(found, said, strict=True)
    ]
    return {"kind": "sweep", "title": title, "size": "GiB" if "memory" in size else size, "lines": lines}


def _line(answer: Mapping[str, Any], sentences: Sequence[str], unit: int) -> dict[str, Any]:
    points = [row for row in answer["points"] if size_of(row["options"])]  # no second tier has no place on the axis
    bounded, infinite = OPTIMAL in answer["points"][0], answer["infinite"]
    return {
        "name": answer["line"],
        "resolved": answer["resolved"],
        "sizes": [size_of(row["options"]) / unit for row in points],
        "rates": [row["hit_rate"] for row in points],
        "optimal": [optimal_rate(row) for row in points] if bounded else None,
        "infinite": None if infinite is None else infinite["hit_rate"],
        "evictions": [-1 if row["evictions"] is None else row["evictions"] for row in points],
        "refused": [refused(row) for row in points],
        "notes": [
            next(f"{name} {row['options'][name]}" for name in (MEMORY, BLOCKS, TIER) if name in row["options"])
            for row in points
        ],
        "commands": [
            shlex.join(word for option, value in row["options"].items() for word in (option, value)) for row in points
        ],
        "said": list(sentences),
    }


# A trace in the JSON form of Chrome's trace events, which Perfetto reads. Times are in microseconds. Perfetto's
# importer takes the unit from the beginning of the file, and names a thread by its number alone, whatever process it is
# of; a process has a thread of its own number. So the tracks of requests are numbered from above the processes.

REQUESTS, GROUPS, POOL, STEPS = 1, 2, 3, 4
"""Numbers of the processes that its tracks belong to."""


def perfetto(outcome: Outcome, engine: str, step_ms: int) -> bytes:
    """A trace of one replay: requests waiting and running, blocks by group, the pool, and the steps."""
    result = result_of(outcome, engine)
    names = {REQUESTS: "requests", GROUPS: "groups", POOL: "pool", STEPS: "scheduler steps"}
    events = [*_of_requests(result, step_ms * 1000), *_of_steps(result, step_ms * 1000)]
    tracks = sorted({(each["pid"], each["tid"]) for each in events if each["ph"] == "X"})
    said = {tid: "steps" if pid == STEPS else f"row {tid - STEPS}" for pid, tid in tracks}
    events += _of_groups(result, [group["group"] for group in groups(outcome)], step_ms * 1000)
    named = [_named("process", pid, pid, name) for pid, name in names.items()]
    named += [_named("thread", pid, tid, said[tid]) for pid, tid in tracks]
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": named + events})


def _of_requests(result: ReplayResult, unit: int) -> Iterator[dict[str, Any]]:
    """A slice for the wait of each request and one for its run, on tracks that are used again once they are free."""
    columns = {name: column.tolist() for name, column in result.requests.items()}
    free: list[int] = []
    for row in sorted(range(len(columns["index"])), key=lambda row: columns["arrived"][row]):
        arrived, admitted, ended = (columns[name][row] for name in ("arrived", "admitted", "ended"))
        if arrived < 0 or ended < 0:
            continue
        track = next((number for number, until in enumerate(free) if until <= arrived), len(free))
        free[track : track + 1] = [ended + 1]
        told = {name: columns[name][row] for name in ("prompt", "hit", "output", "preemptions", "outcome")}
        told["misses"] = {cause: columns[cause][row] for cause in CAUSES if cause in columns and columns[cause][row]}
        name, start = f"request {columns['index'][row]}", arrived
        if admitted > arrived or admitted < 0:
            start = ended if admitted < 0 else admitted
            yield _slice(REQUESTS, STEPS + 1 + track, f"{name} waits", arrived * unit, (start - arrived) * unit, {})
        if admitted >= 0:
            yield _slice(REQUESTS, STEPS + 1 + track, name, start * unit, max(ended + 1 - start, 1) * unit, told)


def _of_steps(result: ReplayResult, unit: int) -> Iterator[dict[str, Any]]:
    columns = {name: column.tolist() for name, column in result.steps.items()}
    for row, step in enumerate(columns["step"]):
        told = {name: column[row] for name, column in columns.items() if name != "step" and column[row]}
        yield _slice(STEPS, STEPS, f"step {step}", step * unit, unit, told)
        yield _counter(POOL, "blocks", step * unit, {"in use": columns["in_use"][row]})
        yield _counter(POOL, "requests", step * unit, {name: columns[name][row] for name in ("running", "waiting")})


def _of_groups(result: ReplayResult, names: Sequence[str], unit: int) -> Iterator[dict[str, Any]]:
    columns = {name: column.tolist() for name, column in result.occupancy.items()}
    for row, step in enumerate(columns.get("step", ())):
        for group, name in enumerate(names):
            told = {kind.name.lower(): columns[f"{kind.name.lower()}_{group}"][row] for kind in OccupancyKind}
            yield _counter(GROUPS, f"{group} {name}", (step + 1) * unit, told)


def _named(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": track, "name": f"{kind}_name", "args": {"name": name}}


def _slice(process: int, track: int, name: str, start: int, length: int, told: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "pid": process, "tid": track, "name": name, "ts": start, "dur": length, "args": dict(told)}


def _counter(process: int, name: str, at: int, told: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "C", "pid": process, "name": name, "ts": at, "args": dict(told)}
