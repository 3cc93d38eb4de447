"""The admission rule: whether a request's next tokens fit, before anything is taken.

vLLM 0.33 `KVCacheManager.allocate_slots`, steps 2 and 5, over `SingleTypeKVCacheManager.get_num_blocks_to_allocate`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.vllm.rules import export, reads, rows
from hkv.dialects.vllm.rules.parameters import READ_FIELDS, CacheField, GroupField, View
from hkv.dialects.vllm.rules.rows import Demand
from hkv.state.loops import Scalar, ceil_divide, divide, loop, remainder
from hkv.state.state import Row
from hkv.state.workspace import Workspace

WRITES = ("requests", "rows", "blocks")
"""Arrays that the rule writes: only spare elements, and which states are left behind."""


def skipped_tokens(view: View, group: Scalar, n: Scalar) -> Scalar:
    """Leading tokens of a group that the query at `n` does not need."""
    return reads.skipped_tokens(n, *(view.group(group, each) for each in READ_FIELDS))


def skipped_blocks(view: View, group: Scalar, n: Scalar) -> Scalar:
    """Entries of a group's row before those that the query at `n` needs, whole blocks only; 0 if it needs them all.

    The sinks' entries count, though they are needed: what is skipped lies between.
    """
    skipped = divide(skipped_tokens(view, group, n), view.group(group, GroupField.BLOCK))
    # Nothing lies between the sinks and what the query reads: then nothing is skipped, and the row stays without
    # nulls.
    return jnp.where(skipped > view.group(group, GroupField.SINKS), skipped, 0)


def wanted_slots(view: View, group: Scalar, demand: Demand) -> Scalar:
    """Tokens that want slots in a group: of the request, or of an encoder's output."""
    return jnp.where(view.group(group, GroupField.ENCODER) != 0, demand.encoder, demand.slots)


def arrives(view: View, group: Scalar, demand: Demand) -> Scalar:
    """True if a group needs any of the external tokens: none if the next query reads none of them."""
    # Full attention skips nothing, a window its past: tokens that arrive there need no slots.
    skipped = skipped_tokens(view, group, demand.total)
    sinks = view.group(group, GroupField.SINKS) > 0
    encoded = view.group(group, GroupField.ENCODER) != 0
    return ~encoded & (demand.external > 0) & ((skipped == 0) | (demand.total > skipped) | sinks)


def hit_blocks(view: View, group: Scalar, tokens: Scalar) -> Scalar:
    """Entries of a group's row that a hit of `tokens` tokens covers."""
    return ceil_divide(tokens, view.group(group, GroupField.BLOCK)) * view.group(group, GroupField.CACHEABLE)


def adopted_blocks(view: View, group: Scalar, tokens: Scalar, short: Scalar) -> Scalar:
    """Entries of a group's row that adopting a hit of `tokens` tokens brings; `short` is its `Row.HIT_SHORT`."""
    # A hit that a connector brought per group may be shorter here than its tokens say: `Row.HIT_SHORT` blocks fewer.
    return jnp.where(tokens > 0, hit_blocks(view, group, tokens) - short, 0)


def ends_inside(work: Workspace, view: View, group: Scalar, demand: Demand) -> Scalar:
    """True if the hit that a demand adopts ends inside a block of a group, which is then to be copied.

    Compiled only where blocks hold several hash blocks.
    """
    if work.sizes.buckets.parts == 0:
        return jnp.bool_(False)
    inside = remainder(demand.hit, view.group(group, GroupField.BLOCK)) != 0
    return inside & (view.group(group, GroupField.CACHEABLE) != 0)


class Fit(NamedTuple):
    """Result of `fits`: a demand fits; it would run out of blocks halfway; some row grows."""

    fits: Scalar
    fails: Scalar
    grows: Scalar


class _Sum(NamedTuple):
    group: Scalar
    estimate: Scalar
    checked: Scalar
    really: Scalar
    adopted: Scalar
    broken: Scalar
    grows: Scalar


