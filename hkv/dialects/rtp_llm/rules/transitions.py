"""Effect of each operation on a cache: its checks, its rules in order, its answer.

A refused operation takes nothing and says why in its status. Three things outlive a refusal, as in RTP-LLM: what was
evicted to make room, sequences that a single group dropped before a fork found no blocks, and keys that a request was
given when it asked. What does not exist is dropped and counted, never clamped to something that does.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hkv.dialects.rtp_llm.rules import admit, evict, fork, insert, lists, malloc
from hkv.dialects.rtp_llm.rules.admit import Ask, longest_list
from hkv.dialects.rtp_llm.rules.malloc import Stage
from hkv.dialects.rtp_llm.rules.operations import RtpArgument, RtpCode
from hkv.dialects.rtp_llm.rules.parameters import CacheField, GroupField, RtpView, effective, shape_of, total
from hkv.machine.operations import Payload
from hkv.state import role_counts
from hkv.state.loops import Scalar, ceil_divide, divide, loop, read, when
from hkv.state.pooled import Counter, PooledRequest, Role
from hkv.state.pooled_workspace import PooledWorkspace
from hkv.state.status import Status


class RtpOp(NamedTuple):
    """The operation at hand, and what its request knew of itself before, as in `PooledRequest`."""

    code: Scalar
    slot: Scalar
    exists: Scalar
    row: tuple[Scalar, ...]
    live: Scalar
    tokens: Scalar
    common: Scalar
    reserve: Scalar
    batch: Scalar
    whole: Scalar
    keys: Scalar
    aligned: Scalar
    held: Scalar

    def argument(self, argument: RtpArgument) -> Scalar:
        """One of its arguments."""
        return self.row[argument]

    def flag(self, argument: RtpArgument) -> Scalar:
        """An argument that says yes or no."""
        return self.row[argument] != 0


class RtpAnswer(NamedTuple):
    """Columns of the result."""

    status: Scalar
    value: Scalar
    count: Scalar

    def refuse(self, condition: Scalar, status: Status) -> RtpAnswer:
        """The answer with another status where the condition holds and nothing was refused before."""
        return self._replace(status=jnp.where(condition & self.ok, int(status), self.status))

    @property
    def ok(self) -> Scalar:
        """True if nothing was refused so far."""
        return self.status == int(Status.OK)


_FETCHED = (
    PooledRequest.LIVE,
    PooledRequest.TOKENS,
    PooledRequest.COMMON,
    PooledRequest.RESERVE,
    PooledRequest.BATCH,
    PooledRequest.WHOLE,
    PooledRequest.KEYS,
    PooledRequest.ALIGNED,
)

SLOTLESS = (RtpCode.RELEASE, RtpCode.EXPORT, RtpCode.EVICT)
"""Operations that are about no request."""


def fetch(
    work: PooledWorkspace, view: RtpView, table: jax.Array, base: Scalar, code: Scalar
) -> tuple[PooledWorkspace, RtpOp]:
    """Reads an operation and its request. A slot that does not exist becomes the spare one."""
    row = tuple(read(table, base + column) for column in range(len(RtpArgument)))
    asked = row[RtpArgument.SLOT]
    # Checked, never clamped: a wrong slot must not become a neighbour's.
    exists = (asked >= 0) & (asked < work.sizes.buckets.requests)
    slot = jnp.where(exists, asked, work.spare_slot)
    work, fields = work.peek_request(code != int(RtpCode.END), slot, *_FETCHED)
    work, held = longest_list(work, view, slot, fields[0] != 0)
    return work, RtpOp(code, slot, exists, row, *fields, held=held)


def needs_request(code: Scalar) -> Scalar:
    """True if an operation is about a request that arrived."""
    needs = code != int(RtpCode.REQUEST)
    for each in SLOTLESS:
        needs = needs & (code != int(each))
    return needs


def arrive(
    work: PooledWorkspace, view: RtpView, op: RtpOp, answer: RtpAnswer, payload: Payload
) -> tuple[PooledWorkspace, RtpAnswer]:
    """REQUEST and APPEND: tokens, and the keys of the blocks that they fill."""
    new = op.code == int(RtpCode.REQUEST)
    mine = answer.ok & (new | (op.code == int(RtpCode.APPEND)))
    buckets, block = work.sizes.buckets, view.whole(CacheField.BLOCK)
    batch = jnp.where(new, op.argument(RtpArgument.SEQUENCES), op.batch)
    before, known = jnp.where(new, 0, op.tokens), jnp.where(new, 0, op.whole)
    added, numbers = op.argument(RtpArgument.TOKENS), op.argument(RtpArgument.NUMBERS)
    start, reserve = op.argument(RtpArgument.START), op.argument(RtpArgument.RESERVE)
    answer = answer.refuse(mine & new & (op.live != 0), Status.NOT_WAITING)
    answer = answer.refuse(mine & ((added < 0) | (before + added < 1) | (reserve < 0)), Status.BAD_LENGTH)
    answer = answer.refuse(mine & ((batch < 1) | (batch > buckets.sequences)), Status.BAD_COUNT)
    whole = divide(jnp.maximum(before + added, 0), block)
    # Keys of blocks that the new tokens complete, for each sequence; a prompt's are given once, for all of them.
    each = whole - known
    wanted = jnp.where(new, each, each * batch)
    inside = (start >= 0) & (numbers >= 0) & (start + numbers <= payload.size)
    answer = answer.refuse(mine & ((numbers != wanted) | ~inside), Status.BAD_COUNT)
    answer = answer.refuse(mine & (whole > buckets.chain), Status.KEYS_FULL)
    mine = mine & answer.ok

    def copy(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        sequence, place, unknown = local
        at = jnp.where(new, place, sequence * each + place)
        key = read(payload.numbers, payload.base + start + at)
        w = w.write("chains", key, w.chain(op.slot, sequence) + known + place)
        over = place + 1 == each
        outside = (key < 0) | (key >= buckets.keys)
        return w, (sequence + over, jnp.where(over, 0, place + 1), unknown + outside)

    end = jnp.where(mine & (each > 0), batch, 0)
    work, (_, _, unknown) = loop(lambda c: c[0] < end, copy, work, (0, 0, 0), writes=("chains",))
    answer = answer.refuse(mine & (unknown > 0), Status.KEYS_FULL)
    tokens = before + added
    # Several sequences share whole blocks only: the last, partly filled one is each one's own.
    common = jnp.where(batch == 1, tokens, jnp.where(new, whole * block, op.common))
    # Keys are made when blocks are asked for. A request that holds none makes them anew, with the tokens it has then.
    forgets = new | (op.held == 0)
    fields = {
        PooledRequest.LIVE: jnp.int32(1),
        PooledRequest.TOKENS: tokens,
        PooledRequest.COMMON: common,
        PooledRequest.RESERVE: jnp.where(new, reserve, op.reserve),
        PooledRequest.BATCH: batch,
        PooledRequest.WHOLE: whole,
        PooledRequest.KEYS: jnp.where(forgets, 0, op.keys),
        PooledRequest.ALIGNED: jnp.where(forgets, 1, op.aligned),
    }

    def note(w: PooledWorkspace) -> PooledWorkspace:
        for field, value in fields.items():
            w = w.set(op.slot, field, value)
        return _clear_lengths(w, op.slot, new)

    return when(mine & answer.ok, note, work, writes=("requests",)), answer


def _clear_lengths(work: PooledWorkspace, slot: Scalar, enabled: Scalar) -> PooledWorkspace:
    buckets = work.sizes.buckets

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        sequence, group = local
        over = group + 1 == buckets.groups
        w = w.write("requests", 0, w.length(slot, sequence, group))
        return w, (sequence + over, jnp.where(over, 0, group + 1))

    end = jnp.where(enabled, buckets.sequences, 0)
    return loop(lambda c: c[0] < end, body, work, (0, 0), writes=("requests",))[0]


def allocate(
    work: PooledWorkspace, view: RtpView, op: RtpOp, answer: RtpAnswer, only: tuple[RtpCode, ...]
) -> tuple[PooledWorkspace, RtpAnswer]:
    """MALLOC and FREE: keys as they stand then, and the allocation's stages."""
    asks = answer.ok & (op.code == int(RtpCode.MALLOC))
    frees = answer.ok & (op.code == int(RtpCode.FREE))
    override = op.argument(RtpArgument.LENGTH)
    length = jnp.where(override == 0, op.tokens, override)
    answer = answer.refuse(asks & (length < 1), Status.BAD_LENGTH)
    work, fits = _rows_fit(work, view, jnp.maximum(length, op.tokens), op.reserve, asks & answer.ok)
    answer = answer.refuse(asks & ~fits, Status.ROW_FULL)
    asks = asks & answer.ok
    new, block = op.held == 0, view.whole(CacheField.BLOCK)
    fresh = ceil_divide(op.tokens, block)
    # RTP-LLM makes keys when blocks are asked for: of a new request also one for a partly filled block, which is
    # dropped when it grows.
    keys = jnp.where(new, jnp.where(op.keys == 0, fresh, op.keys), divide(op.tokens, block))
    aligned = jnp.where(new, jnp.where(op.keys == 0, op.whole == fresh, op.aligned != 0), True)
    work = work.write_if(asks | frees, "requests", jnp.where(frees, 0, keys), work.request(op.slot, PooledRequest.KEYS))
    work = work.write_if(asks | frees, "requests", frees | aligned, work.request(op.slot, PooledRequest.ALIGNED))
    ask = Ask(
        slot=op.slot,
        batch=op.batch,
        seq=op.tokens,
        length=length,
        common=jnp.minimum(op.common, op.tokens + op.reserve),
        reserve=op.reserve,
        reuse=op.flag(RtpArgument.REUSE),
    )
    start = jnp.where(new, int(Stage.CHECK), int(Stage.GROW))
    start = jnp.where(frees, int(Stage.CLEAR), jnp.where(asks, start, int(Stage.DONE)))
    if RtpCode.MALLOC not in only:
        growth = lists.Growth(op.slot, op.batch, op.tokens, op.reserve, ask.reuse)
        count = jnp.where(frees, op.batch * view.num_groups, 0)
        return lists.sweep(work, view, growth, count, jnp.int32(lists.Sweep.CLEAR), jnp.int32(0)), answer
    work, status, hit = malloc.malloc(work, view, ask, keys, op.flag(RtpArgument.DEVICE_CACHE), start)
    answer = answer._replace(status=jnp.where(asks, status, answer.status))
    reused = jnp.where(asks & answer.ok, hit * view.whole(CacheField.REUSED), answer.value)
    return work, answer._replace(value=reused)


