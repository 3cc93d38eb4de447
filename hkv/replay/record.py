"""Record of a replay: every request's outcome, every step's occupancy, and why hits ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from hkv.replay.reasons import HitReasons, Lacking
from hkv.replay.schedule import Arrival, LiveRequest

FINISHED = "finished"
NEVER_FITS = "never fits"
TOO_LONG = "too long"


@dataclasses.dataclass(slots=True)
class RequestRecord:
    """One request's fate. Steps are -1 for what never happened.

    Attributes:
      arrived: the first step that could see it.
      hit: tokens found in the cache when it was first admitted.
      admitted: the step of its first admission.
      ended: the step in which it finished or was refused for good.
      outcome: `finished`, `never fits` or `too long`.
      recomputed: tokens it had when it came back, over all its returns.
      recovered: of these, tokens found in the cache.
      seen: tokens at its start that an earlier request had too (`hkv.replay.schedule.Arrival.seen`).
      computed: tokens, at most `hkv.replay.schedule.Arrival.asked`, whose blocks had been computed by anybody then.
      lacking: what each group lacked there; nothing where the engine cannot tell.
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
    lacking: tuple[Lacking, ...] = ()


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
    """An `Observer` that keeps everything."""

    def __init__(self, num_blocks: int, diagnosis: HitReasons | None, progress: Callable[[], None]) -> None:
        self.requests: dict[int, RequestRecord] = {}
        self.steps = StepRecords()
        self._capacity = num_blocks - 1
        self._diagnosis = diagnosis
        self._progress = progress
        self._told: tuple[int, Sequence[Lacking]] = 0, ()
        self._step = StepSums()

    def too_long(self, step: int, arrival: Arrival) -> None:
        self._end(arrival, TOO_LONG, step)

    def looked_up(self, step: int, live: LiveRequest, hit: int) -> None:
        if self._diagnosis is not None and not live.preemptions:
            self._told = self._diagnosis.lacking(live.keys, hit, live.arrival.asked)

    def put_off(self, step: int, live: LiveRequest) -> None:
        self._step.put_off = 1

    def admitted(self, step: int, live: LiveRequest, hit: int) -> None:
        record = self._record(live.arrival)
        if live.preemptions:
            record.recomputed += live.tokens
            record.recovered += hit
            return
        record.hit, record.admitted = hit, step
        record.computed, record.lacking = self._told[0], tuple(self._told[1])
        self._step.prompt_tokens += live.tokens
        self._step.hit_tokens += hit

    def preempted(self, step: int, live: LiveRequest) -> None:
        self._record(live.arrival).preemptions += 1
        self._step.preemptions += 1

    def never_fits(self, step: int, live: LiveRequest) -> None:
        self._end(live.arrival, NEVER_FITS, step)

    def scheduled(self, step: int, running: int, waiting: int, free: int) -> None:
        steps, sums = self.steps, self._step
        steps.step.append(step)
        steps.in_use.append(self._capacity - free)
        steps.running.append(running)
        steps.waiting.append(waiting)
        steps.prompt_tokens.append(sums.prompt_tokens)
        steps.hit_tokens.append(sums.hit_tokens)
        steps.put_off.append(sums.put_off)
        steps.preemptions.append(sums.preemptions)
        self._step = StepSums()

    def finished(self, step: int, live: LiveRequest) -> None:
        self._end(live.arrival, FINISHED, step)

    def _end(self, arrival: Arrival, outcome: str, step: int) -> None:
        record = self._record(arrival)
        record.outcome, record.ended = outcome, step
        self._progress()

    def _record(self, arrival: Arrival) -> RequestRecord:
        record = self.requests.get(arrival.index)
        if record is None:
            record = RequestRecord(arrival.index, arrival.prompt, arrival.output, arrival.step, seen=arrival.seen)
            self.requests[arrival.index] = record
        return record


@dataclasses.dataclass(slots=True)
class StepSums:
    """Sums over the current step so far."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    put_off: int = 0
    preemptions: int = 0
