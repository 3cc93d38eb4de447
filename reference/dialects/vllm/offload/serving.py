"""vLLM's scheduler with a second tier, step by step: running requests, loads that requests wait for, stores.

Each step gives running requests their next tokens, preempting the last one where blocks run out, and then admits
waiting ones, first those that hold blocks. A waiting request is looked up on the GPU, and then in the tier; it is put
aside while a load of it goes on, or while the tier says: later. The step's output follows at once, so that no step is
in flight when the next is scheduled. First come, first served. A draft proposes tokens after each step that samples;
those that are rejected were computed in vain. vLLM 0.33 `Scheduler.schedule`, `update_from_output`.
"""

from __future__ import annotations

from reference.dialects.vllm.admission import blocks_cost, resumable, states_cost
from reference.dialects.vllm.offload.lives import Ask, Asked, Live, Serving
from reference.dialects.vllm.offload.telling import ask, tell
from reference.dialects.vllm.records import Cache, Code, Kind, Request, Status
from reference.language import NOTHING, Text, clause

TEXT = Text(__name__)


def perform_all(s: Serving, count: int) -> None:
    """The first `count` things asked."""
    for n in range(1, count + 1):
        perform_one(s, s.asked[n], s.asked[n].code)


def perform_one(s: Serving, asked: Asked, code: int) -> None:
    """One thing asked, whose code may be known."""
    live, done = asked.live, 0
    if code == Ask.REQUEST:
        come(s, live)
        s.arrive(live, asked.first, asked.second)
    if code == Ask.SCHEDULE:
        schedule(s)
    if code == Ask.SAMPLE:
        sample(s)
    if code == Ask.LOADED:
        s.loaded(live)
    if code == Ask.REPORT:
        s.report(asked.first, asked.second)
    if code == Ask.RECEIVED:
        if live.finished:
            give_back(s, live)
        else:
            live.loaded = 1
    if code == Ask.ABORT:
        leave_queue(s, live)
        end(s, live, 1, live.loading and not live.loaded)
    if code == Ask.RESET:
        done = reset(s, asked.first, asked.second)
    asked.answer = done


# Requests.


def come(s: Serving, live: Live) -> None:
    """A request comes, whose chain has the numbers of all keys that it will have."""
    ask(s, live, Code.REQUEST, live.prompt)
    live.request.keys = keys_of(s, live.prompt)
    live.present, live.finished, live.ended, live.loading, live.loaded = 1, 0, 0, 0, 0
    live.preempted, live.returned, live.prefilling, live.partway, live.scheduled, live.runs = 0, 0, 0, 0, 0, 0
    live.proposed, live.checked, live.padded, live.looked, live.gone = 0, 0, 0, 0, 0
    s.queues.put_behind(live, s.waiting)


def keys_of(s: Serving, tokens: int) -> int:
    """Keys that a request of so many tokens has."""
    return max(0, tokens - s.cache.config.lookahead) // s.cache.config.hash


def leave_queue(s: Serving, live: Live) -> None:
    """A request stands in none of the queues."""
    s.queues.remove(live)
    s.active -= live.runs
    live.runs = 0


def end(s: Serving, live: Live, aborted: int, keep: int) -> None:
    """A request has finished; `keep`: its blocks stay until the load that writes them has ended."""
    live.finished, live.prefilling = 1, 0
    if s.cache.config.offering and live.request.running:
        ask(s, live, Code.FINALIZE, 0)
    ask(s, live, Code.RETIRE, live.request.computed)
    s.know(live)
    s.finish(live, aborted)
    live.ended = 1
    if not keep:
        give_back(s, live)


def give_back(s: Serving, live: Live) -> None:
    """The cache knows a request no more."""
    computed = live.request.computed
    if live.request.running:
        ask(s, live, Code.FREE, 0)
    ask(s, live, Code.DROP, 0)
    live.request.computed = computed
    live.present = 0


def reset(s: Serving, preempts: int, tier: int) -> bool:
    """Empties the GPU's prefix cache, unless blocks are in use; and the tier, in any case, if asked to."""
    while preempts and s.active > 0:
        preempt(s, s.queues.older[s.running])
    nobody: Live = None  # type: ignore[assignment]
    done = ask(s, nobody, Code.RESET, 0) == Status.OK
    if tier:
        emptied = s.empty()
        done = done and emptied
    return done


def preempt(s: Serving, live: Live) -> None:
    """A running request gives its blocks back, and waits before all others."""
    clause("preempt", "Scheduler._preempt_request", "a running request is preempted")
    ask(s, live, Code.FREE, 0)
    live.preempted, live.returned, live.prefilling, live.proposed = 1, 1, 0, 0
    leave_queue(s, live)
    s.queues.put_behind(live, s.queues.newer[s.waiting])


