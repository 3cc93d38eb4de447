"""Lookups in the second tier, compiled, and loads: the longest prefix that every group can complete.

The twin of `reference.dialects.vllm.offload.lookup`, and of the connector's side of a load.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from hkv.dialects.vllm.rules.offload import lru, pool
from hkv.dialects.vllm.rules.offload.parameters import TierField, TierNumber
from hkv.dialects.vllm.rules.offload.pool import Prefix
from hkv.dialects.vllm.rules.offload.words import LOADED, LOADING, LOADS, ChunkNode, SlotWord, ToldRow
from hkv.dialects.vllm.rules.parameters import GroupField
from hkv.state.loops import Scalar, ceil_divide, divide, loop, remainder
from hkv.state.state import Row

READS = ("chains", "where", "nodes")


class _Search(NamedTuple):
    """A search on its way, in rounds over the groups. Lengths are in tokens.

    Attributes:
      place: place in `TierField.ORDER` of the group to be asked now.
      most: what the groups before have left of the length.
      hit: the same beyond the hit on the GPU; 0 before the first group.
      later: whether a chunk of it is being written.
      again: which groups the next round asks: none, those with windows, or all.
      windows: whether this round has asked one of a window already.
      going: whether the search goes on.
    """

    place: Scalar
    most: Scalar
    hit: Scalar
    later: Scalar
    again: Scalar
    windows: Scalar
    going: Scalar


NOT_AGAIN, WINDOWS_AGAIN, ALL_AGAIN = 0, 1, 2


def external_hit(
    w: Any, view: Any, slot: Scalar, tokens: Scalar, local: Scalar, enabled: Scalar
) -> tuple[Any, Scalar, Scalar]:
    """Tokens beyond a request's hit on the GPU that can be loaded; and whether to ask again later instead.

    `tokens` are the request's, `local` those of that hit.
    """
    tier, groups = view.tier, view.num_groups
    first_window = tier.number(TierNumber.WINDOWS)
    # The last token is computed in any case. Full attention's hit may lose it later; a window's may be none then, so
    # that it is looked up without it.
    most = tokens - (first_window < groups)
    if w.room.states:
        most = most - remainder(jnp.maximum(most, 0), tier.number(TierNumber.GRID))

    def visit(v: Any, carried: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        at = _Search(*carried)
        group = tier.group(at.place, TierField.ORDER)
        size = view.group(group, GroupField.BLOCK)
        v, found, waits = _of_group(v, view, slot, group, tokens, local, at.most)
        later = at.later | waits
        none = found - local < size
        shorter = found - local < at.hit
        # What a group shortens, windows asked before it have to find anew; and all groups, if a chunk of the longer hit
        # is being written, since it may lie behind the shorter one.
        again = jnp.where(shorter & at.windows & (at.again == NOT_AGAIN), WINDOWS_AGAIN, at.again)
        again = jnp.where(shorter & later, ALL_AGAIN, again)
        later = later & ~shorter
        end = at.place + 1 == groups
        start = jnp.where(again == ALL_AGAIN, 0, first_window)
        window = tier.group(group, TierField.WINDOW) > 0
        return v, _Search(
            place=jnp.where(end, start, at.place + 1),
            most=found,
            hit=jnp.where(none, 0, found - local),
            later=later & ~none,
            again=jnp.where(end, NOT_AGAIN, again),
            windows=~end & (at.windows | window),
            going=~none & ~(end & (again == NOT_AGAIN)),
        )

    zero, no = jnp.int32(0), jnp.bool_(False)
    start = _Search(place=zero, most=most, hit=zero, later=no, again=zero, windows=no, going=enabled)
    w, carried = loop(lambda c: c[-1], visit, w, start, writes=READS)
    found = _Search(*carried)
    hit = jnp.where(enabled, found.hit, 0)
    w, loading = _loading(
        w, view, slot, local, local + hit, enabled & (hit > 0) & ~found.later & (w.loading > 0), tokens
    )
    later = enabled & (found.later | loading)
    return w, jnp.where(later, 0, hit), later


def _of_group(
    w: Any, view: Any, slot: Scalar, group: Scalar, tokens: Scalar, local: Scalar, most: Scalar
) -> tuple[Any, Scalar, Scalar]:
    """Length at which one group can resume, `most` at most, 0 for none; and whether that is to be seen later."""
    tier, size = view.tier, view.group(group, GroupField.BLOCK)
    named = divide(tokens, size)
    most = jnp.minimum(most, named * size)
    enough = most - local >= size
    start, end = divide(local, size), jnp.where(enough, jnp.minimum(ceil_divide(most, size), named), 0)
    window, scale = tier.group(group, TierField.WINDOW), view.group(group, GroupField.SCALE)
    chain, width = w.chain(slot) + (scale - 1), w.sizes.buckets.groups

    def state(v: Any, place: Scalar) -> tuple[Scalar, Scalar]:
        key = v.read("chains", chain + place * scale)
        # `where`: 1 plus a chunk; else why there is none, at most 0. READERS is -1 while a chunk is being written.
        value = v.read("where", key * width + group)
        there = value > 0
        readers = v.read("nodes", v.node(jnp.where(there, value - 1, v.spare_node), ChunkNode.READERS))
        return there, there & (readers < 0)

    def forward(v: Any, local_: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        place, writing, _ = local_
        there, new = state(v, place)
        return v, (place + there, writing | new, there)

    def backward(v: Any, local_: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        place, run, need, writing = local_
        there, new = state(v, place)
        run = jnp.where(there, run + 1, 0)
        # The very last run needs `first` chunks, any other `window`; whether one is being written is asked of one run.
        return v, (place - 1, run, jnp.where(there, need, window), (writing & there) | new)

    begin = jnp.where(window > 0, end, start)
    w, (stop, writing, _) = loop(lambda c: (c[0] < end) & c[2], forward, w, (begin, False, True), reads=READS)
    count = jnp.maximum(stop - start, 0)
    first = load_window(view, group, jnp.minimum(most, end * size))
    last = jnp.where(window > 0, end - 1, start - 1)
    w, (place, run, _, late) = loop(
        lambda c: (c[0] >= start) & (c[1] < c[2]), backward, w, (last, 0, first, False), reads=READS
    )
    # Chunks from the start to the run's end: those before the run are not needed.
    count = jnp.where(window > 0, jnp.where(run > 0, place + 1 - start + run, 0), count)
    writing = jnp.where(window > 0, late & (run > 0), writing)
    # While a chunk is being written, nothing is shortened: that is decided when the request asks again.
    found = jnp.where(writing, most, jnp.minimum(most, (start + count) * size))
    return w, jnp.where(enough & (count > 0), found, 0), enough & writing & (count > 0)


def load_window(view: Any, group: Scalar, length: Scalar) -> Scalar:
    """Chunks that resuming at a length takes, which may end inside one."""
    tier, size = view.tier, view.group(group, GroupField.BLOCK)
    window, span = tier.group(group, TierField.WINDOW), tier.group(group, TierField.SPAN)
    # SPAN: tokens that a sliding window keeps before a query, -1 for other groups; `rest`, what of the last chunk is
    # behind the length.
    rest = remainder(size - remainder(length, size), size)
    return jnp.where(span < 0, window, jnp.maximum(window, ceil_divide(jnp.maximum(span, 0) + rest, size)))


def _of_hit(view: Any, group: Scalar, local: Scalar, end: Scalar, tokens: Scalar) -> tuple[Scalar, Scalar]:
    """Chunks that a load from one length to another reads, were nothing of them on the GPU: the first, and after."""
    size = view.group(group, GroupField.BLOCK)
    first, stop = divide(local, size), jnp.minimum(ceil_divide(end, size), divide(tokens, size))
    window = load_window(view, group, end)
    return jnp.where(view.tier.group(group, TierField.WINDOW) > 0, jnp.maximum(first, stop - window), first), stop


def _loading(
    w: Any, view: Any, slot: Scalar, local: Scalar, end: Scalar, enabled: Scalar, tokens: Scalar
) -> tuple[Any, Scalar]:
    """True if a chunk of a hit is being loaded for another request."""
    width = w.sizes.buckets.groups

    def of_group(v: Any, carried: tuple[Scalar, Scalar]) -> tuple[Any, tuple[Scalar, Scalar]]:
        group, _ = carried
        first, stop = _of_hit(view, group, local, end, tokens)
        scale = view.group(group, GroupField.SCALE)

        def one(u: Any, at: tuple[Scalar, Scalar]) -> tuple[Any, tuple[Scalar, Scalar]]:
            key = u.read("chains", u.chain(slot) + (at[0] + 1) * scale - 1)
            value = u.read("where", key * width + group)
            node = jnp.where(value > 0, value - 1, u.spare_node)
            # BLOCK has flags once a chunk is written: until then READERS is below 0.
            readers, flags = (
                u.read("nodes", u.node(node, ChunkNode.READERS)),
                u.read("nodes", u.node(node, ChunkNode.BLOCK)),
            )
            return u, (at[0] + 1, (value > 0) & (readers > 0) & (flags & LOADING != 0))

        v, (_, found) = loop(lambda c: (c[0] < stop) & ~c[1], one, v, (first, False), reads=READS)
        return v, (group + 1, found)

    end_group = jnp.where(enabled, view.num_groups, 0)
    w, (_, found) = loop(lambda c: (c[0] < end_group) & ~c[1], of_group, w, (0, False), writes=READS)
    return w, enabled & found


# Loads.


def load(
    w: Any, view: Any, slot: Scalar, prefix: Prefix, local: Scalar, end: Scalar, enabled: Scalar
) -> tuple[Any, Scalar]:
    """A request that was given blocks loads tokens from `local` to `end` into them; how many chunks it reads.

    It offers from behind them on.
    """
    width = w.sizes.buckets.groups
    # Chunks of the head that the GPU has count as used as well, but under vLLM 0.33's defect (`HEAD_AGES`).
    heads = view.tier.number(TierNumber.WHOLE_HEADS) != 0

    def of_group(v: Any, carried: tuple[Scalar, Scalar]) -> tuple[Any, tuple[Scalar, Scalar]]:
        group, count = carried
        size, scale = view.group(group, GroupField.BLOCK), view.group(group, GroupField.SCALE)
        stop = ceil_divide(end, size)
        v, (null,) = v.peek_row(group >= 0, slot, group, Row.FIRST)

        def missing(u: Any, at: tuple[Scalar, Scalar]) -> tuple[Any, tuple[Scalar, Scalar]]:
            block = u.read("rows", u.row(slot, group) + at[0])
            there = (at[0] >= null) & (block != 0) & (u.read("keys", u.key(block)) == 0)
            return u, (at[0] + ~there, there)

        start = (ceil_divide(local, size), False)
        v, (first, _) = loop(lambda c: (c[0] < stop) & ~c[1], missing, v, start, reads=("rows", "keys"))
        v = v.write("tables", first, v.told_word(slot, group, ToldRow.LOAD_FIRST))
        v = v.write("tables", stop, v.told_word(slot, group, ToldRow.LOAD_END))
        v = v.write("tables", stop, v.told_word(slot, group, ToldRow.CURSOR))
        head = jnp.where(heads, divide(local, size), 0)

        def one(u: Any, at: tuple[Scalar]) -> tuple[Any, tuple[Scalar]]:
            used = at[0] < head
            unit = (jnp.where(used, at[0], at[0] - head + first) + 1) * scale - 1
            u, (key,) = u.peek(at[0] >= 0, "chains", u.chain(slot) + unit)
            u, (value,) = u.peek(at[0] >= 0, "where", key * width + group)
            u, _, again = pool.use(u, value > 0, value - 1, prefix, unit, group, jnp.where(used, 0, 1))
            return u.replace(read_once=u.read_once + (~used & ~again)), (at[0] + 1,)

        chunks = jnp.maximum(stop - first, 0)
        writes = ("chains", "where", *pool.USE_WRITES, "read_once")
        v, _ = loop(lambda c: c[0] < head + chunks, one, v, (0,), writes=writes)
        return v, (group + 1, count + chunks)

    writes = ("rows", "keys", "requests", "tables", "chains", "where", *pool.USE_WRITES, "read_once")
    end_group = jnp.where(enabled, view.num_groups, 0)
    w, (_, count) = loop(lambda c: c[0] < end_group, of_group, w, (0, 0), writes=writes)
    if not w.room.arc:
        w = lru.enlist(w, enabled, prefix, jnp.bool_(False))
    return w.replace(loaded=w.loaded + count, loading=w.loading + enabled), count


def end_loads(w: Any, view: Any, step: Scalar, prefix_of: Any, request_of: Any) -> Any:
    """Loads that were done by the end of a step: their chunks are read no more, and their requests can go on."""
    width = w.sizes.buckets.groups

    def of_slot(v: Any, carried: tuple[Scalar]) -> tuple[Any, tuple[Scalar]]:
        v, (slot,) = v.peek(carried[0] >= 0, "lists", carried[0])
        v, (state, at) = v.peek(
            carried[0] >= 0, "tables", v.slot_word(slot, SlotWord.STATE), v.slot_word(slot, SlotWord.END)
        )
        done = (state == LOADS) & (at <= step)
        v, request = request_of(v, slot, done)
        prefix = prefix_of(request)

        def of_group(u: Any, at_: tuple[Scalar]) -> tuple[Any, tuple[Scalar]]:
            group = at_[0]
            scale = view.group(group, GroupField.SCALE)
            words = (ToldRow.LOAD_FIRST, ToldRow.LOAD_END)
            u, (first, stop) = u.peek(group >= 0, "tables", *(u.told_word(slot, group, word) for word in words))

            def one(x: Any, place: tuple[Scalar]) -> tuple[Any, tuple[Scalar]]:
                unit = (place[0] + 1) * scale - 1
                x, (value,) = x.peek(unit >= 0, "where", view.trace_key(prefix.start + unit) * width + group)
                x, _, _ = pool.use(x, value > 0, value - 1, prefix, unit, group, jnp.int32(-1), notes=False)
                return x, (place[0] + 1,)

            u, _ = loop(lambda c: c[0] < stop, one, u, (first,), writes=("where", "nodes", "marks", "idle"))
            return u, (group + 1,)

        end_group = jnp.where(done, view.num_groups, 0)
        v, _ = loop(lambda c: c[0] < end_group, of_group, v, (0,), writes=("tables", "where", "nodes", "marks", "idle"))
        v = v.write_if(done, "tables", LOADED, v.slot_word(slot, SlotWord.STATE))
        return v.replace(loading=v.loading - done), (carried[0] + 1,)

    start = jnp.where(w.loading > 0, 0, w.held)
    end = w.held
    w, _ = loop(
        lambda c: c[0] < end,
        of_slot,
        w,
        (start,),
        writes=("lists", "tables", "running_words", "where", "nodes", "marks", "idle", "loading"),
    )
    return w
