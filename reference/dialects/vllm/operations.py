"""Operations: what vLLM's scheduler, or a connector, asks of the cache, one a record, in order."""

from __future__ import annotations

from reference.dialects.vllm.admission import fits
from reference.dialects.vllm.cases import of_grant, of_refusal
from reference.dialects.vllm.finding import look_up
from reference.dialects.vllm.forking import fork
from reference.dialects.vllm.growth import adopt, grow
from reference.dialects.vllm.leaving import (
    change_holds,
    clear,
    finalize,
    give_back,
    settle_copies,
    take_offers,
    wait_again,
)
from reference.dialects.vllm.pool import drop_keys, tell_zeroed
from reference.dialects.vllm.records import NONE, Cache, Code, Operation, Request, Result, Status, Told, at_column
from reference.dialects.vllm.registering import enter_filled
from reference.language import Text, clause

TEXT = Text(__name__)

NEW = Code.REQUEST, Code.APPEND, Code.RESUME
"""Operations that bring tokens."""

BLOCKS = Code.EVICT, Code.RESET, Code.COPIES, Code.RELEASE, Code.HOLD, Code.OFFLOADS, Code.STEP
"""Operations without a request."""

OF_WAITING = Code.LOOKUP, Code.CONNECT, Code.FOUND, Code.DROP
OF_RUNNING = Code.ADVANCE, Code.COMMIT, Code.FREE, Code.POP, Code.FORK, Code.UNWRITTEN, Code.FINALIZE
"""Operations of requests that hold no blocks, and of those that do."""

ENDING = Code.FREE, Code.POP, Code.DROP
"""Operations after which a request has no rows."""


def perform_all(c: Cache, count: int) -> None:
    """The first `count` operations."""
    for n in range(1, count + 1):
        perform_at(c, n, c.operations[n].code)


def perform_at(c: Cache, n: int, code: int) -> None:
    """The operation of a record, whose code may be known."""
    result = c.results[n]
    result.value, result.longer, result.lags, result.copies, result.start = 0, 0, 0, 0, c.listed
    if c.config.tells:
        for g in range(1, c.config.width + 1):
            result.first[g], result.end[g] = 0, 0
    status = perform(c, c.operations[n], result, code)
    result.status = Status.FAILED if c.failed else status


def perform(c: Cache, op: Operation, result: Result, code: int) -> int:
    """One operation; its `Status`. What is refused changes nothing, but for what an allocation notes and gives back."""
    if code <= Code.END or code > Code.FINALIZE:
        return Status.UNKNOWN
    if code in BLOCKS:
        return without_request(c, op, result, code)
    if op.slot < 0 or op.slot >= c.slots:
        return Status.NO_SUCH_SLOT
    request = c.requests[op.slot + 1]
    if code in NEW:
        return arrive(c, op, request, code)
    if not request.present:
        return Status.NO_SUCH_SLOT
    if code in OF_WAITING and request.running:
        return Status.NOT_WAITING
    if code in OF_RUNNING and not request.running:
        return Status.NOT_RUNNING
    if code in (Code.LOOKUP, Code.CONNECT):
        most = op.amount - 1 if op.amount > 0 else request.tokens - 1
        hit = look_up(c, request, result, most, code == Code.CONNECT)
        c.asker, c.agreed = NONE, hit
        if code == Code.LOOKUP:
            c.asker = request
        if c.config.tells:
            tell_hit(c, request, result)
    if code == Code.FOUND:
        found(c, op, request)
    if code in (Code.ALLOCATE, Code.COMMIT, Code.RETIRE, Code.FREE, Code.POP, Code.DROP):
        return blocks_of(c, op, request, result, code)
    if code == Code.ADVANCE:
        if op.amount < 0 or op.amount > request.room - request.computed:
            return Status.BAD_LENGTH
        if request.room > request.tokens and request.computed + op.amount < request.room:
            clause("allocate/drafts-rejected", "Scheduler.update_from_output", "some of them are rejected")
        request.computed += op.amount
    if code == Code.COMPUTED:
        request.computed = op.amount
    if code == Code.FORK:
        return start_from(c, op, request, result)
    if code == Code.UNWRITTEN:
        return zero_again(c, request, op.amount)
    if code == Code.FINALIZE and c.config.offering:
        finalize(c, request, op.in_flight)
    return Status.OK


