"""Effect of each operation on a cache: what a request takes, what is its own, and when it becomes the tree's.

A refused operation takes nothing and says why in its status, with two exceptions of SGLang's: what was evicted to make
room stays evicted, and a decode that finds no window page loses a full one (`DECODE_LOSES_PAGE`).

Twin: `reference.dialects.sglang.requests`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hkv.dialects.sglang.rules import evict, locks, pools, radix_tree, states
from hkv.dialects.sglang.rules.operations import SGLangArgument, SGLangCode
from hkv.dialects.sglang.rules.parameters import Field, SGLangView
from hkv.machine.operations import Payload
from hkv.state.loops import Scalar, ceil_divide, divide, loop, read, when
from hkv.state.radix import FULL, STATES, WINDOW, Count, Key, RadixRequest
from hkv.state.radix_workspace import RadixWorkspace
from hkv.state.status import Status

Work = RadixWorkspace


class SGLangOp(NamedTuple):
    """The operation at hand, and what its request knew of itself before, as in `RadixRequest`."""

    code: Scalar
    slot: Scalar
    exists: Scalar
    row: tuple[Scalar, ...]
    live: Scalar
    tokens: Scalar
    prompt: Scalar
    priority: Scalar
    length: Scalar
    protected: Scalar
    entered: Scalar
    slid: Scalar
    ran: Scalar
    branch: Scalar
    node: Scalar
    mark: Scalar
    released: Scalar
    state: Scalar
    first_track: Scalar
    second_track: Scalar
    turn: Scalar
    tracked: Scalar
    tracked_before: Scalar

    def argument(self, argument: SGLangArgument) -> Scalar:
        """One of its arguments."""
        return self.row[argument]

    def on(self, *codes: SGLangCode) -> Scalar:
        """True if it is one of these."""
        found = self.code == int(codes[0])
        for each in codes[1:]:
            found = found | (self.code == int(each))
        return found


class SGLangAnswer(NamedTuple):
    """Columns of the result."""

    status: Scalar
    hit: Scalar
    full: Scalar
    window: Scalar
    states: Scalar

    def refuse(self, condition: Scalar, status: Status) -> SGLangAnswer:
        """The answer with another status where the condition holds and nothing was refused before."""
        return self._replace(status=jnp.where(condition & self.ok, int(status), self.status))

    @property
    def ok(self) -> Scalar:
        """True if nothing was refused so far."""
        return self.status == int(Status.OK)


FETCHED = tuple(RadixRequest[name.upper()] for name in SGLangOp._fields[4:])
"""Words of a request that an `SGLangOp` has, in its order."""

SLOTLESS = (SGLangCode.MATCH, SGLangCode.EVICT, SGLangCode.ROOM)
"""Operations that are about no request."""


def fetch(work: Work, table: jax.Array, base: Scalar, code: Scalar) -> tuple[Work, SGLangOp]:
    """Reads an operation and its request. A slot that does not exist becomes the spare one."""
    row = tuple(read(table, base + column) for column in range(len(SGLangArgument)))
    asked = row[SGLangArgument.SLOT]
    # Checked, never clamped: a wrong slot must not become a neighbour's.
    exists = (asked >= 0) & (asked < work.sizes.buckets.requests)
    slot = jnp.where(exists, asked, work.spare_slot)
    slot = jnp.where(code == int(SGLangCode.MATCH), work.lookup_slot, slot)
    work, fields = work.peek_request(code != int(SGLangCode.END), slot, *FETCHED)
    return work, SGLangOp(code, slot, exists, row, *fields)


def units(view: SGLangView, tokens: Scalar) -> Scalar:
    """Units of a key of so many tokens, of which there is one at least: one less if they are bigrams."""
    return jnp.maximum(tokens - view.whole(Field.EAGLE), 0)


def pages_of(view: SGLangView, tokens: Scalar) -> Scalar:
    """Whole pages of a key of so many tokens."""
    return divide(units(view, tokens), view.page)


def check(view: SGLangView, op: SGLangOp, answer: SGLangAnswer) -> SGLangAnswer:
    """Refuses what cannot come now, before anything changes."""
    extends, enters = op.on(SGLangCode.EXTEND), op.on(SGLangCode.CHECKPOINT, SGLangCode.FINISH)
    length, track = op.argument(SGLangArgument.LENGTH), op.argument(SGLangArgument.TRACK)
    kept = (track == 0) | ((track > op.length) & (track <= length))
    answer = answer.refuse(extends & ((length <= op.length) | (length > op.tokens) | ~kept), Status.BAD_LENGTH)
    # What the tree has of a request ends with a unit, which under EAGLE takes one token more.
    least = op.protected * view.page + view.whole(Field.EAGLE)
    ends = op.on(SGLangCode.FINISH) & (length != 0) & ((length < least) | (length > op.length))
    answer = answer.refuse(ends, Status.BAD_LENGTH)
    answer = answer.refuse(op.on(SGLangCode.DECODE) & (op.length != op.tokens), Status.NOT_COMPUTED)
    return answer.refuse(enters & (op.ran == 0), Status.NOT_COMPUTED)


def arrive(
    work: Work, view: SGLangView, op: SGLangOp, answer: SGLangAnswer, payload: Payload
) -> tuple[Work, SGLangAnswer]:
    """MATCH and ADMIT: the longest cached prefix; of a request's tokens the last is computed in any case."""
    admits, tokens = op.on(SGLangCode.ADMIT), op.argument(SGLangArgument.TOKENS)
    answer = answer.refuse(admits & (op.live != 0), Status.NOT_WAITING)
    answer = answer.refuse(tokens < admits, Status.BAD_LENGTH)
    count, start = op.argument(SGLangArgument.NUMBERS), op.argument(SGLangArgument.START)
    work, answer = _note_keys(work, view, op, answer, payload, (0, count, start), tokens)
    priority = op.argument(SGLangArgument.PRIORITY)
    work, found = take_in(work, view, answer.ok, op.slot, admits, (tokens, priority))
    return work, answer._replace(hit=found.length, full=found.full)


