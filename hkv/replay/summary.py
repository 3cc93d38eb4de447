"""A replay's totals and groups, as plain values: what the tables show."""

from __future__ import annotations

import collections
from typing import Any

from hkv.replay.record import FINISHED, NEVER_FITS, TOO_LONG
from hkv.replay.run import Outcome

UNAVAILABLE = "not available from this engine"


def totals(outcome: Outcome) -> dict[str, Any]:
    """Numbers over the whole replay; lengths in tokens, sizes in blocks, times in steps or seconds."""
    requests = list(outcome.recorder.requests.values())
    steps = outcome.recorder.steps
    outcomes = collections.Counter(request.outcome for request in requests)
    admitted = [request for request in requests if request.admitted >= 0]
    counted = [request for request in admitted if request.index >= outcome.warmup]
    prompt = sum(request.prompt for request in counted)
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
    counters, known = None if outcome.trace is None else outcome.missed.lacking, outcome.cache.reasons
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