# A step.


def schedule(s: Serving) -> None:
    """Schedules a step."""
    nobody: Live = None  # type: ignore[assignment]
    ask(s, nobody, Code.STEP, 0)
    mail = s.mail()
    mail.count, mail.filled, s.looks, s.stuck, s.prefills = 0, 0, 0, 0, 0
    for n in range(1, s.last + 1):
        s.lives[n].scheduled, s.lives[n].looked = 0, 0
    budget = go_on(s)
    if not s.stuck:
        admit_all(s, budget)
    s.order()
    for n in range(1, s.last + 1):
        live = s.lives[n]
        live.gone, live.ended, live.returned = live.returned, 0, 0
        if live.scheduled > 0:
            ask(s, live, Code.ADVANCE, live.scheduled)
            live.partway = live.request.computed < live.request.tokens
            live.prefilling = live.prefilling and live.partway


def go_on(s: Serving) -> int:
    """Running requests get their next tokens; the last ones are preempted where blocks run out. What is left of the
    step's tokens."""
    budget, live = s.numbers.step_tokens, s.queues.newer[s.running]
    while live is not s.running and budget > 0:
        request = live.request
        count = min(request.tokens + live.proposed - request.computed, budget)
        count = min(count, s.cache.config.longest - request.computed - 1)
        count = chunk(s, request, request.computed, count)
        if count == 0:
            live = s.queues.newer[live]
        elif grant(s, live, count, s.numbers.drafts, 0, 0, 0, 0):
            checked = max(0, count + request.computed - request.tokens)
            live.checked, live.padded, live.proposed = min(checked, live.proposed), 0, 0
            s.prefills = s.prefills or live.partway
            live.scheduled = count
            tell(s, live, 0)
            budget -= count
            live = s.queues.newer[live]
        else:
            last = s.queues.older[s.running]
            preempt(s, last)
            s.stuck = 1
            if last is live:
                break
    return budget


def grant(s: Serving, live: Live, new: int, ahead: int, hit: int, external: int, later: int, reserved: int) -> bool:
    """Asks the cache for blocks of a request's next tokens: a waiting one's must fit as a whole."""
    op = s.cache.operations[1]
    op.new, op.ahead, op.hit, op.external, op.reserved, op.boundary = new, ahead, hit, external, reserved, -1
    op.delay, op.advances, op.encoder = later, 0, 0
    op.must_fit, op.waits, op.others = not live.runs, not live.runs, s.active > 0
    return ask(s, live, Code.ALLOCATE, 0) == Status.OK


def admit_all(s: Serving, budget: int) -> None:
    """Waiting requests are admitted until one has no room; those that cannot be looked at yet stay where they are."""
    decoding, queue = budget < s.numbers.step_tokens, s.holding
    live = s.queues.newer[queue]
    while budget > 0 and s.active < s.numbers.most_running:
        if live is queue:
            if queue is s.waiting:
                break
            queue = s.waiting
            live = s.queues.newer[queue]
        else:
            following = s.queues.newer[live]
            count = admit(s, live, budget, decoding)
            if count == NOTHING:
                break
            if count > 0 or (live.loading and queue is s.waiting):
                s.queues.remove(live)
                s.queues.put_behind(live, s.running if count > 0 else s.holding)
            if count > 0:
                s.active += 1
                live.runs = 1
                budget -= count
                live.prefilling = live.prefilling or live.request.computed + count < live.request.tokens
            live = following


def admit(s: Serving, live: Live, budget: int, decoding: bool) -> int:
    """Tokens that a waiting request gets now; 0 if it is put aside, NOTHING if it has no room."""
    request, c = live.request, s.cache
    if live.loading:
        if not live.loaded:
            return 0
        live.loading, live.loaded = 0, 0
        ask(s, live, Code.COMMIT, request.computed)
        if request.computed == request.tokens:
            request.computed -= 1
    local, external, later = 0, 0, False
    if request.computed == 0:
        ask(s, live, Code.LOOKUP, 0)
        local = c.results[1].value
        request.branch = c.results[1].longer
        s.know(live)
        beyond = local % c.config.grid
        matched, waits = s.match(live, local - beyond)
        s.looks += 1
        live.looked, live.local, live.external, live.later = s.looks, local - beyond, matched, waits
        if matched == NOTHING:
            return 0
        if matched > beyond:
            if beyond > 0:
                local -= beyond
                truncate(c, request, local)
            external = matched
        later = waits and external > 0
    start, count, padded, ahead = request.computed + local + external, 0, False, s.numbers.drafts
    if not later:
        left = request.tokens - start
        padded = pads(s, left, start, decoding)
        if padded and 1 + ahead > budget:
            return NOTHING
        count = chunk(s, request, start, 1 + ahead if padded else min(left, budget))
        if padded and count != 1 + ahead:
            count, padded = min(count, 1), False
        if count == 0:
            return NOTHING
    kept = reserved(s) + s.numbers.drafted if later else 0
    if not grant(s, live, count, 0 if later else ahead, local, external, later, kept):
        return NOTHING
    live.scheduled = count
    tell(s, live, 1)
    s.allocated(live, external)
    request.computed = start
    s.know(live)
    live.checked, live.padded = ahead if padded else 0, padded
    if later:
        live.loading, live.prefilling = 1, 1
        s.mail().count -= 1
    return count


