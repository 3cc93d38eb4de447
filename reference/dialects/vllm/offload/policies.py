"""Order in which chunks leave the second tier: LRU by the requests that used them, and ARC.

Neither looks at single lookups. A request counts as one use of every chunk that it stored or read, made when it ends,
from its last position to its first, so that of one prompt the tail leaves before the head. Until then LRU gives all
chunks of a request one rank, and ARC moves nothing. Only chunks that no transfer reads or writes may leave.
vLLM 0.33 `LRUCachePolicy`, `ARCCachePolicy`.
"""

from __future__ import annotations

from reference.dialects.vllm.offload.doubles import added, at_least_one, less
from reference.dialects.vllm.offload.keys import Key
from reference.dialects.vllm.offload.records import Event, Offloaded, Tier, Use, tell
from reference.language import Text, clause

TEXT = Text(__name__)


# Uses of a request.


def begin(t: Tier, request: Offloaded) -> None:
    """A request's uses begin, where they were of a tier that has been emptied since."""
    if request.filling != t.filling:
        clause("uses-begin", "CPUOffloadingManager.on_new_request", "a request's uses of an emptied tier count no more")
        if request.filling > 0:
            forget(t, request)
        request.filling = t.filling
        t.uses.newer[request.ends], t.uses.older[request.ends] = request.ends, request.ends
        request.near, request.number, request.ended = request.ends, 0, 0


def forget(t: Tier, request: Offloaded) -> None:
    """Makes what a request used as before it did."""
    use = t.uses.newer[request.ends]
    while use is not request.ends:
        use.seen, use.stored, use.found, use.missed = 0, 0, 0, 0
        use = t.uses.newer[use]


def note(t: Tier, request: Offloaded, use: Use, ready: bool) -> None:
    """A request uses a chunk, which it found, if it is `ready`."""
    if not use.seen:
        use.seen = 1
        enter(t, request, use)
        if not t.config.arc:
            rank(t, request, use)
    if ready and not use.stored:
        use.found = 1


def enter(t: Tier, request: Offloaded, use: Use) -> None:
    """Puts a use between those that end before it and those that end after it; it is not far from the last one."""
    older = request.near
    while older.end > use.end or (older.end == use.end and older.key.group > use.key.group):
        older = t.uses.older[older]
    newer = t.uses.newer[older]
    while newer is not request.ends and (
        newer.end < use.end or (newer.end == use.end and newer.key.group < use.key.group)
    ):
        newer = t.uses.newer[newer]
    t.uses.put_behind(use, newer)
    request.near = use


def rank(t: Tier, request: Offloaded, use: Use) -> None:
    """A chunk gets a request's rank, if that is higher: it leaves later."""
    clause("rank-by-request", "LRUCachePolicy.on_request_access", "a chunk has the rank of its last user")
    key = use.key
    if request.number == 0:
        t.numbers += 1
        request.number = t.numbers
    if key.chunk > 0 and (request.number > key.number or (request.number == key.number and use.end < key.end)):
        key.number, key.end = request.number, use.end
        t.heap.moved(key)


def end(t: Tier, request: Offloaded) -> None:
    """A request has ended: its uses are made, the last position first."""
    if request.filling == t.filling and not request.ended:
        clause("end", "CPUOffloadingManager.on_request_finished", "a request's uses are made when it ends")
        request.ended = 1
        use = t.uses.older[request.ends]
        while use is not request.ends:
            key = use.key
            if key.chunk > 0:
                if not t.config.arc:
                    t.numbers += 1
                    key.number, key.end = t.numbers, 0
                    t.heap.moved(key)
                elif use.found or use.stored:
                    clause(
                        "found-again",
                        "ARCCachePolicy.on_request_finished",
                        "what another request stored is used often",
                    )
                    to = t.lists.often if use.found else t.lists.within[key]
                    t.lists.take_out(key)
                    t.lists.append(key, to)
            use = t.uses.older[use]


# Chunks that come, rest and leave.


def miss(t: Tier, start: int, count: int) -> None:
    """ARC learns of uses that a request is to store, once a request each, from the last on: what left too early says
    which list should have more chunks."""
    lists = t.lists
    once, often = lists.size[lists.gone_once], lists.size[lists.gone_often]
    up, down = (1, 0, 0), (1, 0, 0)
    if count > 0 and once > 0 and often > 0:
        if often > once:
            up = at_least_one(often, once)
        else:
            down = at_least_one(once, often)
    for at in range(start + count - 1, start - 1, -1):
        use = t.lacked[at]
        to = lists.within[use.key]
        if not use.missed and to is not None:
            clause("learn", "ARCCachePolicy._adapt_to_ghost_hit", "the target follows keys that are missed")
            target = (lists.target, lists.target_high, lists.target_low)
            if to is lists.gone_once:
                target = added(target, up, t.config.chunks)
            else:
                target = less(target, down)
            lists.target, lists.target_high, lists.target_low = target
            lists.take_out(use.key)
            lists.append(use.key, to)
        use.missed = 1


def come(t: Tier, request: Offloaded, use: Use) -> None:
    """A chunk that is written from now on is the one that leaves last, or among them."""
    key = use.key
    if t.config.arc:
        if t.lists.within[key] is not None:
            t.lists.take_out(key)
        t.lists.append(key, t.lists.once)
    else:
        key.number, key.end = request.number, use.end


def rest(t: Tier, key: Key) -> None:
    """No transfer reads or writes a chunk any more."""
    t.idle += 1
    if not t.config.arc:
        t.heap.add(key)


def wake(t: Tier, key: Key) -> None:
    """A transfer reads a chunk that was idle, or it leaves."""
    t.idle -= 1
    if not t.config.arc:
        t.heap.remove(key)


def leave(t: Tier, key: Key, kind: int) -> None:
    """A chunk leaves, and can be handed out."""
    t.free[t.unused] = key.chunk
    t.unused += 1
    key.chunk = 0
    tell(t, key, kind)


def evict_lru(t: Tier, count: int) -> None:
    """Chunks leave that are not spared, by rank; there are so many."""
    clause("evict-lru", "LRUCachePolicy.evict")
    aside = 0
    while count > 0:
        key = t.heap.first()
        t.heap.remove(key)
        if key.spared == t.offers:
            t.aside[aside] = key
            aside += 1
        else:
            t.idle -= 1
            leave(t, key, Event.LEFT)
            count -= 1
    for at in range(aside):
        t.heap.add(t.aside[at])


def evict_arc(t: Tier, count: int) -> None:
    """Chunks leave that are not spared: of those used once while these are as many as they should be, else of the
    others."""
    clause("evict-arc", "ARCCachePolicy.evict")
    lists = t.lists
    once, often = lists.newer[lists.once], lists.newer[lists.often]
    while count > 0:
        first = once is not lists.once and (lists.size[lists.once] >= lists.target or often is lists.often)
        key = once if first else often
        if first:
            once = lists.newer[once]
        else:
            often = lists.newer[often]
        if key.readers == 0 and key.spared != t.offers:
            to = lists.gone_once if first else lists.gone_often
            lists.take_out(key)
            lists.append(key, to)
            if lists.size[to] > t.config.chunks:
                clause("forget-the-gone", "ARCCachePolicy.evict", "as many keys are remembered as there are chunks")
                lists.take_out(lists.newer[to])
            t.idle -= 1
            leave(t, key, Event.LEFT)
            count -= 1
