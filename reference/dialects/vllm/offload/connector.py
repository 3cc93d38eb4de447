"""The scheduler's side of the second tier: what a request may load, what a step stores, and which jobs it waits for.

A request's chunks are offered as its tokens are scheduled, and the transfers read its blocks behind its back: jobs are
told when they are done, however late. vLLM 0.33 `OffloadingConnectorScheduler`.
"""

from __future__ import annotations

from reference.dialects.vllm.offload.jobs import add_chunk, fence, flush, flush_readers, forget_jobs, hand_out, new_job
from reference.dialects.vllm.offload.jobs import report as report_job
from reference.dialects.vllm.offload.lookup import ceil, external_hit, tail_hit
from reference.dialects.vllm.offload.offers import use_of
from reference.dialects.vllm.offload.policies import begin, end
from reference.dialects.vllm.offload.pool import clear, read
from reference.dialects.vllm.offload.records import (
    TAIL_FAILED,
    Code,
    Job,
    Offloaded,
    Operation,
    Result,
    Rows,
    Tier,
    is_ready,
    key_of,
)
from reference.dialects.vllm.offload.stores import store_all
from reference.language import NOTHING, Text, clause

TEXT = Text(__name__)


def perform_any(t: Tier, op: Operation, request: Offloaded, result: Result, code: int) -> None:
    """One operation of a connector, whose code may be known."""
    result.count, result.beside = 0, 0
    if code in (Code.ARRIVE, Code.KNOW):
        request.prompt, request.tokens, request.computed = op.prompt, op.tokens, op.computed
        request.shared, request.hashes = op.shared, op.hashes
    if code == Code.ARRIVE:
        arrive(t, request, op.load_limit, op.store_limit)
    if code == Code.MATCH:
        result.count, result.beside = match(t, request, op.tokens)
    if code == Code.ALLOCATED:
        allocated(t, t.mail.rows[op.start], op.tokens)
    if code == Code.FINISH:
        finish(t, request, op.aborted)
    if code == Code.STEP:
        result.count = step(t, op)
    if code == Code.REPORT:
        result.count = report(t, op.job, op.workers)
    if code == Code.RESET:
        reset(t)


# Requests come, look, and go.


def arrive(t: Tier, request: Offloaded, load_limit: int, store_limit: int) -> None:
    """A request comes."""
    request.load_limit, request.store_limit = load_limit, store_limit
    request.local, request.tail, request.loaded, request.within, request.scheduled = 0, 0, 0, 0, 0
    request.known, request.finished, request.aborted, request.told, request.noted = 1, 0, 0, 0, 0
    forget_blocks(t, request)
    begin(t, request)


def forget_blocks(t: Tier, request: Offloaded) -> None:
    """All of a request is offered again, once its blocks are told."""
    for at in range(t.config.groups):
        request.held[at], request.cursors[at] = 0, 0


def match(t: Tier, request: Offloaded, local: int) -> tuple[int, bool]:
    """Tokens beyond a request's hit on the GPU that can be loaded, NOTHING for: ask again later; whether the load
    takes longer than the step.

    Args:
      t: the tier.
      request: a waiting request, which is offered again from now on, whatever the answer.
      local: tokens of its hit, whole scheduler blocks.
    """
    forget_blocks(t, request)
    if request.first is not None:
        clause("later-while-storing", "OffloadingConnectorScheduler.get_num_new_matched_tokens", "its jobs end first")
        return NOTHING, False
    request.local = local
    found = external_hit(t, request)
    request.tail = 0
    if t.config.tails and found != NOTHING:
        found, request.tail = tail_hit(t, request, found)
    within = fits_the_step(t, request, found)
    return found, found > 0 and not within


def fits_the_step(t: Tier, request: Offloaded, found: int) -> bool:
    """True if a load is within the step's budget, which it takes, and leaves a token to compute."""
    request.within = 0
    fits = found > 0 and request.local + found < request.tokens and found <= t.budget
    if fits:
        clause("within-the-step", "OffloadingConnectorScheduler._reserve_sync_load", "a step waits for small loads")
        t.budget -= found
        request.within = t.step
    return fits


def allocated(t: Tier, rows: Rows, external: int) -> None:
    """A request was given blocks; if tokens are to be loaded into them, the job is made.

    Args:
      t: the tier.
      rows: all of the request's blocks.
      external: tokens to be loaded, as `match` said.
    """
    start, request = rows.start, t.requests[rows.request]
    for at in range(t.config.groups):
        for place in range(start, start + rows.counts[at]):
            hand_out(t, t.mail.given[place])
        start += rows.counts[at]
    if external > 0:
        clause("load", "OffloadingConnectorScheduler.update_state_after_alloc", "a load is ordered")
        load(t, rows, request, request.local + external)


