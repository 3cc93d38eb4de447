"""Number of the longest requests that fit at once, found by letting them run through the pool."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hkv.dialects.vllm.planning.plan import PlannedGroup
from hkv.errors import PlanError
from hkv.limits import MAX_CHUNKS
from hkv.spec import RequestLimits


@dataclasses.dataclass(frozen=True)
class Residency:
    """Result of a simulation of equal requests of the longest length.

    Attributes:
      requests: number of them that the pool holds at once, all at their full length.
      full_length_blocks: blocks that one of them holds at its last token, by group.
      peak_blocks: most blocks that one of them holds at any time, by group.
      peak_usage: most blocks in use at any time while `requests` of them run.
    """

    requests: int
    full_length_blocks: tuple[int, ...]
    peak_blocks: tuple[int, ...]
    peak_usage: int


def simulate(groups: Sequence[PlannedGroup], usable_blocks: int, limits: RequestLimits) -> Residency:
    """Runs requests of the longest length through the pool, and finds how many never run out of blocks.

    Prompts of all tokens but the last are computed in order of arrival, `max_in_flight_tokens` a step, so that a step
    may hold the end of one prompt and the beginning of the next. A request gives back what its window or chunk no
    longer reads when its own turn comes in the step after, as vLLM 0.33 `KVCacheManager.allocate_slots` does: those
    after it still hold theirs. A request whose prompt is done stays, at its last token. Nothing is shared or swapped
    out.

    Args:
      groups: the model's groups.
      usable_blocks: blocks that requests can hold: the pool without the null block.
      limits: longest request and tokens in flight.

    Raises:
      PlanError: so many requests in so many chunks that the simulation would not end (`hkv.limits.MAX_CHUNKS`).
    """
    budget, prompt = limits.max_in_flight_tokens, max(limits.max_model_len - 1, 1)

    @functools.lru_cache(maxsize=1 << 16)
    def held(start: int, end: int) -> int:
        return sum(_held(group, start, end, limits) for group in groups)

    last = held(limits.max_model_len - 1, limits.max_model_len)
    chunks = max(usable_blocks // last if last else 0, 1) * -(-prompt // budget)
    if chunks > MAX_CHUNKS:
        expected = f"at most {MAX_CHUNKS} to simulate: less memory, shorter requests or more tokens in flight"
        raise PlanError("chunks of prompts that fit at once", chunks, expected)

    @functools.cache
    def run(requests: int) -> _Run:
        return _run(requests, prompt, budget, held, last, usable_blocks)

    most = run(usable_blocks // last if last else 0)
    more = range(most.settled + 1, most.begun + 1)
    fits = most.settled + bisect.bisect_left(more, True, key=lambda requests: not run(requests).fits)
    return Residency(
        fits,
        tuple(_held(group, limits.max_model_len - 1, limits.max_model_len, limits) for group in groups),
        tuple(_peak(group, budget, prompt, limits) for group in groups),
        run(fits).peak,
    )


class _Run(NamedTuple):
    """Outcome of a run: most blocks in use; requests that began, and that came to their last token; True if all did."""

    peak: int
    begun: int
    settled: int
    fits: bool


def _run(requests: int, prompt: int, budget: int, held: Callable[[int, int], int], last: int, usable: int) -> _Run:
    """Runs so many requests until all are at their last token, or one finds too few blocks."""
    computing: list[tuple[int, int]] = []
    usage = peak = begun = settled = 0
    while settled < requests:
        left, before, computing = budget, computing, []
        for turn in itertools.count():
            if turn < len(before):
                done, blocks = before[turn]
            elif begun < requests and left:
                done, blocks, begun = 0, 0, begun + 1
            else:
                break
            tokens = min(left, prompt - done)
            now = held(done, done + tokens) if done < prompt else last
            usage += now - blocks
            if usage > usable:
                return _Run(peak, begun, settled, False)
            peak = max(peak, usage)
            settled += done == prompt
            if done < prompt:
                computing.append((done + tokens, now))
                left -= tokens
    return _Run(peak, begun, settled, True)


def _held(group: PlannedGroup, start: int, end: int, limits: RequestLimits) -> int:
    return max(spec.held_blocks(start, end, limits) for spec in group.specs or (group.spec,))


def _peak(group: PlannedGroup, budget: int, prompt: int, limits: RequestLimits) -> int:
    """Most blocks of one group that a request holds when it runs alone."""
    chunks = [(start, min(start + budget, prompt)) for start in range(0, prompt, budget)]
    chunks.append((limits.max_model_len - 1, limits.max_model_len))
    return max(_held(group, start, end, limits) for start, end in chunks)