def fits(work: Workspace, view: View, demand: Demand, limit: Scalar, enabled: Scalar) -> tuple[Workspace, Fit]:
    """Verdict on a demand: it takes at most `limit` blocks out of the queue, and what it really takes is there.

    The blocks of a hit count only if they are in the queue. They are first counted as if all were, and looked at only
    if that does not fit. The dialect's own estimate may be too small for recurrent groups; it is checked as well,
    unless an upstream defect is asked for by name. Everything fits where not `enabled`.
    """

    def attempt(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        exact = local[0]
        # Groups are summed up before anything is compared: vLLM's coordinator adds `get_num_blocks_to_allocate` of
        # all managers and asks once.
        w, sums = loop(
            lambda c: c[0] < view.num_groups,
            lambda v, c: _count(v, view, demand, exact, _Sum(*c)),
            w,
            (0, 0, 0, 0, 0, False, False),
            writes=WRITES,
        )
        total = _Sum(*sums)
        # vLLM's own test is `estimate <= limit`. Its estimate is too small for some recurrent rows, and the engine
        # would then fail in the middle of the allocation. HKV refuses such a demand beforehand, unless the defect is
        # asked for.
        ok = (total.estimate <= limit) & (demand.capped | (total.checked <= w.free))
        return w, (
            True,
            ok,
            ~demand.capped & ((total.really > w.free) | total.broken),
            total.grows,
            ~ok & ~exact & (total.adopted > 0),
        )

    # Two attempts at most: one that counts every block of the hit as queued, an upper bound that needs no look at
    # them, and an exact one if that was refused and there was a hit.
    start = (False, True, False, False, enabled)
    work, (_, ok, fails, grows, _) = loop(lambda c: c[-1], attempt, work, start, writes=WRITES)
    work = export.forget(work, view, demand.slot, enabled & ~ok & ~demand.capped)
    return work, Fit(ok, ok & fails, grows)


def estimate(work: Workspace, view: View, demand: Demand, enabled: Scalar) -> tuple[Workspace, Scalar]:
    """Blocks that the dialect counts for a demand, summed over groups; none where not `enabled`."""
    groups = jnp.where(enabled, view.num_groups, 0)
    work, sums = loop(
        lambda c: c[0] < groups,
        lambda v, c: _count(v, view, demand, jnp.bool_(False), _Sum(*c)),
        work,
        (0, 0, 0, 0, 0, False, False),
        writes=WRITES,
    )
    return work, _Sum(*sums).estimate


def _count(w: Workspace, view: View, demand: Demand, exact: Scalar, sums: _Sum) -> tuple[Workspace, tuple[Scalar, ...]]:
    slot, group = demand.slot, sums.group
    fields = (Row.LENGTH, Row.FIRST, Row.HIT_FIRST, Row.PARTIAL, Row.GROWN, Row.HIT_SHORT)
    w, (have, first_left, hit_first, partial, grown, short) = w.peek_row(group >= 0, slot, group, *fields)
    # From here on it is `SingleTypeKVCacheManager.get_num_blocks_to_allocate`, for all kinds at once: flags switch
    # the terms that a kind's manager overrides.
    block, ring = view.group(group, GroupField.BLOCK), view.group(group, GroupField.ONE_BLOCK) != 0
    adopting = demand.hit > 0
    computed = adopted_blocks(view, group, demand.hit, short)
    skip = jnp.where(have == 0, skipped_blocks(view, group, demand.total), 0)
    recurrent = view.group(group, GroupField.RECURRENT) != 0
    # A hit that ends inside a block shares it with its owner. One more block, for the copy that the request will
    # write.
    split = ends_inside(w, view, group, demand) & ((computed > 0) | ~adopting)
    scratch, grown = view.group(group, GroupField.SCRATCH), jnp.where(have > 0, grown, 0)
    sinks = view.group(group, GroupField.SINKS)
    wanted = ceil_divide(wanted_slots(view, group, demand), block) + scratch
    # The first gate (`full_sequence_must_fit`) asks for the whole request; a window never holds more than its cap.
    target = jnp.where(demand.capped, jnp.minimum(wanted, view.group(group, GroupField.CAP)), wanted)
    estimate = jnp.maximum(target - jnp.maximum(skip, computed + have), 0)
    estimate += jnp.where(skip > 0, jnp.maximum(sinks - computed, 0), 0)
    estimate = jnp.where(ring, (have == 0).astype(jnp.int32), estimate + split)
    columns = ceil_divide(demand.main, block) + scratch
    w, exported = export.plan(w, view, demand, group, have, jnp.where(grown != 0, scratch, 0))
    # The row's own state was registered inside its block: it goes on in place, and the cache gets a copy.
    outlived = recurrent & (partial > 0)
    owed = outlived | (recurrent & split)
    state = columns - computed - have
    # `MambaManager` takes one block for the next state, whatever the number of columns that the tokens jump over.
    most = 1 + owed + exported + jnp.where(grown != 0, 0, scratch)
    state = jnp.minimum(jnp.where(owed, jnp.maximum(state, 0) + 1, state), most)
    estimate = jnp.where(recurrent, state, estimate)
    before = jnp.where(demand.external > 0, jnp.maximum(skip, computed), computed + have)
    arriving = jnp.where(arrives(view, group, demand), jnp.maximum(ceil_divide(demand.total, block) - before, 0), 0)
    first = jnp.maximum(hit_first, jnp.where(recurrent & (demand.external == 0), 0, skip))
    first = rows.start(view, group, first)
    gap_end = jnp.where(sinks > 0, jnp.minimum(skip, computed), 0)
    kept = jnp.where(adopting, jnp.maximum(computed - first, 0) - jnp.maximum(gap_end - sinks, 0), 0)
    copied = outlived | (split & (kept > 0))
    spread = spread_row(before + arriving, columns, scratch, exported, grown)
    # What `grow` will in fact take, for the check that vLLM lacks.
    really = jnp.where(recurrent, arriving + jnp.maximum(columns - spread.end, 0) + copied, estimate)
    # Blocks of the hit that are free leave the queue as well: they count like new ones, though nothing is evicted.
    left = jnp.where(adopting & recurrent, jnp.maximum(computed - hit_first, 0), kept)

    row = w.row(slot, group)

    def one(v: Workspace, local: tuple[Scalar, Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, ...]]:
        i, queued, skipped = local
        # Above 0: the block stands in the queue (`State.blocks`).
        free = (v.read("blocks", v.block(v.read("rows", row + i))) > 0) & ((i < sinks) | (i >= gap_end))
        return v, (i + 1, queued + free, skipped + (free & (i < first)))

    begin = jnp.where(recurrent, hit_first, first)
    end = jnp.where(exact & (left > 0), computed, begin)
    w, (_, queued, skipped) = loop(lambda c: c[0] < end, one, w, (begin, 0, 0), reads=("rows", "blocks"))
    counted = jnp.where(exact, queued, left)
    taken = jnp.where(exact, queued - skipped, kept)
    bug = jnp.where(
        demand.external > 0,
        view.whole(CacheField.EXTERNAL_NOT_COUNTED),
        view.whole(CacheField.NEGATIVE_ESTIMATE),
    )
    excused = recurrent & (bug != 0)
    return w, _Sum(
        group=group + 1,
        estimate=sums.estimate + estimate + counted,
        checked=sums.checked + jnp.where(excused, estimate + counted, really + taken),
        really=sums.really + really + taken,
        adopted=sums.adopted + left,
        broken=sums.broken | (outlived & (partial <= first_left)),
        grows=sums.grows
        | (jnp.where(recurrent, columns, jnp.where(ring, 1, wanted)) > have)
        | owed
        | exported
        | (recurrent & (scratch > 0) & (grown == 0)),
    )


class Spread(NamedTuple):
    """Growth of a row of states before it takes blocks, in entries: its new end, and what is moved there.

    Entries from the old end to `gap_end` become null; `moved` entries from `scratch` on move behind them.
    """

    gap_end: Scalar
    scratch: Scalar
    moved: Scalar
    end: Scalar


def spread_row(length: Scalar, columns: Scalar, scratch: Scalar, exported: Scalar, grown: Scalar) -> Spread:
    """Shape that a row of `length` entries must have before its new blocks (vLLM 0.33 `MambaManager`).

    The running state goes to the last column before the scratch, a state that is left behind for others to the column
    before that. Columns that are passed over are null, and scratch moves along.
    """
    # From the right: scratch for drafts, before it the running state, before that the state which a chunk leaves
    # behind.
    running = columns - scratch - 1
    stop = running - exported
    gap_end = jnp.where(length < running, jnp.maximum(length, stop), length)
    first = jnp.maximum(length - scratch, 0)
    moved = jnp.where(grown != 0, jnp.maximum(jnp.minimum(length, stop) - first, 0), 0)
    return Spread(gap_end, first, moved, gap_end + moved)
