"""The schedule of a replay under RTP-LLM's rules (`docs/replay.md`): a whole prompt gets its blocks at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hkv.dialects.rtp_llm.engines.engine import KeyedRtpEngine
from hkv.dialects.rtp_llm.log import structs
from hkv.dialects.rtp_llm.schedule.agreement import RtpRecorder
from hkv.errors import EngineProcessError
from hkv.replay.schedule import Arrival, LiveRequest, Refusal, Schedule, StepLoop

GRANTED, PERMANENT = "granted", "permanent"


class _Held(NamedTuple):
    """Length for which a running request's last allocation was made.

    Attributes:
      slots: as `_slots` gives them; none after the first allocation, which prunes nothing.
    """

    tokens: int
    slots: tuple[int, ...]


class RtpReplay(StepLoop):
    """Drives an engine under RTP-LLM's rules through a trace."""

    def __init__(
        self,
        engine: KeyedRtpEngine,
        block_size: int,
        caching: bool,
        schedule: Schedule,
        arrivals: Iterable[Arrival],
        observer: RtpRecorder,
    ) -> None:
        super().__init__(schedule, arrivals, observer)
        self._engine = engine
        self._size = block_size
        self._caching = caching
        self._told = observer
        self._reserve = schedule.lookahead + 1 if schedule.lookahead else 0
        self._now = 0
        self._held: dict[str, _Held] = {}

    def _request(self, live: LiveRequest) -> None:
        self._engine.request_keyed(live.id, live.arrival.prompt, live.keys, self._reserve)

    def _begin(self, step: int) -> None:
        self._now = step

    def _available(self) -> int:
        return self._engine.num_available()

    def _grow(self, live: LiveRequest, new: int) -> bool:
        """RTP-LLM asks at every step; what cannot change anything is not asked."""
        held = self._held[live.id]
        if held.tokens == live.tokens:
            return True
        slots = self._slots(live.tokens)
        if held.slots != slots and self._malloc(live).verdict != GRANTED:
            return False
        self._held[live.id] = _Held(live.tokens, slots)
        return True

    def _slots(self, tokens: int) -> tuple[int, ...]:
        """Lengths on which an allocation depends: slots, slots with the reserve, and whole blocks, which have keys."""
        return -(-tokens // self._size), -(-(tokens + self._reserve) // self._size), tokens // self._size

    def _admit(self, step: int, live: LiveRequest, budget: int) -> tuple[int, int] | Refusal:
        self._told.asked(step, live)
        answer = self._malloc(live)
        if answer.verdict != GRANTED:
            return Refusal.NEVER if answer.verdict == PERMANENT else Refusal.PUT_OFF
        self._held[live.id] = _Held(live.tokens, ())
        return answer.reused, min(live.tokens - answer.reused, budget)

    def _malloc(self, live: LiveRequest) -> structs.Malloc:
        answer = self._engine.perform(structs.MallocOp(id=live.id, reuse=self._caching, device_cache=self._caching))
        if not isinstance(answer, structs.Malloc):
            raise EngineProcessError("engine answered malloc", answer, "a verdict, the tokens reused and all lists")
        self._told.answered(self._now, live, answer.verdict)
        return answer

    def _free(self, live: LiveRequest, *, finished: bool) -> None:
        """Frees a request's blocks; if it finished, they enter the cache first. A preempted request's work is lost."""
        if finished and self._caching:
            self._engine.perform(structs.InsertOp(id=live.id))
        self._engine.perform(structs.FreeOp(id=live.id))
        del self._held[live.id]

    def _drop(self, live: LiveRequest) -> None:
        self._engine.perform(structs.DropOp(id=live.id))

    def _extend(self, live: LiveRequest, tokens: int) -> None:
        self._engine.extend(live.id, tokens)
