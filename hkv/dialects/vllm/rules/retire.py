"""The retirement and release rules: gives back blocks that no later query can read, or all of them.

vLLM 0.33 `SingleTypeKVCacheManager.remove_skipped_blocks`, `MambaManager.remove_skipped_blocks` and `free`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from hkv.dialects.vllm.rules import export, rows
from hkv.dialects.vllm.rules.admit import skipped_blocks
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, View
from hkv.state import free_queue
from hkv.state.loops import Scalar, divide, fori_loop, peek, remainder
from hkv.state.state import Request, Row
from hkv.state.workspace import Workspace

WRITES = ("rows", "keys", "requests", *free_queue.RELEASE_WRITES)
"""Arrays that the rules write; `keys` only in its spare element."""


def give_back(
    work: Workspace,
    view: View,
    slot: Scalar,
    processed: Scalar,
    everything: Scalar,
    follows: Scalar,
    enabled: Scalar,
) -> Workspace:
    """`free` if `everything` is given back, else `retire`: one loop serves both. Retirement begins after the sinks.

    Where a chunk `follows`, the state inside the last one is left to later registrations.
    """

    def body(group: Scalar, w: Workspace) -> Workspace:
        # `group >= 0` always holds, here and elsewhere: `peek_row` asks for a condition, and these reads have none.
        w, (length, first, partial) = w.peek_row(group >= 0, slot, group, Row.LENGTH, Row.FIRST, Row.PARTIAL)
        # Never backwards: a scheduler may say fewer processed tokens than before, blocks that are gone stay gone.
        retired = jnp.maximum(jnp.minimum(skipped_blocks(view, group, processed), length), first)
        sinks = view.group(group, GroupField.SINKS)
        begin = jnp.where(everything, rows.start(view, group, first), jnp.maximum(first, sinks))
        # Below 0 while nothing behind the sinks is skipped: then nothing is released. Else the last entry comes first.
        w = free_queue.release(w, w.row(slot, group) + begin, jnp.where(everything, length, retired) - begin)
        # `Row.FIRST` says that all entries before it are null (`rows.start`); with sinks, which are not, the row does.
        w = rows.null(w, slot, group, begin, jnp.where((sinks > 0) & ~everything, retired, begin))
        w = w.set_row(slot, group, Row.FIRST, jnp.where(everything, 0, retired))
        w = w.set_row(slot, group, Row.LENGTH, jnp.where(everything, 0, length))
        # `Row.PARTIAL` is 1 plus an entry: where that is behind the window now, there is nothing to copy any more,
        # but under vLLM 0.33's defect tail-key-outlives-state.
        gone = everything | ((partial <= retired) & (view.whole(CacheField.TAIL_OUTLIVES) == 0))
        w = w.set_row(slot, group, Row.PARTIAL, jnp.where(gone, 0, partial))
        w = export.leave(w, view, slot, group, follows)
        # After `leave`, which may set it: a row that is empty has no states that others wait for.
        emptied = jnp.where(everything, slot, w.spare_slot)
        w = w.set_row(emptied, group, Row.STANDING, 0)
        return w.set_row(emptied, group, Row.CACHED, 0)

    groups = jnp.where(enabled, view.num_groups, 0)
    return fori_loop(0, groups, body, work, writes=WRITES)


def clear_row(work: Workspace, slot: Scalar, group: Scalar) -> Workspace:
    """A request's row in a group as it is before the first allocation."""
    # `HIT_*` stay: no hit is adopted before a lookup wrote them. What else is left means nothing beside a 0 of these.
    for field in (Row.LENGTH, Row.FIRST, Row.CACHED, Row.PARTIAL, Row.GROWN, Row.EXPORT, Row.STANDING):
        work = work.set_row(slot, group, field, 0)
    return work


# Sparse retention: which of the blocks that a request filled are worth registering.
#
# vLLM 0.33 `SlidingWindowManager.reachable_block_mask` and `MambaManager.reachable_block_mask`. A request that
# resumes at some length needs the last blocks before it. So the ends of periods are kept, and the blocks before those
# lengths from which a request is expected to resume: the prompt's end, and where other requests were seen to branch
# off.


