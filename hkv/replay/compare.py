"""Replays of one trace held against each other: totals, the requests whose hits differ, and the causes of that."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hkv.columns import Columns
from hkv.errors import ConfigError, FileError
from hkv.files import decode_json, read_whole
from hkv.replay.attribution import CAUSES
from hkv.replay.result import ReplayResult
from hkv.replay.sweep import COLUMNS

TOTALS = (*COLUMNS, "steps_with_work", "wait_steps_median")
"""Totals that are set side by side."""


Side = tuple[str, ReplayResult]
"""One of the replays, and its name."""


@dataclasses.dataclass(frozen=True)
class HitChange:
    """Hits of one replay against those of the first; a request that was refused hits nothing.

    Attributes:
      name: names the replay.
      longer: requests whose hit is longer.
      shorter: requests whose hit is shorter.
      gained: tokens by which these are longer.
      lost: tokens by which those are shorter.
      gained_from: of the longer ones, tokens by which each cause fell; they add up to `gained`.
      lost_to: of the shorter ones, tokens by which each cause rose; they add up to `lost`.
      other: requests that only one of the two admitted.
    """

    name: str
    longer: int
    shorter: int
    gained: int
    lost: int
    gained_from: Mapping[str, int]
    lost_to: Mapping[str, int]
    other: int


@dataclasses.dataclass(frozen=True)
class CompareResult:
    """Result of a comparison.

    Attributes:
      names: the replays.
      totals: one entry a replay: `replay`, and `TOTALS`; -1 where the engine does not count.
      causes: one entry a replay: `replay`, `hit`, and a column for each cause of misses, in tokens.
      requests: one entry a request: `request`, `prompt`, and its hit under each replay's name; -1 where it was not
        admitted.
      changes: of each replay but the first, its hits against the first one's.
    """

    names: Sequence[str]
    totals: Columns
    causes: Columns
    requests: Columns
    changes: Sequence[HitChange]


def read_side(path: str | os.PathLike[str]) -> Side:
    """A replay that `hkv replay --json` saved: its totals and requests."""
    name, expected = os.fspath(path), "a replay, as hkv replay --json writes it"
    found = decode_json(read_whole(name), name, None, expected, dict[str, Any])
    try:
        columns = {column: np.array(values) for column, values in found["requests"].items()}
        missing = {"prompt", "hit", "admitted", *CAUSES} - columns.keys() or set(TOTALS) - found["totals"].keys()
    except (KeyError, AttributeError, TypeError, ValueError):
        raise FileError(name, None, "", sorted(found)[:8], expected) from None
    if missing:
        raise FileError(name, None, min(missing), "nothing", expected)
    return name, ReplayResult("", found["totals"], {}, columns, {}, {})


def compared(sides: Sequence[Side]) -> CompareResult:
    """Holds replays of one trace against the first of them."""
    names, results = [name for name, _ in sides], [result for _, result in sides]
    if len(sides) < 2 or len(set(names)) != len(names):
        raise ConfigError("replays", ", ".join(names), "at least two, each with a name of its own")
    prompts = results[0].requests["prompt"]
    for name, result in sides[1:]:
        if not np.array_equal(prompts, result.requests["prompt"]):
            raise ConfigError("replays", name, f"a replay of the same requests as {names[0]}")
    return CompareResult(
        names,
        {"replay": np.array(names, str), **{name: _total(results, name) for name in TOTALS}},
        {
            "replay": np.array(names, str),
            **{name: np.array([each.requests[name].sum() for each in results], np.int64) for name in ("hit", *CAUSES)},
        },
        {
            "request": np.arange(len(prompts)),
            "prompt": prompts,
            **{name: np.where(each.requests["admitted"] >= 0, each.requests["hit"], -1) for name, each in sides},
        },
        [_change(name, results[0].requests, each.requests) for name, each in sides[1:]],
    )


def _total(results: Sequence[ReplayResult], name: str) -> np.ndarray:
    return np.array([-1 if each.totals[name] is None else each.totals[name] for each in results])


def _change(name: str, first: Columns, other: Columns) -> HitChange:
    there, here = first["admitted"] >= 0, other["admitted"] >= 0
    more = other["hit"] - first["hit"]
    longer, shorter = more > 0, more < 0

    def by_cause(chosen: np.ndarray, sign: int) -> dict[str, int]:
        rises = {each: int((other[each] - first[each])[chosen].sum()) for each in CAUSES}
        return {cause: sign * tokens for cause, tokens in rises.items() if tokens}

    return HitChange(
        name,
        int(longer.sum()),
        int(shorter.sum()),
        int(more[longer].sum()),
        -int(more[shorter].sum()),
        by_cause(longer, -1),
        by_cause(shorter, 1),
        int((there != here).sum()),
    )


def most_changed(result: CompareResult, name: str, most: int) -> list[int]:
    """Numbers of the requests whose hits differ most between a replay and the first, the first such first."""
    mine, other = result.requests[result.names[0]], result.requests[name]
    change = np.where((mine >= 0) & (other >= 0), np.abs(other - mine), 0)
    order = np.argsort(-change, kind="stable")[:most]
    return order[change[order] > 0].tolist()
