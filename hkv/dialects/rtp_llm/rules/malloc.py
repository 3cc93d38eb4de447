"""Allocation: a request's way from its tokens to blocks, with exact rollback (RTP-LLM `KVCacheAllocator::malloc`).

RTP-LLM's is a sequence of calls with an early return after each. In a compiled program an early return is a jump over
everything behind it; so the calls are stages of a loop, whose next stage follows from the status of the last. Growing
and giving back, which are what takes long to compile, stand in it once though several stages use them.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.rtp_llm.rules import joint_hit, lists
from hkv.dialects.rtp_llm.rules.admit import Ask, Capacity, capacity
from hkv.dialects.rtp_llm.rules.lists import Growth, Sweep
from hkv.dialects.rtp_llm.rules.parameters import CacheField, GroupField, RtpView, shape_of, slots
from hkv.state.loops import Scalar, loop
from hkv.state.pooled_workspace import PooledWorkspace
from hkv.state.status import Status

WRITES = tuple(dict.fromkeys((*lists.WRITES, *joint_hit.WRITES)))
"""Arrays that an allocation writes."""


class Stage(enum.IntEnum):
    """Stages of an allocation. A new request goes through all of them, one that grows begins at GROW."""

    CHECK = 0
    """The pools are checked for whether they could ever hold it; then cached blocks are taken over."""
    JUDGE = 1
    """The pools are checked for whether they can hold the rest now."""
    BEGIN = 2
    """Blocks for what its sequences share (RTP-LLM `initMallocForCommonLen`)."""
    GROW = 3
    """Blocks for what each has for itself (RTP-LLM `incrMalloc`)."""
    CLASSIFY = 4
    """The reason is determined why it found none."""
    CLEAR = 5
    """Everything is given back."""
    DONE = 6


class Progress(NamedTuple):
    """An allocation at work: its `Stage`, its `Status`, keys that were hit, blocks it was estimated to take."""

    stage: Scalar
    status: Scalar
    hit: Scalar
    estimate: Scalar


def malloc(
    work: PooledWorkspace, view: RtpView, ask: Ask, keys: Scalar, adopts: Scalar, start: Scalar
) -> tuple[PooledWorkspace, Scalar, Scalar]:
    """Gives a request blocks for its tokens, or leaves it as it was. What was evicted to make room stays evicted.

    A new request may take over cached blocks if it `adopts`. `start` is the `Stage` to begin with: CHECK for a new
    request, GROW for another, CLEAR to free it, DONE for nothing.
    Returns the `Status`, and how many of its `keys` were hit.
    """
    single = view.whole(CacheField.SINGLE) != 0
    new = start == int(Stage.CHECK)
    adopts = adopts & (view.whole(CacheField.ADOPTS) != 0)
    cached = new & adopts & (~single | view.flag(0, GroupField.REUSE))

    def step(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        at = Progress(*local)
        # A machine of stages in one loop: growing, undoing and judging are each compiled once, though stages use them
        # twice.
        check, judge, begin, grow, classify, clear = (at.stage == int(stage) for stage in tuple(Stage)[:6])
        w, verdict = capacity(w, view, ask, check | judge | classify)
        w, hit = joint_hit.adopt(w, view, ask.slot, keys, check & ~verdict.never & cached)
        w = lists.share(w, view, ask.slot, jnp.where(grow & new, ask.batch, 0))
        w, sequences = _sequences(w, view, ask, begin, grow)
        growth = Growth(
            slot=ask.slot,
            sequences=sequences,
            tokens=jnp.where(begin, ask.common, ask.length),
            reserve=jnp.where(begin, 0, ask.reserve),
            reuse=ask.reuse,
        )
        w, grown = lists.extend(w, view, growth)
        failed = jnp.logical_or(grown.refused, grown.broken)
        # A request that grew gives back what decoding does not need; one that failed is what it was before. What
        # several groups have begun in vain is given back before the reason is asked for (`rollbackInitMalloc`).
        begun = begin & grown.refused & ~single
        mode = jnp.where(clear | begun, int(Sweep.CLEAR), jnp.where(failed, int(Sweep.UNDO), int(Sweep.CLEAN)))
        swept = jnp.where(grow & (failed | ~new), grown.done, 0)
        swept = jnp.where(clear, ask.batch * view.num_groups, jnp.where(begun, view.num_groups, swept))
        leaky = jnp.where(begun & (view.whole(CacheField.LEAKS) != 0), grown.done, 0)
        w = lists.sweep(w, view, growth, swept, mode, leaky)
        at = at._replace(hit=jnp.where(check, hit, at.hit), estimate=jnp.where(check, verdict.need, at.estimate))
        status = _status(view, at, verdict, single, (grown.refused, grown.broken))
        return w, at._replace(stage=_next(at.stage, status, new), status=status)

    begun = Progress(jnp.asarray(start, jnp.int32), jnp.int32(Status.OK), jnp.int32(0), jnp.int32(0))
    work, local = loop(lambda c: c[0] < int(Stage.DONE), step, work, begun, writes=WRITES)
    return work, local[1], local[2]


def _sequences(
    work: PooledWorkspace, view: RtpView, ask: Ask, begin: Scalar, grow: Scalar
) -> tuple[PooledWorkspace, Scalar]:
    """Number of sequences that get blocks; with a single group none, if the first one needs none."""
    single = view.whole(CacheField.SINGLE) != 0
    work, (length,) = work.peek(grow & single, "requests", work.length(ask.slot, 0, 0))
    shape = shape_of(view, jnp.int32(0))
    idle = single & (slots(shape, ask.length + ask.reserve) <= length)
    return work, jnp.where(begin, 1, jnp.where(grow & ~idle, ask.batch, 0))


def _status(view: RtpView, at: Progress, verdict: Capacity, single: Scalar, failures: tuple[Scalar, Scalar]) -> Scalar:
    """Status of an allocation after its stage."""
    refused, broken = failures
    reserve = view.whole(CacheField.RESERVE)
    never, not_now = int(Status.NO_ROOM_FOR_SEQUENCE), int(Status.NO_ROOM)
    left = jnp.maximum(at.estimate - at.hit, 0)
    beside = (reserve > 0) & (left > 0) & (verdict.available < left + reserve)
    alone = jnp.where(beside, int(Status.NOT_EVICTABLE), int(Status.OK))
    several = jnp.where(verdict.never, never, jnp.where(verdict.not_now, not_now, int(Status.OK)))
    reason = jnp.where(verdict.not_now, not_now, int(Status.NOT_EVICTABLE))
    grown = jnp.where(refused, int(Status.NOT_EVICTABLE), jnp.where(broken, int(Status.TAIL_MISSING), int(Status.OK)))
    said = {
        Stage.CHECK: jnp.where(verdict.never, never, int(Status.OK)),
        Stage.JUDGE: jnp.where(single, alone, several),
        Stage.BEGIN: grown,
        Stage.GROW: grown,
        Stage.CLASSIFY: jnp.where(verdict.never, never, reason),
    }
    status = at.status
    for stage, value in said.items():
        status = jnp.where(at.stage == int(stage), value, status)
    return status


def _next(stage: Scalar, status: Scalar, new: Scalar) -> Scalar:
    """Stage at which an allocation goes on: a new request that failed is given back, after the reason was found."""
    unclear = status == int(Status.NOT_EVICTABLE)
    failed = jnp.where(unclear & (stage < int(Stage.CLASSIFY)), int(Stage.CLASSIFY), int(Stage.CLEAR))
    # A request that grows keeps what it had; a new one that was only checked holds nothing yet.
    failed = jnp.where(new & (stage > int(Stage.CHECK)), failed, int(Stage.DONE))
    onward = jnp.where(stage == int(Stage.GROW), int(Stage.DONE), stage + 1)
    return jnp.where((status == int(Status.OK)) | (stage == int(Stage.CLEAR)), onward, failed)
