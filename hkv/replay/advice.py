"""Sentences that follow from a replay's numbers: what costs most, and what would change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hkv.replay import summary
from hkv.replay.attribution import BLOCK, DRAFT, FIRST_USE, TRACE, UNIT, Missed
from hkv.replay.ceilings import Ceiling
from hkv.replay.reasons import EVICTED, NOT_RETAINED
from hkv.replay.run import EVICTS_NOTHING, Outcome

WORTH_SAYING = 0.01
"""Share of the prompt tokens below which a cause is not spoken of."""


def advice(outcome: Outcome, ceilings: Sequence[Ceiling] = ()) -> list[str]:
    """Sentences on a replay, the greatest share first; none where nothing costs much."""
    found, prompt = outcome.missed, summary.totals(outcome)["prompt_tokens"]
    if not prompt:
        return []
    names = [group.spec.to_text() for group in outcome.cache.groups]
    said = [each for each in _sentences(outcome, found, names) if each[0] >= WORTH_SAYING * prompt]
    sentences = [f"{tokens / prompt:.1%} {text}" for tokens, text in sorted(said, reverse=True)]
    return [*sentences, *_of_ceilings(ceilings, summary.totals(outcome)["hit_rate"])]


def _sentences(outcome: Outcome, found: Missed, names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Tokens that a sentence is about, and what to say of them."""
    tokens, unit = found.tokens, outcome.cache.hit_units.unit
    size = outcome.trace.tokens_per_id if outcome.trace is not None else 0
    yield tokens[FIRST_USE], "of the prompt tokens nobody asked for before: no cache can find them."
    if size:
        yield tokens[TRACE], f"may be shared within ids of {size:,} tokens, which the trace does not say."
    else:
        yield tokens[TRACE], "are of prompts that the trace does not name: it says nothing about hits."
    if outcome.unevicted is not None:
        yield tokens[EVICTED], f"was evicted{_pressure(found, names)}: {_without_evictions(outcome.unevicted)}."
    sums = [counter[NOT_RETAINED] for counter in found.by_group]
    most = f": most by {names[max(range(len(sums)), key=lambda place: sums[place])]}" if any(sums) else ""
    yield tokens[NOT_RETAINED], f"was computed but not kept to resume from, evictions or not{most}."
    yield (
        tokens[UNIT],
        f"lies after the last multiple of {unit:,} tokens, where hits end: smaller blocks would find it.",
    )
    yield tokens[BLOCK], f"lies in blocks of {outcome.cache.hit_units.block:,} tokens that are shared in part."
    yield tokens[DRAFT], "is given up for the draft module's proof."


def _pressure(found: Missed, names: Sequence[str]) -> str:
    """By which group's pressure most was evicted, and how long before."""
    if not found.evicted:
        return ""
    most = max(found.evicted, key=lambda each: (each.tokens, names[each.group], names[each.taker]))
    share = most.tokens / max(found.tokens[EVICTED], 1)
    took = f"{share:.0%} of that after {names[most.taker]} took blocks of {names[most.group]}"
    return f", {took}, {most.steps:,} steps (median) before it was asked for again"


def _without_evictions(unevicted: Outcome) -> str:
    found = f"a pool that evicts nothing hits {summary.totals(unevicted)['hit_rate']:.2%}"
    return f"{found}, and the largest one still evicts" if unevicted.evictions else found


def _of_ceilings(ceilings: Sequence[Ceiling], rate: float) -> Iterator[str]:
    """Each replay with something changed, and the one that finds most."""
    for ceiling in ceilings:
        more = "more" if ceiling.hit_rate > rate else "less" if ceiling.hit_rate < rate else "the same"
        bound = " (with evictions still)" if ceiling.evictions and ceiling.change == EVICTS_NOTHING else ""
        yield f"{ceiling.change}: {ceiling.hit_rate:.2%}, {more}{bound}."
    if len(ceilings) > 1:
        best = max(ceilings, key=lambda each: each.hit_tokens)
        yield f"Most is found by this: {best.change}." if best.hit_rate > rate else "None of these finds more."
