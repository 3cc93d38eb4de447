"""The cause of every prompt token that was not a hit: one each, so that hits and causes add up to the prompts.

A prompt is cut at falling limits: what anybody asked for before, what whole blocks, whole units of hits and a draft's
proof leave of that, what of it anybody computes, and what the same replay finds in a pool that evicts nothing, first
with requests one after another, then as they come. The tokens between two limits have the cause that lies between them.
`docs/replay.md` defines each.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hkv.columns import Columns
from hkv.replay.observed import CACHING_OFF, COMPLETE, EVICTED, HAD, NOT_RETAINED, NOT_SHARED, NOTHING, MissReason
from hkv.replay.schedule import Recorder, RequestRecord

FIRST_USE = "first use"
TRACE = "trace granularity"
LAST_TOKEN = "last token"
BLOCK = "block granularity"
UNIT = "hit unit"
DRAFT = "draft drop"
NEVER_COMPUTED = "never computed"
NOT_COMPUTED = "not computed yet"
FELL_SHORT = "lookup fell short"
UNTOLD = "not told by the engine"
REFUSED = "refused"

CAUSES = (
    FIRST_USE,
    TRACE,
    LAST_TOKEN,
    BLOCK,
    UNIT,
    DRAFT,
    NEVER_COMPUTED,
    NOT_RETAINED,
    FELL_SHORT,
    NOT_COMPUTED,
    EVICTED,
    NOT_SHARED,
    CACHING_OFF,
    UNTOLD,
    REFUSED,
)
"""Every cause, in the order in which tables list them."""


@dataclasses.dataclass(frozen=True)
class Evicted:
    """Tokens that were evicted, of requests for which one group's block had been handed out to another, or the same.

    Attributes:
      group: the group that lacked it.
      taker: the group that got it.
      tokens: prompt tokens that were evicted; those of a request that lacked blocks of several groups count for each.
      requests: these requests.
      steps: steps between eviction and admission, their median over these requests.
    """

    group: int
    taker: int
    tokens: int
    requests: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Missed:
    """Prompt tokens of a replay that were no hits, at first admissions or because they were refused, by cause.

    Attributes:
      tokens: by cause; with the hit tokens they add up to the prompts.
      by_group: of each group, tokens by cause of requests for which it lacked something; several may have lacked it.
      reasons: of each group, requests by what it lacked at the boundary that was asked about: where a pool that evicts
        nothing would have resumed, if that is beyond the hit, else where everything computed would have taken it.
      evicted: the evictions among them, where the dialect tells of them.
      requests: one column a cause, int64[n], and of the eviction that was longest ago `evicted_steps_before` and
        `evicted_for`, -1 for none.
    """

    tokens: Mapping[str, int]
    by_group: tuple[Mapping[str, int], ...]
    reasons: tuple[Mapping[str, int], ...]
    evicted: tuple[Evicted, ...]
    requests: Columns

    def most_evicted(self, names: Sequence[str]) -> Evicted | None:
        """The eviction that most tokens were lost to, by groups of these names, whatever their order; None for none."""
        told = ((each.tokens, names[each.group], names[each.taker], each.steps) for each in self.evicted)
        return max(zip(told, self.evicted, strict=True), key=lambda pair: pair[0], default=(None, None))[1]

    def most_lacking(self, cause: str, names: Sequence[str]) -> str:
        """Name of the group that lacked something for most of a cause's tokens, whatever their order; "" for none."""
        lacked = [(counter[cause], name) for counter, name in zip(self.by_group, names, strict=True)]
        tokens, name = max(lacked)
        return name if tokens else ""


class Finished(Protocol):
    """A finished replay, as far as its misses depend on it: `hkv.replay.run.Outcome` says what each field is."""

    @property
    def cache(self) -> Any: ...
    @property
    def recorder(self) -> Recorder: ...
    @property
    def trace(self) -> Any: ...
    @property
    def warmup(self) -> int: ...
    @property
    def unevicted(self) -> Finished | None: ...
    @property
    def one_by_one(self) -> Finished | None: ...


