"""Slots: pages and states are somewhere and in one place only, what is held stays, and what is read is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import DECODE_LOSES_PAGE
from reference.dialects.sglang.invariants.moment import Moment
from reference.dialects.sglang.invariants.register import INVARIANTS, TREE


def may_lose(moment: Moment) -> list[bool]:
    """Of each pool, whether a refused decode may have lost a page of it: of two tied ones the other has none."""
    pools, config = moment.after.pools, moment.config
    refused = isinstance(moment.operation, structs.DecodeOp) and moment.answer.slots is None
    tied = refused and DECODE_LOSES_PAGE in config.bugs and config.page_size > 1 and config.window is not None
    return [tied and pool < 2 and not free_pages(pools[1 - pool]) for pool in range(len(pools))]


def free_pages(pool: structs.Pool) -> list[int]:
    """Pages of a pool that are free, those that wait to be sorted in among them."""
    return [*pool.free, *pool.waiting]


def page_sizes(moment: Moment) -> list[int]:
    """Tokens of a page of each pool."""
    return [1 if group["kind"] == structs.STATES else moment.config.page_size for group in moment.header.groups]


@INVARIANTS.invariant("pages are somewhere", needs=TREE)
def pages_are_somewhere(moment: Moment) -> Iterator[str]:
    """Each page of each pool is free, or the tree's, or one request's, and in one place only.

    A decode that is refused loses a page, and one only, of two tied pools where the other has none: 0.5.23 does.
    """
    mapping = dict(moment.after.window)
    for pool, (group, size) in enumerate(zip(moment.header.groups, page_sizes(moment), strict=True)):
        if twice := _twice(list(_held(moment.after, group["kind"], mapping))):
            yield f"slots {twice} of pool {pool} are in two places"
        pages = _pages(moment.after, group["kind"], pool, size)
        if twice := _twice(pages):
            yield f"pages {twice} of pool {pool} are in two places"
        lost = set(range(1, moment.header.num_blocks[pool] + 1)).difference(pages)
        lost = lost and lost.intersection(_pages(moment.before, group["kind"], pool, size))
        if len(lost) > may_lose(moment)[pool]:
            name = "states" if group["kind"] == structs.STATES else "pages"
            yield f"{name} {sorted(lost)} of pool {pool} are nowhere"


def _pages(state: structs.State, kind: str, pool: int, size: int) -> list[int]:
    """Pages of a pool that are somewhere."""
    return [*{slot // size for slot in _held(state, kind, dict(state.window))}, *free_pages(state.pools[pool])]


def _twice(ids: Sequence[int]) -> list[int]:
    return sorted(id for id, times in Counter(ids).items() if times > 1) if len(set(ids)) < len(ids) else []


def own_slots(request: structs.Owned, kind: str, mapping: Mapping[int, int]) -> list[int]:
    """Slots of a pool, or states, that a request has besides the tree's."""
    own = request.slots[request.protected :]
    if kind == structs.STATES:
        return request.states
    return own if kind == structs.FULL_ATTENTION else [mapping[slot] for slot in own if slot in mapping]


def _held(state: structs.State, kind: str, mapping: Mapping[int, int]) -> Iterator[int]:
    """Slots of a pool that nodes and requests have, one for each of them."""
    for request in state.requests.values():
        yield from own_slots(request, kind, mapping)
    for node in state.nodes or []:
        if kind == structs.FULL_ATTENTION:
            yield from node.slots
        elif kind == structs.SLIDING_WINDOW:
            yield from node.window or []
        elif node.state is not None:
            yield node.state


@INVARIANTS.invariant("windows are mapped", needs=TREE)
def windows_are_mapped(moment: Moment) -> Iterator[str]:
    """A node's window slots are those that its full slots are mapped to; a tombstone's are mapped to none."""
    if moment.config.window is None:
        return
    mapping = dict(moment.after.window)
    for place in moment.tree.places:
        mapped = [mapping.get(slot) for slot in place.node.slots]
        if mapped != (place.node.window or [None] * len(mapped)):
            has = "is a tombstone" if place.node.window is None else f"has window slots {place.node.window}"
            yield f"{moment.story.called(place)} {has}, and its full slots are mapped to {mapped}"


@INVARIANTS.invariant("held slots stay", needs=TREE)
def held_slots_stay(moment: Moment) -> Iterator[str]:
    """Full slots, window slots and states that are held stay where they are, whatever leaves."""
    for place in moment.earlier.places:
        later = moment.tree.ends.get(place.path)
        full, *rest = place.node.locks
        if not full:
            continue
        slots = [slot for each in moment.tree.whole(place.path) for slot in each.node.slots][place.start :]
        called = moment.story.called(place)
        if later is None or slots != place.node.slots:
            yield f"full slots {place.node.slots} of {called}, which requests hold, are {slots or 'gone'} now"
        locks = dict(zip([group["kind"] for group in moment.header.groups[1:]], rest, strict=True))
        if locks.get(structs.SLIDING_WINDOW) and place.node.window and later is not None and later.node.window is None:
            yield f"window slots of {called}, which requests hold, are gone"
        if (
            locks.get(structs.STATES)
            and place.node.state
            and later is not None
            and later.node.state != place.node.state
        ):
            yield f"the state of {called}, which a request holds, is {later.node.state or 'gone'} now"


@INVARIANTS.invariant("windows slide no further", after=(structs.SlideOp, structs.CheckpointOp))
def windows_slide_no_further(moment: Moment) -> Iterator[str]:
    """A request gives back its own window slots as far as whole pages of them are behind its window."""
    window, size, id = moment.config.window, moment.config.page_size, moment.operation.id
    if window is None:
        return
    before, after = moment.before.requests[id], moment.after.requests[id]
    behind = len(after.slots) - -(-max(window, size) // size) * size
    branched = (
        after.protected if moment.entry is not None and moment.entry.branches else 0
    )  # it slides again behind that
    most = max(before.slid, before.protected, branched, behind // size * size)
    if after.slid > most:
        yield f"{id} gave back window slots up to {after.slid}, and up to {most} its window has slid"


@INVARIANTS.invariant("windows are there")
def windows_are_there(moment: Moment) -> Iterator[str]:
    """The window slots that a running request's next token reads are there."""
    window = moment.config.window
    if window is None:
        return
    mapping = dict(moment.after.window)
    for id, request in moment.after.requests.items():
        read = request.slots[max(0, len(request.slots) - window + 1) :]
        if gone := [slot for slot in read if slot not in mapping]:
            yield f"{id} reads the window of full slots {gone}, which is gone"
