"""The schedule of a replay: which request gets how many tokens computed in which step, and its record."""

from __future__ import annotations

import abc
import collections
import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hkv.errors import ConfigError
from hkv.limits import MAX_TOKENS, check_whole
from hkv.replay.observed import HitReasons, MissReason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The numbers that steer a replay. All are integers; no decision of a replay uses any other kind of number.

    Attributes:
      step_tokens: most tokens computed in one step, over all requests.
      decode_tokens: tokens that a request generates in a step at whose end all its tokens are computed.
      max_running: most requests running at once.
      lookahead: slots allocated for draft tokens beyond the tokens computed.
      max_model_len: most tokens of prompt and output together; longer requests are refused on arrival.
      closed_loop: 0 to let requests arrive when the trace says; else the number of requests kept in the system.
    """

    step_tokens: int = 8192
    decode_tokens: int = 2
    max_running: int = 256
    lookahead: int = 0
    max_model_len: int = 1 << 17
    closed_loop: int = 0

    def __post_init__(self) -> None:
        least = {"lookahead": 0, "closed_loop": 0}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            check_whole(field.name, value, least.get(field.name, 1), MAX_TOKENS)
        if self.step_tokens < self.decode_tokens:
            raise ConfigError("decode_tokens", self.decode_tokens, f"at most step_tokens {self.step_tokens}")


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """A request of the trace on its way in.

    Attributes:
      step: the first step that can see it.
      keys: makes its prefix keys, called once, on arrival, for requests that are not too long.
      seen: tokens at the start of its prompt that an earlier request that is not too long had too, as far as is known.
      asked: the boundary up to which it is asked why its hit ended.
    """

    index: int
    step: int
    prompt: int
    output: int
    keys: Callable[[], Sequence[int]]
    seen: int = 0
    asked: int = 0


class SharedArrivals(list[Arrival]):
    """Requests on their way in that several replays share.

    Attributes:
      prepared: the same as arrays, once a compiled replay made them; else None.
    """

    prepared: Any = None


@dataclasses.dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that is waiting or running.

    Attributes:
      shared_boundary: `shared_prefix` of the lookup that admitted it.
    """

    arrival: Arrival
    id: str
    keys: Sequence[int]
    tokens: int
    computed: int = 0
    shared_boundary: int = 0
    preemptions: int = 0


class Refusal(enum.Enum):
    """Reason why the request at the head of the queue did not get its blocks."""

    LATER = "the step has no token left for it; it was not asked for"
    ASIDE = "it waits for a transfer, and those behind it go on"
    PUT_OFF = "they may be free later"
    NEVER = "they never will be"


