"""Effect of each operation on a cache: what a request takes, what is its own, and when it becomes the tree's.

A refused operation takes nothing and says why in its status, with two exceptions of SGLang's: what was evicted to make
room stays evicted, and a decode that finds no window page loses a full one (`DECODE_LOSES_PAGE`).

Twin: `reference.dialects.sglang.manager`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hkv.dialects.sglang.rules import evict, locks, pools, radix_tree
from hkv.dialects.sglang.rules.evict import Wanted
from hkv.dialects.sglang.rules.operations import SGLangArgument, SGLangCode
from hkv.dialects.sglang.rules.parameters import Field, View
from hkv.dialects.sglang.rules.radix_tree import Entry
from hkv.machine.operations import Payload
from hkv.state.loops import Scalar, ceil_divide, divide, loop, read
from hkv.state.radix import FULL, WINDOW, Count, Held, Key
from hkv.state.radix_workspace import RadixWorkspace
from hkv.state.status import Status

Work = RadixWorkspace


class Op(NamedTuple):
    """The operation at hand, and what its request knew of itself before, as in `Held`."""

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

    def argument(self, argument: SGLangArgument) -> Scalar:
        """One of its arguments."""
        return self.row[argument]

    def on(self, *codes: SGLangCode) -> Scalar:
        """True if it is one of these."""
        found = self.code == int(codes[0])
        for each in codes[1:]:
            found = found | (self.code == int(each))
        return found


class Answer(NamedTuple):
    """Columns of the result."""

    status: Scalar
    hit: Scalar
    full: Scalar
    window: Scalar
    states: Scalar

    def refuse(self, condition: Scalar, status: Status) -> Answer:
        """The answer with another status where the condition holds and nothing was refused before."""
        return self._replace(status=jnp.where(condition & self.ok, int(status), self.status))

    @property
    def ok(self) -> Scalar:
        """True if nothing was refused so far."""
        return self.status == int(Status.OK)


FETCHED = tuple(Held[name.upper()] for name in Op._fields[4:])
"""Words of a request that an `Op` has, in its order."""

SLOTLESS = (SGLangCode.MATCH, SGLangCode.EVICT)
"""Operations that are about no request."""


def fetch(work: Work, table: jax.Array, base: Scalar, code: Scalar) -> tuple[Work, Op]:
    """Reads an operation and its request. A slot that does not exist becomes the spare one."""
    row = tuple(read(table, base + column) for column in range(len(SGLangArgument)))
    asked = row[SGLangArgument.SLOT]
    # Checked, never clamped: a wrong slot must not become a neighbour's.
    exists = (asked >= 0) & (asked < work.sizes.buckets.requests)
    slot = jnp.where(exists, asked, work.spare_slot)
    slot = jnp.where(code == int(SGLangCode.MATCH), work.lookup_slot, slot)
    work, fields = work.peek_request(code != int(SGLangCode.END), slot, *FETCHED)
    return work, Op(code, slot, exists, row, *fields)


def units(view: View, tokens: Scalar) -> Scalar:
    """Units of a key of so many tokens, of which there is one at least: one less if they are bigrams."""
    return jnp.maximum(tokens - view.whole(Field.EAGLE), 0)


def pages_of(view: View, tokens: Scalar) -> Scalar:
    """Whole pages of a key of so many tokens."""
    return divide(units(view, tokens), view.page)


def check(op: Op, answer: Answer) -> Answer:
    """Refuses what cannot come now, before anything changes."""
    extends, enters = op.on(SGLangCode.EXTEND), op.on(SGLangCode.CHECKPOINT, SGLangCode.FINISH)
    length = op.argument(SGLangArgument.LENGTH)
    answer = answer.refuse(extends & ((length <= op.length) | (length > op.tokens)), Status.BAD_LENGTH)
    answer = answer.refuse(op.on(SGLangCode.DECODE) & (op.length != op.tokens), Status.NOT_COMPUTED)
    return answer.refuse(enters & (op.ran == 0), Status.NOT_COMPUTED)


def arrive(work: Work, view: View, op: Op, answer: Answer, payload: Payload) -> tuple[Work, Answer]:
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
    work: Work, view: View, present: Scalar, slot: Scalar, admits: Scalar, comes: tuple[Scalar, Scalar]
) -> tuple[Work, radix_tree.Match]:
    """Matches the keys of a slot, if `present`; if it `admits` a request, that one holds what is found.

    `comes`: its tokens, and its priority.
    """
    tokens, priority = comes
    asked = pages_of(view, jnp.where(admits, tokens - 1, tokens))
    work, found = radix_tree.match(work, view, present, slot, asked)
    takes = admits & present
    work = _take_rows(work, takes, slot, jnp.int32(0), found.length)
    work, mark = locks.lock(work, view, takes, found.node)
    fields = {
        Held.LIVE: 1,
        Held.TOKENS: tokens,
        Held.PROMPT: tokens,
        Held.PRIORITY: priority,
        Held.LENGTH: found.length * view.page,
        Held.PROTECTED: found.length,
        Held.BRANCH: jnp.where(view.windowed & (found.full > found.length), found.full, 0),
        Held.NODE: found.node,
        Held.MARK: mark,
    }
    for field in Held:
        work = work.write_if(takes, "requests", fields.get(field, 0), work.request(slot, field))
    return work, found


def _note_keys(
    work: Work,
    view: View,
    op: Op,
    answer: Answer,
    payload: Payload,
    span: tuple[Scalar, Scalar, Scalar],
    tokens: Scalar,
) -> tuple[Work, Answer]:
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


def _take_rows(work: Work, present: Scalar, slot: Scalar, start: Scalar, end: Scalar) -> Work:
    """A request's row has the tree's pages between two positions."""

    def one(w: Work, local: tuple[Scalar]) -> tuple[Work, tuple[Scalar]]:
        (at,) = local
        page = w.read("keys", w.key(w.read("chains", w.chain(slot, at)), Key.PAGE))
        return w.write("rows", page, w.row(slot, at)), (at + 1,)

    last = jnp.where(present, end, start)
    return loop(lambda c: c[0] < last, one, work, (start,), reads=("chains", "keys"), writes=("rows",))[0]


def note_token(work: Work, view: View, op: Op, answer: Answer, payload: Payload) -> tuple[Work, Answer]:
    """DECODE: the key that the token completes, if any, stands ready; and it must be given."""
    span = (pages_of(view, op.tokens), op.argument(SGLangArgument.NUMBERS), op.argument(SGLangArgument.START))
    return _note_keys(work, view, op, answer, payload, span, op.tokens + 1)


def make_room(work: Work, view: View, op: Op, answer: Answer) -> tuple[Work, Answer]:
    """EXTEND, DECODE and EVICT: what must leave leaves."""
    evicts = op.on(SGLangCode.EVICT)
    length = jnp.where(op.on(SGLangCode.DECODE), op.length + 1, op.argument(SGLangArgument.LENGTH))
    room = room_for(view, op.length, length, op.on(SGLangCode.DECODE))
    wanted = Wanted(
        full=jnp.where(evicts, op.argument(SGLangArgument.FULL), room),
        window=jnp.where(evicts, op.argument(SGLangArgument.WINDOW), room),
        room=~evicts,
    )
    work, freed = evict.evict(work, view, answer.ok, wanted)
    return work, answer._replace(full=jnp.where(evicts, freed.full, 0), window=jnp.where(evicts, freed.window, 0))


def room_for(view: View, start: Scalar, end: Scalar, decodes: Scalar) -> Scalar:
    """Tokens that there is to be room for before a request gets slots: with pages one page more than could be needed,
    and for a decoded token a page."""
    return jnp.where(decodes, view.page, end - start + jnp.where(view.page > 1, view.page, 0))


def allocate(work: Work, view: View, op: Op, answer: Answer) -> tuple[Work, Answer]:
    """EXTEND and DECODE: pages of both pools, or of neither. A refused token does not come."""
    decodes = op.on(SGLangCode.DECODE)
    length = jnp.where(decodes, op.length + 1, op.argument(SGLangArgument.LENGTH))
    work, granted = lengthen(work, view, answer.ok, op.slot, (op.length, length), decodes)
    tokens, ran = jnp.where(decodes, length, op.tokens), jnp.where(decodes, op.ran, 1)
    for field, value in ((Held.LENGTH, length), (Held.TOKENS, tokens), (Held.RAN, ran)):
        work = work.write_if(granted, "requests", value, work.request(op.slot, field))
    return work, answer.refuse(~granted, Status.NO_ROOM)


def lengthen(
    work: Work, view: View, present: Scalar, slot: Scalar, lengths: tuple[Scalar, Scalar], decodes: Scalar
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


def slide(
    work: Work, view: View, slot: Scalar, present: Scalar, length: Scalar, own: tuple[Scalar, Scalar], every: Scalar
) -> tuple[Work, Scalar]:
    """Frees window pages of a request's own that a query at `length` does not read, if `present`; pages slid then.

    `own`: pages that it has slid, and those that are the tree's.
    """
    slid, protected = own
    window, page = view.whole(Field.WINDOW), view.page
    due = jnp.asarray(present) & view.windowed & (length - window >= slid * page + every)
    start = jnp.maximum(slid, protected)
    kept = ceil_divide(jnp.maximum(window, page), page) * page
    end = jnp.maximum(start, divide(jnp.maximum(length - kept, 0), page))
    count = jnp.where(due, end - start, 0)
    work = pools.free_window(work, view, work.row(slot, start), count)
    return work, jnp.where(due, end, slid)


def pass_window(work: Work, view: View, op: Op, answer: Answer) -> tuple[Work, Answer]:
    """SLIDE and RELEASE_WINDOW."""
    slides, releases = op.on(SGLangCode.SLIDE), op.on(SGLangCode.RELEASE_WINDOW)
    own, every = (op.slid, op.protected), op.argument(SGLangArgument.EVERY)
    work, slid = slide(work, view, op.slot, slides, op.length, own, every)
    # Only a lock with a mark has a part that can be given back alone.
    gives = releases & (op.mark != 0) & (op.released == 0)
    work = locks.unlock(work, view, op.node, op.mark, jnp.bool_(False), gives)
    work = work.write_if(slides, "requests", slid, work.request(op.slot, Held.SLID))
    return work.write_if(gives, "requests", 1, work.request(op.slot, Held.RELEASED)), answer


def enter(work: Work, view: View, op: Op, answer: Answer) -> tuple[Work, Answer]:
    """CHECKPOINT and FINISH: a request's pages are entered, the tree's take their place, and it holds the last node."""
    runs, eagle, counted = op.on(SGLangCode.CHECKPOINT), view.whole(Field.EAGLE), _counted(op)
    # The prefix that a window kept this request from using ends here, so that the next one can use it.
    branches = (op.branch > op.protected) & (op.branch * view.page + eagle <= counted)
    length = jnp.where(branches, op.branch * view.page + eagle, counted)
    work, slid = slide(work, view, op.slot, runs, length - eagle - 1, (op.slid, op.protected), jnp.int32(1))
    pages = pages_of(view, length)
    work, node = _insert(work, view, op, pages, slid)
    work = _take_rows(work, jnp.bool_(True), op.slot, op.protected, pages)
    work = locks.unlock(work, view, op.node, op.mark, jnp.bool_(True), op.released == 0)
    work, mark = locks.lock(work, view, jnp.bool_(True), node)
    again = runs & branches
    work, slid = slide(work, view, op.slot, again, op.length - eagle - 1, (slid, pages), jnp.int32(1))
    fields = {
        Held.PROTECTED: pages,
        Held.ENTERED: jnp.maximum(op.entered, pages),
        Held.SLID: slid,
        Held.BRANCH: jnp.where(branches, 0, op.branch),
        Held.NODE: node,
        Held.MARK: mark,
        Held.RELEASED: 0,
    }
    for field, value in fields.items():
        work = work.write("requests", value, work.request(op.slot, field))
    return work, answer


def _counted(op: Op) -> Scalar:
    """Tokens of a request that are entered: all that have slots, but for a pass beyond its end."""
    asked = jnp.where(op.on(SGLangCode.FINISH), op.argument(SGLangArgument.LENGTH), 0)
    return jnp.where(asked > 0, asked, op.length)


def _insert(work: Work, view: View, op: Op, pages: Scalar, slid: Scalar) -> tuple[Work, Scalar]:
    """Inserts a request's pages; where full attention is all there is, a prompt is parted from what was generated
    after it, and kept longer: it is likelier to come again."""
    prompt = pages_of(view, op.prompt)
    parts = ~view.windowed & (prompt > 0) & (prompt < pages)

    def one(w: Work, local: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
        turn, last = local
        again = turn > 0
        entry = Entry(
            slot=op.slot,
            pages=jnp.where(again, prompt, pages),
            owned=jnp.where(again, prompt, op.protected),
            slid=jnp.where(again, 0, slid),
            counted=jnp.where(again, prompt, op.entered),
            priority=op.priority + again,
        )
        w, node = radix_tree.insert(w, view, jnp.bool_(True), entry)
        return w, (turn + 1, jnp.where(again, last, node))

    turns = jnp.where(parts, 2, 1)
    work, (_, node) = loop(lambda c: c[0] < turns, one, work, (0, 0), writes=radix_tree.WRITES)
    return work, node


def leave(work: Work, view: View, op: Op, answer: Answer) -> tuple[Work, Answer]:
    """FINISH, once it is entered, and ABORT: pages of its own are free, and it holds nothing."""
    fields = (Held.PROTECTED, Held.SLID, Held.NODE, Held.MARK, Held.RELEASED)
    work, (protected, slid, node, mark, released) = work.peek_request(True, op.slot, *fields)
    whole, end = ceil_divide(_counted(op), view.page), ceil_divide(op.length, view.page)

    def one(w: Work, local: tuple[Scalar, Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar, Scalar]]:
        turn, first, last = local
        ends = (first, jnp.clip(slid, first, last), last)
        return pools.free_own(w, view, w.row(op.slot, 0), ends), (turn + 1, last, end)

    # Pages of a pass beyond the end are given back after the others.
    work, _ = loop(lambda c: c[0] < 2, one, work, (0, protected, whole), writes=pools.WRITES)
    work = locks.unlock(work, view, node, mark, jnp.bool_(True), released == 0)
    return work.write("requests", 0, work.request(op.slot, Held.LIVE)), answer


def count_dropped(work: Work, count: Scalar) -> Work:
    """Counts slots that did not exist."""
    work, (dropped,) = work.peek(count > 0, "counters", work.count(Count.DROPPED))
    return work.write_if(count > 0, "counters", dropped + count, work.count(Count.DROPPED))
