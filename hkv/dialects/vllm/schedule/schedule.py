"""The schedule of a replay under vLLM 0.33's rules: prompts are computed in chunks. `docs/replay.md` defines it."""

from __future__ import annotations

from collections.abc import Iterable

from hkv.dialects.vllm.engines.engine import KeyedEngine
from hkv.dialects.vllm.log.structs import AllocateOp, Hit
from hkv.dialects.vllm.schedule import occupancy
from hkv.dialects.vllm.schedule.chunking import Chunking
from hkv.replay.occupancy import Sampling
from hkv.replay.schedule import Arrival, LiveRequest, Observer, Refusal, Schedule, StepLoop


class Replay(StepLoop):
    """Drives an engine through a trace, step by step, as vLLM 0.33's `Scheduler.schedule` would.

    Args:
      engine: an empty engine.
      schedule: the numbers.
      chunking: rule by which prefill chunks end.
      arrivals: the trace, `step` never falling.
      observer: is told what happens.
      sampling: takes samples of the engine's state; None for none.
      groups: groups of the cache.
    """

    def __init__(
        self,
        engine: KeyedEngine,
        schedule: Schedule,
        chunking: Chunking,
        arrivals: Iterable[Arrival],
        observer: Observer,
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
            self._sampling.add(step, occupancy.of_answer(self._engine.state(), self._groups))

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