def without_request(c: Cache, op: Operation, result: Result, code: int) -> int:
    """Operations on the pool: blocks lose their keys, references or promises; or a step begins."""
    if code == Code.STEP:
        c.step += 1
        return Status.OK
    if code == Code.OFFLOADS:
        if c.config.offering:
            take_offers(c)
        return Status.OK
    if code in (Code.EVICT, Code.RELEASE, Code.HOLD):
        for n in range(op.count):
            block = c.payload[op.start + n]
            if block < (code != Code.EVICT) or block > c.config.pool:
                return Status.BAD_BLOCK
    if code == Code.RESET:
        c.asker = NONE
        if c.free.count < c.config.pool:
            clause("reset/refused", "BlockPool.reset_prefix_cache", "a reset is refused while blocks are in use")
            return Status.IN_USE
        clause("reset/done", "BlockPool.reset_prefix_cache", "the prefix cache is reset")
        c.resets += 1
    if code in (Code.RELEASE, Code.HOLD) and not change_holds(c, op.start, op.count, code):
        return Status.BAD_BLOCK
    c.asker = NONE
    if code == Code.COPIES:
        settle_copies(c, op.live)
    if code in (Code.EVICT, Code.RESET):
        told = c.told
        if code == Code.EVICT:
            clause("evict/named", "BlockPool.evict_blocks", "named blocks lose their keys")
        for n in range(c.config.pool if code == Code.RESET else op.count):
            block = c.blocks[n + 1] if code == Code.RESET else c.blocks[c.payload[op.start + n]]
            if block is not None:
                drop_keys(c, block, NONE)
        if code == Code.RESET and c.config.events:
            c.told = told + 1  # one event for all
            c.news[c.told].kind = Told.CLEARED
        result.value = 1
    return Status.OK


