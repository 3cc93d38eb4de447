"""Number of the longest requests that fit at once, found by letting them run through the pool."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.planning.plan import PlannedGroup
from hkv.errors import PlanError
from hkv.limits import MAX_CHUNKS
from hkv.spec import LayerSpec, RequestLimits


@dataclasses.dataclass(frozen=True)
class Residency:
    """Number of the longest requests that the pool holds at once, all at their full length.

    Of one of them, by group: blocks at its last token, and most blocks at any time; of all together, the most in use.
    """

    requests: int
    full_length_blocks: tuple[int, ...]
    peak_blocks: tuple[int, ...]
    peak_usage: int


def simulate(
    groups: Sequence[PlannedGroup],
    usable_blocks: int,
    limits: RequestLimits,
    *,
    step_tokens: int | None = None,
    batches: int = 1,
) -> Residency:
    """Runs requests of the longest length through the pool, and finds how many never run out of blocks.

    Prompts of all tokens but the last are computed in order of arrival, `step_tokens` a step, so that a step may hold
    the end of one prompt and the beginning of the next. A request gives back what its window or chunk no longer reads
    when its own turn comes in the step after, as vLLM 0.33 `KVCacheManager.allocate_slots` does: those after it still
    hold theirs. What a step still running computes counts as not yet computed then. A request whose prompt is done
    stays, at its last token. Nothing is shared or swapped out. `batches` counts the steps in flight at the same
    time, the one that is scheduled among them.
    """
    budget, prompt = step_tokens or limits.max_in_flight_tokens, max(limits.max_model_len - 1, 1)

    alike = [tuple(dict.fromkeys(group.specs or (group.spec,))) for group in groups]  # layers of one kind hold the same

    @functools.lru_cache(maxsize=1 << 16)
    def held(start: int, end: int) -> int:
        return sum(_held(specs, start, end, limits) for specs in alike)

    resting = _ResidentRequest.resting(limits.max_model_len, batches)
    last = held(*resting.span(limits.max_model_len, 0))
    chunks = max(usable_blocks // last if last else 0, 1) * -(-prompt // budget)
    if chunks > MAX_CHUNKS:
        expected = f"at most {MAX_CHUNKS} to simulate: less memory, shorter requests or more tokens in flight"
        raise PlanError("chunks of prompts that fit at once", chunks, expected)

    @functools.cache
    def run(requests: int) -> _Run:
        return _run(requests, resting, limits.max_model_len, budget, held, usable_blocks)

    most = run(usable_blocks // last if last else 0)
    more = range(most.settled + 1, most.begun + 1)
    fits = most.settled + bisect.bisect_left(more, True, key=lambda requests: not run(requests).fits)
    return Residency(
        fits,
        tuple(_held(specs, *resting.span(limits.max_model_len, 0), limits) for specs in alike),
        tuple(_peak(specs, resting, budget, limits) for specs in alike),
        run(fits).peak,
    )


class _ResidentRequest(NamedTuple):
    """A request between two of its turns: prompt tokens scheduled so far, and how many each step computes that runs."""

    done: int
    running: tuple[int, ...]

    @classmethod
    def resting(cls, longest: int, batches: int) -> _ResidentRequest:
        """A request that stays at its last token, no step computing its prompt any more."""
        return cls(max(longest - 1, 1), (0,) * (batches - 1))

    def span(self, longest: int, tokens: int) -> tuple[int, int]:
        """Tokens whose computation is over at its next turn, and those for which it then has blocks.

        Where no more prompt tokens are scheduled in that turn, the last token is.
        """
        done = min(self.done, longest - 1)
        return max(done - sum(self.running), 0), self.done + tokens if tokens else longest

    def after(self, tokens: int) -> _ResidentRequest:
        """The request after a turn of so many prompt tokens, or of the last token."""
        return _ResidentRequest(self.done + tokens, (*self.running, tokens)[1:])


class _Run(NamedTuple):
    """Outcome of a run: most blocks in use; requests that began, and that came to their last token; True if all did."""

    peak: int
    begun: int
    settled: int
    fits: bool


def _run(
    requests: int, resting: _ResidentRequest, longest: int, budget: int, held: Callable[[int, int], int], usable: int
) -> _Run:
    """Runs so many requests until all are at their last token, or one finds too few blocks."""
    computing: list[tuple[_ResidentRequest, int]] = []
    usage = peak = begun = settled = 0
    while settled < requests:
        left, before, computing = budget, computing, []
        for turn in itertools.count():
            if turn < len(before):
                request, blocks = before[turn]
            elif begun < requests and left:
                request, blocks, begun = _ResidentRequest(0, (0,) * len(resting.running)), 0, begun + 1
            else:
                break
            tokens = min(left, resting.done - request.done)
            now = held(*request.span(longest, tokens))
            usage += now - blocks
            if usage > usable:
                return _Run(peak, begun, settled, False)
            peak = max(peak, usage)
            if request == resting:
                settled += 1
            else:
                computing.append((request.after(tokens), now))
                left -= tokens
    return _Run(peak, begun, settled, True)


def _held(specs: Sequence[LayerSpec], start: int, end: int, limits: RequestLimits) -> int:
    if len(specs) == 1:
        return kinds.layer(specs[0]).held_blocks(start, end, limits)
    return max(kinds.layer(spec).held_blocks(start, end, limits) for spec in specs)


def _peak(specs: Sequence[LayerSpec], resting: _ResidentRequest, budget: int, limits: RequestLimits) -> int:
    """Most blocks of one group that a request holds when it runs alone."""
    longest, request, most = limits.max_model_len, _ResidentRequest(0, (0,) * len(resting.running)), 0
    while request != resting:
        tokens = min(budget, resting.done - request.done)
        most = max(most, _held(specs, *request.span(longest, tokens), limits))
        request = request.after(tokens)
    return max(most, _held(specs, *resting.span(longest, 0), limits))


# Number of blocks that a request needs, and length of the longest request that fits into a memory.


def request_blocks(groups: Sequence[PlannedGroup], limits: RequestLimits) -> int:
    """Blocks reserved for one request of the longest length, all groups together.

    Each group draws its own blocks from the shared pool; the neediest layer of a mixed group decides (vLLM 0.33
    `_max_memory_usage_bytes_from_groups`). An empty group still takes blocks: its table exists on every stage.
    """
    layers = [[kinds.layer(spec) for spec in group.specs or (group.spec,)] for group in groups]
    return sum(max(layer.max_request_blocks(limits) for layer in group) for group in layers)


def longest_request(groups: Sequence[PlannedGroup], limits: RequestLimits, blocks: int) -> int:
    """Tokens of the longest request, up to `limits.max_model_len`, that `blocks` blocks can hold; 0 if none can."""
    lengths = range(1, limits.max_model_len + 1)
    return bisect.bisect_right(lengths, blocks, key=lambda n: request_blocks(groups, limits.with_max_model_len(n)))


def fit_length(
    workers: Sequence[Sequence[PlannedGroup]], blocks: Sequence[int], limits: RequestLimits
) -> RequestLimits:
    """The limits with the longest request that fits on every worker (vLLM 0.33 `_auto_fit_max_model_len`)."""
    longest = min(longest_request(groups, limits, count) for groups, count in zip(workers, blocks, strict=True))
    if longest < 1:
        raise PlanError("memory", list(blocks), "blocks for a request of one token")
    return limits.with_max_model_len(longest)


def check_fits(groups: Sequence[PlannedGroup], usable: int, block: int, memory: int, limits: RequestLimits) -> None:
    """Raise PlanError unless one longest request fits besides the null block (vLLM `_check_enough_kv_cache_memory`)."""
    needed = request_blocks(groups, limits)
    if needed <= usable:
        return
    longest = longest_request(groups, limits, usable)
    hint = f"; requests of {longest} tokens would fit" if longest else ""
    expected = (
        f"at least {(needed + 1) * block} bytes: {needed} blocks of {block} bytes for a request of "
        f"{limits.max_model_len} tokens, and the null block{hint}"
    )
    raise PlanError("memory", memory, expected)
