"""Allocation: blocks for all tokens of a request, of a new one or one that grew.

A new request takes over what is cached of its tokens, then gets blocks for what its sequences share, then each those
for itself. What is refused keeps what it had; what was evicted to make room for it stays evicted.
"""

from __future__ import annotations

import enum

from reference.dialects.rtp_llm.cache import key_at, match, whole_keys
from reference.dialects.rtp_llm.lists import Sweep, append, effective, extend, has_block, sweep_all, total
from reference.dialects.rtp_llm.pools import available, refer
from reference.dialects.rtp_llm.records import (
    Cache,
    Group,
    Kind,
    Operation,
    Request,
    Result,
    Role,
    Status,
    ceil,
    current,
)
from reference.language import Text, clause

TEXT = Text(__name__)


class Stage(enum.IntEnum):
    """Stages of an allocation: what the pools could ever hold, the hit, blocks, and what is given back."""

    CEILING, HIT, FILL, END = range(4)


def allocate(c: Cache, request: Request, op: Operation, result: Result, new: bool, frees: int) -> int:
    """Blocks for a request's tokens, or if it `frees` none; a status.

    A new one is judged three times: by what the pools could ever hold; after the hit by what they can hold now; and if
    it found no blocks, again, for the reason. One full group is not judged after the hit: its reserve turns it down.
    """
    clause("allocate", "KVCacheAllocator::malloc")
    status, mode, done, estimate, turned_down = Status.OK, Sweep.NOTHING, 0, 0, False
    if not frees:
        note_keys(c, request, new)
    for stage in range(Stage.END if frees else Stage.CEILING if new else Stage.FILL, 4):
        if stage == Stage.HIT and op.device_cache and c.config.adopts:
            result.value = adopt(c, request) * c.config.reused
        if stage == Stage.HIT and c.config.single:
            left = max(estimate - request.rows[0].groups[0].length, 0)
            turned_down = c.config.reserve > 0 and left > 0 and available(c.pools[1]) < left + c.config.reserve
            if turned_down:
                clause("reserve-forbids", "SingleTypeKVCacheAllocator::initMalloc", "the reserve forbids an allocation")
        elif new and not frees and stage != Stage.FILL and (stage < Stage.FILL or status == Status.INTERNAL_ERROR):
            verdict, estimate = judge(c, request, op.reuse, stage > Stage.CEILING)
            if verdict != Status.OK:
                status = verdict
            if stage == Stage.CEILING and status != Status.OK:
                break
        if stage == Stage.FILL and status == Status.OK:
            status = Status.INTERNAL_ERROR
            if not turned_down:
                length = op.length if op.length > 0 else request.tokens
                status, mode, done = fill(c, request, 0 if new else 1, length, op.reuse)
        if stage == Stage.END:
            mode = Sweep.NOTHING
            if frees or (new and status != Status.OK):
                mode = Sweep.CLEAR
            elif not new and status == Status.OK and not c.config.single:
                mode = Sweep.CLEAN
        if mode != Sweep.NOTHING:
            sweep_all(c, request, mode, done, op.reuse)
    if status != Status.OK:
        result.value = 0
    if status == Status.INTERNAL_ERROR:
        clause("internal-error", "KVCacheAllocator::malloc", "what the cache holds could not be evicted")
    return status


def note_keys(c: Cache, request: Request, new: bool) -> None:
    """The keys of a request's tokens are in use: at first with that of a partly filled block."""
    for r in range(request.batch):
        row = request.rows[r]
        if not new:
            row.count, row.aligned = request.whole, 1
        elif row.count == 0:
            row.aligned = request.tokens % c.config.block == 0
            row.count = request.whole + (not row.aligned)


# ------------------------------------------------------------------ the verdict


