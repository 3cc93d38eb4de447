"""Most hits that any choice of evictions could find: Belady's rule over the groups that read everything.

See `docs/replay.md`.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from hkv.replay.observed import HitUnits
from hkv.replay.traces.interned import InternedTrace
from hkv.spec import LayerSpec

NO_LIMIT = 1 << 60
"""Room at a moment of which nothing is known."""


@dataclasses.dataclass(frozen=True)
class BoundedPool:
    """Groups that draw their blocks from one pool.

    Attributes:
      blocks: blocks that can be handed out.
      reserve: of these, blocks that a request may have to leave free.
    """

    blocks: int
    specs: Sequence[LayerSpec]
    reserve: int = 0


def optimal_hits(reuse: Reuse, pools: Sequence[BoundedPool], lookahead: int = 0) -> np.ndarray:
    """Hit tokens of each request, the sum of which no choice of evictions exceeds.

    Returns:
      int64[n]. Only the sum is a bound: another choice may find more for some request, and less for others.
    """
    certain, possible = np.ones((2, len(reuse.prompts)), bool)
    room = np.full(len(reuse.prompts), NO_LIMIT, np.int64)
    for pool in pools:
        held = _held_by_prompts(reuse, pool)
        certain &= _most_needed(reuse, pool, lookahead) <= pool.blocks - pool.reserve
        possible &= held <= pool.blocks
        room = np.minimum(room, _room(reuse, pool, held))
    spans = reuse.spans[possible[reuse.spans[:, 1]]]
    kept = _kept(spans, np.where(certain, room, NO_LIMIT))
    return (np.where(possible, reuse.free, 0) + kept) * reuse.unit


def _most_needed(reuse: Reuse, pool: BoundedPool, lookahead: int) -> np.ndarray:
    """Blocks that a request needs at most: one that needs no more than there are is never refused for good."""
    longest = reuse.lengths + lookahead
    return sum((-(-longest // spec.block_size) + 1 + spec.scratch_blocks for spec in pool.specs), 0 * longest)


def _held_by_prompts(reuse: Reuse, pool: BoundedPool) -> np.ndarray:
    """Blocks of a pool that each request must have at the moment at which it has all its prompt's, at least."""
    lengths, places = np.unique(reuse.prompts, return_inverse=True)
    return np.array([sum(_held(spec, prompt) for spec in pool.specs) for prompt in lengths.tolist()], np.int64)[places]


def _room(reuse: Reuse, pool: BoundedPool, held: np.ndarray) -> np.ndarray:
    """Units of other prompts that a pool has room for at these moments."""
    size = sum((Fraction(reuse.unit, spec.block_size) for spec in pool.specs if spec.reads_all), Fraction(0))
    if not size:
        return np.full(len(reuse.prompts), NO_LIMIT, np.int64)
    return np.maximum(pool.blocks - held, 0) * size.denominator // size.numerator


def _held(spec: LayerSpec, prompt: int) -> int:
    """Blocks that a request must have of a group while the last token of its prompt is computed, at least."""
    if not spec.prefix_cacheable:
        return 0
    if spec.snapshot:
        return 1
    count = after = 0
    for part in (*spec.reads(prompt - 1), range(prompt - 1, prompt)):
        stop = (part.stop - 1) // spec.block_size + 1
        count += max(0, stop - max(part.start // spec.block_size, after))
        after = max(after, stop)
    return count


def _kept(spans: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Units kept for each request, as many as possible in all.

    A unit of a span takes room at all moments after its first request's and before its last one's. Where there are too
    many, those go that are wanted last: of intervals that count alike no other choice keeps more, however the room
    changes.
    """
    count = len(room)
    kept, left, wanted = np.zeros(count, np.int64), spans[:, 2].tolist(), spans[:, 1].tolist()
    beginning: list[list[int]] = [[] for _ in range(count)]
    ending: list[list[int]] = [[] for _ in range(count)]
    for span, (first, last) in enumerate(spans[:, :2].tolist()):
        beginning[first].append(span)
        ending[last].append(span)
    held, heap = 0, []
    for moment, most in enumerate(room.tolist()):
        for span in ending[moment]:
            held -= left[span]
            kept[moment] += left[span]
        while held > most:
            span = heap[0][1]
            given = min(left[span], held - most)
            left[span] -= given
            held -= given
            if not left[span]:
                heapq.heappop(heap)
        for span in beginning[moment]:
            held += left[span]
            heapq.heappush(heap, (-wanted[span], span))
    return kept


# Reuse of a trace's prompts: which units of each prompt an earlier request brought, and which one did last.


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
    """Finds the reuse of a trace's prompts."""
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
