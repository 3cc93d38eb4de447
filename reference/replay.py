"""The schedule of a replay, whatever cache it drives: requests arrive, wait, run in order of admission, grow, and end.

A step gives every running request its next tokens, oldest first, then admits from the head of the queue, as long as
the step's budget lasts; at its end the tokens are computed. When a running request is refused room, the one admitted
last gives back everything and waits at the head of the queue.

The cache is asked one operation at a time (`Replay.operate`), in *turns*: each goes on to the next request that the
cache has something to do for, asks it, and notes what follows from the answer. Whatever cache it is says what a request
asks of it, and until when it need not be asked.
"""

from __future__ import annotations

import enum

from reference.language import Line, Part, Record, Ring, Settings, Table, Text
from reference.language.clauses import seldom

TEXT = Text(__name__)

LAST_STEP = 1 << 29
"""A step that no replay reaches."""


class Arrival(Record):
    """A request of the trace, and what became of it. Lengths are in tokens; steps are -1 for what never happened.

    Attributes:
      step: the first step that can see it. prompt, output: tokens. first_key: place of its first prefix key.
      asked: the boundary up to which it is asked why its hit ended.
      next: the request behind it in the queue. tokens: that it has while it waits.
      hit: tokens found when it was first admitted. admitted, ended: steps. outcome: an `Outcome`.
      computed: tokens up to `asked` whose blocks had been computed by anybody when it was looked up first. reasons: of
      each group, the dialect's number of a reason why it had no more of them.
      preemptions: times that it gave everything back. recomputed: tokens that it had when it came back, over all its
      returns. recovered: of these, tokens that were found.
    """

    step: int
    prompt: int
    output: int
    first_key: int
    asked: int
    next: Arrival
    tokens: int
    hit: int
    admitted: int
    ended: int
    outcome: int
    preemptions: int
    recomputed: int
    recovered: int
    computed: int
    reasons: Line[int]


class Live(Record):
    """A request that runs, or that is about to.

    Attributes:
      arrival: the request. next: where it is vacant, the next vacant one. tokens: of prompt and output so far.
      computed: of these. scheduled: that this step computes, those of a hit included. came: tokens with which it was
      admitted. undisturbed: tokens up to which the cache has nothing to do for it, as the dialect counts them.
    """

    arrival: Arrival
    next: Live
    tokens: int
    computed: int
    scheduled: int
    came: int
    undisturbed: int


class Step(Record):
    """A step, once all its requests have room.

    Attributes:
      step: its number. in_use: blocks held by requests. running, waiting: requests. prompt_tokens: of the requests that
      were first admitted in it; hit_tokens: of these, found. put_off: whether the head of the queue was refused.
      preemptions: requests that gave everything back.
    """

    step: int
    in_use: int
    running: int
    waiting: int
    prompt_tokens: int
    hit_tokens: int
    put_off: int
    preemptions: int


class Numbers(Settings):
    """Numbers that steer a replay: `hkv.replay.schedule.Schedule`."""

    step_tokens: int
    decode_tokens: int
    max_running: int
    lookahead: int
    max_model_len: int
    closed_loop: int


class Phase(enum.IntEnum):
    """Phase of a step: it begins; running requests grow; one is preempted; the queue is admitted; every request has its
    room; tokens are computed; the cache takes what one computes; one ends; all is done; the cache failed."""

    BEGIN, GROW, PREEMPT, ADMIT, READY, COMPUTE, ENTER, FINISH, DONE, FAILED = range(10)


class Answer(enum.IntEnum):
    """Answer of the cache: more is to be asked for the same; done; refused for want of room, for now or for good; not
    as it should be."""

    MORE, DONE, REFUSED, NEVER, FAILED = range(5)


class Outcome(enum.IntEnum):
    """End of a request."""

    NONE, FINISHED, NEVER_FITS, TOO_LONG = range(4)


ASKS = Phase.GROW, Phase.PREEMPT, Phase.ADMIT, Phase.ENTER, Phase.FINISH
"""Phases in which the cache is asked something."""


