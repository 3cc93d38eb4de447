"""A finished replay as totals and columns, hit rates with one cause of misses removed, and advice.

That is what the tables show, `--json` holds, and a library call returns.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hkv.columns import Columns
from hkv.limits import counted
from hkv.replay.attribution import BLOCK, CAUSES, DRAFT, FIRST_USE, TRACE, UNIT, Missed
from hkv.replay.observed import EVICTED, NOT_RETAINED
from hkv.replay.run import COMPILED, EVICTS_NOTHING, Outcome, Timing, default_engine, replay
from hkv.replay.schedule import FINISHED, NEVER_FITS, TOO_LONG, RequestRecord, Schedule
from hkv.replay.traces.interned import InternedTrace
from hkv.version import __version__


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """Result of a replay. Lengths are in tokens, times in steps.

    Attributes:
      engine: name of the engine.
      totals: numbers over the whole replay, by name; None where the engine does not count.
      groups: one entry a group: `group`, `layers` (how many), `eagle`, and, where the engine tells, the number of
        requests by what the group lacked beyond their hits (`hkv.replay.attribution.Missed.reasons`).
      requests: one entry a request, in the trace's order: the fields of `hkv.replay.schedule.RequestRecord` but for
        what groups lacked, its prompt tokens by the cause for which they were no hits
        (`hkv.replay.attribution.CAUSES`), and `evicted_steps_before` and `evicted_for` (the group that got the
        missing block): -1 for none.
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
    fields = [field.name for field in dataclasses.fields(RequestRecord) if field.name != "miss_reasons"]
    told = groups(outcome)
    counted = outcome.cache.reasons if told and told[0]["reasons"] is not None else ()
    columns: Columns = {} if outcome.trace is None else outcome.missed.requests
    return ReplayResult(
        engine,
        totals(outcome),
        {
            "group": np.array([group["group"] for group in told], str),
            "layers": np.array([len(group["layers"]) for group in told], np.int64),
            "eagle": np.array([group["eagle"] for group in told], bool),
            **{reason: np.array([group["reasons"][reason] for group in told], np.int64) for reason in counted},
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
        "groups": groups(outcome),
        "monitored": outcome.monitored(),
        "missed": None if outcome.trace is None else _plain(outcome.missed),
        "ceilings": [dataclasses.asdict(each) for each in ceilings],
        "advice": [] if outcome.trace is None else advice(outcome, ceilings),
        "requests": {name: column.tolist() for name, column in result.requests.items()},
        "steps": {name: column.tolist() for name, column in result.steps.items()},
        "occupancy": {name: column.tolist() for name, column in result.occupancy.items()},
    }


def _plain(found: Missed) -> dict[str, Any]:
    """Sums, as values that JSON has."""
    return {
        "tokens": dict(found.tokens),
        "by_group": [{cause: counter[cause] for cause in CAUSES if counter[cause]} for counter in found.by_group],
        "evicted": [dataclasses.asdict(each) for each in found.evicted],
    }


# Totals and groups as plain values.

UNAVAILABLE = "not available from this engine"


def totals(outcome: Outcome) -> dict[str, Any]:
    """Numbers over the whole replay; lengths in tokens, sizes in blocks, times in steps or seconds.

    Prompts of refused requests count among all: a pool that refuses long ones would seem to hit more.
    """
    requests = list(outcome.recorder.requests.values())
    steps = outcome.recorder.steps
    outcomes = collections.Counter(request.outcome for request in requests)
    admitted = [request for request in requests if request.admitted >= 0]
    counted = [request for request in admitted if request.index >= outcome.warmup]
    prompt = sum(request.prompt for request in requests if request.index >= outcome.warmup)
    hit = sum(request.hit for request in counted)
    in_use = sorted(steps.in_use)
    return {
        "requests": len(requests),
        "warmup": outcome.warmup,
        "finished": outcomes[FINISHED],
        "never_fit": outcomes[NEVER_FITS],
        "too_long": outcomes[TOO_LONG],
        "prompt_tokens": prompt,
        "hit_tokens": hit,
        "loaded_tokens": sum(request.loaded for request in counted),
        "hit_rate": hit / prompt if prompt else 0.0,
        "output_tokens": sum(request.output for request in requests if request.outcome == FINISHED),
        "preemptions": sum(request.preemptions for request in requests),
        "recomputed_tokens": sum(request.recomputed for request in requests),
        "recovered_tokens": sum(request.recovered for request in requests),
        "put_off": sum(steps.put_off),
        "evictions": outcome.evictions,
        "blocks": outcome.cache.blocks,
        "blocks_in_use_median": in_use[len(in_use) // 2] if in_use else 0,
        "blocks_in_use_peak": in_use[-1] if in_use else 0,
        "running_peak": max(steps.running, default=0),
        "waiting_peak": max(steps.waiting, default=0),
        "wait_steps_median": _median([request.admitted - request.arrived for request in admitted]),
        "steps": outcome.steps,
        "steps_with_work": len(steps.step),
        "seconds": outcome.seconds,
        **outcome.extra,
        **_trace(outcome),
    }


def _trace(outcome: Outcome) -> dict[str, Any]:
    if outcome.trace is None:
        return {}
    found = outcome.trace
    return {
        "tokens_per_id": found.tokens_per_id,
        "without_content": found.without_content,
        "synthetic": list(found.synthetic),  # as JSON has it: a command and a call give the same
    }


def groups(outcome: Outcome) -> list[dict[str, Any]]:
    """Per group: name, layers if known, whether it serves a draft module, and what it lacked, over first admissions."""
    counters, known = None if outcome.trace is None else outcome.missed.reasons, outcome.cache.reasons
    if counters is not None and not any(counters):
        counters = None
    return [
        {
            "group": outcome.cache.group_names[index],
            "layers": list(group.layers),
            "eagle": index in outcome.cache.eagle_groups,
            "reasons": None if counters is None else {reason: counters[index][reason] for reason in known},
        }
        for index, group in enumerate(outcome.cache.groups)
    ]


def _median(values: list[int]) -> int:
    return sorted(values)[len(values) // 2] if values else 0


MAX_KEYS = 16_000_000
"""Prefix keys of a replay for a ceiling; a trace that needs more, in blocks of one token, is not replayed so."""


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """A replay with something changed.

    Attributes:
      options: options of `hkv replay` that make it with those of the first beside them, by name; none where a model's
        plan has none for it.
      hit_rate: of all prompt tokens, those of refused requests too.
      evictions: cached blocks that were still handed out; None where the engine does not count.
    """

    change: str
    options: Mapping[str, str]
    hit_tokens: int
    hit_rate: float
    evictions: int | None


def ceilings(
    trace: InternedTrace, outcome: Outcome, schedule: Schedule, timing: Timing, engine: str = COMPILED
) -> tuple[Ceiling, ...]:
    """Replays a trace once more for each change that the cache's dialect offers, compiled where it can be."""
    served = [each for each in trace.requests if each.input_length + each.output_length <= schedule.max_model_len]
    tokens = sum(each.input_length + each.output_length for each in served)
    found: list[Ceiling] = []
    for change, cache in outcome.cache.changed(tokens, len(served), schedule).items():
        if tokens // cache.key_tokens > MAX_KEYS:
            continue
        name = default_engine(cache)[0] if engine == COMPILED else engine
        changed = outcome.unevicted if change == EVICTS_NOTHING else None
        changed = changed or replay(
            trace, cache, schedule, timing, engine=name, causes=False, warmup=str(outcome.warmup)
        )
        numbers = totals(changed)
        found.append(Ceiling(change, cache.options, numbers["hit_tokens"], numbers["hit_rate"], changed.evictions))
    return tuple(found)


WORTH_SAYING = 0.01
"""Share of the prompt tokens below which a cause is not spoken of."""


def advice(outcome: Outcome, ceilings: Sequence[Ceiling] = ()) -> list[str]:
    """Sentences on a replay, the greatest share first; none where nothing costs much."""
    found, prompt = outcome.missed, totals(outcome)["prompt_tokens"]
    if not prompt:
        return []
    said = [each for each in _sentences(outcome, found, outcome.cache.group_names) if each[0] >= WORTH_SAYING * prompt]
    sentences = [f"{tokens / prompt:.1%} {text}" for tokens, text in sorted(said, reverse=True)]
    return [*sentences, *_of_ceilings(ceilings, totals(outcome)["hit_rate"])]


def _sentences(outcome: Outcome, found: Missed, names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Tokens that a sentence is about, and what to say of them."""
    tokens, unit = found.tokens, outcome.cache.hit_units.unit
    size = outcome.trace.tokens_per_id if outcome.trace is not None else 0
    yield tokens[FIRST_USE], "of the prompt tokens nobody asked for before: no cache can find them."
    if size:
        said, most = f"may be shared within ids of {size:,} tokens, which the trace does not say", ""
        if size > outcome.cache.hit_units.unit and not all(group.spec.reads_all for group in outcome.cache.groups):
            bound = 1 - tokens[FIRST_USE] / max(totals(outcome)["prompt_tokens"], 1)
            most = f"; as windows and states end where no id does, finer ones may hit up to {bound:.1%} in all"
        yield tokens[TRACE], f"{said}{most}."
    else:
        yield tokens[TRACE], "are of prompts that the trace does not name: it says nothing about hits."
    if outcome.unevicted is not None:
        yield tokens[EVICTED], f"was evicted{_pressure(found, names)}: {_without_evictions(outcome.unevicted)}."
    most = found.most_lacking(NOT_RETAINED, names)
    by = f": most by {most}" if most else ""
    yield tokens[NOT_RETAINED], f"was computed but not kept to resume from, evictions or not{by}."
    yield (
        tokens[UNIT],
        f"lies after the last multiple of {unit:,} tokens, where hits end.",
    )
    yield tokens[BLOCK], f"lies in blocks of {outcome.cache.hit_units.block:,} tokens that are shared in part."
    yield tokens[DRAFT], "is given up for the draft module's proof."


def _pressure(found: Missed, names: Sequence[str]) -> str:
    """By which group's pressure most was evicted, and how long before."""
    most = found.most_evicted(names)
    if most is None:
        return ""
    share = most.tokens / max(found.tokens[EVICTED], 1)
    took = f"{share:.0%} of that after {names[most.taker]} took blocks of {names[most.group]}"
    return f", {took}, {counted(most.steps, 'step')} (median) before it was asked for again"


def _without_evictions(unevicted: Outcome) -> str:
    by = _command(unevicted.cache.options)
    found = f"a pool that evicts nothing{by} hits {totals(unevicted)['hit_rate']:.2%}"
    return f"{found}, and the largest one still evicts" if unevicted.evictions else found


def _command(options: Mapping[str, str]) -> str:
    """The options that make a change, as the command line takes them."""
    flags = {"True": "--{}", "False": "--no-{}"}
    words = (flags.get(value, "--{} " + value).format(name.replace("_", "-")) for name, value in options.items())
    return f" ({' '.join(words)})" if options else ""


def _of_ceilings(ceilings: Sequence[Ceiling], rate: float) -> Iterator[str]:
    """Each replay with something changed, and the one that finds most."""
    for ceiling in ceilings:
        more = "more" if ceiling.hit_rate > rate else "less" if ceiling.hit_rate < rate else "the same"
        bound = " (with evictions still)" if ceiling.evictions and ceiling.change == EVICTS_NOTHING else ""
        yield f"{ceiling.change}{_command(ceiling.options)}: {ceiling.hit_rate:.2%}, {more}{bound}."
    if len(ceilings) > 1:
        most = max(each.hit_rate for each in ceilings)
        best = [each.change for each in ceilings if each.hit_rate == most]
        said = f"Most is found by {'this' if len(best) == 1 else 'each of these'}: {'; '.join(best)}."
        yield said if most > rate else "None of these finds more."
