"""Locks: as many as requests hold what they are on, of each component, and marks where somebody's window ends."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.dialects.sglang import log as structs
from reference.dialects.sglang.invariants.moment import Moment
from reference.dialects.sglang.invariants.register import INVARIANTS, TREE

NAMES = {structs.FULL_ATTENTION: "full locks", structs.SLIDING_WINDOW: "window locks", structs.STATES: "state locks"}


@INVARIANTS.invariant("locks are counted", needs=TREE)
def locks_are_counted(moment: Moment) -> Iterator[str]:
    """As many locks are on a node's full slots, its window slots and its state as requests hold them: the full slots of
    a prefix, window slots as far back as whole nodes cover a window, the state of its end."""
    receipts = {id: known.receipt for id, known in moment.story.requests.items()}
    for place in moment.tree.places:
        for group, locks in zip(moment.header.groups, place.node.locks, strict=True):
            part = structs.KINDS.index(group["kind"])
            holders = [id for id, receipt in receipts.items() if receipt.holds(place, part)]
            if locks != len(holders):
                by = f"{len(holders)} hold{'s' * (len(holders) == 1)} it" + (
                    f": {', '.join(holders)}" if holders else ""
                )
                earlier = moment.earlier.part_of(place)
                split = earlier is not None and earlier.path != place.path
                said = f"{moment.story.called(place)} has {locks} {NAMES[group['kind']]}, and {by}"
                yield said + "; it was split off just now" * split


@INVARIANTS.invariant("windows end at marks", needs=TREE)
def windows_end_at_marks(moment: Moment) -> Iterator[str]:
    """A node is marked if a request's window was seen to end there, which stays the older edge when it is split."""
    for place in moment.tree.places:
        if place.node.mark != (place.edge in moment.story.edges):
            seen = "is marked, and no window was seen to end at its edge"
            missing = "is not marked, and a window was seen to end at its edge"
            yield f"{moment.story.called(place)} {seen if place.node.mark else missing}"
