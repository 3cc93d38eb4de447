"""The chunks of the second tier: what a request may store, which chunk is handed out next, what transfers read.

One pool serves all groups, and a chunk of any group costs the same. A store is all or nothing: room for every new chunk
of a request's step, or none of them. vLLM 0.33 `CPUOffloadingManager`.
"""

from __future__ import annotations

from reference.dialects.vllm.offload.policies import (
    begin,
    come,
    end,
    evict_arc,
    evict_lru,
    leave,
    miss,
    note,
    rest,
    wake,
)
from reference.dialects.vllm.offload.records import Code, Event, Key, Offloaded, Operation, Tier, is_ready, tell
from reference.language import NOTHING, Text, clause

TEXT = Text(__name__)


# Operations.


def perform_all(t: Tier, count: int) -> None:
    """The first `count` operations."""
    for n in range(1, count + 1):
        perform_at(t, n, t.operations[n].code)


def perform_at(t: Tier, n: int, code: int) -> None:
    """The operation of a record, whose code may be known."""
    op = t.operations[n]
    t.results[n].count = perform(t, op, t.requests[op.request], code)


def perform(t: Tier, op: Operation, request: Offloaded, code: int) -> int:
    """One operation; of STORE how many chunks are to be written, NOTHING without room, of ROOM how many can be had."""
    if code == Code.BEGIN:
        begin(t, request)
    if code == Code.STORE:
        return store(t, request, op.start, op.count, op.spares, 0)
    if code in (Code.LOAD, Code.USE):
        read(t, request, op.start, op.count, op.count if code == Code.LOAD else 0)
    if code in (Code.STORED, Code.FAILED, Code.LOADED):
        for at in range(op.start, op.start + op.count):
            transferred(t, t.moving[at], code != Code.LOADED, code != Code.FAILED)
    if code == Code.END:
        end(t, request)
    if code == Code.CLEAR:
        clear(t)
    if code == Code.ROOM:
        t.offers += 1
        return room(t, request, op.start, op.count, op.spares)
    return 0


# Stores.


def store(t: Tier, request: Offloaded, start: int, count: int, spares: int, partial: int) -> int:
    """Takes chunks for those uses that are absent and worth it; how many they are, NOTHING where there is no room.

    In any case offers are counted, and what is resident and ready counts as used. None of the offered chunks leaves
    for it, nor, if it `spares` them, any that the request has used.

    Args:
      t: the tier.
      request: the request.
      start: of its uses in the payload.
      count: how many there are.
      spares: whether what it has used stays.
      partial: whether, where there is not room for all, the first ones are stored, by their ends.
    """
    clause("store", "CPUOffloadingManager.prepare_store")
    begin(t, request)
    t.offers += 1
    absent, fits = 0, left_over(t)
    for at in range(start, start + count):
        absent += int(t.payload[at].key.chunk == 0)
    if absent > fits:
        fits = room(t, request, start, count, spares)
        if partial and absent > fits:
            clause("store-what-fits", "", "a step stores what there is room for, from the prompt's beginning on")
            t.refused += 1
            count = without_the_last(t, start, count, fits)
    if t.config.threshold >= 2:
        count_offers(t, start, count)
    absent = 0
    for at in range(start, start + count):
        use = t.payload[at]
        if is_lacked(t, use.key):
            t.lacked[start + absent] = use
            absent += 1
    if t.config.arc:
        miss(t, start, absent)
    for at in range(start, start + count):
        use = t.payload[at]
        ready = is_ready(use.key)
        if ready or is_lacked(t, use.key):
            note(t, request, use, ready)
    if absent == 0:
        return 0
    lacking = absent - left_over(t)
    if lacking > 0:
        if fits < absent:
            clause("no-room", "CPUOffloadingManager.prepare_store", "a store of more chunks than can leave stores none")
            t.counts.refused += 1
            return NOTHING
        if t.config.arc:
            evict_arc(t, lacking)
        else:
            evict_lru(t, lacking)
        t.counts.evicted += lacking
    for at in range(start, start + absent):
        use = t.lacked[at]
        use.stored, use.key.chunk, use.key.readers, use.key.read = 1, take(t), -1, 0
        come(t, request, use)
    t.counts.stored += absent
    t.counts.peak = max(t.counts.peak, t.handed_out - t.unused)
    return absent


def without_the_last(t: Tier, start: int, count: int, left: int) -> int:
    """Keeps, of absent uses in the payload, the first `left` by their ends; how many uses there are then."""
    low, high = 0, 1
    for at in range(start, start + count):
        high = max(high, t.payload[at].end + 1)
    while low + 1 < high:  # as many end before `low` at most, and more before `high`
        middle, before = (low + high) // 2, 0
        for at in range(start, start + count):
            use = t.payload[at]
            before += int(use.key.chunk == 0 and use.end < middle)
        if before > left:
            high = middle
        else:
            low = middle
    for at in range(start, start + count):
        use = t.payload[at]
        left -= int(use.key.chunk == 0 and use.end < low)
    kept = 0
    for at in range(start, start + count):
        use = t.payload[at]
        keeps = use.key.chunk > 0 or use.end < low
        if not keeps and use.end == low and left > 0:
            keeps = True
            left -= 1
        if keeps:
            t.payload[start + kept] = use
            kept += 1
    return kept


