"""Pools of pages whose free lists keep their order, and the mapping that ties the window's pool to the full one.

A free list is a ring: pages are taken from its front. Pages of one token come back to its end, larger ones to its
front, a run of them as a block in its own order (SGLang's `TokenToKVPoolAllocator.free`,
`PagedTokenToKVPoolAllocator.free_page_ids`). So a run reserves its places first and fills them one by one. Where pages
are sorted they wait behind the list's end, in the same ring, until the list has too few.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hkv.dialects.sglang.rules.parameters import Field, SGLangView
from hkv.state import role_counts
from hkv.state.loops import Scalar, loop, peek
from hkv.state.radix import FULL, STATES, WINDOW, Key, PoolCount, RadixNode
from hkv.state.radix_workspace import RadixWorkspace

Work = RadixWorkspace

WRITES = ("counters", "lists", "bitmap", "rows", "keys")
"""Arrays that these functions write, `rows` and `keys` only in their spare elements."""


def free_pages(work: Work, present: Scalar, pool: int) -> tuple[Work, Scalar]:
    """Pages of a pool that can be handed out, those that wait among them; 0 unless `present`."""
    places = (work.pool_count(pool, field) for field in (PoolCount.FREE, PoolCount.WAITING))
    work, counts = work.peek(present, "counters", *places)
    return work, counts[0] + counts[1]


def sort_in(work: Work, view: SGLangView, present: Scalar, pool: int, needed: Scalar) -> Work:
    """Sorts the waiting pages in, if `present` and the others are fewer than needed (`merge_and_sort_free`).

    Pages are put into a bitmap and come out of it smallest first: a page costs a word a level each way, and each that
    waits is sorted in once.
    """
    front, free, waiting = (work.pool_count(pool, field) for field in PoolCount if field <= PoolCount.WAITING)
    work, (begin, there, more) = work.peek(present, "counters", front, free, waiting)
    end = jnp.where(jnp.asarray(present) & (more > 0) & (needed > there), there + more, 0)
    ids: Any = role_counts

    def put(w: Work, local: tuple[Scalar]) -> tuple[Work, tuple[Scalar]]:
        (done,) = local
        w, (page,) = w.peek(done >= 0, "lists", w.listed(pool, begin + done))
        w, words = peek(done >= 0, lambda v: ids.id_path(v, pool, page), w, ("bitmap",), (0,) * len(levels))
        return ids.put_id(w, True, pool, page, words), (done + 1,)

    def take_out(w: Work, local: tuple[Scalar]) -> tuple[Work, tuple[Scalar]]:
        (done,) = local
        nothing = (0,) * (1 + len(levels))
        w, found = peek(done >= 0, lambda v: ids.smallest_id(v, pool), w, ("bitmap",), nothing)
        w = ids.take_id(w, True, pool, found)
        return w.write("lists", found[0], w.listed(pool, begin + done)), (done + 1,)

    levels = work.sizes.buckets.levels
    for step in (put, take_out):
        work, _ = loop(lambda c: c[0] < end, step, work, (0,), writes=("lists", "bitmap"))
    work = work.write_if(end > 0, "counters", end, free)
    return work.write_if(end > 0, "counters", 0, waiting)


def count(work: Work, pool: int, change: Scalar, field: PoolCount = PoolCount.UNHELD) -> Work:
    """Counts so many pages more: by default, of those of the tree that nobody holds."""
    place = work.pool_count(pool, field)
    work, (before,) = work.peek(change != 0, "counters", place)
    return work.write_if(change != 0, "counters", before + change, place)


def take(work: Work, pool: int, count: Scalar) -> tuple[Work, Scalar]:
    """Takes the first pages of a list, which has so many; place of the first of them in its ring (`Work.listed`)."""
    front, free = work.pool_count(pool, PoolCount.FRONT), work.pool_count(pool, PoolCount.FREE)
    work, (begin, there) = work.peek(count > 0, "counters", front, free)
    work = work.write_if(count > 0, "counters", work.around(begin + count), front)
    return work.write_if(count > 0, "counters", there - count, free), begin


def give_back(work: Work, view: SGLangView, pool: int, count: Scalar) -> tuple[Work, Scalar]:
    """Makes room in a list for a run of pages that come back; place of the first of them in its ring."""
    front, free, waiting = (work.pool_count(pool, field) for field in PoolCount if field <= PoolCount.WAITING)
    work, (begin, there, more) = work.peek(count > 0, "counters", front, free, waiting)
    # States are pages of one token, and never sorted.
    waits = jnp.bool_(False) if pool == STATES else view.flag(Field.SORT)
    at_end = jnp.bool_(True) if pool == STATES else (view.page == 1) | waits
    place = work.around(work.around(jnp.where(at_end, begin + there, begin - count)) + jnp.where(at_end, more, 0))
    work = work.write_if((count > 0) & ~at_end, "counters", place, front)
    work = work.write_if((count > 0) & waits, "counters", more + count, waiting)
    return work.write_if((count > 0) & ~waits, "counters", there + count, free), place


def free_window(work: Work, view: SGLangView, start: Scalar, count: Scalar) -> Work:
    """Frees the window pages of full pages that stand one after the other in `rows` from an index on."""
    return _free(work, view, start, count, jnp.bool_(False), jnp.bool_(True), of_node=False)


def free_own(work: Work, view: SGLangView, row: Scalar, ends: tuple[Scalar, Scalar, Scalar]) -> Work:
    """Frees a request's pages between the first and the last of three positions of its row; those before the second
    have no window pages any more, and come first."""
    first, live, last = ends

    def one(w: Work, local: tuple[Scalar]) -> tuple[Work, tuple[Scalar]]:
        later = local[0] > 0
        start, end = jnp.where(later, live, first), jnp.where(later, last, live)
        return _free(w, view, row + start, end - start, jnp.bool_(True), later, of_node=False), (local[0] + 1,)

    # Two runs, each a block of its own in the free list: those that have lost the window's page come back first.
    turns = jnp.where(first < last, 2, 0)
    return loop(lambda c: c[0] < turns, one, work, (0,), writes=WRITES)[0]


def free_node(work: Work, view: SGLangView, node: Scalar, count: Scalar, full: Scalar, window: Scalar) -> Work:
    """Frees pages of a node that has `count` of them; keys that lose their full pages are in the tree no more."""
    work, (first,) = work.peek(count > 0, "nodes", work.node(node, RadixNode.FIRST))
    return _free(work, view, first, count, full, window & view.windowed, of_node=True)


def _free(
    work: Work, view: SGLangView, start: Scalar, count: Scalar, full: Scalar, window: Scalar, *, of_node: bool
) -> Work:
    """`start`: the first page's index into `rows`, or, `of_node`, its key."""
    window = window & view.windowed
    work, place = give_back(work, view, FULL, jnp.where(full, count, 0))
    work, other = give_back(work, view, WINDOW, jnp.where(window, count, 0))

    def one(w: Work, local: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
        done, at = local
        if of_node:
            w, (page, after) = w.peek(done >= 0, "keys", w.key(at, Key.PAGE), w.key(at, Key.NEXT))
            w = w.write_if(full, "keys", 0, w.key(at, Key.PAGE))
        else:
            w, (page,) = w.peek(done >= 0, "rows", at)
            after = at + 1
        w, (mapped,) = w.peek(window, "lists", w.mapped(page))
        w = w.write_if(window, "lists", 0, w.mapped(page))
        w = w.write_if(window, "lists", mapped, w.listed(WINDOW, other + done))
        w = w.write_if(full, "lists", page, w.listed(FULL, place + done))
        return w, (done + 1, after)

    return loop(lambda c: c[0] < count, one, work, (0, start), writes=("lists", "rows", "keys"))[0]


def hand_out(work: Work, start: Scalar, taken: tuple[Scalar, Scalar], full: Scalar, window: Scalar) -> Work:
    """Takes pages of both pools; where both are taken they are tied to each other and put into `rows` from `start` on.

    `taken`: pages of the full pool and of the window's. `full`, `window`: whether they are used, or lost.
    """
    work, place = take(work, FULL, taken[0])
    work, other = take(work, WINDOW, taken[1])

    def one(w: Work, local: tuple[Scalar]) -> tuple[Work, tuple[Scalar]]:
        (done,) = local
        w, (page, mapped) = w.peek(done >= 0, "lists", w.listed(FULL, place + done), w.listed(WINDOW, other + done))
        w = w.write("rows", page, start + done)
        return w.write_if(window, "lists", mapped, w.mapped(page)), (done + 1,)

    end = jnp.where(full, taken[0], 0)
    return loop(lambda c: c[0] < end, one, work, (0,), writes=("lists", "rows"))[0]
