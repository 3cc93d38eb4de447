"""The cause of every prompt token that was not a hit: one each, so that hits and causes add up to the prompt.

A prompt is cut at falling limits: what anybody asked for before, what whole blocks, whole units of hits and a draft's
proof leave of that, and how far each group could have gone. The tokens between two limits have the cause that lies
between them. `docs/replay.md` defines each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hkv.replay.hit_units import HitUnits
from hkv.replay.reasons import (
    CACHING_OFF,
    EVICTED,
    FELL_SHORT,
    NEVER_SEEN,
    NOT_RETAINED,
    NOT_SHARED,
    RETIRED,
    WAITING,
    WHOLE_PROMPT,
    GroupSearch,
)
from hkv.replay.record import RequestRecord

FIRST_USE = "first use"
TRACE = "trace granularity"
LAST_TOKEN = "last token"
BLOCK = "block granularity"
UNIT = "hit unit"
DRAFT = "draft drop"
NOT_COMPUTED = "not computed yet"
UNTOLD = "not told by the engine"

CAUSES = (
    FIRST_USE,
    TRACE,
    LAST_TOKEN,
    BLOCK,
    UNIT,
    DRAFT,
    NOT_COMPUTED,
    EVICTED,
    RETIRED,
    NOT_RETAINED,
    WAITING,
    FELL_SHORT,
    NOT_SHARED,
    CACHING_OFF,
    UNTOLD,
)
"""Every cause, in the order in which tables list them."""

OF_REASON = {NEVER_SEEN: NOT_COMPUTED, "not finished": NOT_COMPUTED}
"""Causes of reasons that have another name: an earlier request began so, or else it would be a first use."""


@dataclasses.dataclass(frozen=True, slots=True)
class Attributed:
    """One request's tokens by cause.

    Attributes:
      tokens: of each cause, by name; causes of no token are left out. With the hit they add up to the prompt.
      groups: of each group, where the engine tells: the same for the part that the cache decides, the group seen alone.
      group: the group that ended the hit, or -1.
      evicted: the step with work in which the block was evicted that it lacked, as `GroupSearch.evicted`; or 0.
      taker: the group that got that block, or -1.
    """

    tokens: dict[str, int]
    groups: tuple[dict[str, int], ...] = ()
    group: int = -1
    evicted: int = 0
    taker: int = -1


def attribute(record: RequestRecord, unresolved: int, units: HitUnits) -> Attributed:
    """Attributes the tokens of a request that was admitted.

    Args:
      record: the request.
      unresolved: tokens after `RequestRecord.seen` of which the trace cannot say whether they are shared.
      units: the units in which the cache finds prefixes.
    """
    prompt, seen, hit = record.prompt, record.seen, record.hit
    last, blocks, whole, proven = (int(limit) for limit in units.boundaries(prompt, seen))
    cuts = [
        (prompt, FIRST_USE),
        (min(seen + unresolved, prompt), TRACE),
        (seen, LAST_TOKEN),
        (last, BLOCK),
        (blocks, UNIT),
        (whole, DRAFT),
    ]
    limiting, decided = _decided(record, max(proven, hit), units)
    tokens = _between([*cuts, *decided], hit)
    if limiting < 0 or EVICTED not in tokens or not record.searches:
        return Attributed(tokens, _alone(record, proven), limiting)
    search = record.searches[limiting]
    return Attributed(tokens, _alone(record, proven), limiting, search.evicted, search.taker)


def _between(cuts: Sequence[tuple[int, str]], hit: int) -> dict[str, int]:
    """Tokens between each limit and the next one, the hit being the last, by the cause that each limit is named by."""
    tokens: dict[str, int] = {}
    ends = [limit for limit, _ in cuts[1:]] + [hit]
    for (limit, cause), end in zip(cuts, ends, strict=True):
        if max(limit, hit) > max(end, hit):
            tokens[cause] = tokens.get(cause, 0) + max(limit, hit) - max(end, hit)
    return tokens


def _decided(record: RequestRecord, top: int, units: HitUnits) -> tuple[int, list[tuple[int, str]]]:
    """The group that ended the hit, and limits from `top` down of the part that the cache decides."""
    if top <= record.hit:
        return -1, [(top, UNTOLD)]
    if not units.shared:
        return -1, [(top, NOT_SHARED)]
    if not record.searches:
        return _by_reasons(record, top)
    shared = [group for group, search in enumerate(record.searches) if search.reason not in (NOT_SHARED, CACHING_OFF)]
    if not shared:
        return -1, [(top, CACHING_OFF)]
    limiting = min(shared, key=lambda group: record.searches[group].resumes)
    together = FELL_SHORT if FELL_SHORT in record.reasons else WAITING
    search = record.searches[limiting]
    return limiting, [*_own(search, top), (min(search.resumes, top), together)]


def _own(search: GroupSearch, top: int) -> list[tuple[int, str]]:
    """Limits of one group, beyond where it could resume: up to where its blocks were computed, and beyond that."""
    computed = max(min(search.computed, top), search.resumes)
    return [(top, NOT_COMPUTED), (computed, OF_REASON.get(search.reason, search.reason))]


def _by_reasons(record: RequestRecord, top: int) -> tuple[int, list[tuple[int, str]]]:
    """The same where the dialect tells no more than reasons: one cause for the whole part."""
    for group, reason in enumerate(record.reasons):
        if reason not in (WAITING, WHOLE_PROMPT, NOT_SHARED):
            return group, [(top, OF_REASON.get(reason, reason))]
    return -1, [(top, WAITING if WAITING in record.reasons else UNTOLD)]


def _alone(record: RequestRecord, top: int) -> tuple[dict[str, int], ...]:
    """Each group's own causes between the hit and `top`: it waits for others as far as it could have gone itself."""
    found = []
    for search in record.searches:
        if search.reason in (NOT_SHARED, CACHING_OFF):
            cuts = [(top, search.reason)]
        else:
            cuts = [*_own(search, max(top, record.hit)), (search.resumes, WAITING)]
        found.append(_between(cuts, record.hit) if top > record.hit else {})
    return tuple(found)