def is_lacked(t: Tier, key: Key) -> bool:
    """True for a key that is absent and worth a chunk."""
    return key.chunk == 0 and (t.config.threshold < 2 or key.offers >= t.config.threshold)


def count_offers(t: Tier, start: int, count: int) -> None:
    """Counts an offer; keys that it names do not leave for others that it names."""
    clause("count-offers", "CPUOffloadingManager._record_accesses", "offers of a key are counted")
    known = 0
    for at in range(start, start + count):
        key = t.payload[at].key
        if key.offers > 0:
            key.offers += 1
            t.counted.remove(key)
            t.counted.put(key)
            known += 1
    replaceable = t.tracked - known
    for at in range(start, start + count):
        key = t.payload[at].key
        if key.offers == 0:
            full = t.tracked >= t.config.tracked
            if full and replaceable > 0:
                first = t.counted.oldest()
                first.offers = 0
                t.counted.remove(first)
                t.tracked -= 1
                replaceable -= 1
                full = False
            if not full:
                key.offers = 1
                t.counted.put(key)
                t.tracked += 1


def room(t: Tier, request: Offloaded, start: int, count: int, spares: int) -> int:
    """Chunks that are free, or can be made free without those that are spared now."""
    idle = t.idle
    for at in range(start, start + count):
        idle -= spare(t, t.payload[at].key)
    if spares and request.filling == t.filling:
        use = t.uses.newer[request.ends]
        while use is not request.ends:
            idle -= spare(t, use.key)
            use = t.uses.newer[use]
    return left_over(t) + idle


def spare(t: Tier, key: Key) -> int:
    """A key is not to leave for this store; how many chunks can leave no more, none or one."""
    before = key.spared
    key.spared = t.offers
    return int(key.chunk > 0 and key.readers == 0 and before != t.offers)


def left_over(t: Tier) -> int:
    """Chunks that are free."""
    return t.unused + t.config.chunks - t.handed_out


def take(t: Tier) -> int:
    """A chunk that is free."""
    if t.handed_out < t.config.chunks:
        t.handed_out += 1
        return t.handed_out
    t.unused -= 1
    return t.free[t.unused]


def transferred(t: Tier, key: Key, writes: int, ok: bool) -> None:
    """A transfer has read a chunk, or has written it: it can be read from now on or, where that failed, leaves again.

    What is written may have been forgotten meanwhile.
    """
    clause("transferred", "CPUOffloadingManager.complete_store")
    if key.chunk > 0 and (key.readers < 0 or not writes):
        key.readers = 0 if writes else key.readers - 1
        if not ok:
            if t.config.arc:
                t.lists.take_out(key)
            leave(t, key, Event.FAILED)
        elif key.readers == 0:
            rest(t, key)
        if ok and writes:
            tell(t, key, Event.STORED)


# Loads.


def read(t: Tier, request: Offloaded, start: int, count: int, loads: int) -> None:
    """A request uses chunks that can be read: it has read the first ones elsewhere, and `loads` the last, which stay
    until they are transferred."""
    clause("read", "CPUOffloadingManager.prepare_load")
    begin(t, request)
    for at in range(start, start + count):
        use = t.payload[at]
        key = use.key
        if is_ready(key):
            if at >= start + count - loads:
                if key.readers == 0:
                    wake(t, key)
                key.readers += 1
                t.counts.loaded += 1
                t.counts.read += not key.read
                key.read = 1
            note(t, request, use, True)


def clear(t: Tier) -> None:
    """Empties the tier, whatever is being transferred; offers that were counted stay, and uses count no more."""
    clause("clear", "CPUOffloadingManager.reset_cache")
    for n in range(1, t.known + 1):
        key = t.keys[n]
        key.chunk, key.readers, key.number, key.end = 0, 0, 0, 0
        t.heap.place[key] = 0
        t.lists.within[key] = None  # type: ignore[assignment]
    t.heap.count = 0
    for ends in (t.lists.once, t.lists.often, t.lists.gone_once, t.lists.gone_often):
        t.lists.newer[ends], t.lists.older[ends], t.lists.size[ends] = ends, ends, 0
    t.lists.target, t.lists.target_high, t.lists.target_low = 0, 0, 0
    t.handed_out, t.unused, t.idle, t.numbers = 0, 0, 0, 0
    t.filling += 1