def judge(c: Cache, request: Request, reuse: int, now: int) -> tuple[int, int]:
    """Verdict on whether a new request fits next to the reserve, and the blocks that it takes.

    Of one pool, every group is credited with the longest list's slots. Of several, each is judged alone: one that can
    never hold its part decides at once, one that cannot now when all were asked.
    With `now` it is asked not only what the pools could hold, but what they can hold now.
    """
    clause("judge", "KVCacheAllocator::evaluateInitCapacity")
    needed, verdict, longest, sizes, rests = 0, Status.OK, current(c, request), 0, 0
    for g in range(c.config.groups):
        group = c.groups[g + 1]
        sizes += 0 if group.explicit else group.pool.total
        rests += 0 if group.explicit else available(group.pool)
    for g in range(c.config.groups):
        group = c.groups[g + 1]
        own = request.rows[0].groups[g].length
        shared, each = need(c, group, request, own if c.config.apart else longest, reuse)
        mine = shared + request.batch * each
        needed += mine
        last = c.config.apart or g == c.config.groups - 1
        asked = mine if c.config.apart else needed
        for turn in range(1 + now if last and asked > 0 else 0):
            size, whole = available(group.pool) if turn else group.pool.total, rests if turn else sizes
            reserve = c.config.reserve
            if c.config.apart:
                reserve = 0 if group.explicit else part(reserve, size, whole)
            if asked + reserve > size:
                if turn:
                    clause("retryable", "KVCacheAllocator::evaluateInitCapacity", "it fits when others give back")
                    verdict = Status.RETRYABLE
                else:
                    clause("permanent", "KVCacheAllocator::evaluateInitCapacity", "a pool is too small for it")
                    return Status.PERMANENT, needed
    return verdict, needed


def need(c: Cache, group: Group, request: Request, reused: int, reuse: int) -> tuple[int, int]:
    """Blocks that a first allocation takes of a group, next to those reused: shared ones, and each sequence's own."""
    clause("need", "KVCacheGroup::getNeedBlocks")
    credit = reused if reuse else 0
    seq = effective(c, group, request.tokens)
    common = ceil(effective(c, group, common_tokens(request)), group.block)
    filled, whole = ceil(seq, group.block), total(group, seq, request.reserve)
    if group.kind == Kind.FULL:
        return common - min(credit, common), max(whole - common, 0)
    shared, each, states = 0, 0, group.kind == Kind.LINEAR
    for at in range(0 if states else credit, whole if states else filled):
        # Of a hit, a group of states brings one block: that under the last key.
        if not states or at != credit - 1:
            if states and at < common and has_block(c, group, at, common, 0, reuse):
                shared += 1
            elif has_block(c, group, at, filled, request.reserve if states else 0, reuse):
                each += 1
    if not states:
        each += max(whole - max(filled, credit), 0)
    return shared, each


def common_tokens(request: Request) -> int:
    """Tokens that all sequences of a request share, never more than there are."""
    return min(request.common, request.tokens + request.reserve)


def part(number: int, size: int, whole: int) -> int:
    """`number * size // whole`, whose product may have more than 31 bits; 0 if `whole` is."""
    quotient, rest = 0, 0
    for bit in range(24 if whole > 0 else -1, -1, -1):
        rest = 2 * rest + (size if number >> bit & 1 else 0)
        quotient = 2 * quotient + rest // whole
        rest = rest % whole
    return quotient


# ------------------------------------------------------------------ the hit