def take_in(
    work: Work, view: SGLangView, present: Scalar, slot: Scalar, admits: Scalar, comes: tuple[Scalar, Scalar]
) -> tuple[Work, radix_tree.PrefixMatch]:
    """Matches the keys of a slot, if `present`; if it `admits` a request, that one holds what is found.

    `comes`: its tokens, and its priority.
    """
    tokens, priority = comes
    asked = pages_of(view, jnp.where(admits, tokens - 1, tokens))
    work, found = radix_tree.match(work, view, present, slot, asked)
    takes = admits & present
    work = take_rows(work, takes, slot, jnp.int32(0), found.length)
    work, mark = locks.lock(work, view, takes, found.node)
    fields = {
        RadixRequest.LIVE: 1,
        RadixRequest.TOKENS: tokens,
        RadixRequest.PROMPT: tokens,
        RadixRequest.PRIORITY: priority,
        RadixRequest.LENGTH: found.length * view.page,
        RadixRequest.PROTECTED: found.length,
        # Beside states a window has no say in where an insert ends: a state stands for its length alone.
        RadixRequest.BRANCH: jnp.where(view.windowed & ~view.stateful & (found.full > found.length), found.full, 0),
        RadixRequest.NODE: found.node,
        RadixRequest.MARK: mark,
    }
    for field in RadixRequest:
        work = work.write_if(takes, "requests", fields.get(field, 0), work.request(slot, field))
    return work, found


