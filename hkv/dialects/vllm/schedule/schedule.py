"""The schedule of a replay under vLLM 0.33's rules: prompts are computed in chunks. `docs/replay.md` defines it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.engine import KeyedEngine
from hkv.dialects.vllm.log.structs import AllocateOp, CacheState, Hit
from hkv.replay.occupancy import Kind, Sampling
from hkv.replay.schedule import Arrival, LiveRequest, Recorder, Refusal, Schedule, StepLoop


class Replay(StepLoop):
    """Drives an engine through a trace, step by step, as vLLM 0.33's `Scheduler.schedule` would."""

    def __init__(
        self,
        engine: KeyedEngine,
        schedule: Schedule,
        chunking: Chunking,
        arrivals: Iterable[Arrival],
        observer: Recorder,
        sampling: Sampling | None = None,
        groups: int = 0,
    ) -> None:
        super().__init__(schedule, arrivals, observer)
        self._sampling, self._groups, self._done = sampling, groups, 0
        self._engine = engine
        self._chunking = chunking

    def _request(self, live: LiveRequest) -> None:
        self._engine.request_keyed(live.id, live.arrival.prompt, live.keys)

    def _begin(self, step: int) -> None:
        self._engine.step()

    def _ended(self, step: int) -> None:
        self._done += 1
        if self._sampling is not None and self._sampling.due(self._done):
            self._sampling.add(step, of_answer(self._engine.state(), self._groups))

    def _planned(self) -> None:
        if self._chunking.hash_block_size:
            self._engine.copies()

    def _available(self) -> int:
        return self._engine.num_free()

    def _advance(self, live: LiveRequest, tokens: int) -> None:
        self._engine.advance(live.id, tokens)

    def _tokens(self, live: LiveRequest, budget: int) -> int:
        return self._chunking.tokens(live, live.computed, budget)

    def _grow(self, live: LiveRequest, new: int) -> bool:
        return self._engine.allocate(self._operation(live, new)).blocks is not None

    def _free(self, live: LiveRequest, *, finished: bool) -> None:
        self._engine.free(live.id)

    def _drop(self, live: LiveRequest) -> None:
        self._engine.drop(live.id)

    def _extend(self, live: LiveRequest, tokens: int) -> None:
        self._engine.extend(live.id, tokens)

    def _admit(self, step: int, live: LiveRequest, budget: int) -> tuple[int, int] | Refusal:
        hit = self._engine.lookup(live.id)
        live.junction = hit.shared_prefix
        new = self._chunking.tokens(live, hit.hit, budget)
        if not new:
            return Refusal.LATER
        self._observer.looked_up(step, live, hit.hit)
        if self._engine.allocate(self._operation(live, new, hit)).blocks is None:
            return Refusal.PUT_OFF
        return hit.hit, new

    def _operation(self, live: LiveRequest, new: int, hit: Hit | None = None) -> AllocateOp:
        return AllocateOp(
            id=live.id,
            new=new,
            hit=0 if hit is None else hit.hit,
            lookahead=self._schedule.lookahead,
            external=0,
            delay=False,
            must_fit=hit is not None,
            reserved=0,
            in_flight=0,
            shared_prefix=None if hit is None else hit.shared_prefix,
        )


# End of a request's tokens in one step: at its last token, at the step's budget, or where a state must be kept.


class Progress(Protocol):
    """Fields of a request that chunking reads: `hkv.replay.schedule.LiveRequest` has them."""

    tokens: int
    junction: int

    @property
    def arrival(self) -> HasPrompt: ...


class HasPrompt(Protocol):
    """Something with a prompt of so many tokens."""

    @property
    def prompt(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Chunking:
    """Cuts a request's tokens into chunks, one a step (vLLM 0.33 `Scheduler._mamba_block_aligned_split`).

    Attributes:
      block_size: tokens between two states that recurrent groups can keep, or 0 when there are none to keep.
      eagle: whether the EAGLE drop rule is on: the last block after a hit cannot be trusted.
      hash_block_size: with sub-block hits, tokens between two boundaries where a prompt's last state is kept; else 0.
    """

    step_tokens: int
    block_size: int = 0
    eagle: bool = False
    hash_block_size: int = 0

    @classmethod
    def of(cls, config: VllmConfig, step_tokens: int) -> Chunking:
        """The chunking that a configuration asks for."""
        recurrent = [spec.block_size for spec in config.topology.specs if spec.snapshot]
        keep = math.lcm(*recurrent) if recurrent and config.caching else 0
        fine = config.hash_block_size if config.partial_hits else 0
        return cls(step_tokens, keep, config.uses_eagle, fine)

    def tokens(self, request: Progress, start: int, budget: int) -> int:
        """Tokens to compute next, from `start` on, at most `budget`. 0 when the budget does not reach the next stop."""
        end = min(request.tokens, start + budget)
        if self.block_size and start < max(request.arrival.prompt, request.tokens - 1):
            end = self._last_stop(request, start, end)
        return max(end - start, 0)

    def _last_stop(self, request: Progress, start: int, end: int) -> int:
        """States are kept where chunks end: chunks end on block boundaries, and never run past one that is needed."""
        size = self.block_size
        if end < max(request.arrival.prompt, request.tokens - 1):
            aligned = end // size * size
            if aligned > start or size <= self.step_tokens:
                end = aligned
        last = self._last_kept(request.tokens, size)
        stops = [last]
        if start % size:
            stops.append((start // size + 1) * size)
        if start < request.junction < end:
            stops.append(start + (request.junction - start) // size * size)
        if self.hash_block_size:
            tail = self._last_kept(request.arrival.prompt, self.hash_block_size)
            if last < tail < request.arrival.prompt:
                stops.append(tail)
        return min((stop for stop in stops if start < stop < end), default=end)

    def _last_kept(self, tokens: int, size: int) -> int:
        """The last multiple of `size` whose state a later request with these tokens can resume from."""
        return max(0, tokens // size * size - size if self.eagle else (tokens - 1) // size * size)


# Blocks of each group in a cache under vLLM 0.33's rules, counted in the state of any engine.


def of_answer(state: CacheState, groups: int) -> np.ndarray:
    """Blocks by `Kind` and group, int64[3, groups], in what an engine says of its state."""
    found = np.zeros((len(Kind), groups), np.int64)
    held = {int(block) for block in state.refs}
    for group in range(groups):
        found[Kind.HELD, group] = len(held.intersection(block for rows in state.rows.values() for block in rows[group]))
    for block, (group, _, _) in state.cached.items():
        found[Kind.CACHED, group] += 1
        found[Kind.EVICTABLE, group] += int(block) not in held
    return found
