"""The hit rule: the longest prefix that every group can resume from, by repeated narrowing.

vLLM 0.33 `HybridKVCacheCoordinator.find_longest_cache_hit`, and `UnitaryKVCacheCoordinator` for a single group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from hkv.dialects.vllm.rules import finders, reads
from hkv.dialects.vllm.rules.finders import Query, Search
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, View
from hkv.state.loops import Scalar, divide, fori_loop, loop, peek
from hkv.state.state import Request, Row
from hkv.state.workspace import Workspace

WRITES = ("table", "chains", "rows", "requests")
"""Arrays that the rule writes; `table` and `chains` only in their spare elements."""


class Hit(NamedTuple):
    """Result of a lookup, in tokens: the hit, and the longest prefix that the search came to if that is longer, else 0.

    fails: whether an upstream defect that was asked for by name makes the lookup fail; it found nothing then.
    """

    tokens: Scalar
    shared_prefix: Scalar
    fails: Scalar


class _Progress(NamedTuple):
    """A search on its way. Lengths are in tokens; sets of finders are words, a bit for each.

    Attributes:
      finder: the one to be asked now, in rounds.
      current: the candidate, which each finder may shorten.
      hit: the candidate when the round began.
      longest: the most that any one finder found.
      verified: finders whose drop was proved at the present length.
      seen: finders that were asked.
      fails: whether the engine fails (`Hit`).
      active: whether the search goes on.
    """

    finder: Scalar
    current: Scalar
    hit: Scalar
    longest: Scalar
    verified: Scalar
    seen: Scalar
    fails: Scalar
    active: Scalar


def hashed_keys(view: View, tokens: Scalar, keys: Scalar) -> Scalar:
    """Prefix keys that a request of `tokens` tokens may use, of the `keys` it has."""
    hashed = jnp.maximum(tokens - view.whole(CacheField.LOOKAHEAD), 0)
    return jnp.minimum(keys, divide(hashed, view.whole(CacheField.HASH_BLOCK)))


def resumable(view: Any, tokens: Scalar, unit: Scalar) -> Scalar:
    """The last multiple of `unit` tokens from whose state a repetition of `tokens` tokens could resume.

    vLLM 0.33 `get_mamba_prefill_checkpoint_position`. Elementwise.
    """
    drops = view.whole(CacheField.DROPS) != 0
    last = jnp.where(drops, tokens, jnp.maximum(tokens - jnp.maximum(view.whole(CacheField.LOOKAHEAD), 1), 0))
    return jnp.maximum(divide(last, unit) - drops.astype(jnp.int32), 0) * unit


def longest_hit(
    work: Workspace, view: View, slot: Scalar, enabled: Scalar, limit: Scalar | int = 0
) -> tuple[Workspace, Hit]:
    """Looks a waiting request up. Its rows take the blocks found, its `Row.HIT_FIRST` where they begin.

    `limit` is one more than the most tokens of the hit; 0 for all but the last. No hit where not `enabled`.
    `Row.HIT_LENGTH` is what a group found when it was asked last, which may be more than the hit: its blocks up to the
    hit alone are adopted (`hkv.dialects.vllm.rules.admit.adopted_blocks`).
    """
    work, (tokens, keys) = peek(
        enabled,
        lambda w: w.get(slot, Request.TOKENS, Request.KEYS),
        work,
        reads=("requests",),
        default=(1, 0),
    )
    keys = hashed_keys(view, tokens, keys)
    searches = view.whole(CacheField.FINDERS)
    unitary = view.whole(CacheField.UNITARY) != 0
    single_pass = view.whole(CacheField.SINGLE_PASS) != 0
    hash_block = view.whole(CacheField.HASH_BLOCK)
    drops = view.whole(CacheField.DROPS) != 0
    has_parts = work.sizes.buckets.parts > 0

    def visit(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        at = _Progress(*local)
        first, count = view.group(at.finder, GroupField.FINDER_FIRST), view.group(at.finder, GroupField.FINDER_COUNT)
        group = view.group(first, GroupField.MEMBER)
        # Full attention's finder is asked once, for all rounds.
        once = view.group(group, GroupField.ONCE) != 0
        block = view.group(group, GroupField.BLOCK)
        scale = view.group(group, GroupField.SCALE)
        bit = jnp.left_shift(jnp.int32(1), at.finder)
        # A prefix of a full-attention hit is a hit: vLLM keeps its blocks and cuts them, and so does this, without a
        # lookup.
        again = ((at.seen & bit) != 0) & once
        w, (known,) = w.peek_row(again, slot, group, Row.HIT_LENGTH)
        drop = (view.group(group, GroupField.EAGLE) != 0) & ((at.verified & bit) == 0)
        fine = view.group(group, GroupField.FINE) != 0 if has_parts else jnp.bool_(False)
        # With several groups one block more is looked at, so that the drop does not cost a block each time a group is
        # asked.
        proof = drop & (view.group(group, GroupField.RECURRENT) == 0) & ~unitary
        margin = jnp.where(fine, hash_block, block)
        length = jnp.where(proof, jnp.minimum(at.current + margin, keys * hash_block), at.current)
        query = Query(
            slot=slot,
            first=first,
            members=count,
            block=block,
            scale=scale,
            # A query looks back from the last multiple of so many tokens: a chunk's size, else 1.
            unit=view.group(group, GroupField.UNIT),
            lookback=view.group(group, GroupField.LOOKBACK),
            # What a query skips is halved so often: with 1, it reads the latter half.
            halvings=view.group(group, GroupField.HALVINGS),
            # Blocks in a run to resume behind; -1 where any length will do.
            need=view.group(group, GroupField.NEED),
            # Blocks between two lengths that a hit may have.
            steps=view.group(group, GroupField.STEPS),
            length=length,
            drop=drop,
            limit=jnp.minimum(divide(length, block), divide(keys, scale)),
            units=jnp.minimum(divide(length, hash_block), keys),
        )
        search = _search(view, group, query)
        whole = search._replace(drop=search.drop & ~fine)
        w, right, right_first = finders.forward(w, view, *_from_the_left(query, whole), ~again & whole.looks_right)
        # Without all of its sinks a group resumes nowhere beyond those that it has, whatever run there is further on.
        near = query._replace(limit=jnp.where(right < whole.sinks, jnp.minimum(right, query.limit), query.limit))
        w, left, left_first = finders.backward(w, view, near, whole, ~again & ~fine & search.backward)
        fails = ~again & ~fine & _beyond_the_keys(view, query, search, once, keys, right)
        blocks = jnp.where(search.backward, left, right)
        found, start = blocks * block, jnp.where(search.backward, left_first, right_first)
        if has_parts:
            w, units, first_inside = finders.inside(w, view, query, search, blocks, ~again & fine)
            found, start = jnp.where(fine, units * hash_block, found), jnp.where(fine, first_inside, start)
        w = _note(w, view, slot, first, jnp.where(again, 0, count), found, start)
        # The candidate never grows: each group narrows what the ones before it found.
        new = jnp.where(again, jnp.minimum(at.current, known), found)
        # A shorter candidate has to be proved anew by the groups that drop.
        forget = ~again & ~drop & (new < at.current)
        verified = jnp.where(~again & drop, at.verified | bit, jnp.where(forget, 0, at.verified))
        end = at.finder + 1 == searches
        # Under the drop a group looks beyond the candidate even at 0: there the search goes on, as vLLM's does.
        nothing = (new == 0) & ~drops
        # A fixed point: a round over all groups that shortened nothing. One pass suffices for full attention and one
        # other kind, since whatever the other finds, full attention has (vLLM's `HybridKVCacheCoordinator`).
        done = (end & ((new >= at.hit) | single_pass)) | nothing
        return w, _Progress(
            finder=jnp.where(end, 0, at.finder + 1),
            current=new,
            hit=jnp.where(end | nothing, jnp.minimum(at.hit, new), at.hit),
            longest=jnp.where(again, at.longest, jnp.maximum(at.longest, new)),
            verified=verified,
            seen=at.seen | bit,
            fails=fails,
            active=~done & ~fails,
        )

    # The last token is always computed, or there would be no logits (`KVCacheManager.get_computed_blocks`).
    tokens = jnp.maximum(tokens - 1, 0)
    tokens = jnp.where(limit > 0, limit - 1, tokens)
    zero, no = jnp.int32(0), jnp.bool_(False)
    start = _Progress(
        finder=zero,
        current=tokens,
        hit=tokens,
        longest=zero,
        verified=zero,
        seen=zero,
        fails=no,
        active=enabled & (searches > 0),
    )
    work, local = loop(lambda c: c[-1], visit, work, start, writes=WRITES)
    end = _Progress(*local)
    # A group that found nothing ended the search for all, before the others were looked up.
    work = _note(work, view, slot, 0, jnp.where(enabled & ~drops & (end.current == 0), view.num_groups, 0), 0, 0)
    hit = jnp.where(enabled & (searches > 0) & ~end.fails, end.hit, 0)
    shared = jnp.where((end.longest > hit) & ~unitary & enabled & ~end.fails, end.longest, 0)
    return work, Hit(hit, shared, end.fails)


def _beyond_the_keys(view: View, query: Query, search: Search, once: Scalar, keys: Scalar, length: Scalar) -> Scalar:
    """True if vLLM 0.33's finder asks for the key of a block that has none (defect finder-index-error).

    Searches from the last block start there; those to the right, which go from block to block as far as they find them,
    arrive there. Kinds that need every block are bounded by the keys in vLLM 0.33 too, and it has none with sinks.
    """
    # With drafts, a length may be looked at of which the last block has no key yet.
    wanted, keyed = divide(query.length, query.block), divide(keys, query.scale)
    left = search.backward & (search.need > 0) & (search.sinks == 0) & (wanted > keyed)
    right = ~search.backward & ~once & (wanted > length) & (length >= keyed)
    return (view.whole(CacheField.FINDER_ERROR) != 0) & (left | right)


def _search(view: View, group: Scalar, query: Query) -> Search:
    """Search for a group: forward from the first block needed on, or for the last run that is long enough.

    Under the drop a run is one block longer. Recurrent states drop none, and without need of a run any length will do.
    """
    drop = query.drop & (view.group(group, GroupField.RECURRENT) == 0)
    anywhere = (query.need < 0) & ~drop
    need = jnp.where(anywhere, 0, jnp.maximum(jnp.maximum(query.need, 0) + drop, 1))
    start = divide(reads.skipped_tokens(query.length, query.unit, query.lookback, query.halvings), query.block)
    sinks = view.group(group, GroupField.SINKS)
    return Search(
        backward=view.group(group, GroupField.BACKWARD) != 0,
        start=start,
        need=need,
        drop=drop,
        sinks=sinks,
    )


def _from_the_left(query: Query, search: Search) -> tuple[Query, Search]:
    """Query and search for the look from the left: of a kind with sinks only for those, wherever a hit may end."""
    sinks = search.backward
    limit = jnp.where(sinks, jnp.minimum(query.limit, search.sinks), query.limit)
    query = query._replace(limit=limit, steps=jnp.where(sinks, 1, query.steps))
    return query, search._replace(start=jnp.where(sinks, 0, search.start), drop=search.drop & ~sinks)


def _note(
    work: Workspace, view: View, slot: Scalar, column: Scalar, count: Scalar, tokens: Scalar, first: Scalar
) -> Workspace:
    """Notes what the `count` groups from a column on found: a hit of so many tokens, from that entry on."""

    def body(member: Scalar, w: Workspace) -> Workspace:
        group = view.group(column + member, GroupField.MEMBER)
        # HIT_SHORT: only a hit that a connector brings for each group (`live.found`) is shorter in some of them.
        w = w.set_row(slot, group, Row.HIT_FIRST, first).set_row(slot, group, Row.HIT_SHORT, 0)
        return w.set_row(slot, group, Row.HIT_LENGTH, tokens)

    return fori_loop(0, count, body, work, writes=("requests",))
