"""How many of the longest requests fit at once, found by letting them run through the pool."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from hkv.planning.plan import PlannedGroup
from hkv.spec import RequestLimits


@dataclasses.dataclass(frozen=True)
class Residency:
    """What a simulation of equal requests of the longest length found.

    Attributes:
      requests: how many of them the pool holds at once, all at their full length.
      full_length_blocks: blocks that one of them holds at its last token, by group.
      peak_blocks: most blocks that one of them holds at any time, by group.
      peak_usage: most blocks in use at any time while `requests` of them run.
    """

    requests: int
    full_length_blocks: tuple[int, ...]
    peak_blocks: tuple[int, ...]
    peak_usage: int


def simulate(groups: Sequence[PlannedGroup], usable_blocks: int, limits: RequestLimits) -> Residency:
    """Runs requests of the longest length through the pool until one more does not fit.

    Prompts of all tokens but the last are computed in order of arrival, `max_in_flight_tokens` a step, so that a step
    may hold the end of one prompt and the beginning of the next. What a window or chunk no longer reads is given back
    in the step after. A request whose prompt is done stays, at its last token. Nothing is shared or swapped out.

    Args:
      groups: the model's groups.
      usable_blocks: blocks that requests can hold: the pool without the null block.
      limits: longest request and tokens in flight.
    """
    budget, prompt = limits.max_in_flight_tokens, max(limits.max_model_len - 1, 1)

    @functools.lru_cache(maxsize=1 << 16)
    def held(start: int, end: int) -> int:
        return sum(_held(group, start, end, limits) for group in groups)

    last = held(limits.max_model_len - 1, limits.max_model_len)
    requests = peak = in_step = begun = step = 0
    while last and (requests + 1) * last <= usable_blocks:
        first = requests * prompt
        if first // budget != step:
            step, in_step, begun = first // budget, 0, 0
        usage, blocks = _run(first, prompt, budget, held, in_step + (requests - begun) * last, requests * last)
        if usage > usable_blocks:
            break
        requests += 1
        peak = max(peak, usage, requests * last)
        end_step = (first + prompt - 1) // budget
        in_step, begun = (in_step + blocks, begun + 1) if end_step == step else (blocks, 1)
        step = end_step
    return Residency(
        requests,
        tuple(_held(group, limits.max_model_len - 1, limits.max_model_len, limits) for group in groups),
        tuple(_peak(group, budget, prompt, limits) for group in groups),
        peak,
    )


def _run(
    first: int, prompt: int, budget: int, held: Callable[[int, int], int], beside: int, later: int
) -> tuple[int, int]:
    """Most blocks in use while one prompt runs, and its own blocks in its last step.

    `beside` blocks belong to others in its first step, `later` in those after.
    """
    start = most = blocks = 0
    while start < prompt:
        end = min(prompt, ((first + start) // budget + 1) * budget - first)
        blocks = held(start, end)
        most = max(most, blocks + (later if start else beside))
        start = end
    return most, blocks


def _held(group: PlannedGroup, start: int, end: int, limits: RequestLimits) -> int:
    return max(spec.held_blocks(start, end, limits) for spec in group.specs or (group.spec,))


def _peak(group: PlannedGroup, budget: int, prompt: int, limits: RequestLimits) -> int:
    """Most blocks of one group that a request holds when it runs alone."""
    chunks = [(start, min(start + budget, prompt)) for start in range(0, prompt, budget)]
    chunks.append((limits.max_model_len - 1, limits.max_model_len))
    return max(_held(group, start, end, limits) for start, end in chunks)