def adopt(c: Cache, request: Request) -> int:
    """Takes over what is cached under all keys but the last; how many keys.

    A hit is the longest prefix from which every group can go on. Full groups want a block under every key, also if
    their policy forbids reuse. Of the others only the last key counts: of states always, of windows if their policy
    allows reuse. Looking counts as using.
    """
    clause("adopt", "HybridTypeKVCacheAllocator::reuseCache")
    row, first = request.rows[0], c.groups[1]
    if c.config.single and not first.reuse:
        return 0
    canonical = c.config.ranks > 1
    keys = max(whole_keys(c, row, canonical) - 1, 0)
    longest, voters = keys, False
    for g in range(c.config.groups):
        group, at = c.groups[g + 1], 0
        if group.kind == Kind.FULL:
            while at < keys:
                block = match(c, key_at(c, row, at, canonical), group)
                if block == 0:
                    break
                row.groups[g].blocks[at] = block
                at += 1
            longest = min(longest, at)
        voters = voters or group.votes
    while voters and longest > 0:
        found, key = True, key_at(c, row, longest - 1, canonical)
        for g in range(c.config.groups):
            group = c.groups[g + 1]
            if group.votes:
                found = match(c, key, group) > 0 and found
        if found:
            break
        longest -= 1
    if longest > 0:
        clause("hit", "HybridTypeKVCacheAllocator::reuseCache", "a new request takes cached blocks over")
    else:
        clause("nothing-cached", "HybridTypeKVCacheAllocator::reuseCache", "a new request finds nothing")
    for g in range(c.config.groups):
        begin_with(c, request, c.groups[g + 1], longest)
    return longest


def begin_with(c: Cache, request: Request, group: Group, keys: int) -> None:
    """A list begins with the blocks of a hit: of full groups all, of others holes, and the block under the last key if
    it has a vote. States lie at logical slots, whatever their mapping."""
    row = request.rows[0]
    ids, slots = row.groups[group.at], keys
    if group.kind != Kind.FULL:
        slots = keys if group.compact else keys * c.config.ranks
        if slots > 1:
            clause("hit-with-holes", "HybridTypeKVCacheAllocator::reuseCache", "of a group a hit brings one block")
        for at in range(slots):
            ids.blocks[at] = 0
        if slots > 0 and group.votes:
            ids.blocks[slots - 1] = key_at(c, row, keys - 1, c.config.ranks > 1).blocks[group.at]
    for at in range(slots):
        refer(c, group.pool, ids.blocks[at], Role.REQUEST)
    ids.length = slots


# ------------------------------------------------------------------ blocks


def fill(c: Cache, request: Request, first: int, length: int, reuse: int) -> tuple[int, int, int]:
    """Blocks for what is common, which all sequences share (from `first` 0 on), and for what each has for itself; a
    status, and where lists find no blocks how they are to be swept, and how many had grown."""
    clause("fill", "KVCacheAllocator::incrMalloc")
    done = 0
    for turn in range(first, request.batch + 1):
        c.fills += turn < 2
        common, reserve = turn == 0, 0 if turn == 0 else request.reserve
        if turn == 1 and c.config.single and total(c.groups[1], length, reserve) <= request.rows[0].groups[0].length:
            break  # of one full group the first sequence stands for all
        for g in range(c.config.groups):
            group, ids = c.groups[g + 1], request.rows[max(turn - 1, 0)].groups[g]
            tokens = effective(c, group, common_tokens(request) if common else length)
            end = max(total(group, tokens, reserve), 0 if group.kind == Kind.LINEAR else ids.length)
            status = extend(c, group, ids, ceil(tokens, group.block), end, reserve, reuse)
            if status != Status.OK:
                if not common:
                    return status, Sweep.UNDO, done
                if status == Status.INTERNAL_ERROR and not c.config.single:
                    clause("rollback", "HybridKVCacheAllocator::rollbackInitMalloc", "a new request finds no blocks")
                    return status, Sweep.ABANDON, done
                return status, Sweep.NOTHING, done
            done += 1
        if common:
            done = 0
            for n in range(c.config.groups, request.batch * c.config.groups):
                g = n % c.config.groups
                source, target = request.rows[0].groups[g], request.rows[n // c.config.groups].groups[g]
                append(c, c.groups[g + 1], target, source, source.length)
    if first > 0:
        clause("grown", "KVCacheAllocator::incrMalloc", "a request that grew has slots for its tokens")
    return Status.OK, Sweep.NOTHING, 0
