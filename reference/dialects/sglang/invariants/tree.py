"""The tree: nodes of whole pages, matches that are sound and the longest, splits that change nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hkv.dialects.sglang import log as structs
from reference.dialects.sglang.invariants.moment import Moment, Path
from reference.dialects.sglang.invariants.register import INVARIANTS, TREE


@INVARIANTS.invariant("a tree of pages", needs=TREE)
def tree_of_pages(moment: Moment) -> Iterator[str]:
    """Nodes are whole pages, with a slot a unit, and siblings differ in their first page."""
    size, seen = moment.config.page_size, set[Path]()
    for place in moment.tree.places:
        node, units = place.node, place.end - place.start
        slots = len(node.slots), len(node.window or node.slots)
        if units < 1 or units % size or slots != (units, units):
            called = moment.story.called(place)
            yield f"{called} has {units} units and slots {node.slots}: whole pages of {size} are due"
        if place.edge in seen:
            yield f"{moment.story.called(place)} begins as a sibling does"
        seen.add(place.edge)


# Matches.


@INVARIANTS.invariant("matches are sound", after=(structs.MatchOp, structs.AdmitOp), needs=TREE)
def matches_are_sound(moment: Moment) -> Iterator[str]:
    """A hit is cached under the key's namespace; the window that is read behind it is there, and a state at its
    end; and its slots are those of the tree."""
    full, ends, live, slots = _cached(moment)
    hit, window = moment.answer.hit, moment.config.window or 0
    if moment.answer.full > full or hit > full:
        yield f"{max(hit, moment.answer.full)} units are found, and {full} are cached of that key{_under(moment)}"
    elif hit and not all(live[max(0, hit - window) : hit]):
        yield f"the hit is {hit}, and the window of {window} behind it is not there in full"
    elif hit and hit not in ends:
        yield f"the hit is {hit}, and no state is kept there: a request could resume at {sorted(ends) or 'no length'}"
    elif moment.answer.slots != slots[:hit]:
        yield f"the hit is {hit}, of slots {moment.answer.slots}, and the tree has {slots[:hit]}"


@INVARIANTS.invariant("matches are longest", after=(structs.MatchOp, structs.AdmitOp), needs=TREE)
def matches_are_longest(moment: Moment) -> Iterator[str]:
    """At no node further down, and at the end of what full attention has, could a request resume."""
    full, ends, live, _ = _cached(moment)
    window = moment.config.window or 0
    due = max((end for end in ends if all(live[max(0, end - window) : end])), default=0)
    if moment.answer.full < full:
        yield f"full attention has {full} units of that key, and {moment.answer.full} are found"
    if moment.answer.hit < due:
        lacks = [name for name, there in (("its window", window), ("its state", moment.config.states)) if there]
        yield f"the hit is {moment.answer.hit}, and a request could resume at {due}" + (
            f", where {' and '.join(lacks)} is there" * bool(lacks)
        )


def _cached(moment: Moment) -> tuple[int, list[int], list[bool], list[int]]:
    """Of a key, before it was looked for: units that are cached, lengths at which it could end, but for what a window
    reads, whether each unit has a window slot, and full slots."""
    live, slots, ends, end = list[bool](), list[int](), list[int](), 0
    for place, end in moment.earlier.along(moment.found or ((None, None), ())):
        node, part = place.node, end - place.start
        live += [moment.config.window is None or node.window is not None] * part
        slots += node.slots[:part]
        if moment.config.states is None or (node.state is not None and end == place.end):
            ends.append(end)
    return len(slots), ends, live, slots


def _under(moment: Moment) -> str:
    adapter, salt = moment.operation.namespace
    return f" under adapter {adapter} and salt {salt}" if adapter or salt else ""


# Splits.


@INVARIANTS.invariant("splits keep what they split", needs=TREE)
def splits_keep_what_they_split(moment: Moment) -> Iterator[str]:
    """Nodes are what they were, or parts of it: of the same age, with their slots, but for those that leave or that a
    tombstone gets; and where nobody enters them, of as many hits and of the same priority."""
    made = list[tuple[int, int]]()
    for place in moment.tree.places:
        if (before := moment.earlier.part_of(place)) is None:
            continue
        made.append((before.node.made, place.node.made))
        part = slice(place.start - before.start, place.end - before.start)
        now, then, called = place.node, before.node, moment.story.called(place)
        recovered = then.window is None and now.window is not None
        if now.slots != then.slots[part] and not (moment.entry is not None and recovered):
            yield f"{called} has slots {now.slots}, and had {then.slots[part]}"
        if now.window and then.window and now.window != then.window[part]:
            yield f"{called} has window slots {now.window}, and had {then.window[part]}"
        if moment.entry is None and (now.hits, now.priority) != (then.hits, then.priority):
            had = f"{then.hits} and {then.priority}"
            yield f"{called} has {now.hits} hits and priority {now.priority}, and had {had}, though nobody entered it"
    made.sort()
    for (old, new), (older, newer) in itertools.pairwise(made):
        if (old == older) != (new == newer) or new > newer:
            yield f"parts of a node are of one age: those of ages {old} and {older} are of {new} and {newer} now"
