"""Entries: what a request enters is in the tree, whole, counted once, and no path has more states than it may."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.dialects.sglang import log as structs
from reference.dialects.sglang.invariants.moment import Moment, Place
from reference.dialects.sglang.invariants.register import INVARIANTS, TREE

ENTERING = structs.CheckpointOp, structs.FinishOp
"""Operations that enter what a request has computed."""


@INVARIANTS.invariant("entries are whole", after=ENTERING, needs=TREE)
def entries_are_whole(moment: Moment) -> Iterator[str]:
    """All that a request enters is in the tree, up to a node's end; of a running one its row has the tree's slots, and
    so many are protected; and window slots that it had for the last window are there, of tombstones that were computed
    again, too."""
    entry, id = moment.entry, moment.operation.id
    if entry is None:
        return
    nodes, length = moment.tree.whole(entry.path), len(entry.path[1])
    end = nodes[-1].end if nodes else 0
    if end != length:
        yield f"{id} enters {length} units{_branch(entry.branches)}, and the tree has {end} of them up to a node's end"
    slots = [slot for place in nodes for slot in place.node.slots]
    now = moment.after.requests.get(id)
    if now is not None and now.protected != length:
        yield f"{id} enters {length} units{_branch(entry.branches)}, and {now.protected} are protected"
    if now is not None and now.slots[:length] != slots:
        yield f"{id} has slots {now.slots[:length]} of what it entered, and the tree has {slots}"
    window, mapped = moment.config.window, dict(moment.before.window)
    if window is None:
        return
    row = moment.before.requests[id].slots
    for place in nodes:
        start = max(entry.owned, length - window, place.start)
        if place.node.window is None and any(slot in mapped for slot in row[start : place.end]):
            yield f"{moment.story.called(place)} is a tombstone, though {id} computed its window slots again"
    size = moment.config.page_size
    if nodes and nodes[-1].node.window is not None and moment.earlier.part_of(nodes[-1]) is None:
        tail, most = nodes[-1].end - nodes[-1].start, -(-window // size) * size
        if tail > most:
            called = moment.story.called(nodes[-1])
            yield f"{called} is a leaf of {tail} units, longer than the {most} of a window, and a lock holds it whole"


def _branch(branches: bool) -> str:
    return ", up to the branch where a window was missing" if branches else ""


@INVARIANTS.invariant("entries are counted", after=ENTERING, needs=TREE)
def entries_are_counted(moment: Moment) -> Iterator[str]:
    """A node is hit once by each request that enters it, and has the highest of their priorities."""
    entry = moment.entry
    if entry is None:
        return
    for place in moment.tree.places:
        before, entered, hits = moment.earlier.part_of(place), place.on(entry.path), place.node.hits
        raised = entry.priority + (place.end <= entry.prompt)
        had = 0 if before is None else before.node.hits
        due = {had + (entered and place.end > entry.counted)}
        if before is None or (before.path != place.path and place.node.window is None):
            due.add(had)  # parts split off what is new, or off a tombstone, are not hit
        if hits not in due:
            yield f"{moment.story.called(place)} has {hits} hits, and {max(due)} are due: each request counts once"
        priority = max(raised, raised if before is None else before.node.priority) if entered else place.node.priority
        if place.node.priority != priority:
            said = f"{priority} is the highest that entered it"
            yield f"{moment.story.called(place)} has priority {place.node.priority}, and {said}"


@INVARIANTS.invariant("states are thinned", after=ENTERING, needs=TREE)
def states_are_thinned(moment: Moment) -> Iterator[str]:
    """Of a path with more states than it may have those nearest the root go that nobody holds or branches from."""
    entry, most = moment.entry, moment.config.most_states
    if entry is None or most < 1:
        return
    nodes = moment.tree.whole(entry.path)[:-1]
    children = [place.node.parent for place in moment.tree.places]
    dropped = [place for place in nodes if _state_before(moment, place) and place.node.state is None]
    for place in nodes:
        before = moment.earlier.ends.get(place.path)
        droppable = before is not None and not before.node.locks[-1] and children.count(place.number) == 1
        if droppable and place.node.state is not None and dropped and dropped[-1].start > place.start:
            went, stays = map(moment.story.called, (dropped[-1], place))
            yield f"the state of {went} went before that of {stays}, nearer the root"


def _state_before(moment: Moment, place: Place) -> bool:
    before = moment.earlier.ends.get(place.path)
    return before is not None and before.node.state is not None
