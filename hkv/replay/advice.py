"""Sentences that follow from a replay's numbers: what costs most, and what would change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hkv.replay import summary
from hkv.replay.attribution import BLOCK, DRAFT, FIRST_USE, TRACE, UNIT
from hkv.replay.ceilings import Ceiling
from hkv.replay.missed import Missed, missed
from hkv.replay.reasons import EVICTED, NOT_RETAINED, RETIRED, WAITING
from hkv.replay.run import EVICTS_NOTHING, Outcome

WORTH_SAYING = 0.01
"""Share of the prompt tokens below which a cause is not spoken of."""


def advice(outcome: Outcome, ceilings: Sequence[Ceiling] = ()) -> list[str]:
    """Sentences on a replay, the greatest share first; none where nothing costs much.

    Args:
      outcome: the replay, of a trace.
      ceilings: what other replays of it found.
    """
    found, prompt = missed(outcome), summary.totals(outcome)["prompt_tokens"]
    if not prompt:
        return []
    names = [group.spec.to_text() for group in outcome.cache.groups]
    said = [each for each in _sentences(outcome, found, names) if each[0] >= WORTH_SAYING * prompt]
    sentences = [f"{tokens / prompt:.1%} {text}" for tokens, text in sorted(said, reverse=True)]
    return [*sentences, *(_of_ceiling(each, summary.totals(outcome)["hit_rate"]) for each in ceilings)]


def _sentences(outcome: Outcome, found: Missed, names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Tokens that a sentence is about, and what to say of them."""
    tokens, unit = found.tokens, outcome.cache.hit_units.unit
    size = outcome.trace.tokens_per_id if outcome.trace is not None else 0
    yield tokens[FIRST_USE], "of the prompt tokens nobody asked for before: no cache can find them."
    if size:
        yield tokens[TRACE], f"may be shared within ids of {size:,} tokens, which the trace does not say."
    else:
        yield tokens[TRACE], "are of prompts that the trace does not name: it says nothing about hits."
    if found.evicted:
        most = max(found.evicted, key=lambda each: each.tokens)
        yield (
            tokens[EVICTED],
            (
                f"was evicted: {most.tokens / max(tokens[EVICTED], 1):.0%} of that when {names[most.taker]} took "
                f"blocks of {names[most.group]}, {most.steps:,} steps (median) before it was asked for again."
            ),
        )
    lost = tokens[RETIRED] + tokens[NOT_RETAINED]
    if lost:
        sums = [counter[RETIRED] + counter[NOT_RETAINED] for counter in found.ended_by]
        group = max(range(len(sums)), key=lambda place: sums[place])
        yield lost, f"was computed but not kept to resume from: most by {names[group]}."
    yield tokens[WAITING], "each group had, but no boundary that all of them had."
    yield (
        tokens[UNIT],
        f"lies after the last multiple of {unit:,} tokens, where hits end: smaller blocks would find it.",
    )
    yield tokens[BLOCK], f"lies in blocks of {outcome.cache.hit_units.block:,} tokens that are shared in part."
    yield tokens[DRAFT], "is given up for the draft module's proof."


def _of_ceiling(ceiling: Ceiling, rate: float) -> str:
    more = "more" if ceiling.hit_rate > rate else "less" if ceiling.hit_rate < rate else "the same"
    bound = " (with evictions still)" if ceiling.evictions and ceiling.change == EVICTS_NOTHING else ""
    return f"{ceiling.change}: {ceiling.hit_rate:.2%}, {more}{bound}."
