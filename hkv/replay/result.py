"""A finished replay as columns and totals: what the tables show, `--json` holds, and a library call returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hkv.columns import Columns
from hkv.replay import summary
from hkv.replay.attribution import as_plain
from hkv.replay.run import Outcome
from hkv.replay.schedule import RequestRecord
from hkv.replay.summary import Ceiling, advice
from hkv.version import __version__


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """Result of a replay. Lengths are in tokens, times in steps.

    Attributes:
      engine: name of the engine.
      totals: numbers over the whole replay, by name; None where the engine does not count.
      groups: one entry a group: `group`, `layers` (how many), `eagle`, and, where the engine tells, the number of
        requests by what the group lacked beyond their hits (`hkv.replay.attribution.Missed.lacking`).
      requests: one entry a request, in the trace's order: the fields of `hkv.replay.schedule.RequestRecord` but for
        what groups lacked, its prompt tokens by the cause for which they were no hits
        (`hkv.replay.attribution.CAUSES`), and `evicted_steps_before` and `evicted_for` (who got the block that was
        lacking): -1 for none.
      steps: one entry a step with work: the fields of `hkv.replay.schedule.StepRecords`.
      occupancy: one entry a sample, at the ends of at most 256 steps: `step`, and of group 0 `held_0`, `cached_0` and
        `evictable_0`, its blocks that requests hold, that are cached, and that are cached and not held; and so on.
        Nothing where the dialect does not tell.
    """

    engine: str
    totals: Mapping[str, Any]
    groups: Columns
    requests: Columns
    steps: Columns
    occupancy: Columns


def result_of(outcome: Outcome, engine: str) -> ReplayResult:
    """The result of a replay by the engine of that name."""
    requests = [outcome.recorder.requests[index] for index in sorted(outcome.recorder.requests)]
    fields = [field.name for field in dataclasses.fields(RequestRecord) if field.name != "lacking"]
    groups = summary.groups(outcome)
    counted = outcome.cache.reasons if groups and groups[0]["reasons"] is not None else ()
    columns: Columns = {} if outcome.trace is None else outcome.missed.requests
    return ReplayResult(
        engine,
        summary.totals(outcome),
        {
            "group": np.array([group["group"] for group in groups], str),
            "layers": np.array([len(group["layers"]) for group in groups], np.int64),
            "eagle": np.array([group["eagle"] for group in groups], bool),
            **{reason: np.array([group["reasons"][reason] for group in groups], np.int64) for reason in counted},
        },
        {
            **columns,
            **{
                name: np.array([getattr(request, name) for request in requests], str if name == "outcome" else np.int64)
                for name in fields
            },
        },
        {name: np.array(values, np.int64) for name, values in dataclasses.asdict(outcome.recorder.steps).items()},
        {} if outcome.occupancy is None else outcome.occupancy.columns(),
    )


def document(
    outcome: Outcome, engine: str, options: Mapping[str, Any], ceilings: Sequence[Ceiling] = ()
) -> dict[str, Any]:
    """Everything, for `--json`. Requests and steps are columns: name to one value each."""
    result = result_of(outcome, engine)
    return {
        "hkv": __version__,
        "options": dict(options),
        "totals": result.totals,
        "groups": summary.groups(outcome),
        "monitored": outcome.monitored(),
        "missed": None if outcome.trace is None else as_plain(outcome.missed),
        "ceilings": [dataclasses.asdict(each) for each in ceilings],
        "advice": [] if outcome.trace is None else advice(outcome, ceilings),
        "requests": {name: column.tolist() for name, column in result.requests.items()},
        "steps": {name: column.tolist() for name, column in result.steps.items()},
        "occupancy": {name: column.tolist() for name, column in result.occupancy.items()},
    }