def _note_keys(
    work: Work,
    view: SGLangView,
    op: SGLangOp,
    answer: SGLangAnswer,
    payload: Payload,
    span: tuple[Scalar, Scalar, Scalar],
    tokens: Scalar,
) -> tuple[Work, SGLangAnswer]:
    """Copies keys of the payload into the slot's chain: from a position on so many, of which the first is where.

    Refused unless they are the keys of exactly the whole pages of so many tokens.
    """
    first, count, start = span
    inside = (count >= 0) & (start >= 0) & (start + count <= payload.size)
    answer = answer.refuse(~inside | (first + count != pages_of(view, tokens)), Status.BAD_COUNT)
    most = work.sizes.buckets.row * view.page
    answer = answer.refuse(tokens > most, Status.ROW_FULL)

    def one(w: Work, local: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
        done, unknown = local
        key = read(payload.numbers, payload.base + start + done)
        w = w.write("chains", key, w.chain(op.slot, first + done))
        return w, (done + 1, unknown | (key < 0) | (key >= w.sizes.buckets.keys))

    end = jnp.where(answer.ok, count, 0)
    work, (_, unknown) = loop(lambda c: c[0] < end, one, work, (0, False), writes=("chains",))
    return work, answer.refuse(unknown, Status.KEYS_FULL)


def take_rows(work: Work, present: Scalar, slot: Scalar, start: Scalar, end: Scalar) -> Work:
    """A request's row has the tree's pages between two positions."""

    def one(w: Work, local: tuple[Scalar]) -> tuple[Work, tuple[Scalar]]:
        (at,) = local
        page = w.read("keys", w.key(w.read("chains", w.chain(slot, at)), Key.PAGE))
        return w.write("rows", page, w.row(slot, at)), (at + 1,)

    last = jnp.where(present, end, start)
    return loop(lambda c: c[0] < last, one, work, (start,), reads=("chains", "keys"), writes=("rows",))[0]


def note_token(
    work: Work, view: SGLangView, op: SGLangOp, answer: SGLangAnswer, payload: Payload
) -> tuple[Work, SGLangAnswer]:
    """DECODE: the key that the token completes, if any, stands ready; and it must be given."""
    span = (pages_of(view, op.tokens), op.argument(SGLangArgument.NUMBERS), op.argument(SGLangArgument.START))
    return _note_keys(work, view, op, answer, payload, span, op.tokens + 1)


def make_room(work: Work, view: SGLangView, op: SGLangOp, answer: SGLangAnswer) -> tuple[Work, SGLangAnswer]:
    """ADMIT, EXTEND, DECODE, CHECKPOINT, EVICT and ROOM: what must leave leaves, first for states, and then for tokens.

    A request that resumes at a node copies its state into one of its own, and so does the tree with a running one's.
    """
    evicts, extends = op.on(SGLangCode.EVICT), op.on(SGLangCode.EXTEND)
    lacks = jnp.where(extends, states.missing(view, op.state, op.first_track), 0)
    copies = op.on(SGLangCode.CHECKPOINT) & (~view.flag(Field.TRACKED) | (op.tracked != 0))
    copies = view.stateful & (copies | (op.on(SGLangCode.ADMIT) & (answer.hit > 0)))
    # The state to be copied is of a node that the request holds by now, so that evicting for the copy cannot take it.
    lacks = jnp.where(copies, 1, lacks)
    length = jnp.where(op.on(SGLangCode.DECODE), op.length + 1, op.argument(SGLangArgument.LENGTH))
    room = room_for(view, op.length, length, op.on(SGLangCode.DECODE))
    room = jnp.where(op.on(SGLangCode.ROOM), op.argument(SGLangArgument.FULL), room)

    def one(w: Work, local: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
        first = local[0] == 0
        full, window, some = (op.argument(each) for each in _WANTED)
        full, window = (jnp.where(evicts, each, jnp.where(first, 0, room)) for each in (full, window))
        wanted = evict.Wanted(full, window, jnp.where(first, lacks, jnp.where(evicts, some, 0)), first | ~evicts)
        w, freed = evict.evict(w, view, jnp.bool_(True), wanted)
        w, free = pools.free_pages(w, first, STATES)
        enough = ~first | (free >= lacks)
        return w, (local[0] + 1, enough, *freed)

    begin = jnp.where(lacks > 0, 0, 1)
    end = jnp.where(op.on(SGLangCode.EXTEND, SGLangCode.DECODE, SGLangCode.EVICT, SGLangCode.ROOM), 2, 1)
    local = (begin, True, 0, 0, 0)
    work, (_, enough, *freed) = loop(lambda c: (c[0] < end) & c[1], one, work, local, writes=evict.WRITES)
    refused = op.on(SGLangCode.ADMIT) & ~enough
    work = _take_back(work, view, refused, op.slot)
    # A checkpoint's own is taken where it is entered, for it takes another's place.
    held = jnp.where(enough & ~op.on(SGLangCode.CHECKPOINT), lacks, 0)
    work = states.take_missing(work, op.slot, held)
    full, window, some = (jnp.where(evicts, each, was) for each, was in zip(freed, answer[2:], strict=True))
    return work, answer._replace(full=full, window=window, states=some).refuse(~enough, Status.NO_STATE)


_WANTED = SGLangArgument.FULL, SGLangArgument.WINDOW, SGLangArgument.STATES


def _take_back(work: Work, view: SGLangView, present: Scalar, slot: Scalar) -> Work:
    """A request that was just admitted is not, if `present`."""
    yes = jnp.bool_(True)

    def once(w: Work) -> Work:
        w, (node, mark) = w.peek_request(yes, slot, RadixRequest.NODE, RadixRequest.MARK)
        return locks.unlock(w, view, node, mark, yes, yes).write("requests", 0, w.request(slot, RadixRequest.LIVE))

    return when(present, once, work, writes=(*locks.WRITES, "requests"))


def room_for(view: SGLangView, start: Scalar, end: Scalar, decodes: Scalar) -> Scalar:
    """Tokens that there is to be room for before a request gets slots: with pages one page more than could be needed,
    and for a decoded token a page."""
    return jnp.where(decodes, view.page, end - start + jnp.where(view.page > 1, view.page, 0))


def allocate(work: Work, view: SGLangView, op: SGLangOp, answer: SGLangAnswer) -> tuple[Work, SGLangAnswer]:
    """EXTEND and DECODE: pages of both pools, or of neither. A refused token does not come."""
    decodes = op.on(SGLangCode.DECODE)
    length = jnp.where(decodes, op.length + 1, op.argument(SGLangArgument.LENGTH))
    work, granted = lengthen(work, view, answer.ok, op.slot, (op.length, length), decodes)
    tokens, ran = jnp.where(decodes, length, op.tokens), jnp.where(decodes, op.ran, 1)
    for field, value in ((RadixRequest.LENGTH, length), (RadixRequest.TOKENS, tokens), (RadixRequest.RAN, ran)):
        work = work.write_if(granted, "requests", value, work.request(op.slot, field))
    track = op.argument(SGLangArgument.TRACK)
    # A chunk of a prompt is never beyond the end: only decoded tokens leave a state behind to fall back to.
    kept = jnp.where(track > 0, jnp.where(decodes, length, track), 0)
    work = keep_state(work, granted, (op.slot, op.turn), kept, jnp.where(decodes, op.tracked, 0))
    return work, answer.refuse(~granted, Status.NO_ROOM)


def keep_state(work: Work, present: Scalar, by: tuple[Scalar, Scalar], length: Scalar, before: Scalar) -> Work:
    """A pass keeps a state of a length, if `present` and unless that is 0, in the one of the two that was not written
    last; the other one is of `before`. `by`: the request's slot, and its `RadixRequest.TURN`."""
    (slot, turn), keeps = by, jnp.asarray(present) & (length > 0)
    for field, value in (
        (RadixRequest.TRACKED, length),
        (RadixRequest.TRACKED_BEFORE, before),
        (RadixRequest.TURN, 1 - turn),
    ):
        work = work.write_if(keeps, "requests", value, work.request(slot, field))
    return work


def lengthen(
    work: Work, view: SGLangView, present: Scalar, slot: Scalar, lengths: tuple[Scalar, Scalar], decodes: Scalar
) -> tuple[Work, Scalar]:
    """Gives a request the pages that it lacks between two lengths in tokens, if `present`; whether it got them.

    SGLang takes a decoded token's full page before it asks the window's pool; when that has none, the page is lost.
    """
    start = ceil_divide(lengths[0], view.page)
    need = ceil_divide(lengths[1], view.page) - start
    work, full_free = pools.free_pages(work, present, FULL)
    work, window_free = pools.free_pages(work, jnp.asarray(present) & view.windowed, WINDOW)
    has = (need <= full_free, (need <= window_free) | ~view.windowed)
    granted = jnp.asarray(present) & has[0] & has[1]
    loses = jnp.asarray(present) & decodes & view.windowed & view.flag(Field.LOSES)
    taken = (granted | (loses & has[0]), granted | (loses & has[1]))
    # SGLang bounds the pages from above before it counts them, and sorts by the bound. A single pool sorts before it
    # finds that it has too few; of two, each does where a decode may lose a page, and else only once both have enough.
    bound = jnp.where(decodes, 1, jnp.where(view.page == 1, need, divide(lengths[1] - lengths[0], view.page) + 2))
    sorts = view.flag(Field.SORT) & (granted | (jnp.asarray(present) & (~view.windowed | loses)))
    work = pools.sort_in(work, view, sorts, FULL, bound)
    work = pools.sort_in(work, view, sorts & view.windowed, WINDOW, bound)
    counts = (jnp.where(taken[0], need, 0), jnp.where(taken[1] & view.windowed, need, 0))
    return pools.hand_out(work, work.row(slot, start), counts, granted, view.windowed), granted


class Own(NamedTuple):
    """Pages of a request whose window's it has given back, those that are the tree's, and the length in tokens of the
    state that it kept last, 0 for none."""

    slid: Scalar
    protected: Scalar
    tracked: Scalar


def slide(
    work: Work, view: SGLangView, slot: Scalar, present: Scalar, length: Scalar, own: Own, every: Scalar
) -> tuple[Work, Scalar]:
    """Frees window pages of a request's own that a query at `length` does not read, if `present`; pages slid then."""
    window, page = view.whole(Field.WINDOW), view.page
    due = jnp.asarray(present) & view.windowed & (length - window >= own.slid * page + every)
    start = jnp.maximum(own.slid, own.protected)
    floor = length - ceil_divide(jnp.maximum(window, page), page) * page
    # The next match ends at the state that was kept, and reads a window there.
    floor = jnp.where(own.tracked > 0, jnp.minimum(floor, own.tracked - window), floor)
    end = jnp.maximum(start, divide(jnp.maximum(floor, 0), page))
    count = jnp.where(due, end - start, 0)
    work = pools.free_window(work, view, work.row(slot, start), count)
    return work, jnp.where(due, end, own.slid)


def pass_window(work: Work, view: SGLangView, op: SGLangOp, answer: SGLangAnswer) -> tuple[Work, SGLangAnswer]:
    """SLIDE and RELEASE_WINDOW."""
    slides, releases = op.on(SGLangCode.SLIDE), op.on(SGLangCode.RELEASE_WINDOW)
    own, every = Own(op.slid, op.protected, op.tracked), op.argument(SGLangArgument.EVERY)
    work, slid = slide(work, view, op.slot, slides, op.length, own, every)
    # Only a lock with a mark has a part that can be given back alone.
    gives = releases & (op.mark != 0) & (op.released == 0)
    work = locks.unlock(work, view, op.node, op.mark, jnp.bool_(False), gives)
    work = work.write_if(slides, "requests", slid, work.request(op.slot, RadixRequest.SLID))
    return work.write_if(gives, "requests", 1, work.request(op.slot, RadixRequest.RELEASED)), answer


def count_dropped(work: Work, count: Scalar) -> Work:
    """Counts slots that did not exist."""
    work, (dropped,) = work.peek(count > 0, "counters", work.count(Count.DROPPED))
    return work.write_if(count > 0, "counters", dropped + count, work.count(Count.DROPPED))
