"""Order: what is used comes first, what leaves is what the policy says, and no more leaves than is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import STRANDS_FULL
from reference.dialects.sglang.invariants.moment import Moment, Path, Place
from reference.dialects.sglang.invariants.pages import free_pages, page_sizes
from reference.dialects.sglang.invariants.register import INVARIANTS, TREE

EVICTING = structs.ExtendOp, structs.DecodeOp, structs.EvictOp, structs.RoomOp
"""Operations that make room, and change nothing else of the tree."""

POLICIES: dict[str, tuple[Callable[[structs.TreeNode], Any], str]] = {
    "lru": (lambda node: node.used, "was used before"),
    "mru": (lambda node: -node.used, "was used after"),
    "fifo": (lambda node: node.made, "was entered before"),
    "filo": (lambda node: -node.made, "was entered after"),
    "lfu": (lambda node: node.hits, "was entered less often than, or used before"),
    "slru": (lambda node: node.hits >= 2, "was not entered twice as, or used before"),
    "priority": (lambda node: node.priority, "has a lower priority than, or was used before"),
}
"""By which of its properties a leaf leaves before another, and in words how the other one compares to it."""

# What is used.


@INVARIANTS.invariant("matches are used", after=(structs.MatchOp, structs.AdmitOp), needs=TREE)
def matches_are_used(moment: Moment) -> Iterator[str]:
    """The nodes that are hit are the ones used last, the nearer to the root the earlier; others keep their order."""
    found = moment.found
    if not found or not found[1]:
        return
    hit = found[0], found[1][: moment.answer.hit]
    path = [place for place in moment.tree.places if place.on(hit)]
    others = [place for place in moment.tree.places if not place.on(hit)]
    latest = max(others, key=lambda place: place.node.used, default=None)
    for place in path:
        if latest is not None and place.node.used <= latest.node.used:
            last = moment.story.called(latest)
            yield f"{moment.story.called(place)} is hit, and {last} counts as used later"
        latest = place


@INVARIANTS.invariant("orders are of use", needs=TREE)
def orders_are_of_use(moment: Moment) -> Iterator[str]:
    """The order of window slots has every node that has some, once, that of states likewise. What is matched or entered
    comes first: of window slots those of a window and a page back, the nearest foremost. Others keep their order, and
    the upper part of a split node stands behind the lower."""
    kinds = [group["kind"] for group in moment.header.groups[1:]]
    for kind, before, after in zip(kinds, moment.before.recent, moment.after.recent, strict=True):
        windows = kind == structs.SLIDING_WINDOW
        name = f"the order of {'window slots' if windows else 'states'}"
        has = [place.number for place in moment.tree.places if _has(place, windows)]
        if sorted(after) != has:
            yield f"{name} has the nodes {after}, and nodes {has} have some"
            continue
        first = _first(moment, windows)
        known = {place.path for number in before for place in _parts(moment, number, windows)}
        others = [place for number in before for place in _parts(moment, number, windows)]
        now = [moment.tree.places[number] for number in after]
        front = [place.number for place in now[: len(first)]]
        if front != [place.number for place in first]:
            wrong = next(place for place, number in zip(first, front, strict=True) if place.number != number)
            due = [place.number for place in first]
            yield f"{name} is {after}, and {moment.story.called(wrong)} was used just now: nodes {due} come first"
        rest = [place.number for place in now[len(first) :] if place.path in known]
        taken = {place.number for place in first}
        due = [place.number for place in others if _has(place, windows) and place.number not in taken]
        if rest != due:
            yield f"{name} has the nodes {rest} behind what was used, and {due} was their order"


def _has(place: Place, windows: bool) -> bool:
    return (place.node.window if windows else place.node.state) is not None


def _parts(moment: Moment, number: int, windows: bool) -> list[Place]:
    """Parts of a node of before, the lower first; of one with a state the last only."""
    path = moment.earlier.places[number].path
    start = moment.earlier.places[number].start
    parts = [place for place in moment.tree.whole(path) if place.start >= start]
    return list(reversed(parts)) if windows else [place for place in parts if place.path == path]


def _first(moment: Moment, windows: bool) -> list[Place]:
    """Nodes that come first: on the path of what was matched or entered."""
    path: Path | None = None
    if moment.found is not None and moment.found[1]:
        path = moment.found[0], moment.found[1][: moment.answer.hit]
    elif moment.entry is not None:
        path = moment.entry.path
    nodes = list(reversed(moment.tree.whole(path))) if path else []
    if not windows:
        return [place for place in nodes[:1] if place.path == path and place.node.state is not None]
    reach = moment.config.page_size + (moment.config.window or 0)
    end = nodes[0].end if nodes else 0
    return [place for place in nodes if end - place.end < reach and place.node.window is not None]


# What leaves.


@INVARIANTS.invariant("leaves leave in order", after=EVICTING, needs=TREE)
def leaves_leave_in_order(moment: Moment) -> Iterator[str]:
    """Of leaves that nobody holds the one leaves first that the policy names, for full attention's sake; and for
    another component's the one with something of it that was used longest ago."""
    for place in _gone(moment):
        if any(place.node.locks):
            yield f"{moment.story.called(place)} left, which requests hold"
        claims = list(_claims(moment, place))
        if None not in claims:
            stays = claims[0] if claims else "though there was room"
            yield f"{moment.story.called(place)} left, {stays}"


def _gone(moment: Moment) -> list[Place]:
    return [place for place in moment.earlier.places if place.path not in moment.tree.ends]