class StepLoop(abc.ABC):
    """Loop that all schedules share: requests arrive, wait in a queue, run in order of admission, grow, and end."""

    def __init__(self, engine: Any, schedule: Schedule, arrivals: Iterable[Arrival], observer: Recorder) -> None:
        self._engine, self._schedule = engine, schedule
        self._arrivals = iter(arrivals)
        self._next: Arrival | None = next(self._arrivals, None)
        self._observer = observer
        self._waiting: collections.deque[LiveRequest] = collections.deque()
        self._running: list[LiveRequest] = []

    def run(self) -> int:
        """Replays the whole trace; every request finishes or is refused for good. Returns the last step + 1."""
        step = 0
        while True:
            if not self._present():
                self._rest(step)
                if self._next is None:
                    return step
                if not self._schedule.closed_loop:
                    step = max(step, self._next.step)
            self._arrive(step)
            if self._present():
                self._step(step)
                step += 1

    def _present(self) -> int:
        """Requests that have arrived and neither finished nor been refused for good."""
        return len(self._running) + len(self._waiting)

    def _rest(self, step: int) -> None:
        """Nothing waits or runs before this step."""
        return

    def left(self) -> dict[str, Any]:
        """Fields of the outcome (`hkv.replay.run.Outcome`), once it has run."""
        return {"recorder": self._observer, "evictions": getattr(self._engine, "evictions", None)}

    def _request(self, live: LiveRequest) -> None:
        """Tells the engine of a new request, where it wants to know before the request is admitted."""
        return

    def _tokens(self, live: LiveRequest, budget: int) -> int:
        """Tokens that a running request computes next, at most `budget`."""
        return min(live.tokens - live.computed, budget)

    @abc.abstractmethod
    def _admit(self, live: LiveRequest, budget: int) -> tuple[int, int] | Refusal:
        """Looks up the request at the head of the queue, notifies the observer, and asks for its blocks.

        Returns:
          Tokens found in the cache, and tokens that it computes next, at most `budget`; or why it got no blocks.
        """

    @abc.abstractmethod
    def _available(self) -> int:
        """Blocks that could be handed out."""

    @abc.abstractmethod
    def _grow(self, live: LiveRequest, new: int) -> bool:
        """Gives a running request blocks for `new` more tokens; False when refused."""

    @abc.abstractmethod
    def _free(self, live: LiveRequest, *, finished: bool) -> None:
        """A request gives its blocks back."""

    def _drop(self, live: LiveRequest) -> None:
        """A request without blocks is forgotten."""
        return

    def _extend(self, live: LiveRequest, tokens: int) -> None:
        """A request generated `tokens` tokens."""
        return

    def _begin(self) -> None:
        """A step begins."""
        return

    def _ended(self, step: int) -> None:
        """A step has ended."""
        return

    def _planned(self) -> None:
        """Every request that computes in this step has its blocks."""
        return

    def _advance(self, live: LiveRequest, tokens: int) -> None:
        """The step computes `tokens` tokens of a request."""
        return

    def _step(self, step: int) -> None:
        """One step."""
        self._begin()
        scheduled: list[tuple[LiveRequest, int]] = []
        budget, refused = self._continue_running(step, scheduled)
        if not refused:
            self._admit_waiting(step, budget, scheduled)
        self._planned()
        running = len(self._running)
        self._observer.scheduled(step, running, self._present() - running, self._available())
        for live, tokens in scheduled:
            self._advance(live, tokens)
            self._compute(step, live, tokens)
        self._ended(step)

    def _arrive(self, step: int) -> None:
        while (arrival := self._next) is not None and self._is_due(arrival, step):
            self._next = next(self._arrivals, None)
            if arrival.prompt + arrival.output > self._schedule.max_model_len:
                self._observer.ended(step, arrival, TOO_LONG)
                continue
            live = LiveRequest(arrival, str(arrival.index), arrival.keys(), arrival.prompt)
            self._request(live)
            self._waiting.append(live)

    def _is_due(self, arrival: Arrival, step: int) -> bool:
        if self._schedule.closed_loop:
            return self._present() < self._schedule.closed_loop
        return arrival.step <= step

    def _continue_running(self, step: int, scheduled: list[tuple[LiveRequest, int]]) -> tuple[int, bool]:
        """Gives running requests their next tokens, oldest first. Returns the budget left, and if any was refused."""
        budget, refused, index = self._schedule.step_tokens, False, 0
        while index < len(self._running) and budget:
            live = self._running[index]
            index += 1
            new = self._tokens(live, budget)
            if not new:
                continue
            while not self._grow(live, new):
                refused = True
                if self._give_up_last(step) is live:
                    return budget, refused
            scheduled.append((live, new))
            budget -= new
        return budget, refused

    def _admit_waiting(self, step: int, budget: int, scheduled: list[tuple[LiveRequest, int]]) -> None:
        """Admits from the head of the queue on, until one is refused that may get its blocks later."""
        while self._waiting and budget and len(self._running) < self._schedule.max_running:
            live = self._waiting[0]
            answer = self._admit(live, budget)
            if answer is Refusal.LATER:
                return
            if answer is Refusal.PUT_OFF and self._blocks_return():
                self._observer.put_off()
                return
            self._waiting.popleft()
            if isinstance(answer, Refusal):
                self._refuse_for_good(step, live)
                continue
            hit, new = answer
            self._running.append(live)
            self._observer.admitted(step, live, hit)
            scheduled.append((live, hit + new))
            budget -= new

    def _blocks_return(self) -> bool:
        """True if others hold blocks that they will give back."""
        return bool(self._running)

    def _give_up_last(self, step: int) -> LiveRequest:
        """Preempts the request that was admitted last; one that runs alone and still does not fit never will."""
        victim = self._running.pop()
        self._free(victim, finished=False)
        victim.computed = 0
        if self._blocks_return():
            victim.preemptions += 1
            self._waiting.appendleft(victim)
            self._observer.preempted(victim)
        else:
            self._refuse_for_good(step, victim)
        return victim

    def _refuse_for_good(self, step: int, live: LiveRequest) -> None:
        self._drop(live)
        self._observer.ended(step, live.arrival, NEVER_FITS)

    def _compute(self, step: int, live: LiveRequest, tokens: int) -> None:
        """The step's computation of one request, after which it may generate, and finish."""
        live.computed += tokens
        if live.computed < live.tokens:
            return
        left = live.arrival.prompt + live.arrival.output - live.tokens
        if left > self._schedule.decode_tokens:
            self._extend(live, self._schedule.decode_tokens)
            live.tokens += self._schedule.decode_tokens
            return
        self._running.remove(live)
        self._free(live, finished=True)
        self._drop(live)
        self._observer.ended(step, live.arrival, FINISHED)


FINISHED = "finished"
NEVER_FITS = "never fits"
TOO_LONG = "too long"