def attributed(outcome: Finished) -> Missed:
    """Causes of a replay's misses, in the order of the trace; none of the warm-up."""
    records = [outcome.recorder.requests[index] for index in sorted(outcome.recorder.requests)]
    others = _same(records, outcome.unevicted)
    columns = _columns(outcome, records, others)
    groups = range(len(outcome.cache.groups))
    by_group: list[collections.Counter[str]] = [collections.Counter() for _ in groups]
    reasons: list[collections.Counter[str]] = [collections.Counter() for _ in groups]
    ages: dict[tuple[int, int], list[tuple[int, int]]] = collections.defaultdict(list)
    before, taker = np.full((2, len(records)), -1, np.int64)
    steps, lost = outcome.recorder.steps.step, columns[EVICTED].tolist()
    rest = {cause: columns[cause].tolist() for cause in (NOT_COMPUTED, NOT_RETAINED, FELL_SHORT)}
    names = [*outcome.cache.group_names, ""]
    for place, (record, other) in enumerate(zip(records, others, strict=True)):
        if record.admitted < 0 or record.index < outcome.warmup:
            continue
        for group, each in enumerate(record.miss_reasons):
            if each.reason == EVICTED and lost[place]:
                by_group[group][EVICTED] += lost[place]
                if each.evicted:
                    age = record.admitted - steps[each.evicted - 2]  # the count is 2 in the first step
                    ages[group, each.taker].append((age, lost[place]))
                    if (age, names[each.taker]) > (before[place], names[taker[place]]):
                        before[place], taker[place] = age, each.taker
        beyond: tuple[MissReason, ...] = () if other is None else other.miss_reasons
        asked = record if lost[place] or other is None else other
        for group, each in enumerate(asked.miss_reasons):
            reasons[group][NOTHING if each.reason == HAD and asked.computed <= asked.hit else each.reason] += 1
        for group, each in enumerate(beyond):
            if each.reason not in COMPLETE:
                for cause, tokens in rest.items():
                    if tokens[place]:
                        by_group[group][cause] += tokens[place]
    return Missed(
        {cause: int(columns[cause].sum()) for cause in CAUSES},
        tuple(by_group),
        tuple(reasons),
        tuple(_evicted(*pair, found) for pair, found in sorted(ages.items())),
        {**columns, "evicted_steps_before": before, "evicted_for": taker},
    )


def _same(records: Sequence[RequestRecord], other: Finished | None) -> Sequence[RequestRecord | None]:
    """The same requests in another replay; None where it has not been made."""
    return [None if other is None else other.recorder.requests.get(record.index) for record in records]


def _columns(outcome: Finished, records: Sequence[RequestRecord], others: Sequence[RequestRecord | None]) -> Columns:
    """Tokens of each request by cause."""
    if outcome.trace is None:
        raise ValueError("outcome.trace")
    index, prompt, seen, hit, admitted = (
        np.array([getattr(record, name) for record in records], np.int64)
        for name in ("index", "prompt", "seen", "hit", "admitted")
    )
    unresolved, computed = (
        np.array([column[place] for place in index], np.int64)
        for column in (outcome.trace.unresolved, outcome.trace.computed)
    )
    units = outcome.cache.hit_units
    last, blocks, whole, proven = units.boundaries(prompt, seen)
    cuts = [
        (FIRST_USE, prompt),
        (TRACE, np.minimum(seen + unresolved, prompt)),
        (LAST_TOKEN, seen),
        (BLOCK, last),
        (UNIT, blocks),
        (DRAFT, whole),
        (NEVER_COMPUTED, proven),
    ]
    found = units.boundaries(prompt, computed)[-1]
    if not outcome.cache.reuses or not units.shared:
        cuts.append((NOT_SHARED if outcome.cache.reuses else CACHING_OFF, found))
    else:
        told = np.array([other is not None and other.admitted >= 0 for other in others], bool)
        unevicted = np.maximum(hit, [0 if other is None else other.hit for other in others])
        alone = [0 if other is None else other.hit for other in _same(records, outcome.one_by_one)]
        alone = np.maximum(unevicted, alone)
        found = np.maximum(found, alone)
        cuts += [(UNTOLD, found), (NOT_RETAINED, np.where(told, found, hit))]
        cuts += [(NOT_COMPUTED, np.where(told, alone, hit)), (EVICTED, np.where(told, unevicted, hit))]
    counted = index >= outcome.warmup
    columns = {cause: np.zeros(len(records), np.int64) for cause in CAUSES}
    ends = [*(limit for _, limit in cuts[1:]), hit]
    for (cause, limit), end in zip(cuts, ends, strict=True):
        columns[cause] = np.where(counted & (admitted >= 0), np.maximum(limit, hit) - np.maximum(end, hit), 0)
    columns[REFUSED] = np.where(counted & (admitted < 0), prompt, 0)
    short = np.array([other is not None and _all_had(other.miss_reasons) for other in others], bool)
    columns[FELL_SHORT] = np.where(short, columns[NOT_RETAINED], 0)
    columns[NOT_RETAINED] -= columns[FELL_SHORT]
    return columns


def _all_had(found: Sequence[MissReason]) -> bool:
    """True if every group that shares blocks had all that was needed, and the lookup found less nevertheless."""
    reasons = {each.reason for each in found}
    return HAD in reasons and reasons <= COMPLETE


def _evicted(group: int, taker: int, found: list[tuple[int, int]]) -> Evicted:
    ages = sorted(age for age, _ in found)
    return Evicted(group, taker, sum(tokens for _, tokens in found), len(found), ages[len(ages) // 2])
