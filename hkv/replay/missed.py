"""The missed tokens of a whole replay: sums of the attribution of its requests, and columns of them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from hkv.columns import Columns
from hkv.replay.attribution import CAUSES, NOT_COMPUTED, Attributed, attribute
from hkv.replay.reasons import EVICTED
from hkv.replay.run import Outcome


@dataclasses.dataclass(frozen=True)
class Evicted:
    """Tokens that were missed since one group's block had been handed out to another, or the same.

    Attributes:
      group: the group that lacked it.
      taker: the group that got it.
      tokens: prompt tokens that were missed.
      requests: requests that missed them.
      steps: steps between eviction and admission, their median over these requests.
    """

    group: int
    taker: int
    tokens: int
    requests: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Missed:
    """Prompt tokens of a replay that were no hits, at first admissions, by cause.

    Attributes:
      tokens: by cause; with the hit tokens they add up to the prompts.
      ended_by: of each group, tokens by cause where it was the one that ended the hit.
      alone: of each group, tokens by cause in the part that the cache decides, the group seen alone.
      evicted: the evictions among them.
      requests: one column a cause, int64[n], and `ended_by`, `evicted_steps_before`, `evicted_for`: -1 for none.
    """

    tokens: Mapping[str, int]
    ended_by: tuple[Mapping[str, int], ...]
    alone: tuple[Mapping[str, int], ...]
    evicted: tuple[Evicted, ...]
    requests: Columns


def missed(outcome: Outcome) -> Missed:
    """The attribution of a replay's requests, in the order of the trace; those never admitted have nothing.

    Raises:
      ValueError: the replay was not of a trace.
    """
    if outcome.trace is None:
        raise ValueError("outcome.trace")
    records = [outcome.recorder.requests[index] for index in sorted(outcome.recorder.requests)]
    groups, units, steps = range(len(outcome.cache.groups)), outcome.cache.hit_units, outcome.recorder.steps.step
    total: collections.Counter[str] = collections.Counter()
    ended_by: list[collections.Counter[str]] = [collections.Counter() for _ in groups]
    alone: list[collections.Counter[str]] = [collections.Counter() for _ in groups]
    ages: dict[tuple[int, int], list[tuple[int, int]]] = collections.defaultdict(list)
    columns = {name: np.zeros(len(records), np.int64) for name in CAUSES}
    columns |= {
        name: np.full(len(records), -1, np.int64) for name in ("ended_by", "evicted_steps_before", "evicted_for")
    }
    for place, record in enumerate(records):
        if record.admitted < 0:
            continue
        each = attribute(record, outcome.trace.unresolved[record.index], units)
        total.update(each.tokens)
        for cause, tokens in each.tokens.items():
            columns[cause][place] = tokens
        for counter, own in zip(alone, each.groups, strict=False):
            counter.update(own)
        if each.group >= 0:
            ended_by[each.group].update(_of_cache(each))
            columns["ended_by"][place] = each.group
        if each.evicted:
            age = record.admitted - steps[each.evicted - 2]  # the count is 2 in the first step
            columns["evicted_steps_before"][place], columns["evicted_for"][place] = age, each.taker
            ages[each.group, each.taker].append((age, each.tokens[EVICTED]))
    return Missed(
        {cause: total[cause] for cause in CAUSES},
        tuple(ended_by),
        tuple(alone),
        tuple(_evicted(*pair, found) for pair, found in sorted(ages.items())),
        columns,
    )


def _of_cache(each: Attributed) -> dict[str, int]:
    """The causes that some group answers for."""
    decided = CAUSES[CAUSES.index(NOT_COMPUTED) :]
    return {cause: tokens for cause, tokens in each.tokens.items() if cause in decided}


def _evicted(group: int, taker: int, found: list[tuple[int, int]]) -> Evicted:
    ages = sorted(age for age, _ in found)
    return Evicted(group, taker, sum(tokens for _, tokens in found), len(found), ages[len(ages) // 2])


def as_plain(found: Missed) -> dict[str, Any]:
    """Sums, as values that JSON has."""
    return {
        "tokens": dict(found.tokens),
        "ended_by": [{cause: counter[cause] for cause in CAUSES if counter[cause]} for counter in found.ended_by],
        "alone": [{cause: counter[cause] for cause in CAUSES if counter[cause]} for counter in found.alone],
        "evicted": [dataclasses.asdict(each) for each in found.evicted],
    }