def load(t: Tier, rows: Rows, request: Offloaded, end: int) -> None:
    """The job that loads what a request lacks up to a length; its head, which the GPU has, is used as well."""
    job, within, start, count, heads = new_job(t, request, False), request.within == t.step, rows.start, 0, 0
    for head in (1, 0):
        for at in range(t.config.groups):
            group = t.groups[at + 1]
            place, last = 0, min(request.local, request.hashes * t.config.unit) // group.chunk
            if head and t.defects.head_ages_while_tail_loads:
                last = 0
            if not head:
                first, blocks = ceil(request.local, group.size), ceil(end, group.size)
                while first < blocks and (
                    t.mail.given[start + first] == 0 or (t.mail.hashed[start + first] and not within)
                ):
                    first += 1
                job.sizes[at], job.starts[at] = blocks - first, first
                request.cursors[at] = ceil(end, group.chunk)
                start += rows.counts[at]
                place, last = first // t.config.per_chunk, ceil(end, group.chunk)
                if first == blocks:
                    place = last
                elif request.tail > 0:
                    place = min(place, last - 1)
            while place < last:
                tokens = (place + 1) * group.chunk
                if request.tail > 0 and not head and place + 1 == last:
                    tokens = request.tail + group.proof
                if not head or is_ready(key_of(t, request, at, tokens)):
                    use = use_of(t, request, at, tokens)
                    t.payload[count] = use
                    count += 1
                    if not head:
                        add_chunk(job, use)
                        use.key.loading = int(use.key.loading or not within)
                place += 1
        if head:
            clause("use-the-head", "", "a prompt's head is used whenever its tail is")
            heads = count
    request.tail, request.loaded = 0, 1
    read(t, request, 0, count, count - heads)


def finish(t: Tier, request: Offloaded, aborted: int) -> None:
    """A request has finished, its blocks are about to be given back: jobs that read them are fenced."""
    clause("finish", "OffloadingConnectorScheduler.request_finished")
    request.finished, request.aborted = 1, aborted
    job = request.first
    while job is not None:
        fence(t, job, True)
        job = job.after


# Steps.


def step(t: Tier, op: Operation) -> int:
    """Orders of a step that has been scheduled; how many stores there are, TAIL_FAILED where vLLM's engine ends.

    Of each scheduled request, in order, of those that finished, by name, and of those that were preempted there are
    rows.
    """
    clause("step", "OffloadingConnectorScheduler._build_connector_meta")
    t.ordered, first, last = 0, op.start, op.start + op.count
    for n in range(first, last):
        note_rows(t, t.mail.rows[n])
    for at in range(op.targets_start, op.targets_start + op.targets):
        hand_out(t, t.mail.given[at])
    if t.renewed > 0 and t.config.groups > t.config.full:
        for n in range(1, t.last + 1):
            if t.requests[n].known:
                give_up(t, t.requests[n])
    for n in range(first, last):
        if t.mail.rows[n].preempted and t.requests[t.mail.rows[n].request].known:
            flush_jobs(t, t.requests[t.mail.rows[n].request])
    flush_readers(t)
    failed = store_all(t, op)
    for n in range(first, last):
        request = t.requests[t.mail.rows[n].request]
        request.scheduled = 0
        if t.mail.rows[n].finished and request.known:
            request.told = 1
            end(t, request)
            forget(t, request)
    t.renewed = 0
    t.budget = t.config.sync_tokens
    t.step += 1
    return TAIL_FAILED if failed else t.ordered


def note_rows(t: Tier, rows: Rows) -> None:
    """Takes note of a request's new blocks, and of the tokens that it is scheduled for."""
    request = t.requests[rows.request]
    request.scheduled += rows.tokens
    if rows.whole:
        for at in range(t.config.groups):
            request.held[at] = 0
    if rows.told:
        start, request.noted = rows.start, t.step
        for at in range(t.config.groups):
            column = request.held[at]
            request.before[at] = column
            for place in range(start, start + rows.counts[at]):
                request.blocks[column * t.config.groups + at] = t.mail.given[place]
                column += 1
                hand_out(t, t.mail.given[place])
            request.held[at] = column
            start += rows.counts[at]


def give_up(t: Tier, request: Offloaded) -> None:
    """Takes blocks from windows that were handed out since."""
    for at in range(t.config.groups):
        if t.groups[at + 1].window > 0:
            last = request.before[at] if request.noted == t.step else request.held[at]
            first = request.cursors[at] * t.config.per_chunk if t.defects.reset_revives_window_blocks else 0
            for column in range(first, last):
                place = column * t.config.groups + at
                block = request.blocks[place]
                if block > 0 and t.handed[block] == t.step:
                    clause("give-up", "OffloadingConnectorScheduler._update_req_states", "a window loses blocks")
                    request.blocks[place] = 0


def flush_jobs(t: Tier, request: Offloaded) -> None:
    """Jobs of a preempted request are finished before the step, but for loads that it orders."""
    job = request.first
    while job is not None:
        if job.writes or job.ordered != t.step:
            flush(t, job)
        job = job.after


# Reports.


def report(t: Tier, job: Job, workers: int) -> int:
    """Workers have finished their parts of a job; the block that it reads twice, or 0."""
    request = job.owner
    twice = report_job(t, job, workers)
    if twice == 0:
        forget(t, request)
    return twice


def forget(t: Tier, request: Offloaded) -> None:
    """A request that has ended, and whose jobs have, is the tier's no more."""
    if request.told and request.first is None:
        leave(t, request)


def leave(t: Tier, request: Offloaded) -> None:
    """A request's uses are others'."""
    request.known = 0
    for at in range(request.hashes * t.config.groups):
        use = request.uses[at]
        if use is not None:
            use.seen, use.stored, use.found, use.missed = 0, 0, 0, 0
            use.next, t.vacant = t.vacant, use
            t.unnamed += 1
            request.uses[at] = None  # type: ignore[assignment]
    request.filling = 0


def reset(t: Tier) -> None:
    """Empties the tier; jobs that go on are flushed with the next step, and their reports mean nothing."""
    clause("reset", "OffloadingConnectorScheduler.reset_cache")
    for n in range(1, t.last + 1):
        request = t.requests[n]
        if request.known:
            forget_jobs(t, request)
            if request.finished:
                leave(t, request)
            else:
                request.tail = 0
                for at in range(t.config.groups):
                    request.cursors[at] = 0
    clear(t)