def _claims(moment: Moment, place: Place) -> Iterator[str | None]:
    """For each component for whose sake a node may have left, None if it was its turn, else who was before it."""
    tree, rank = moment.earlier, moment.config.policy
    if _lacking(moment)[0] > 0:
        key, why = POLICIES[rank]
        stay = [each for each in tree.places if tree.is_leaf(each) and each.path in moment.tree.ends]
        first = [each for each in stay if (key(each.node), each.node.used) < (key(place.node), place.node.used)]
        yield f"and {moment.story.called(first[0])}, which {why} it, stays" if first else None
    for component, order in enumerate(moment.before.recent):
        if place.number in order:
            other = _overtaken(moment, place, component)
            yield other and f"and {moment.story.called(other)}, which was used before it, stays"
    if moment.config.window is not None and place.node.window is None and STRANDS_FULL not in moment.config.bugs:
        yield None  # with the last of what came after it


def _overtaken(moment: Moment, place: Place, component: int) -> Place | None:
    """A node with something of a component, as another had, that was used before it, and has it still though nobody
    holds it."""
    order, windows = moment.before.recent[component], _windowed(moment, component)
    for number in order[order.index(place.number) + 1 :]:
        each = moment.earlier.places[number]
        later = moment.tree.ends.get(each.path)
        if not each.node.locks[component + 1] and later is not None and _has(later, windows):
            return each
    return None


@INVARIANTS.invariant("slots leave in order", after=EVICTING, needs=TREE)
def slots_leave_in_order(moment: Moment) -> Iterator[str]:
    """Window slots of inner nodes, and states, leave by last use; a state leaves with its window."""
    for component, order in enumerate(moment.before.recent):
        windows = _windowed(moment, component)
        for place in map(moment.earlier.places.__getitem__, order):
            later = moment.tree.ends.get(place.path)
            if later is None or _has(later, windows):
                continue
            called, tombstoned = moment.story.called(place), place.node.window is not None and later.node.window is None
            if windows and later.node.state is not None:
                yield f"{called} lost its window slots, and has its state still"
            if (windows or not tombstoned) and (other := _overtaken(moment, place, component)) is not None:
                name = "window slots" if windows else "the state"
                yield f"{name} of {called} left before those of {moment.story.called(other)}, which was used before it"


def _windowed(moment: Moment, component: int) -> bool:
    return moment.header.groups[component + 1]["kind"] == structs.SLIDING_WINDOW


# How much leaves.


@INVARIANTS.invariant("no less leaves", after=EVICTING, needs=TREE)
def no_less_leaves(moment: Moment) -> Iterator[str]:
    """Tokens that are freed are free afterwards, and nothing that may leave stays where there is too little."""
    operation, answer = moment.operation, moment.answer
    before, after = (_rooms(moment, state) for state in (moment.before, moment.after))
    if isinstance(operation, structs.EvictOp):
        if answer.tokens != [now - then for then, now in zip(before, after, strict=True)]:
            yield f"{answer.tokens} are said to be freed, and what is free went from {before} to {after}"
        lacking = [want - freed for want, freed in zip(operation.tokens, answer.tokens, strict=True)]
    elif isinstance(answer, structs.Slots) and answer.slots is None:
        lacking = [due - room for due, room in zip(_due(moment), after, strict=True)]
    else:
        return
    for component, lacks in enumerate(lacking):
        may = [place for place in moment.tree.places if not place.node.locks[component]]
        if component:
            may = [place for place in may if _has(place, _windowed(moment, component - 1))]
        else:
            may = [place for place in may if moment.tree.is_leaf(place)]
        if lacks > 0 and may:
            kind = moment.header.groups[component]["kind"]
            yield f"{moment.story.called(may[0])} stays, which nobody holds, though {kind} lacks {lacks}"


@INVARIANTS.invariant("no more leaves", after=EVICTING, needs=TREE)
def no_more_leaves(moment: Moment) -> Iterator[str]:
    """Of full attention alone no leaf leaves when there is enough without it."""
    lacking, gone = _lacking(moment)[0], _gone(moment)
    if len(moment.header.groups) > 1 or not gone:
        return
    sizes = [len(place.node.slots) for place in gone]
    if sum(sizes) - max(sizes) >= max(lacking, 0):
        called = ", ".join(map(moment.story.called, gone))
        yield f"{called} left, one more than it took: {sum(sizes)} tokens, where {max(lacking, 0)} were lacking"


def _rooms(moment: Moment, state: structs.State) -> list[int]:
    """Tokens, or states, that are free in each pool."""
    pools = zip(state.pools, page_sizes(moment), strict=True)
    return [size * len(free_pages(pool)) for pool, size in pools]


def _due(moment: Moment) -> list[int]:
    """Tokens that an operation is to have room for in each pool; of states none."""
    operation, size = moment.operation, moment.config.page_size
    tokens = operation.tokens if isinstance(operation, structs.RoomOp) else size
    if isinstance(operation, structs.ExtendOp):
        held = len(moment.before.requests[operation.id].slots)
        tokens = operation.length - held + (size if size > 1 else 0)  # a page more than could be needed
    return [0 if group["kind"] == structs.STATES else tokens for group in moment.header.groups]


def _lacking(moment: Moment) -> list[int]:
    """Tokens, or states, of each pool that an operation lacks before anything leaves."""
    if isinstance(moment.operation, structs.EvictOp):
        return moment.operation.tokens
    return [due - room for due, room in zip(_due(moment), _rooms(moment, moment.before), strict=True)]