def _rows_fit(
    work: PooledWorkspace, view: RtpView, tokens: Scalar, reserve: Scalar, enabled: Scalar
) -> tuple[PooledWorkspace, Scalar]:
    """True if every list has room for so many tokens and a reserve."""

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        group, most = local
        shape = shape_of(view, group)
        slots = total(shape, jnp.maximum(effective(view, group, tokens), tokens), reserve)
        return w, (group + 1, jnp.maximum(most, slots))

    end = jnp.where(enabled, view.num_groups, 0)
    work, (_, most) = loop(lambda c: c[0] < end, body, work, (0, 0))
    return work, most <= work.sizes.buckets.row


def enter(work: PooledWorkspace, view: RtpView, op: RtpOp, answer: RtpAnswer) -> tuple[PooledWorkspace, RtpAnswer]:
    """INSERT: the key of a partly filled block is dropped first."""
    mine = answer.ok & (op.code == int(RtpCode.INSERT))
    answer = answer.refuse(mine & (op.held == 0), Status.NOT_RUNNING)
    mine = mine & answer.ok
    keys = op.keys - (op.aligned == 0)
    work = work.write_if(mine, "requests", keys, work.request(op.slot, PooledRequest.KEYS))
    work = work.write_if(mine, "requests", 1, work.request(op.slot, PooledRequest.ALIGNED))
    sequences = jnp.where(mine, op.batch, 0)
    batch = insert.InsertedRequest(op.slot, sequences, keys, op.tokens, op.flag(RtpArgument.RESIDENT))
    return insert.insert(work, view, batch), answer