@dataclasses.dataclass(slots=True)
class RequestRecord:
    """One request's result. Steps are -1 for what never happened.

    Attributes:
      arrived: the first step that could see it.
      hit: tokens found in the cache, its second tier included, when it was first admitted.
      admitted: the step of its first admission.
      ended: the step in which it finished or was refused for good.
      outcome: `finished`, `never fits` or `too long`.
      recomputed: tokens it had when it came back, over all its returns.
      recovered: of these, tokens found in the cache.
      seen: tokens at its start that an earlier request had too (`hkv.replay.schedule.Arrival.seen`).
      computed: tokens, at most `hkv.replay.schedule.Arrival.asked`, whose blocks had been computed by anybody then.
      miss_reasons: what each group lacked there; nothing where the engine cannot tell.
      loaded: of the hit, tokens that were loaded from a second tier.
    """

    index: int
    prompt: int
    output: int
    arrived: int
    hit: int = 0
    admitted: int = -1
    ended: int = -1
    outcome: str = ""
    preemptions: int = 0
    recomputed: int = 0
    recovered: int = 0
    seen: int = 0
    computed: int = 0
    miss_reasons: tuple[MissReason, ...] = ()
    loaded: int = 0


@dataclasses.dataclass(slots=True)
class StepRecords:
    """One entry per step that was not skipped.

    Attributes:
      in_use: blocks held by requests when all of the step's blocks are allocated.
      prompt_tokens: prompt tokens of the requests first admitted in it.
      hit_tokens: of these, tokens found in the cache.
      put_off: 1 if the head of the queue was refused in it, else 0.
    """

    step: list[int] = dataclasses.field(default_factory=list)
    in_use: list[int] = dataclasses.field(default_factory=list)
    running: list[int] = dataclasses.field(default_factory=list)
    waiting: list[int] = dataclasses.field(default_factory=list)
    prompt_tokens: list[int] = dataclasses.field(default_factory=list)
    hit_tokens: list[int] = dataclasses.field(default_factory=list)
    put_off: list[int] = dataclasses.field(default_factory=list)
    preemptions: list[int] = dataclasses.field(default_factory=list)


class Recorder:
    """Is told what happens, and keeps everything; `diagnosis` is None where the engine cannot tell why hits ended."""

    def __init__(self, num_blocks: int, diagnosis: HitReasons | None, progress: Callable[[], None]) -> None:
        self.requests: dict[int, RequestRecord] = {}
        self.steps = StepRecords()
        self._capacity = num_blocks - 1
        self._diagnosis = diagnosis
        self._progress = progress
        self._told: tuple[int, Sequence[MissReason]] = 0, ()
        self._sums = dict.fromkeys(SUMS, 0)

    def looked_up(self, live: LiveRequest, hit: int) -> None:
        """The request at the head of the queue, of which `hit` tokens are cached, is about to ask for blocks."""
        if self._diagnosis is not None and not live.preemptions:
            self._told = self._diagnosis.miss_reasons(live.keys, hit, live.arrival.asked)

    def put_off(self) -> None:
        """The request just looked up was refused and stays at the head of the queue."""
        self._sums["put_off"] = 1

    def admitted(self, step: int, live: LiveRequest, hit: int, loaded: int = 0) -> None:
        """The request just looked up got its blocks and runs, or waits for the tokens that are loaded into them."""
        record = self._record(live.arrival)
        if live.preemptions:
            record.recomputed += live.tokens
            record.recovered += hit
            return
        record.hit, record.admitted, record.loaded = hit, step, loaded
        record.computed, record.miss_reasons = self._told[0], tuple(self._told[1])
        self._sums["prompt_tokens"] += live.tokens
        self._sums["hit_tokens"] += hit

    def preempted(self, live: LiveRequest) -> None:
        """A running request gave all its blocks back and waits again."""
        self._record(live.arrival).preemptions += 1
        self._sums["preemptions"] += 1

    def scheduled(self, step: int, running: int, waiting: int, free: int) -> None:
        """Every request that computes in this step has its blocks; none has been given back by a finished one."""
        values = {"step": step, "in_use": self._capacity - free, "running": running, "waiting": waiting, **self._sums}
        for name, value in values.items():
            getattr(self.steps, name).append(value)
        self._sums = dict.fromkeys(SUMS, 0)

    def ended(self, step: int, arrival: Arrival, outcome: str) -> None:
        """A request generated its last token and gave its blocks back, or was refused for good, on arrival or later."""
        record = self._record(arrival)
        record.outcome, record.ended = outcome, step
        self._progress()

    def _record(self, arrival: Arrival) -> RequestRecord:
        record = self.requests.get(arrival.index)
        if record is None:
            record = RequestRecord(arrival.index, arrival.prompt, arrival.output, arrival.step, seen=arrival.seen)
            self.requests[arrival.index] = record
        return record


SUMS = ("prompt_tokens", "hit_tokens", "put_off", "preemptions")
"""Fields of `StepRecords` that are summed up while a step's blocks are allocated."""
