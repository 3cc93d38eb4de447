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


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the replays.

    Attributes:
      requests: columns of `hkv.replay.result.ReplayResult.requests`.
    """

    name: str
    totals: Mapping[str, Any]
    requests: Columns


@dataclasses.dataclass(frozen=True)
class HitChange:
    """Hits of one replay against those of the first. Tokens of requests that both admitted.

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


def side_of(name: str, result: ReplayResult) -> Side:
    """A replay that has just been made."""
    return Side(name, result.totals, result.requests)


def read_side(path: str | os.PathLike[str]) -> Side:
    """A replay that `hkv replay --json` saved."""
    name, expected = os.fspath(path), "a replay, as hkv replay --json writes it"
    found = decode_json(read_whole(name), name, None, expected, dict[str, Any])
    try:
        columns = {column: np.array(values) for column, values in found["requests"].items()}
        missing = {"prompt", "hit", "admitted", *CAUSES} - columns.keys() or set(TOTALS) - found["totals"].keys()
    except (KeyError, AttributeError, TypeError, ValueError):
        raise FileError(name, None, "", sorted(found)[:8], expected) from None
    if missing:
        raise FileError(name, None, min(missing), "nothing", expected)
    return Side(name, found["totals"], columns)


def compared(sides: Sequence[Side]) -> CompareResult:
    """Holds replays of one trace against the first of them."""
    names = [side.name for side in sides]
    if len(sides) < 2 or len(set(names)) != len(names):
        raise ConfigError("replays", ", ".join(names), "at least two, each with a name of its own")
    first = sides[0]
    for side in sides[1:]:
        if not np.array_equal(first.requests["prompt"], side.requests["prompt"]):
            raise ConfigError("replays", side.name, f"a replay of the same requests as {first.name}")
    count = len(first.requests["prompt"])
    return CompareResult(
        names,
        {"replay": np.array(names, str), **{name: _total(sides, name) for name in TOTALS}},
        {
            "replay": np.array(names, str),
            **{name: np.array([side.requests[name].sum() for side in sides], np.int64) for name in ("hit", *CAUSES)},
        },
        {
            "request": np.arange(count),
            "prompt": first.requests["prompt"],
            **{side.name: np.where(side.requests["admitted"] >= 0, side.requests["hit"], -1) for side in sides},
        },
        [_change(first, side) for side in sides[1:]],
    )


def _total(sides: Sequence[Side], name: str) -> np.ndarray:
    return np.array([-1 if side.totals[name] is None else side.totals[name] for side in sides])


def _change(first: Side, side: Side) -> HitChange:
    there, here = first.requests["admitted"] >= 0, side.requests["admitted"] >= 0
    more = np.where(there & here, side.requests["hit"] - first.requests["hit"], 0)
    longer, shorter = more > 0, more < 0

    def by_cause(chosen: np.ndarray, sign: int) -> dict[str, int]:
        rises = {each: int((side.requests[each] - first.requests[each])[chosen].sum()) for each in CAUSES}
        return {cause: sign * tokens for cause, tokens in rises.items() if tokens}

    return HitChange(
        side.name,
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