def split(
    work: PooledWorkspace, view: RtpView, op: RtpOp, answer: RtpAnswer, payload: Payload
) -> tuple[PooledWorkspace, RtpAnswer]:
    """FORK: refused with `NO_ROOM` when blocks for copies are missing."""
    mine = answer.ok & (op.code == int(RtpCode.FORK))
    count, start = op.argument(RtpArgument.NUMBERS), op.argument(RtpArgument.START)
    inside = (start >= 0) & (count >= 0) & (start + count <= payload.size)
    answer = answer.refuse(mine & (~inside | (count > work.sizes.buckets.sequences)), Status.BAD_COUNT)
    at = fork.Fork(
        slot=op.slot,
        batch=op.batch,
        numbers=payload.numbers,
        start=payload.base + start,
        count=count,
        copy=op.flag(RtpArgument.COPY),
        keys=op.whole,
    )

    def look(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        place, unknown = local
        source = at.source(place)
        return w, (place + 1, unknown | (source < 0) | (source >= op.batch))

    end = jnp.where(mine & answer.ok, count, 0)
    _, (_, unknown) = loop(lambda c: c[0] < end, look, work, (0, False))
    answer = answer.refuse(unknown, Status.OUT_OF_RANGE)
    at = at._replace(count=jnp.where(mine & answer.ok, count, 0))
    work, done, copies = fork.fork(work, view, at)
    answer = answer.refuse(mine & ~done, Status.NO_ROOM)
    return work, answer._replace(count=jnp.where(mine & answer.ok, copies, answer.count))


def leave(work: PooledWorkspace, op: RtpOp, answer: RtpAnswer) -> tuple[PooledWorkspace, RtpAnswer]:
    """DROP: the slot is empty."""
    mine = answer.ok & (op.code == int(RtpCode.DROP))
    answer = answer.refuse(mine & (op.held != 0), Status.NOT_WAITING)
    return work.write_if(mine & answer.ok, "requests", 0, work.request(op.slot, PooledRequest.LIVE)), answer


def hold(work: PooledWorkspace, view: RtpView, op: RtpOp, answer: RtpAnswer) -> tuple[PooledWorkspace, RtpAnswer]:
    """HOLD: the blocks of a sequence that have keys (RTP-LLM `incrKVCacheRef` of all its keys)."""
    mine = answer.ok & (op.code == int(RtpCode.HOLD))
    sequence, role = op.argument(RtpArgument.SEQUENCE), op.argument(RtpArgument.ROLE)
    answer = answer.refuse(mine & ((sequence < 0) | (sequence >= op.batch)), Status.OUT_OF_RANGE)
    answer = answer.refuse(mine & ((role < 0) | (role > int(Role.CACHE))), Status.OUT_OF_RANGE)

    def one(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        group, count = local
        row, pool = w.row(op.slot, sequence, group), view.pool_of(group)
        w, (length,) = w.peek(group >= 0, "requests", w.length(op.slot, sequence, group))

        def body(v: PooledWorkspace, at: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
            position, held = at
            v, (block,) = v.peek(position >= 0, "rows", row + position)
            v = role_counts.reference(v, block != 0, pool, block, role)
            return v, (position + 1, held + (block != 0))

        last = jnp.minimum(length, op.keys)
        w, (_, count) = loop(lambda c: c[0] < last, body, w, (0, count), writes=("rows", *role_counts.WRITES))
        return w, (group + 1, count)

    end = jnp.where(mine & answer.ok, view.num_groups, 0)
    work, (_, count) = loop(lambda c: c[0] < end, one, work, (0, 0), writes=lists.LISTS)
    return work, answer._replace(value=jnp.where(mine, count, answer.value))


def release(
    work: PooledWorkspace, view: RtpView, op: RtpOp, answer: RtpAnswer, payload: Payload
) -> tuple[PooledWorkspace, RtpAnswer]:
    """RELEASE: references that do not exist are dropped, counted and reported."""
    mine = answer.ok & (op.code == int(RtpCode.RELEASE))
    count, start = op.argument(RtpArgument.NUMBERS), op.argument(RtpArgument.START)
    role = op.argument(RtpArgument.ROLE)
    inside = (start >= 0) & (count >= 0) & (start + count <= payload.size) & (count % 2 == 0)
    answer = answer.refuse(mine & ~inside, Status.BAD_COUNT)
    answer = answer.refuse(mine & ((role < 0) | (role > int(Role.CACHE))), Status.OUT_OF_RANGE)

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        place, unknown = local
        group, block = (read(payload.numbers, payload.base + start + place + side) for side in (0, 1))
        known = (group >= 0) & (group < view.num_groups)
        pool = view.pool_of(jnp.where(known, group, 0))
        known = known & (block > 0) & (block <= view.group(pool, GroupField.TOTAL))
        block = jnp.where(known, block, 0)
        w, (references,) = w.peek(known, "references", w.reference(pool, block, role))
        w = role_counts.release(w, references > 0, pool, block, role)
        return w, (place + 2, unknown + (references == 0))

    end = jnp.where(mine & answer.ok, count, 0)
    work, (_, unknown) = loop(lambda c: c[0] < end, body, work, (0, 0), writes=role_counts.WRITES)
    work = count_dropped(work, unknown)
    answer = answer._replace(value=jnp.where(mine, unknown, answer.value))
    return work, answer.refuse(unknown > 0, Status.OUT_OF_RANGE)


def count_dropped(work: PooledWorkspace, number: Scalar) -> PooledWorkspace:
    """Counts what was named and does not exist."""
    work, (dropped,) = work.peek(number > 0, "counters", work.counter(Counter.DROPPED))
    return work.write_if(number > 0, "counters", dropped + number, work.counter(Counter.DROPPED))


def export(work: PooledWorkspace, view: RtpView, op: RtpOp, answer: RtpAnswer) -> tuple[PooledWorkspace, RtpAnswer]:
    """EXPORT and EVICT: whole keys leave, the least recently used first, or chains of the prefix tree."""
    keeps = op.code == int(RtpCode.EXPORT)
    mine = answer.ok & (keeps | (op.code == int(RtpCode.EVICT)))
    least = jnp.where(mine, op.argument(RtpArgument.LEAST), 0)
    work, blocks, keys = evict.select(work, view, evict.Wanted(jnp.int32(evict.ANY_GROUP), least, keeps))
    return work, answer._replace(value=jnp.where(mine, blocks, answer.value), count=jnp.where(mine, keys, answer.count))


def estimate(work: PooledWorkspace, view: RtpView, op: RtpOp, answer: RtpAnswer) -> tuple[PooledWorkspace, RtpAnswer]:
    """PEAK: an upper bound of the blocks to come."""
    mine = answer.ok & (op.code == int(RtpCode.PEAK))
    remaining, width = op.argument(RtpArgument.TOKENS), op.argument(RtpArgument.SEQUENCES)
    answer = answer.refuse(mine & (remaining < 0), Status.BAD_LENGTH)
    outlook = admit.Outlook(
        slot=op.slot,
        batch=op.batch,
        seq=op.tokens,
        common=op.common,
        reserve=op.reserve,
        remaining=remaining,
        reuse=op.flag(RtpArgument.REUSE),
        width=jnp.maximum(op.batch, width),
        fresh=jnp.bool_(False),
    )
    work, most = admit.batch_peak(work, view, outlook, mine & answer.ok)
    return work, answer._replace(value=jnp.where(mine, most, answer.value))