class Replay(Part):
    """A trace, its requests on their way, and a record of each step. A subclass has the cache.

    Attributes:
      count: requests of the trace. arrived: that have arrived. active, waiting: that run, that wait in the queue.
      ended: that finished or were refused for good. first, last: ends of the queue. vacant: a request that neither runs
      nor is about to.
      running: requests that run, in order of admission.
      recorded: steps on record; no step begins when there are `most_steps` of them, nor from step `until` on.
      phase: a `Phase`. step: the step's number. live: the request at hand; beside a preempted one, `asked` is the one
      that was refused. midway: whether the cache was asked and has more to do. entered: whether it took what that
      request computes. budget: tokens that the step may still compute. new: those of the request at hand. hit: tokens
      found for it. refused: whether a running one was refused room in this step.
      sums: of the step, so far.
    """

    arrivals: Table[Arrival]
    lives: Table[Live]
    steps: Table[Step]
    running: Ring[Live]
    numbers: Numbers
    count: int
    arrived: int
    active: int
    waiting: int
    ended: int
    first: Arrival
    last: Arrival
    vacant: Live
    recorded: int
    most_steps: int
    until: int
    phase: int
    step: int
    live: Live
    asked: Live
    midway: int
    entered: int
    budget: int
    new: int
    hit: int
    refused: int
    prompt_tokens: int
    hit_tokens: int
    put_off: int
    preemptions: int

    # What the cache says.

    def operate(self, live: Live) -> int:
        """Asks the cache for the next operation of the phase: of GROW, room for `new` tokens of a request, computed
        after those it has; of ADMIT, what is cached (`hit`) and room for `new` more; of PREEMPT and FINISH, to give
        everything back; of ENTER, to take what the step computes of it. An `Answer`."""
        raise NotImplementedError

    def next_tokens(self, live: Live, budget: int) -> int:
        """Tokens that a running request computes next."""
        return min(live.tokens - live.computed, budget)

    def needs(self, live: Live, new: int) -> bool:
        """True if the cache has something to do for a running request of which `new` tokens more are computed."""
        raise NotImplementedError

    def enters(self, live: Live) -> bool:
        """True if the cache takes what a request computes in this step before it is computed."""
        raise NotImplementedError

    def in_use(self) -> int:
        """Blocks that requests hold."""
        raise NotImplementedError


def empty(r: Replay, lives: int) -> None:
    """Nothing has arrived yet; `lives` requests may run or be about to, the first record is the end of the ring."""
    ends = r.lives[1]
    r.running.ends, r.running.newer[ends], r.running.older[ends] = ends, ends, ends
    for n in range(2, lives + 2):
        r.lives[n].next = r.vacant
        r.vacant = r.lives[n]


def run(r: Replay) -> None:
    """Steps until the trace ends, there is no room to record another one, or `until` is reached."""
    while r.phase < Phase.DONE and not (r.phase == Phase.BEGIN and (r.recorded >= r.most_steps or r.step >= r.until)):
        turn(r)


def turn(r: Replay) -> None:
    """Goes on to the next request that the cache has something to do for, asks it, and notes what follows."""
    if not r.midway:
        if r.phase == Phase.BEGIN:
            begin(r)
        if r.phase == Phase.GROW:
            pass_over(r)
        if seldom(r.phase == Phase.ADMIT):
            look_at_queue(r)
        if seldom(r.phase == Phase.READY):
            record(r)
        if r.phase == Phase.COMPUTE:
            compute(r)
    if r.phase in ASKS:
        answer = r.operate(r.live)
        r.midway = answer == Answer.MORE
        if answer == Answer.FAILED:
            r.phase = Phase.FAILED
        elif answer != Answer.MORE:
            follow(r, r.live, answer)


def begin(r: Replay) -> None:
    """The clock goes on where nothing waits or runs; what is due arrives; a step begins if there is something to do."""
    if r.active + r.waiting == 0:
        if r.arrived == r.count:
            r.phase = Phase.DONE
            return
        if r.numbers.closed_loop == 0:
            r.step = max(r.step, min(r.arrivals[r.arrived + 1].step, r.until))
    while r.arrived < r.count and r.step < r.until and is_due(r, r.arrivals[r.arrived + 1]):
        r.arrived += 1
        arrive(r, r.arrivals[r.arrived])
    if r.active + r.waiting > 0:
        r.phase, r.live, r.budget, r.refused = Phase.GROW, r.running.oldest(), r.numbers.step_tokens, 0


def is_due(r: Replay, arrival: Arrival) -> bool:
    """True if a request arrives now: at its step, or where so many are kept in the system."""
    if r.numbers.closed_loop:
        return r.active + r.waiting < r.numbers.closed_loop
    return arrival.step <= r.step


def arrive(r: Replay, arrival: Arrival) -> None:
    """A request goes to the end of the queue, unless it is too long."""
    arrival.admitted, arrival.ended, arrival.tokens = -1, -1, arrival.prompt
    if arrival.prompt > r.numbers.max_model_len or arrival.output > r.numbers.max_model_len - arrival.prompt:
        end(r, arrival, Outcome.TOO_LONG)
        return
    if r.waiting == 0:
        r.first = arrival
    else:
        r.last.next = arrival
    r.last = arrival
    r.waiting += 1


def end(r: Replay, arrival: Arrival, outcome: int) -> None:
    """A request finished, or was refused for good."""
    arrival.ended, arrival.outcome = r.step, outcome
    r.ended += 1