class Kept(NamedTuple):
    """Retained entries of a row: the last ones of each period, and those before some ends. Units are blocks.

    An entry's *phase* is its place within its period, below 0 before the first one.

    Attributes:
      period: length of a period; 1 if every entry is kept.
      least: the first phase that is kept.
      shift: entry at which the first period begins.
      keep: entries kept before each of the ends.
      ends: entries after the last one that is kept for a length that is expected; 0 for none.
    """

    period: Scalar
    least: Scalar
    shift: Scalar
    keep: Scalar
    ends: tuple[Scalar, ...]

    def phase(self, entry: Scalar) -> Scalar:
        """The phase of an entry."""
        place = entry - self.shift
        # Below 0, before the first period, nothing is kept by phase: `least` is at least 0.
        return jnp.where(place < 0, place, remainder(jnp.maximum(place, 0), self.period))

    def next_phase(self, phase: Scalar) -> Scalar:
        """The phase of the next entry."""
        return jnp.where(phase + 1 == self.period, 0, phase + 1)

    def skip(self, entry: Scalar, inside: Scalar, until: Scalar) -> Scalar:
        """The next entry up to `until` that is retained, from one that is at the beginning of a stretch."""
        gap = jnp.where(inside, 0, jnp.maximum(self.least - self.phase(entry), 0))
        return jnp.minimum(entry + gap, jnp.maximum(until, entry))

    def stretch(self, entry: Scalar, stop: Scalar) -> tuple[Scalar, Scalar]:
        """True if an entry is retained for one of the ends; and the entry, at most `stop`, up to which that holds."""
        inside, until = jnp.bool_(False), stop
        for end in self.ends:
            begin = end - self.keep
            near = (entry >= begin) & (entry < end)
            inside = inside | near
            change = jnp.where(near, end, jnp.where(entry < begin, begin, stop))
            until = jnp.minimum(until, change)
        return inside, until


def kept(work: Workspace, view: View, slot: Scalar, group: Scalar) -> tuple[Workspace, Kept]:
    """Retained entries of a request's row in a group."""
    period = view.group(group, GroupField.PERIOD)
    every = period == 0
    # RETAINED: tokens that retained lengths are multiples of; 0 without a retention interval: then no end is expected.
    sparse = ~every & (view.whole(CacheField.RETAINED) != 0)
    work, ends = peek(
        sparse,
        lambda w: expected_ends(view, group, *w.get(slot, Request.PROMPT, Request.SHARED_PREFIX)),
        work,
        reads=("requests",),
        default=(0, 0, 0, 0),
    )
    keep, shift = view.group(group, GroupField.KEEP), view.group(group, GroupField.SHIFT)
    return work, Kept(
        period=jnp.where(every, 1, period),
        least=jnp.where(every, 0, period - keep),
        shift=jnp.where(every, 0, shift),
        keep=keep,
        ends=ends,
    )


def expected_ends(view: Any, group: Scalar, prompt: Scalar, shared_boundary: Scalar) -> tuple[Scalar, ...]:
    """Ends of the retained blocks, for each length from which somebody is expected to resume.

    A repeated prompt computes its last token again (vLLM 0.33 `replay_boundaries`). Under the EAGLE drop its hit
    loses a scheduler block more, counted from the prompt without and with its last token; and a hit at a shared
    boundary loses a block in the groups under the drop. Elementwise.
    """
    unit = view.whole(CacheField.SCHEDULER_BLOCK)
    drops = view.whole(CacheField.DROPS) != 0
    block, rounded = view.group(group, GroupField.BLOCK), view.whole(CacheField.RETAINED)

    def replayed(length: Scalar) -> Scalar:
        return jnp.maximum(divide(length, unit) - 1, 0) * unit

    def end(length: Scalar) -> Scalar:
        # SHIFT is 1 in a window under the EAGLE drop: the block that the hit drops has to be there, too.
        whole = divide(divide(jnp.maximum(length, 0), rounded) * rounded, block) + view.group(group, GroupField.SHIFT)
        return jnp.where(length >= 0, whole, 0)

    last = jnp.maximum(prompt - 1, 0)
    known = shared_boundary > 0
    # BELOW_SHARED_BOUNDARIES: since vLLM 0.33 (`VllmConfig.retains_below_shared_boundaries`).
    eagle = known & (view.group(group, GroupField.EAGLE) != 0) & (view.whole(CacheField.BELOW_SHARED_BOUNDARIES) != 0)
    return (
        end(jnp.where(drops, replayed(last), last)),  # a resend of the prompt
        end(jnp.where(drops, replayed(prompt), last)),  # a longer prompt that begins with it
        end(jnp.where(known, shared_boundary, -1)),  # another prompt branches off where others did
        end(jnp.where(eagle, shared_boundary - block, -1)),  # it does so right there, and drops the block before
    )
