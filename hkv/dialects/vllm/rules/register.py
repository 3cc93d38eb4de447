"""The registration rule: enters filled blocks into the prefix cache.

vLLM 0.33 `KVCacheCoordinator.cache_blocks`, `SingleTypeKVCacheManager.cache_blocks`, `BlockPool.cache_full_blocks`, and
`FullAttentionManager`'s prompt tail.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hkv.dialects.vllm.rules import export, retire, rows, unwritten
from hkv.dialects.vllm.rules.export import NOTHING_DUE, Due, Ends
from hkv.dialects.vllm.rules.hit import hashed_keys, resumable
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, View
from hkv.state import key_table
from hkv.state.loops import Scalar, divide, loop, peek, remainder, when
from hkv.state.state import NOT_RETAINED, RETIRED, Request, Row
from hkv.state.workspace import Event, Workspace, emit

WRITES = ("rows", "chains", "requests", *key_table.WRITES)
"""Arrays that the rule writes; `rows` and `chains` only in their spare elements."""

FIELDS = (Row.CACHED, Row.FIRST, Row.LENGTH, Row.EXPORT, Row.BEGUN, Row.STANDING)
"""Fields of a row that the rule reads."""


def cacheable_tokens(view: Any, group: Scalar, tokens: Scalar) -> Scalar:
    """Tokens of a group that may be registered when `tokens` are computed.

    vLLM 0.33 `get_num_cacheable_tokens`: of a hybrid only whole scheduler blocks, unless sub-block hits are on, and a
    block more where a hit drops a block; of a single group all but what may be prefilled again. Elementwise.
    """
    # Tokens that drafts may have to compute again are not final.
    certain = jnp.maximum(tokens - view.whole(CacheField.REPREFILLABLE), 0)
    alignment = view.whole(CacheField.REGISTRATION_ALIGNMENT)
    aligned = tokens - remainder(tokens, alignment)
    eagle = (view.group(group, GroupField.EAGLE) != 0) & (aligned > 0)
    block = view.group(group, GroupField.BLOCK)
    # One block beyond the alignment, for the hit that drops one: without it EAGLE would lose a whole scheduler block.
    more = jnp.minimum(certain, certain - remainder(certain, alignment) + block)
    hybrid = jnp.where(eagle, more, aligned)
    return jnp.where(view.whole(CacheField.UNITARY) != 0, certain, hybrid)


def register(
    work: Workspace, view: View, slot: Scalar, tokens: Scalar, computed: Scalar, enabled: Scalar
) -> tuple[Workspace, Scalar]:
    """Every group registers those of a request's blocks that its first `tokens` tokens fill; whether the engine fails
    over it.

    These tokens are computed, or will be by this step, and certain; `computed` were before (defect
    checkpoint-beyond-keys).
    """
    enabled = enabled & (view.whole(CacheField.CACHING) != 0)
    work, (tokens_held, prompt, keys, shared) = work.peek_request(
        enabled, slot, Request.TOKENS, Request.PROMPT, Request.KEYS, Request.SHARED_PREFIX
    )
    # A request may have more tokens than keys: keys lag behind by the look-ahead of multimodal hashing.
    keys = hashed_keys(view, tokens_held, keys)
    # A state is kept at the boundary by the chunk of the prompt that comes to it, and not by later ones.
    ahead = (view.whole(CacheField.SHARED_BOUNDARIES) != 0) & (computed < shared) & (shared <= prompt)
    shared_boundary = jnp.where(ahead, shared, -1)

    def body(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        group, failed = local
        w, (done, first, length, exported, begun, standing) = w.peek_row(group >= 0, slot, group, *FIELDS)
        # A bit for each entry from `done` on whose block holds another state than its end's.
        standing = export.with_begun(standing, done, exported, begun)
        cacheable = jnp.where(view.group(group, GroupField.CACHEABLE) != 0, cacheable_tokens(view, group, tokens), 0)
        block, scale = view.group(group, GroupField.BLOCK), view.group(group, GroupField.SCALE)
        full = jnp.minimum(divide(cacheable, block), divide(keys, scale))
        first = rows.start(view, group, first)
        ends = Ends(cacheable, prompt, shared_boundary, shared, keys, first, length, exported, standing)
        w, fails = _group(w, view, slot, group, done, full, ends)
        w = unwritten.note_row(w, view, slot, group, jnp.maximum(done, first), full)
        return w, (group + 1, failed | fails)

    groups = jnp.where(enabled, view.num_groups, 0)
    work, (_, failed) = loop(lambda c: c[0] < groups, body, work, (0, False), writes=WRITES)
    return work, failed


def _group(
    work: Workspace, view: View, slot: Scalar, group: Scalar, done: Scalar, full: Scalar, ends: Ends
) -> tuple[Workspace, Scalar]:
    """Registers blocks from `done` to `full` of a row, then what may be due inside a block; whether the engine fails
    over it.

    Entries that no block has under their key and blocks without keys come in stretches, a few nanoseconds each. What is
    different ends a stretch and is entered by itself. So is what is due inside a block, in a trip of its own at the
    end.
    """
    column, scale = view.group(group, GroupField.COLUMN), view.group(group, GroupField.SCALE)
    groups, spare = work.sizes.buckets.groups, work.spare_entry
    row, chain = work.row(slot, group), work.chain(slot) + (scale - 1)
    # TAIL: 0 for none, 1 for attention's, 2 for a snapshot. `exported`: length of the state that the chunk leaves
    # behind inside itself, and then there is no tail; 0 for none.
    tail = (view.group(group, GroupField.TAIL) != 0) & (ends.cacheable > 0) & (ends.exported == 0)
    inside_due = tail | (ends.exported > 0)

    def look(w: Workspace, i: Scalar, kept_here: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        block = jnp.where(i >= ends.first, w.read("rows", row + i), 0)
        # Its key would name the state at the block's end, which is not the one that stands in it.
        kept_here = kept_here & ~export.stands(ends.standing, done, i)
        why = jnp.where(block == 0, RETIRED, jnp.where(kept_here, 0, NOT_RETAINED))
        # An entry of the table: the key's line and the group's column.
        return block, why, w.read("chains", chain + i * scale) * groups + column

    # Enters what the trip before found: a trip writes `table` and `keys` before it reads them, so that XLA can update
    # them in place (`hkv.state.loops`, rule 1). A value of the table is 8 times a block, or the reason why there is no
    # block, which is negative.
    def settle(w: Workspace, entry: Scalar, value: Scalar) -> Workspace:
        w = w.write("table", value, w.entry(entry))
        # The low 3 bits are flags of `State.table`, all clear here.
        block = jnp.maximum(value, 0) >> 3
        # A plain word: the stretch only holds blocks without other keys under keys without other blocks.
        w = w.write("keys", jnp.where(value > 0, key_table.word_of(entry), 0), w.key(block))
        return emit(w, value > 0, Event.KEY, entry)

    # An if: a loop of at most one trip (`loops.when`).
    def everything(w: Workspace, _: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        w, kept = retire.kept(w, view, slot, group)
        place = jnp.where(full > done, slot, w.spare_slot)
        # Before the tail, which may set `CACHED` back. KNOWN: vLLM has a `num_cached_block` of the request from now on.
        w = w.set_row(place, group, Row.CACHED, full).set(place, Request.KNOWN, 1)
        # Bits of entries that are looked at now are free for those 32 further on.
        w = w.set_row(place, group, Row.STANDING, export.passed(ends.standing, done, full))

        def plain(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
            i, phase, inside, entry, value, _ = local
            w = settle(w, entry, value)
            block, why, entry = look(w, i, inside | (phase >= kept.least))
            # What is not so (a duplicate, or a block that has a key) ends the stretch and is entered by itself.
            new = (w.read("table", w.entry(entry)) <= 0) & ((why != 0) | (w.read("keys", w.key(block)) == 0))
            value = jnp.where(why != 0, why, block * 8)
            after = jnp.where(new, kept.next_phase(phase), phase)
            return w, (i + 1, after, inside, jnp.where(new, entry, spare), jnp.where(new, value, 0), ~new)

        def stretch(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
            i, late, failed = local
            # The last trip, after all whole blocks: what is due inside a block, whose event vLLM publishes last.
            late = late & (i >= full)
            # Within a stretch the answer to "is it retained?" depends on the phase alone; it ends where that changes.
            inside, until = kept.stretch(i, full)
            # Blocks that are not retained need no trip unless somebody wants to know why they are missed later.
            i = jnp.where(view.whole(CacheField.SILENT) != 0, kept.skip(i, inside, until), i)
            w, (i, phase, _, entry, value, stopped) = loop(
                lambda c: (c[0] < until) & ~c[-1],
                plain,
                w,
                (i, kept.phase(i), inside, spare, 0, False),
                reads=("rows", "chains"),
                writes=("table", "keys", "events", "num_events"),
            )
            # The entry that ended the stretch was counted, but not entered.
            w, i = settle(w, entry, value), i - stopped
            w, (block, why, entry) = peek(
                stopped,
                lambda v: look(v, i, inside | (phase >= kept.least)),
                w,
                reads=("rows", "chains"),
                default=(0, 0, 0),
            )
            # The event's code and the slot share its first word: the code has the low 3 bits.
            w = emit(w, late & (full > done), Event.STORED + 8 * slot, group, done, full)
            w, due, fails = _inside_a_block(w, view, slot, group, ends, late)
            entered = stopped & (why == 0)
            due = due.instead(
                ~late,
                Due(drops=entered, adds=entered, block=block, part=jnp.int32(0), entry=entry, end=jnp.int32(0)),
            )
            w = key_table.note_absence(w, stopped & ~entered, entry, why)
            w = when(due.drops | due.adds, lambda v: _enter(v, view, slot, group, due), w, writes=key_table.WRITES)
            return w, (i + stopped, inside_due & ~late, failed | fails)

        start = (done, inside_due, False)
        w, (_, _, failed) = loop(lambda c: (c[0] < full) | c[1], stretch, w, start, writes=WRITES)
        w = emit(w, (full > done) & ~inside_due, Event.STORED + 8 * slot, group, done, full)
        return w, (False, failed)

    start = ((full > done) | inside_due, False)
    work, (_, failed) = loop(lambda c: c[0], everything, work, start, writes=WRITES)
    return work, failed


def _enter(work: Workspace, view: View, slot: Scalar, group: Scalar, due: Due) -> Workspace:
    """A block stands under a key that it has not, or loses those it has."""
    work = key_table.drop_keys(work, due.drops, due.block)
    work = key_table.add_key(work, due.adds, due.block, due.part, due.entry)
    work = emit(work, due.adds, Event.KEY, due.entry)
    # vLLM reports such a key as one hash block, not as a part of its manager block.
    begin = due.end - view.whole(CacheField.HASH_BLOCK)
    return emit(work, due.adds & (due.end > 0), Event.STORED_PART + 8 * slot, group, begin, due.end)


def _inside_a_block(
    work: Workspace, view: View, slot: Scalar, group: Scalar, ends: Ends, enabled: Scalar
) -> tuple[Workspace, Due, Scalar]:
    """Change due under a key that ends inside a block: the prompt's tail, or a state that the chunk exports."""

    def tail(w: Workspace, _: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        w, due = _prompt_tail(w, view, slot, group, ends)
        return w, (False, *due)

    def left_behind(w: Workspace, _: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        w, due, fails = export.register(w, view, slot, group, ends)
        return w, (False, fails, *due)

    exporting = ends.exported > 0
    work, (_, *found) = loop(lambda c: c[0], tail, work, (enabled & ~exporting, *NOTHING_DUE), writes=WRITES)
    start = (enabled & exporting, False, *NOTHING_DUE)
    work, (_, fails, *left) = loop(lambda c: c[0], left_behind, work, start, writes=WRITES)
    return work, Due(*left).instead(~exporting, Due(*found)), fails


def _prompt_tail(work: Workspace, view: View, slot: Scalar, group: Scalar, tail: Ends) -> tuple[Workspace, Due]:
    """The prompt's last hash block, to be registered where it is not yet.

    In full attention it may end inside a manager block, which its owner goes on to fill: `FullAttentionManager`. A
    recurrent state is registered when exactly as many tokens are computed as a repeated prompt could resume from, or
    others branched off at, and will be copied before its owner goes on: `MambaManager._cache_partial_tail_block`.
    """
    hash_block = view.whole(CacheField.HASH_BLOCK)
    column, scale = view.group(group, GroupField.COLUMN), view.group(group, GroupField.SCALE)
    groups = work.sizes.buckets.groups
    # TAIL: 1 is attention's, 2 a snapshot's.
    snapshot = view.group(group, GroupField.TAIL) == 2
    last = resumable(view, tail.prompt, hash_block)
    units = jnp.where(snapshot, divide(tail.cacheable, hash_block), reusable(view, group, tail.prompt, tail.keys))
    part = remainder(units, scale)
    # A state at a block's end stands in that block; a tail of attention at its end would be the whole block's key.
    index = divide(units, scale) - (snapshot & (part == 0))
    end = units * hash_block
    exact = (end == tail.cacheable) & ((end == last) | (end == tail.shared_boundary))
    due = jnp.where(snapshot, exact, (end <= tail.cacheable) & (part != 0))
    wanted = (units > 0) & due & (index >= tail.first) & (index < tail.length) & (units <= tail.keys)
    places = ("rows", work.row(slot, group) + index), ("chains", work.chain(slot) + units - 1)
    work, (block, key) = work.peek_each(wanted, *places)
    wanted = wanted & (block != 0)
    # One block if that holds, else none: a boolean counts as 0 or 1.
    work = unwritten.note_blocks(work, view, slot, group, index, index + (wanted & ~snapshot))
    entry = key * groups + column
    # The word of a key that ends inside the block is 1 plus its entry; that of the whole block's has flags as well.
    work, (held,) = work.peek(wanted, "keys", work.key(block, part))
    known = jnp.where(part == 0, key_table.entry_of(held), held - 1) == entry
    work, highest = key_table.highest_part(work, wanted, block)
    # Registered already by somebody's chunk that ended here; vLLM 0.32 goes on, and registers it once more.
    again = view.whole(CacheField.TAILS_AGAIN) != 0
    covered = wanted & snapshot & (highest == part) & known & ~again
    wanted, fresh = wanted & ~covered, wanted & ~known & ~covered
    # A block that is filled up loses the key by which less of it was known.
    less = (highest > 0) & ((part == 0) | (highest < part))
    # The last column of a key's line is the step that registers its state: hits wait for the next (`unwritten`).
    work = work.write_if(wanted & snapshot, "table", work.steps, work.entry(key * groups + groups - 1))
    # A state that is registered inside its block is copied before its owner goes on (`Row.PARTIAL`), and its entry is
    # looked at again once the block is full. An allocation has the copy to make, and so is no no-op.
    place = jnp.where(wanted & snapshot & (part != 0), slot, work.spare_slot)
    work = work.set_row(place, group, Row.PARTIAL, index + 1).set_row(place, group, Row.CACHED, index)
    drops = fresh & (less | (highest == part))
    return work.set(place, Request.NOOP_UNTIL, 0), Due(drops, fresh, block, part, entry, end)


def reusable(view: Any, group: Scalar, prompt: Scalar, keys: Scalar) -> Scalar:
    """Hash blocks of a prompt that a repetition of it may hit. Elementwise."""
    # The last token is computed again; a hit under the EAGLE drop gives up its last hash block, and that token with it.
    last = jnp.where(view.group(group, GroupField.EAGLE) != 0, prompt, jnp.maximum(prompt - 1, 0))
    return jnp.minimum(divide(last, view.whole(CacheField.HASH_BLOCK)), keys)
