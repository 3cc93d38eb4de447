"""The registration rule: enters filled blocks into the prefix cache.

vLLM 0.33 `KVCacheCoordinator.cache_blocks`, `SingleTypeKVCacheManager.cache_blocks`, `BlockPool.cache_full_blocks`, and
`FullAttentionManager`'s prompt tail.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.vllm import export, retention
from hkv.dialects.vllm.hit import SNAPSHOT, hashed_keys, resumable
from hkv.dialects.vllm.parameters import CacheField, GroupField, View
from hkv.state import key_table
from hkv.state.events import Event, emit
from hkv.state.loops import Scalar, divide, loop, peek, remainder, when
from hkv.state.state import NOT_RETAINED, RETIRED, Request, Row
from hkv.state.workspace import Workspace

WRITES = ("rows", "chains", "requests", *key_table.WRITES)
"""What the rule writes; `rows` and `chains` only to their spare elements."""


def cacheable_tokens(view: View, group: Scalar, tokens: Scalar) -> Scalar:
    """Tokens of a group that may be registered when `tokens` are computed.

    vLLM 0.33 `get_num_cacheable_tokens`: of a hybrid only whole scheduler blocks, unless sub-block hits are on, and a
    block more where a hit drops a block; of a single group all but what may be prefilled again.
    """
    certain = jnp.maximum(tokens - view.whole(CacheField.REPREFILLABLE), 0)
    alignment = view.whole(CacheField.GRAIN)
    aligned = tokens - remainder(tokens, alignment)
    eagle = (view.group(group, GroupField.EAGLE) != 0) & (aligned > 0)
    block = view.group(group, GroupField.BLOCK)
    more = jnp.minimum(certain, certain - remainder(certain, alignment) + block)
    hybrid = jnp.where(eagle, more, aligned)
    return jnp.where(view.whole(CacheField.UNITARY) != 0, certain, hybrid)


def register(
    work: Workspace, view: View, slot: Scalar, tokens: Scalar, computed: Scalar, enabled: Scalar
) -> tuple[Workspace, Scalar]:
    """Every group registers those of a request's blocks that its first `tokens` tokens fill.

    Args:
      work: needs `WRITES` to write.
      view: the configuration.
      slot: the request.
      tokens: tokens that are computed, or will be by this step, and certain.
      computed: tokens that were computed before.
      enabled: whether to do it.

    Returns:
      The workspace, and whether the engine fails over it (`hkv.bugs`: checkpoint-beyond-keys).
    """
    enabled = enabled & (view.whole(CacheField.CACHING) != 0)
    work, (length, prompt, keys, shared) = peek(
        enabled,
        lambda w: w.get(slot, Request.TOKENS, Request.PROMPT, Request.KEYS, Request.SHARED_PREFIX),
        work,
        reads=("requests",),
        default=(0, 0, 0, 0),
    )
    keys = hashed_keys(view, length, keys)
    ahead = (view.whole(CacheField.JUNCTIONS) != 0) & (computed < shared) & (shared <= prompt)
    junction = jnp.where(ahead, shared, -1)

    def body(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        group, failed = local
        w, (done, first, rows, exported) = peek(
            group >= 0,
            lambda v: v.get_row(slot, group, Row.CACHED, Row.FIRST, Row.LENGTH, Row.EXPORT),
            w,
            reads=("requests",),
            default=(0, 0, 0, 0),
        )
        cacheable = jnp.where(view.group(group, GroupField.CACHEABLE) != 0, cacheable_tokens(view, group, tokens), 0)
        block, scale = view.group(group, GroupField.BLOCK), view.group(group, GroupField.SCALE)
        full = jnp.minimum(divide(cacheable, block), divide(keys, scale))
        w = when(
            full > done,
            lambda v: _whole_blocks(v, view, slot, group, done, full, first),
            w,
            writes=WRITES,
        )
        w = when(
            (view.group(group, GroupField.TAIL) != 0) & (cacheable > 0) & (exported == 0),
            lambda v: _prompt_tail(v, view, slot, group, _Tail(cacheable, prompt, junction, keys, first, rows)),
            w,
            writes=WRITES,
        )
        w, fails = export.register(
            w, view, slot, group, export.Exported(prompt, shared, keys, first, rows), exported > 0
        )
        w = _stamp(w, view, slot, group, jnp.maximum(done, first), full)
        return w, (group + 1, failed | fails)

    groups = jnp.where(enabled, view.num_groups, 0)
    work, (_, failed) = loop(lambda c: c[0] < groups, body, work, (0, False), writes=WRITES)
    return work, failed


def _whole_blocks(
    work: Workspace, view: View, slot: Scalar, group: Scalar, done: Scalar, full: Scalar, first: Scalar
) -> Workspace:
    column, scale = view.group(group, GroupField.COLUMN), view.group(group, GroupField.SCALE)
    groups, spare = work.sizes.buckets.groups, work.spare_entry
    row, chain = work.row(slot, group), work.chain(slot) + (scale - 1)
    work, kept = retention.kept(work, view, slot, group)

    def look(w: Workspace, i: Scalar, kept_here: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        block = jnp.where(i >= first, w.read("rows", row + i), 0)
        why = jnp.where(block == 0, RETIRED, jnp.where(kept_here, 0, NOT_RETAINED))
        return block, why, w.read("chains", chain + i * scale) * groups + column

    def settle(w: Workspace, entry: Scalar, value: Scalar) -> Workspace:
        w = w.write("table", value, w.entry(entry))
        block = jnp.maximum(value, 0) >> 3
        w = w.write("keys", jnp.where(value > 0, key_table.word_of(entry), 0), w.key(block))
        return emit(w, value > 0, Event.KEY, entry)

    def plain(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        i, phase, inside, entry, value, _ = local
        w = settle(w, entry, value)
        block, why, entry = look(w, i, inside | (phase >= kept.least))
        new = (w.read("table", w.entry(entry)) <= 0) & ((why != 0) | (w.read("keys", w.key(block)) == 0))
        value = jnp.where(why != 0, why, block * 8)
        after = jnp.where(new, kept.next_phase(phase), phase)
        return w, (i + 1, after, inside, jnp.where(new, entry, spare), jnp.where(new, value, 0), ~new)

    def stretch(w: Workspace, local: tuple[Scalar]) -> tuple[Workspace, tuple[Scalar]]:
        inside, until = kept.stretch(local[0], full)
        w, (i, phase, _, entry, value, stopped) = loop(
            lambda c: (c[0] < until) & ~c[-1],
            plain,
            w,
            (local[0], kept.phase(local[0]), inside, spare, 0, False),
            reads=("rows", "chains"),
            writes=("table", "keys", "events", "num_events"),
        )
        w, i = settle(w, entry, value), i - stopped
        w, (block, why, entry) = peek(
            stopped,
            lambda v: look(v, i, inside | (phase >= kept.least)),
            w,
            reads=("rows", "chains"),
            default=(0, 0, 0),
        )
        w = when(stopped, lambda v: enter(v, block, why, entry), w, writes=key_table.WRITES)
        return w, (i + stopped,)

    def enter(w: Workspace, block: Scalar, why: Scalar, entry: Scalar) -> Workspace:
        entered = why == 0
        w = key_table.note_absence(w, ~entered, entry, why)
        w = key_table.drop_keys(w, entered, block)
        w = key_table.add_key(w, entered, block, jnp.int32(0), entry)
        return emit(w, entered, Event.KEY, entry)

    work, _ = loop(lambda c: c[0] < full, stretch, work, (done,), writes=WRITES)
    work = emit(work, full > done, Event.STORED + 8 * slot, group, done, full)
    work = work.set_row(slot, group, Row.CACHED, full)
    return work.set(slot, Request.KNOWN, 1)


def _stamp(work: Workspace, view: View, slot: Scalar, group: Scalar, start: Scalar, end: Scalar) -> Workspace:
    """Notes the step at the keys of states that were looked at: nothing has written them yet."""
    row, groups = work.row(slot, group), work.sizes.buckets.groups
    recurrent = view.group(group, GroupField.KIND) == SNAPSHOT

    def body(w: Workspace, local: tuple[Scalar]) -> tuple[Workspace, tuple[Scalar]]:
        w, (block,) = peek(recurrent, lambda v: (v.read("rows", row + local[0]),), w, reads=("rows",), default=(0,))
        w, entry = key_table.primary_entry(w, block != 0, block)
        last = w.entry(jnp.maximum(entry, 0) | (groups - 1))
        return w.write_if(entry >= 0, "table", w.steps, last), (local[0] + 1,)

    first = (jnp.where(recurrent, start, end),)
    return loop(lambda c: c[0] < end, body, work, first, writes=("rows", "keys", "table"))[0]


class _Tail(NamedTuple):
    """What is known of a request's row when a tail is due: tokens three times, keys, blocks twice.

    `junction`: where others were seen to branch off, if the request comes to compute it now; else -1.
    """

    cacheable: Scalar
    prompt: Scalar
    junction: Scalar
    keys: Scalar
    first: Scalar
    length: Scalar


def _prompt_tail(work: Workspace, view: View, slot: Scalar, group: Scalar, tail: _Tail) -> Workspace:
    """Registers the prompt's last hash block, where it is not yet.

    In full attention it may end inside a manager block, which its owner goes on to fill: `FullAttentionManager`. A
    recurrent state is registered when exactly as many tokens are computed as a repeated prompt could resume from, or
    others branched off at, and will be copied before its owner goes on: `MambaManager._cache_partial_tail_block`.
    """
    hash_block = view.whole(CacheField.HASH_BLOCK)
    column, scale = view.group(group, GroupField.COLUMN), view.group(group, GroupField.SCALE)
    groups = work.sizes.buckets.groups
    snapshot = view.group(group, GroupField.TAIL) == 2
    last = resumable(view, tail.prompt, hash_block)
    units = jnp.where(snapshot, divide(tail.cacheable, hash_block), _reusable(view, group, tail.prompt, tail.keys))
    part = remainder(units, scale)
    index = divide(units, scale) - (snapshot & (part == 0))
    end = units * hash_block
    exact = (end == tail.cacheable) & ((end == last) | (end == tail.junction))
    due = jnp.where(snapshot, exact, (end <= tail.cacheable) & (part != 0))
    wanted = (units > 0) & due & (index >= tail.first) & (index < tail.length) & (units <= tail.keys)
    work, (block, key) = peek(
        wanted,
        lambda w: (w.read("rows", w.row(slot, group) + index), w.read("chains", w.chain(slot) + units - 1)),
        work,
        reads=("rows", "chains"),
        default=(0, 0),
    )
    wanted = wanted & (block != 0)
    entry = key * groups + column
    work, (held,) = peek(wanted, lambda w: (w.read("keys", w.key(block, part)),), work, reads=("keys",), default=(0,))
    known = jnp.where(part == 0, key_table.entry_of(held), held - 1) == entry
    work, highest = key_table.highest_part(work, wanted, block)
    covered = wanted & snapshot & (highest == part) & known
    wanted, fresh = wanted & ~covered, wanted & ~known & ~covered
    less = (highest > 0) & ((part == 0) | (highest < part))
    work = key_table.drop_keys(work, fresh & (less | (highest == part)), block)
    work = key_table.add_key(work, fresh, block, part, entry)
    work = emit(work, fresh, Event.KEY, entry)
    work = emit(work, fresh, Event.STORED_PART + 8 * slot, group, end - hash_block, end)
    work = work.write_if(wanted & snapshot, "table", work.steps, work.entry(key * groups + groups - 1))
    place = jnp.where(wanted & snapshot & (part != 0), slot, work.spare_slot)
    work = work.set_row(place, group, Row.PARTIAL, index + 1).set_row(place, group, Row.CACHED, index)
    return work.set(place, Request.CALM, 0)


def _reusable(view: View, group: Scalar, prompt: Scalar, keys: Scalar) -> Scalar:
    """Hash blocks of a prompt that a repetition of it may hit."""
    last = jnp.where(view.group(group, GroupField.EAGLE) != 0, prompt, jnp.maximum(prompt - 1, 0))
    return jnp.minimum(divide(last, view.whole(CacheField.HASH_BLOCK)), keys)
