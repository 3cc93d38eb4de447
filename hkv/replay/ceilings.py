"""Hit rates with one cause of misses removed alone: found by replaying the trace again, not estimated."""

from __future__ import annotations

import dataclasses

from hkv.replay import summary
from hkv.replay.run import COMPILED, EVICTS_NOTHING, Outcome, Timing, default_engine, replay
from hkv.replay.schedule import Schedule
from hkv.replay.traces.interned import InternedTrace

MAX_KEYS = 16_000_000
"""Prefix keys of a replay for a ceiling; a trace that needs more, in blocks of one token, is not replayed so."""


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """A replay with something changed.

    Attributes:
      hit_rate: of the prompt tokens of first admissions.
      evictions: cached blocks that were still handed out; None where the engine does not count.
    """

    change: str
    hit_tokens: int
    hit_rate: float
    evictions: int | None


def ceilings(
    trace: InternedTrace, outcome: Outcome, schedule: Schedule, timing: Timing, engine: str = COMPILED
) -> tuple[Ceiling, ...]:
    """Replays a trace once more for each change that the cache's dialect offers, compiled where it can be."""
    served = [each for each in trace.requests if each.input_length + each.output_length <= schedule.max_model_len]
    tokens = sum(each.input_length + each.output_length for each in served)
    found = []
    for change, cache in outcome.cache.changed(tokens, len(served), schedule).items():
        if tokens // cache.key_tokens > MAX_KEYS:
            continue
        name = default_engine(cache)[0] if engine == COMPILED else engine
        changed = outcome.unevicted if change == EVICTS_NOTHING else None
        changed = changed or replay(
            trace, cache, schedule, timing, engine=name, causes=False, warmup=str(outcome.warmup)
        )
        totals = summary.totals(changed)
        found.append(Ceiling(change, totals["hit_tokens"], totals["hit_rate"], changed.evictions))
    return tuple(found)
