"""Stores that a step orders: states that are handed over, ends of prompts inside blocks, and chunks that are whole.

vLLM 0.33 `OffloadingConnectorScheduler._build_store_jobs`.
"""

from __future__ import annotations

from reference.dialects.vllm.offload.jobs import add_chunk, fence, new_job
from reference.dialects.vllm.offload.offers import offer, storable_chunks, storable_tokens, use_of
from reference.dialects.vllm.offload.pool import store
from reference.dialects.vllm.offload.records import TAIL_FAILED, Handed, Offloaded, Operation, Rows, Tier
from reference.language import NOTHING, Text, clause

TEXT = Text(__name__)

CHUNKS = -1
"""Column of a store of whole chunks, each of which has columns of its own."""


def store_all(t: Tier, op: Operation) -> bool:
    """Stores of a step, one after the other: states that are handed over, the ends of prompts with the last of these,
    chunks of each request; True where vLLM's engine ends."""
    tails = op.handed if t.config.tails else 0
    failed = False
    for turn in range(op.handed + tails + op.count):
        request: Offloaded = None  # type: ignore[assignment]
        column = CHUNKS
        if turn < op.handed:
            request = t.requests[t.mail.handing[op.handed_start + turn].request]
            count, column = offer_state(t, t.mail.handing[op.handed_start + turn])
        elif turn < op.handed + tails:
            at = turn - op.handed + 1
            handed = t.mail.handing[op.handed_start + at - 1]
            request = t.requests[handed.request]
            note_tail(t, handed)
            count = NOTHING
            if at == op.handed or t.mail.handing[op.handed_start + at].request != handed.request:
                count, column = offer_tail(t, request)
        else:
            request = t.requests[t.mail.rows[op.start + turn - op.handed - tails].request]
            count = offer_chunks(t, t.mail.rows[op.start + turn - op.handed - tails])
        if count == TAIL_FAILED:
            failed = True
            break
        if count != NOTHING:
            store_offered(t, request, count, column)
    return failed


def store_offered(t: Tier, request: Offloaded, count: int, column: int) -> None:
    """Stores what a request offers in the payload, if it is new and there is room."""
    taken = 0
    if count > 0:
        spares = not t.defects.tail_evicts_its_own_head
        taken = store(t, request, 0, count, spares, not t.defects.step_beyond_the_tier_stores_nothing)
    if taken == NOTHING:
        clause("offer-again", "OffloadingConnectorScheduler._build_store_jobs", "without room chunks are offered again")
        t.refused += 1
    elif column == CHUNKS:
        for at in range(t.config.groups):
            request.cursors[at] = max(request.cursors[at], request.reach[at])
    if taken > 0:
        order(t, request, taken, column)


def order(t: Tier, request: Offloaded, count: int, column: int) -> None:
    """The job that writes chunks that were taken, from the blocks of their columns, or of one column from those that
    are handed over; these are fenced from the beginning."""
    job, per_chunk, groups = new_job(t, request, True), t.config.per_chunk, t.config.groups
    job.early = int(column != CHUNKS)
    for at in range(count):
        use = t.lacked[at]
        index = use.key.group
        group = t.groups[index + 1]
        first = column
        if column == CHUNKS:
            first = (use.end // group.chunk - 1) * per_chunk
        for place in range(per_chunk):
            block = group.block if place == 0 else 0
            if column == CHUNKS:
                block = request.blocks[(first + place) * groups + index]
            use.blocks[place] = block
            if block > 0:
                if job.sizes[index] == 0:
                    job.starts[index] = first + place
                job.sizes[index] += 1
        add_chunk(job, use)
    t.stores[t.ordered] = job
    t.ordered += 1
    for late in (0, 1):
        if not late or request.finished:
            fence(t, job, late)


# Offers: how many uses there are in the payload, NOTHING for none at all; and of one column, which.


def offer_chunks(t: Tier, rows: Rows) -> int:
    """Offers chunks of a request of a step, all groups together, and notes up to which they may be stored."""
    request = t.requests[rows.request]
    if not request.known or (rows.tokens == 0 and not rows.finished):
        return NOTHING
    tokens = request.computed + request.scheduled
    if request.aborted:
        tokens = request.computed
    elif request.finished:
        tokens = max(request.prompt, request.tokens - 1)
    tokens, prompt = storable_tokens(t, request, tokens), storable_tokens(t, request, request.prompt)
    offered = 0
    for at in range(t.config.groups):
        group = t.groups[at + 1]
        request.reach[at] = storable_chunks(t, request, group, tokens)
        offered = offer(t, request, group, request.reach[at], prompt // group.chunk, offered)
    return offered


def offer_state(t: Tier, handed: Handed) -> tuple[int, int]:
    """Offers a state that is handed over at the end of a chunk."""
    request, group = t.requests[handed.request], t.groups[handed.index + 1]
    offers = request.known and handed.block > 0 and handed.tokens % group.chunk == 0
    if not offers or handed.tokens > storable_tokens(t, request, request.tokens):
        return NOTHING, 0
    clause("states", "OffloadingConnectorScheduler._build_aligned_boundary_store_jobs", "states are stored alone")
    t.payload[0] = use_of(t, request, group.index, handed.tokens)
    group.block = handed.block
    return 1, handed.tokens // group.size - 1


def note_tail(t: Tier, handed: Handed) -> None:
    """Takes note of a state at the end of a prompt inside a block."""
    group = t.groups[handed.index + 1]
    if handed.tokens % group.chunk > 0:
        group.block, t.requests[handed.request].tail_end = handed.block, handed.tokens


def offer_tail(t: Tier, request: Offloaded) -> tuple[int, int]:
    """Offers the end of a prompt inside a block, of all groups together; TAIL_FAILED where vLLM's engine ends.

    With a draft's layers, only of requests that were loaded for: others leave their tail to the GPU's cache.
    """
    end, groups, proof = request.tail_end, t.config.groups, t.config.proof
    request.tail_end = 0
    column = end // t.groups[1].chunk
    if end == 0 or not request.known or (proof > 0 and not request.loaded):
        return NOTHING, 0
    if request.store_limit != NOTHING and end > request.store_limit:
        if not t.defects.tail_past_the_limit:
            return NOTHING, 0
        clause("tail-past-the-limit", "", "defect: a tail beyond the limit ends the engine, or is stored")
        if request.store_limit > 0:
            return TAIL_FAILED, 0
    ready = proof == 0 or end + proof <= min(request.computed + request.scheduled, request.prompt)
    for at in range(groups):
        ready = ready and (t.groups[at + 1].aligned or column < request.held[at])
    if not ready:
        return NOTHING, 0
    clause("tails", "OffloadingConnectorScheduler._build_partial_tail_store_jobs", "a prompt's tail is stored")
    for at in range(groups):
        group = t.groups[at + 1]
        t.payload[at] = use_of(t, request, at, end + group.proof)
        if not group.aligned:
            group.block = request.blocks[column * groups + at]
    return groups, column
