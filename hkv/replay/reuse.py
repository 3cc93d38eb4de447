"""Reuse of a trace's prompts: which units of each prompt an earlier request brought, and which one did last."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hkv.replay.hit_units import HitUnits
from hkv.replay.traces.prefix_keys import PrefixKeys
from hkv.replay.traces.reader import TraceRequest, granularity
from hkv.replay.traces.sharing import shared_prefixes


@dataclasses.dataclass(frozen=True)
class Reuse:
    """Reuse of a trace's prompts, whatever cache it meets.

    A unit is what hits grow by: so many tokens at a multiple of them, known by the whole prefix that they end. Requests
    that are too long are left out; the others are numbered in order.

    Attributes:
      unit: tokens of a unit.
      prompts: int64[n], tokens of each prompt.
      lengths: int64[n], tokens of each prompt and its output.
      free: int64[n], units of each prompt that an earlier request generated: no cache need have kept them.
      spans: int64[m, 3], units that can be hits: the last earlier request whose prompt had them, the request that has
        them again, and how many these are; in order of the second.
    """

    unit: int
    prompts: np.ndarray
    lengths: np.ndarray
    free: np.ndarray
    spans: np.ndarray


def reuse(requests: Sequence[TraceRequest], units: HitUnits, max_model_len: int) -> Reuse:
    """Finds the reuse of a trace's prompts.

    Args:
      requests: in order of arrival.
      units: the units in which the cache finds prefixes, with the blocks that prefixes are known by.
      max_model_len: most tokens of a request that is served.
    """
    served = [each for each in requests if each.input_length + each.output_length <= max_model_len]
    shared, _ = shared_prefixes(served, max_model_len)
    prompts = np.array([each.input_length for each in served], np.int64)
    most = units.boundaries(prompts, shared)[-1] // units.unit
    keys, per_unit = PrefixKeys(units.block, max(1, granularity(requests))), units.unit // units.block
    brought, generated = np.full(1 << 12, -1, np.int32), np.zeros(1 << 12, bool)
    free, spans = np.zeros(len(served), np.int64), []
    for index, request in enumerate(served):
        named = keys.of(request)[per_unit - 1 :: per_unit]
        while keys.count > len(brought):
            brought = np.concatenate([brought, np.full_like(brought, -1)])
            generated = np.concatenate([generated, np.zeros_like(generated)])
        whole = request.input_length // units.unit
        again = named[: most[index]]
        free[index] = generated[again].sum()
        last = brought[again[~generated[again]]]
        ends = np.flatnonzero(np.diff(last, append=-2))
        for count, end in zip(np.diff(ends, prepend=-1).tolist(), ends.tolist(), strict=True):
            if last[end] >= 0:
                spans.append((int(last[end]), index, count))
        brought[named[:whole]] = index
        generated[named[whole:]] = True
    lengths = prompts + np.array([each.output_length for each in served], np.int64)
    return Reuse(units.unit, prompts, lengths, free, np.array(spans, np.int64).reshape(-1, 3))
