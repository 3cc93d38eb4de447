"""Pages of requests: how a request gets them, and how they go back, full ones and the window pages tied to them.

Pages of one token come from the front of a list and go back to its end; larger ones go back to its front, so that the
page freed last is used next. A run of pages goes back in its own order. Where pages are sorted they wait behind the
list.
"""

from __future__ import annotations

from reference.dialects.sglang.records import Cache, Pool, Request, ceil
from reference.language import Text, clause

TEXT = Text(__name__)


def empty(c: Cache, full: int, window: int, states: int, nodes: int) -> None:
    """Nothing is cached yet: all pages of the pools, and all states, are free, and all records of nodes but the
    root's."""
    for pool, count in ((c.full, full), (c.swa, window), (c.states, states)):
        for place in range(count):
            pool.free[place] = place + 1
        pool.count = count
    root = c.nodes[1]
    c.root, c.clock, root.used = root, 1, 1
    for ring in (c.recent, c.recent_states):
        ring.ends, ring.newer[root], ring.older[root] = root, root, root
    for n in range(nodes, 1, -1):
        node = c.nodes[n]
        node.parent, c.vacant = c.vacant, node


def lengthen(c: Cache, request: Request, length: int, decodes: int) -> int:
    """Gives a request pages of both pools up to a length in tokens, or of neither; whether it got them."""
    clause("lengthen", "SWATokenToKVPoolAllocator.alloc_extend")
    start = ceil(request.length, c.config.page)
    count = ceil(length, c.config.page) - start
    granted = count <= available(c.full) and (not c.config.window or count <= available(c.swa))
    loses = c.defects.decode_loses_page and c.config.page > 1 and c.config.window and decodes
    if c.config.sorts and (granted or loses or not c.config.window):
        sort_both(c, request, length, count, decodes)
    if granted:
        for at in range(start, start + count):
            page = c.full.take()
            request.row[at] = page
            if c.config.window:
                c.peer[page] = c.swa.take()
        request.length = length
    elif loses:
        clause("decode-loses-page", "SWATokenToKVPoolAllocator.alloc_decode", "defect: a refused decode loses a page")
        # SGLang asks each pool by itself: the page of the one is lost when the other has none.
        if available(c.full) > 0:
            c.full.take()
        if available(c.swa) > 0:
            c.swa.take()
    return granted


def sort_both(c: Cache, request: Request, length: int, count: int, decodes: int) -> None:
    """Sorts waiting pages in where a list has too few: the engine bounds the pages from above, and sorts by the
    bound."""
    clause("sort-by-bound", "PagedTokenToKVPoolAllocator.alloc_extend")
    needed = count
    if c.config.page > 1:
        needed = (length - request.length) // c.config.page + 2
    if decodes:
        needed = 1
    sort_in(c.full, needed)
    if c.config.window:
        sort_in(c.swa, needed)


def available(pool: Pool) -> int:
    """Pages that can be handed out."""
    return pool.count + pool.waiting


def sort_in(pool: Pool, needed: int) -> None:
    """Takes the waiting pages back, sorted, if the free ones are fewer than needed."""
    if pool.waiting > 0 and needed > pool.count:
        clause("sort-in", "BaseTokenToKVPoolAllocator.merge_and_sort_free", "waiting pages are sorted in")
        pool.count += pool.waiting
        pool.waiting = 0
        # A heap sort, in place: the largest page is at the top, and goes to the end.
        for at in range(pool.count // 2 - 1, -1, -1):
            sink(pool, at, pool.count)
        for last in range(pool.count - 1, 0, -1):
            largest = pool.free[pool.front & pool.mask]
            pool.put(pool.front, pool.free[(pool.front + last) & pool.mask])
            pool.put(pool.front + last, largest)
            sink(pool, 0, last)


def sink(pool: Pool, at: int, count: int) -> None:
    """Moves a page of the heap below larger ones."""
    page = pool.free[(pool.front + at) & pool.mask]
    while 2 * at + 1 < count:
        below = 2 * at + 1
        larger = pool.free[(pool.front + below) & pool.mask]
        if below + 1 < count and pool.free[(pool.front + below + 1) & pool.mask] > larger:
            below += 1
            larger = pool.free[(pool.front + below) & pool.mask]
        if larger <= page:
            break
        pool.put(pool.front + at, larger)
        at = below
    pool.put(pool.front + at, page)


def give_back(pool: Pool, count: int, sorts: int, in_front: int) -> int:
    """Makes room for pages that come back; the place of the first, for `put`."""
    if sorts:
        clause("wait-to-be-sorted", "BaseTokenToKVPoolAllocator.free", "pages that come back wait to be sorted")
        pool.waiting += count
        return pool.front + pool.count + pool.waiting - count
    return pool.reserve(count, in_front)


def of_kv(c: Cache, pool: Pool, count: int) -> int:
    """`give_back`, of full pages or window pages."""
    return give_back(pool, count, c.config.sorts, c.config.page > 1 and not c.config.alone)


def window_page(c: Cache, page: int) -> int:
    """The page that is given back with a full one, which is tied to none any more."""
    found = c.peer[page]
    return page if c.config.alone else found


def free_run(c: Cache, request: Request, start: int, end: int, windows: int) -> None:
    """A request's full pages between two positions are free and, if `windows`, the window pages tied to them."""
    place, other = of_kv(c, c.full, end - start), 0
    if windows:
        other = of_kv(c, c.swa, end - start)
    for at in range(start, end):
        page = request.row[at]
        c.full.put(place + at - start, page)
        if windows:
            c.swa.put(other + at - start, window_page(c, page))
            c.peer[page] = 0


def free_window(c: Cache, request: Request, start: int, end: int) -> None:
    """The window pages of a request's full ones between two positions are free."""
    place = of_kv(c, c.swa, end - start)
    for at in range(start, end):
        page = request.row[at]
        c.swa.put(place + at - start, window_page(c, page))
        c.peer[page] = 0


def free_own(c: Cache, request: Request, start: int, end: int) -> None:
    """A request's own pages are free; those that its window has passed come back first."""
    live = min(max(start, request.slid), end)
    for first, last, windows in ((start, live, 0), (live, end, c.config.window > 0)):
        if first < last:
            free_run(c, request, first, last, windows)


def free_state(c: Cache, state: int) -> None:
    """A state is free, unless it is 0."""
    if state > 0:
        c.states.put(c.states.reserve(1, False), state)