def truncate(c: Cache, request: Request, tokens: int) -> None:
    """A hit ends after so many tokens, whole blocks; states may end before (`truncate_computed_blocks`)."""
    for g in range(1, c.config.width + 1):
        row = request.rows[g]
        row.found = min(row.found, tokens // c.groups[g].size)
        row.first_found = min(row.first_found, row.found)
    c.agreed = tokens


def pads(s: Serving, left: int, start: int, decoding: bool) -> bool:
    """True if a request with one token left gets room for drafts that there are not: a step of one shape."""
    drafts = s.numbers.drafts
    alike = left == 1 and not s.prefills and (decoding or start > 0)
    return drafts > 0 and alike and start + 2 + drafts <= s.cache.config.longest


def reserved(s: Serving) -> int:
    """Blocks that requests on the way to their last token still need, loads among them."""
    clause("reserve", "Scheduler._reserved_blocks", "loads leave room for what is on its way")
    c, total, drafts = s.cache, 0, 1 + 2 * s.numbers.drafts if s.numbers.drafts > 0 else 0
    for n in range(1, s.last + 1):
        live = s.lives[n]
        if live.present and live.prefilling:
            request = live.request
            length, at = min(request.tokens, c.config.longest), request.computed
            for g in range(1, c.config.width + 1):
                group, row = c.groups[g], request.rows[g]
                if group.kind == Kind.STATE:
                    total += states_cost(c, request, group, row, at, at, length, 0, 1)[0]
                else:
                    total += blocks_cost(c, c.operations[1], group, row, at, at, length + drafts, 0, 1)
    return total


def chunk(s: Serving, request: Request, start: int, count: int) -> int:
    """Tokens to compute from `start` on: beside recurrent groups a prefill stops where states are kept."""
    c, size, goal = s.cache, s.numbers.state, max(request.prompt, request.tokens - 1)
    end = start + count
    if size == 0 or start >= goal:
        return count
    if end < goal:
        whole = end // size * size
        if whole > start or size <= s.numbers.step_tokens:
            end = whole
    last, tail = resumable(c, request.tokens, size), 0
    if c.config.partial or (c.config.alone and c.config.parts > 1):
        tail = resumable(c, request.prompt, c.config.hash)
        if tail <= last or tail >= request.prompt:
            tail = 0
    inside, branch = 0, 0
    if start % size > 0:
        inside = (start // size + 1) * size
    if start < request.branch and request.branch < end:
        branch = start + (request.branch - start) // size * size
    stop = end
    for each in (last, tail, inside, branch):
        if start < each and each < end:
            stop = min(stop, each)
    return max(0, stop - start)


# Its output.


def accepted(tokens: int, drafts: int) -> int:
    """Tokens that a step accepts of a request's drafts, from its length before: no model runs."""
    return tokens // 2 % (drafts + 1)


def sample(s: Serving) -> None:
    """Requests whose tokens are all computed get another, and those that have all of theirs finish."""
    live, drafts = s.queues.newer[s.running], s.numbers.drafts
    while live is not s.running:
        following, request = s.queues.newer[live], live.request
        if live.scheduled > 0 and request.computed >= request.tokens:
            right = 0 if live.padded else accepted(request.tokens, live.checked)
            room = min(live.output + request.prompt, s.cache.config.longest) - request.tokens
            told = min(1 + right, room)
            request.computed += told - 1 - live.checked
            request.tokens += told
            request.keys = keys_of(s, request.tokens)
            if drafts > 0:
                ask(s, live, Code.COMMIT, request.computed)
            live.proposed = drafts
            if told == room:
                leave_queue(s, live)
                end(s, live, 0, 0)
        live = following