def pass_over(r: Replay) -> None:
    """Gives running requests their next tokens, up to one that the cache has something to do for."""
    while r.live is not r.running.ends and r.budget > 0:
        live = r.live
        new = r.next_tokens(live, r.budget)
        if new > 0 and r.needs(live, new):
            r.new = new
            return
        live.scheduled = new
        r.budget -= new
        r.live = r.running.newer[live]
    r.phase = Phase.READY if r.refused else Phase.ADMIT


def look_at_queue(r: Replay) -> None:
    """The head of the queue is at hand, if it may be admitted now."""
    if r.waiting > 0 and r.budget > 0 and r.active < r.numbers.max_running:
        live = r.vacant
        live.arrival, live.tokens, live.computed, live.came = r.first, r.first.tokens, 0, r.first.tokens
        r.live = live
    else:
        r.phase = Phase.READY


def record(r: Replay) -> None:
    """Puts the step on record, in which every request has its room now."""
    r.recorded += 1
    step = r.steps[r.recorded]
    step.step, step.in_use, step.running, step.waiting = r.step, r.in_use(), r.active, r.waiting
    step.prompt_tokens, step.hit_tokens = r.prompt_tokens, r.hit_tokens
    step.put_off, step.preemptions = r.put_off, r.preemptions
    r.prompt_tokens, r.hit_tokens, r.put_off, r.preemptions = 0, 0, 0, 0
    r.phase, r.live, r.entered = Phase.COMPUTE, r.running.oldest(), 0


def compute(r: Replay) -> None:
    """The step's computation, up to a request that the cache takes something of, or that ends; then the step ends."""
    while r.live is not r.running.ends:
        live = r.live
        if live.scheduled > 0:
            if not r.entered and r.enters(live):
                r.phase = Phase.ENTER
                return
            live.computed += live.scheduled
            live.scheduled, r.entered = 0, 0
            if live.computed >= live.tokens:
                if live.arrival.prompt + live.arrival.output - live.tokens <= r.numbers.decode_tokens:
                    r.phase = Phase.FINISH
                    return
                live.tokens += r.numbers.decode_tokens
        r.live = r.running.newer[live]
    r.phase = Phase.BEGIN
    r.step += 1


def follow(r: Replay, live: Live, answer: int) -> None:
    """Transition by the cache's answer."""
    if seldom(r.phase == Phase.ADMIT):
        admit(r, live, answer)
    elif seldom(r.phase == Phase.PREEMPT or r.phase == Phase.FINISH):
        leave(r, live)
    elif r.phase == Phase.ENTER:
        r.phase, r.entered = Phase.COMPUTE, 1
    elif answer == Answer.DONE:
        live.scheduled = r.new
        r.budget -= r.new
        r.live = r.running.newer[live]
    else:
        r.phase, r.refused, r.asked, r.live = Phase.PREEMPT, 1, live, r.running.older[r.running.ends]


def admit(r: Replay, live: Live, answer: int) -> None:
    """The head of the queue runs; refused, it stays there, or never fits, if nobody else holds anything."""
    arrival = r.first
    if answer == Answer.REFUSED and r.active > 0:
        r.put_off, r.phase = 1, Phase.READY
        return
    r.first = arrival.next
    r.waiting -= 1
    if answer != Answer.DONE:
        end(r, arrival, Outcome.NEVER_FITS)
        return
    r.vacant = live.next
    r.running.put(live)
    r.active += 1
    r.budget -= r.new
    live.scheduled = r.hit + r.new
    if arrival.preemptions == 0:
        arrival.hit, arrival.admitted = r.hit, r.step
        r.prompt_tokens += live.tokens
        r.hit_tokens += r.hit
    else:
        arrival.recomputed += live.tokens
        arrival.recovered += r.hit


def leave(r: Replay, live: Live) -> None:
    """A running request has given everything back: it finished, or was preempted; one that ran alone never fits."""
    arrival, finished, next = live.arrival, r.phase == Phase.FINISH, r.running.newer[live]
    r.running.remove(live)
    r.active -= 1
    live.next, r.vacant = r.vacant, live
    if finished:
        end(r, arrival, Outcome.FINISHED)
        r.phase, r.live = Phase.COMPUTE, next
        return
    r.phase, r.live = Phase.READY if live is r.asked else Phase.GROW, r.asked
    if r.active == 0:
        end(r, arrival, Outcome.NEVER_FITS)
        return
    arrival.tokens, arrival.preemptions = live.tokens, arrival.preemptions + 1
    if r.waiting == 0:
        r.last = arrival
    arrival.next, r.first = r.first, arrival
    r.waiting += 1
    r.preemptions += 1