def arrive(c: Cache, op: Operation, request: Request, code: int) -> int:
    """Tokens of a request and the keys that they complete: of its prompt, generated ones, or those with which a
    streaming session goes on after the `keep` that stay."""
    known, tokens = request.keys, request.tokens
    if code == Code.REQUEST:
        if request.present:
            return Status.NOT_WAITING
        if op.amount < 1:
            return Status.BAD_LENGTH
        known, tokens = 0, 0
    elif not request.present:
        return Status.NO_SUCH_SLOT
    if code == Code.RESUME:
        if op.keep < 0 or op.keep > tokens or op.prompt < 1 or op.prompt > op.keep + op.amount:
            return Status.BAD_LENGTH
        known, tokens = min(known, op.keep // c.config.hash), op.keep
    if op.amount < 0 or tokens + op.amount > c.config.longest:
        return Status.BAD_LENGTH
    if code == Code.REQUEST:
        request.present, request.running, request.reports, request.prompt = 1, 0, op.reports, op.amount
        request.computed, request.flying, request.room, request.branch, request.grant_step = 0, 0, 0, 0, 0
        request.named, request.returned = op.named, 0
    if code == Code.RESUME:
        clause("resume", "Scheduler._update_request_as_session", "a streaming session goes on")
        request.prompt = op.prompt
        c.asker = NONE
    for at in range(op.count):
        request.chain[known + at] = c.payload[op.start + at]
    request.keys, request.tokens = known + op.count, tokens + op.amount
    return Status.OK


def found(c: Cache, op: Operation, request: Request) -> None:
    """A hit that a request is to adopt, of `amount` tokens: for each group, how many columns, and their blocks."""
    at = op.start
    for g in range(1, c.config.width + 1):
        row = request.rows[g]
        row.found, row.first_found = c.payload[at], 0
        at += 1
        for column in range(row.found):
            block = c.blocks[c.payload[at]]
            row.blocks[column] = block
            if block is None and row.first_found == column:
                row.first_found = column + 1
            at += 1
    c.asker, c.agreed = request, op.amount


def blocks_of(c: Cache, op: Operation, request: Request, result: Result, code: int) -> int:
    """A request's blocks come, are registered, and go: ALLOCATE, COMMIT, RETIRE, FREE, POP and DROP."""
    hit, new, settled = op.hit, op.new, op.amount
    if code == Code.ALLOCATE:
        if hit < 0:
            hit = c.agreed if c.asker is request else 0
        if new < 0:
            new = max(request.tokens - request.computed - hit - op.external, 0)
        if new + hit + op.external == 0:
            return Status.BAD_LENGTH
        if request.running and hit + op.external > 0:
            return Status.NOT_WAITING
        if hit > 0 and (c.asker is not request or c.agreed != hit):
            return Status.BAD_HIT
    most = min(request.computed, request.tokens)
    if code == Code.COMMIT and (settled < 0 or (settled > most and not op.live)):
        return Status.BAD_LENGTH
    if code in (Code.RETIRE, Code.FREE):
        give_back(c, request, op.amount, code == Code.FREE)
    if code == Code.RETIRE:
        return Status.OK
    c.asker = NONE
    if code == Code.ALLOCATE:
        if not allocate(c, op, request, result, hit, new):
            if c.config.explains:
                of_refusal(c, op, request, hit)
                c.refused, c.reserved = request, op.reserved
            return Status.NO_ROOM
        settled = -1 if op.delay else min(request.room, request.tokens)
    if code in (Code.FREE, Code.POP):
        wait_again(c, request)
    if code in ENDING:
        clear(c, request)
        if code == Code.DROP:
            clause("request/dropped", "Scheduler.finish_requests", "a waiting request is forgotten")
            request.present = 0
    elif c.config.caching and settled >= 0 and not c.failed:
        if code == Code.COMMIT:
            clause("register/commit", "KVCacheManager.cache_blocks", "tokens are registered after they were computed")
        enter_filled(c, request, settled)
    if code == Code.ALLOCATE and op.advances:
        request.computed += hit + op.external + new
    return Status.OK


def allocate(c: Cache, op: Operation, request: Request, result: Result, hit: int, new: int) -> bool:
    """Gives a request blocks for its next tokens; True if it got them.

    A refusal touches neither rows nor hits, except that a running request has given back what it no longer needs.
    """
    clause("allocate", "KVCacheManager.allocate_slots")
    total = request.computed + hit + op.external
    main = min(total, c.config.longest) + new
    slots, length, granted = min(main + op.ahead, c.config.longest), min(request.tokens, c.config.longest), True
    request.flying = op.in_flight
    if op.boundary >= 0:
        request.branch = op.boundary
        if op.boundary > 0:
            clause("allocate/pinned-boundary", "Request.shared_prefix_boundary", "a shared-prefix boundary is set")
    if op.in_flight > 0:
        clause("allocate/in-flight", "KVCacheManager.allocate_slots", "tokens in flight hold blocks that could go back")
    for whole in (1, 0):
        if granted and (op.must_fit or not whole):
            reached = min(total, c.config.longest)
            if not whole:
                give_back(c, request, max(0, reached - request.flying), 0)
                reached = total
            granted = fits(c, op, request, hit, reached, length if whole else main, length if whole else slots, whole)
    if granted and not c.failed:
        if c.config.explains:
            of_grant(c, op, request, hit, main)
            c.refused = NONE
        if hit + op.external > 0:
            adopt(c, request, hit, total)
        grow(c, op, request, result, total, main, slots)
        if c.config.tells:
            tell_new(c, request, result)
        if request.grant_step != c.step:
            request.grant_step, request.granted, request.joined = c.step, request.computed + hit, not request.running
        if not request.running:
            clause("admit", "KVCacheManager.allocate_slots", "a waiting request is granted blocks")
            c.scheduled += 1
        request.running, request.room, result.value = 1, main, hit
    return granted


def start_from(c: Cache, op: Operation, request: Request, result: Result) -> int:
    """FORK: a request is started in another slot."""
    if op.amount < 0 or op.amount >= c.slots or c.requests[op.amount + 1].present:
        return Status.NO_SUCH_SLOT
    return Status.OK if fork(c, request, c.requests[op.amount + 1], result) else Status.NO_ROOM


def zero_again(c: Cache, request: Request, tokens: int) -> int:
    """A request's blocks from `tokens` on are to be zeroed after all (`record_blocks_for_zeroing`)."""
    for g in range(1, c.config.width + 1):
        if c.groups[g].zeroed and (tokens < 0 or tokens % c.groups[g].size > 0):
            return Status.BAD_LENGTH
    for g in range(1, c.config.width + 1):
        group, row = c.groups[g], request.rows[g]
        for column in range(tokens // group.size, row.length):
            tell_zeroed(c, group, at_column(group, row, column))
    return Status.OK


# ------------------------------------------------------------------ ids in answers


def tell_hit(c: Cache, request: Request, result: Result) -> None:
    """The blocks of a hit, group by group, from the first column on that is not null."""
    for g in range(1, c.config.width + 1):
        group, row = c.groups[g], request.rows[g]
        first = 0 if group.sinks > 0 else min(row.first_found, row.found)
        result.first[g], result.end[g] = first, row.found
        for column in range(first, row.found):
            there = column < group.sinks or column >= row.first_found
            c.ids[c.listed] = row.blocks[column] if there else NONE
            c.listed += 1


def tell_new(c: Cache, request: Request, result: Result) -> None:
    """The new blocks of a request, group by group."""
    for g in range(1, c.config.width + 1):
        group, row = c.groups[g], request.rows[g]
        for column in range(result.first[g], result.end[g]):
            c.ids[c.listed] = at_column(group, row, column)
            c.listed += 1
