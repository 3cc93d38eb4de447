"""Sweeping options, and comparing replays: `hkv sweep` and `hkv compare` as functions."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hkv.columns import Columns
from hkv.errors import ConfigError
from hkv.replay import sweep as options_of_sweeps
from hkv.replay.compare import CompareResult, Side, compared, read_side, side_of
from hkv.replay.points import Point
from hkv.replay.result import ReplayResult
from hkv.replay.run import Timing
from hkv.replay.swept import answers, swept
from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import read_trace
from hkv.replay.verb import cache_options, replay_trace

ELSEWHERE = ("trace", "engine", "check", "tokens_per_id", "limit", "step_ms", "speed", "dialect_options", "warmup")
"""Arguments of `replay_trace` that say nothing about the cache or the schedule."""

SIZES = {"memory": options_of_sweeps.MEMORY, "num_blocks": options_of_sweeps.BLOCKS}


@dataclasses.dataclass(frozen=True)
class SweepResult:
    """Result of a sweep.

    Attributes:
      points: one entry a replay: what varies, by name, as text; `line`, what is equal on one line, all that varies but
        the size; the totals `hkv.replay.sweep.COLUMNS` (-1 where the engine does not count); and, with bounds,
        `optimal_tokens`, hit tokens that no choice of evictions exceeds.
      lines: one entry a line: `line`; `highest`, its best hit rate; `knee`, the size at which the gain bends, or "";
        and, with bounds, `infinite`, the hit rate in a pool that evicts nothing (NaN where nothing is reused).
    """

    points: Columns
    lines: Columns


def sweep(
    trace: str | os.PathLike[str],
    vary: Mapping[str, Sequence[object]],
    options: Mapping[str, object] | None = None,
    *,
    engine: str | None = None,
    tokens_per_id: int | None = None,
    limit: int | None = None,
    step_ms: int = 50,
    speed: int | Fraction = 1,
    warmup: int | str = 0,
    jobs: int = 1,
    bounds: bool = False,
    results: str | os.PathLike[str] | None = None,
) -> SweepResult:
    """Replays a trace with every combination of values (`hkv sweep`).

    Args:
      trace: path of the trace, perhaps compressed; `-` is standard input.
      vary: values by name: arguments of `replay_trace`, or options of the dialect (`retention`, ...). One of them is
        `memory` or `num_blocks`.
      options: the same with one value each.
      engine: name of the engine; None for the compiled one, where it has the cache's rules, else the NumPy engine.
      tokens_per_id: as in `replay_trace`.
      limit: as in `replay_trace`.
      step_ms: as in `replay_trace`.
      speed: as in `replay_trace`.
      warmup: as in `replay_trace`.
      jobs: points replayed at once, by the compiled engine in threads; by others in processes, for which a script needs
        the guard `if __name__ == "__main__"`.
      bounds: whether to find what a pool that evicts nothing hits, and the most that any choice of evictions could.
      results: path of a file of JSON lines, one a point; points that stand there are not replayed again.

    Raises:
      HKVError: the trace, a cache, a dialect or the engine cannot be used, or an option is not known.
    """
    if not SIZES.keys() & vary.keys():
        raise ConfigError("vary", sorted(vary), "values of memory or of num_blocks among them")
    timing = Timing(step_ms=step_ms, speed=Fraction(speed))
    points = [
        Point(
            labels=_labels(values),
            options=_options({**(options or {}), **values}),
            timing=timing,
            engine=engine,
            warmup=str(warmup),
        )
        for values in _combinations(vary)
    ]
    interned = InternedTrace(read_trace(os.fspath(trace), tokens_per_id, limit))
    path = None if results is None else os.fspath(results)
    rows, infinite = swept(points, interned, jobs=jobs, with_bounds=bounds, results=path)
    return _result(rows, answers(rows, infinite), bounds)


def compare(replays: Mapping[str, ReplayResult | str | os.PathLike[str]]) -> CompareResult:
    """Holds replays of one trace against the first of them (`hkv compare`).

    Args:
      replays: by name, results of `replay_trace`, or paths of what `hkv replay --json` wrote.

    Raises:
      HKVError: fewer than two, a file that is none, or replays of different requests.
    """
    sides: list[Side] = []
    for name, each in replays.items():
        if isinstance(each, ReplayResult):
            sides.append(side_of(name, each))
        else:
            sides.append(dataclasses.replace(read_side(each), name=name))
    return compared(sides)


def _combinations(vary: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    """Every combination of values, by the same rule as the command's."""
    places = {name: [str(place) for place in range(len(values))] for name, values in vary.items()}
    return [{name: vary[name][int(place)] for name, place in each.items()} for each in options_of_sweeps.points(places)]


def _labels(values: Mapping[str, object]) -> dict[str, str]:
    return {SIZES.get(name, name): _text(value) for name, value in values.items()}


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(_text(each) for each in cast("Sequence[object]", value))
    return str(getattr(value, "to_text", lambda: value)())


def _options(arguments: Mapping[str, object]) -> dict[str, Any]:
    """The arguments, with the defaults of `replay_trace`, as a dialect's command takes them."""
    known = inspect.signature(replay_trace).parameters
    common = {name: each.default for name, each in known.items() if name not in ELSEWHERE}
    own = {name: value for name, value in arguments.items() if name not in common}
    return cache_options({name: arguments.get(name, default) for name, default in common.items()}, own)


def _result(rows: Sequence[options_of_sweeps.Row], found: Sequence[Mapping[str, Any]], bounds: bool) -> SweepResult:
    names = {option: name for name, option in SIZES.items()}
    labels: list[str] = list(rows[0]["options"])
    totals = [*options_of_sweeps.COLUMNS, *([options_of_sweeps.OPTIMAL] if bounds else ())]
    points: dict[str, npt.NDArray[Any]] = {
        **{names.get(name, name): np.array([row["options"][name] for row in rows], str) for name in labels},
        "line": np.array([options_of_sweeps.line_of(row["options"]) for row in rows], str),
        **{name: np.array([-1 if row[name] is None else row[name] for row in rows]) for name in totals},
    }
    lines: dict[str, npt.NDArray[Any]] = {
        "line": np.array([each["line"] for each in found], str),
        "highest": np.array([each["highest"]["hit_rate"] for each in found], float),
        "knee": np.array([_size(each["knee"]) for each in found], str),
    }
    if bounds:
        rates = [each["infinite"]["hit_rate"] if each["infinite"] else np.nan for each in found]
        lines["infinite"] = np.array(rates, float)
    return SweepResult(points, lines)


def _size(row: options_of_sweeps.Row | None) -> str:
    """The size of a point's pool as text; "" for none."""
    return "" if row is None else next(str(row["options"][size]) for size in SIZES.values() if size in row["options"])
