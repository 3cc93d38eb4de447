"""Reuse of a trace's prompts: which units of each prompt an earlier request brought, and which one did last."""

from __future__ import annotations

import dataclasses

import numpy as np

from hkv.replay.hit_units import HitUnits
from hkv.replay.traces.interned import InternedTrace


@dataclasses.dataclass(frozen=True)
class Reuse:
    """Reuse of a trace's prompts, whatever cache it meets.

    A unit is what hits grow by: so many tokens at a multiple of them, known by the whole prefix that they end. Requests
    that are too long are left out; the others are numbered in order.

    Attributes:
      unit: tokens of a unit.
      requests: int64[n], the requests' numbers in the trace.
      prompts: int64[n], tokens of each prompt.
      lengths: int64[n], tokens of each prompt and its output.
      free: int64[n], units of each prompt that an earlier request generated: no cache need have kept them.
      spans: int64[m, 3], units that can be hits: the last earlier request whose prompt had them, the request that has
        them again, and how many these are; in order of the second.
    """

    unit: int
    requests: np.ndarray
    prompts: np.ndarray
    lengths: np.ndarray
    free: np.ndarray
    spans: np.ndarray


def reuse(trace: InternedTrace, units: HitUnits, max_model_len: int) -> Reuse:
    """Finds the reuse of a trace's prompts.

    Args:
      trace: the trace.
      units: the units in which the cache finds prefixes, with the blocks that prefixes are known by.
      max_model_len: most tokens of a request that is served.
    """
    keys, seen = trace.keys(units.block, max_model_len), trace.shared(max_model_len)[0]
    lengths = np.array([each.input_length + each.output_length for each in trace.requests], np.int64)
    prompts = np.array([each.input_length for each in trace.requests], np.int64)
    served = np.flatnonzero(lengths <= max_model_len)
    lengths, prompts = lengths[served], prompts[served]
    most = units.boundaries(prompts, seen[served])[-1] // units.unit
    brought = np.full(keys.keys.max(initial=0) + 1, -1, np.int32)
    generated = np.zeros(len(brought), bool)
    free, spans, per_unit = np.zeros(len(served), np.int64), [], units.unit // units.block
    for place, index in enumerate(served.tolist()):
        named = keys.of(index)[per_unit - 1 :: per_unit]
        whole = prompts[place] // units.unit
        again = named[: most[place]]
        paid = ~generated[again]
        free[place] = len(again) - paid.sum()
        last = brought[again[paid]]
        ends = np.flatnonzero(np.diff(last, append=-2))
        for count, end in zip(np.diff(ends, prepend=-1).tolist(), ends.tolist(), strict=True):
            if last[end] >= 0:
                spans.append((int(last[end]), place, count))
        brought[named[:whole]] = place
        generated[named[whole:]] = True
    return Reuse(units.unit, served, prompts, lengths, free, np.array(spans, np.int64).reshape(-1, 3))
