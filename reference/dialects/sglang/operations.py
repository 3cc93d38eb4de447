"""Operations: what SGLang's scheduler does with a request, or asks of the cache, one a record, in order."""

from __future__ import annotations

from reference.dialects.sglang.evicting import evict
from reference.dialects.sglang.holding import release_window, unlock
from reference.dialects.sglang.records import Cache, Code, Mode, Operation, Request, Result, Status, ceil
from reference.dialects.sglang.requests import (
    arrive,
    enter,
    grow,
    lacking_states,
    pages_of,
    release,
    slide,
    take_states,
)
from reference.language import Text, clause

TEXT = Text(__name__)

STATES = Code.ADMIT, Code.CHECKPOINT
"""Operations that need a state and nothing else."""


def perform_all(c: Cache, count: int) -> None:
    """The first `count` operations."""
    for n in range(1, count + 1):
        perform_at(c, n, c.operations[n].code)


def perform_at(c: Cache, n: int, code: int) -> None:
    """The operation of a record, whose code may be known."""
    op, result = c.operations[n], c.results[n]
    result.hit, result.full_hit, result.full, result.window, result.states = 0, 0, 0, 0, 0
    result.status = perform(c, op, result, code)


def perform(c: Cache, op: Operation, result: Result, code: int) -> int:
    """One operation: it comes, room is made for it, and it is done; its `Status`.

    What is refused changes nothing but what made room for it, and the order of use that a match leaves.
    """
    slotless = code in (Code.MATCH, Code.EVICT, Code.ROOM)
    if code < Code.MATCH or code > Code.ROOM:
        return Status.UNKNOWN
    slot = 1 if slotless else op.slot + 2
    if not slotless and (slot < 2 or slot > c.slots + 1):
        return Status.NO_SUCH_SLOT
    request = c.requests[slot]
    if not request.running and not slotless and code != Code.ADMIT:
        return Status.NO_SUCH_SLOT
    status = refusal(c, op, request, code)
    if status != Status.OK:
        return status
    if code in (Code.MATCH, Code.ADMIT, Code.DECODE):
        status = note_keys(c, op, request, code)
        if status != Status.OK:
            return status
    if code in (Code.MATCH, Code.ADMIT):
        arrive(c, op, request, result, code == Code.ADMIT)
    if code in (Code.EXTEND, Code.DECODE, Code.EVICT, Code.ROOM) or (c.config.states and code in STATES):
        status = make_room(c, op, request, code)
        if status != Status.OK:
            return status
    if code == Code.EVICT:
        result.full, result.window, result.states = c.full.freed, c.swa.freed, c.states.freed
    if code in (Code.EXTEND, Code.DECODE):
        length = request.length + 1 if code == Code.DECODE else op.length
        track = length if code == Code.DECODE and op.track else op.track
        if not grow(c, request, length, track, code == Code.DECODE):
            clause("no-room", "alloc_for_extend", "a request is refused pages")
            return Status.NO_ROOM
    if code == Code.SLIDE:
        slide(c, request, request.length, op.every)
    if code == Code.RELEASE_WINDOW and request.edge > 0 and not request.window_released:
        release_window(c, request)
    if code in (Code.CHECKPOINT, Code.FINISH, Code.ABORT):
        length = request.length
        if code == Code.FINISH and op.length != 0:
            clause("ends-at-a-length", "release_kv_cache", "a request ends where a pass may have run beyond it")
            length = op.length
        if code != Code.ABORT:
            enter(c, request, length, code == Code.CHECKPOINT)
        if code != Code.CHECKPOINT:
            release(c, request, length)
    return Status.OK


def refusal(c: Cache, op: Operation, request: Request, code: int) -> int:
    """The status that refuses an operation before anything happens, or OK."""
    if code == Code.ADMIT and request.running:
        return Status.NOT_WAITING
    if code == Code.ADMIT and op.tokens < 1:
        return Status.BAD_LENGTH
    if code == Code.EXTEND:
        if op.length <= request.length or op.length > request.tokens:
            return Status.BAD_LENGTH
        if op.track != 0 and (op.track <= request.length or op.track > op.length):
            return Status.BAD_LENGTH
    if code == Code.DECODE and request.length != request.tokens:
        return Status.NOT_COMPUTED
    # What the tree has of it ends with a unit, which under EAGLE takes one token more: SGLang fails an assertion.
    least = request.protected * c.config.page + c.config.eagle
    if code == Code.FINISH and op.length != 0 and (op.length < least or op.length > request.length):
        return Status.BAD_LENGTH
    if code in (Code.CHECKPOINT, Code.FINISH) and not request.ran:
        return Status.NOT_COMPUTED
    return Status.OK


def note_keys(c: Cache, op: Operation, request: Request, code: int) -> int:
    """The keys of a request's pages stand ready, those of a decoded token behind the others; a status."""
    first, tokens = 0, op.tokens
    if code == Code.DECODE:
        first, tokens = pages_of(c, request.tokens), request.tokens + 1
    if first + op.count != pages_of(c, tokens):
        return Status.BAD_COUNT
    if tokens > c.row * c.config.page:
        return Status.ROW_FULL
    for at in range(op.count):
        request.chain[first + at] = c.payload[op.start + at]
    return Status.OK


def make_room(c: Cache, op: Operation, request: Request, code: int) -> int:
    """Lets leave what must leave: first until there are the states that a request lacks, which it takes; a status."""
    evicts, passes, lacking = code == Code.EVICT, code == Code.EXTEND, 0
    if c.config.states and (passes or code in STATES):
        lacking = lacking_states(c, request, passes)
    tokens = op.full
    if passes:
        # With larger pages the engine asks for one more than a chunk could need.
        tokens = op.length - request.length + (c.config.page if c.config.page > 1 else 0)
    elif code == Code.DECODE:
        tokens = c.config.page
    elif code in STATES:
        tokens = 0
    full, window = ceil(tokens, c.config.page), ceil(op.window if evicts else tokens, c.config.page)
    for turn in range(0 if c.config.states else 1, 2):
        first = turn == 0
        states = lacking if first else (op.states if evicts else 0)
        evict(
            c, 0 if first else full, 0 if first else window, states, Mode.FREED if evicts and not first else Mode.ROOM
        )
        if first and lacking > 0:
            if c.states.count < lacking:
                if code == Code.ADMIT:
                    unlock(c, request)
                    request.running = 0
                return Status.NO_STATES
            if code != Code.CHECKPOINT:
                take_states(c, request, passes)
    return Status.OK
