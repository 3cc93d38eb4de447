"""Invariants of SGLang's cache, asked of its whole state after every operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from hkv.contract.invariant import PlainMoment, Register
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import DECODE_LOSES_PAGE

INVARIANTS = Register(structs.NAME)


@INVARIANTS.invariant("pages are somewhere")
def pages_are_somewhere(moment: PlainMoment) -> Iterator[str]:
    """Each page of each pool is free, or the tree's, or one request's, and in one place only."""
    mapping = dict(moment.after.window)
    for pool, (group, count) in enumerate(zip(moment.header.groups, moment.header.num_blocks, strict=True)):
        size = 1 if group["kind"] == structs.STATES else moment.header.groups[0]["block_size"]
        held = list(_held(moment.after, group["kind"], mapping))
        if twice := _twice(held):
            yield f"slots {twice} of pool {pool} are in two places"
        ids = moment.after.pools[pool]
        pages = [*{slot // size for slot in held}, *ids.free, *ids.waiting]
        if twice := _twice(pages):
            yield f"pages {twice} of pool {pool} are in two places"
        lost = sorted(set(range(1, count + 1)).difference(pages))
        if lost and DECODE_LOSES_PAGE not in moment.header.bugs:
            yield f"pages {lost} of pool {pool} are nowhere"


def _twice(ids: list[int]) -> list[int]:
    return sorted(id for id, times in Counter(ids).items() if times > 1) if len(set(ids)) < len(ids) else []


def _held(state: structs.State, kind: str, mapping: Mapping[int, int]) -> Iterator[int]:
    """Slots of a pool that nodes and requests have, one for each of them."""
    nodes = state.nodes or []
    for request in state.requests.values():
        own = request.slots[request.protected :]
        if kind == structs.FULL_ATTENTION:
            yield from own
        elif kind == structs.SLIDING_WINDOW:
            yield from (mapping[slot] for slot in own if slot in mapping)
        else:
            yield from request.states
    for node in nodes:
        if kind == structs.FULL_ATTENTION:
            yield from node.slots
        elif kind == structs.SLIDING_WINDOW:
            yield from node.window or []
        elif node.state is not None:
            yield node.state


@INVARIANTS.invariant("a tree of pages")
def tree_of_pages(moment: PlainMoment) -> Iterator[str]:
    """Nodes are whole pages, with a slot a unit, and siblings differ in their first page."""
    size = moment.header.groups[0]["block_size"]
    bigrams = moment.header.eagle and moment.header.groups[-1]["kind"] != structs.STATES
    seen = set[tuple[object, ...]]()
    for number, node in enumerate(moment.after.nodes):
        units = len(node.tokens) - bigrams
        if units < 1 or units % size or len(node.slots) != units or len(node.window or node.slots) != units:
            yield f"node {number} has {units} units and slots {node.slots}"
        first = (node.parent, node.namespace, tuple(node.tokens[: size + bigrams]))
        if first in seen:
            yield f"node {number} begins as a sibling does"
        seen.add(first)


@INVARIANTS.invariant("locks are counted")
def locks_are_counted(moment: PlainMoment) -> Iterator[str]:
    """As many locks are on a node's full slots as requests have it in their prefix."""
    prefixes = [set(request.slots[: request.protected]) for request in moment.after.requests.values()]
    for number, node in enumerate(moment.after.nodes):
        holders = sum(not prefix.isdisjoint(node.slots[:1]) for prefix in prefixes)
        if node.locks[0] != holders:
            yield f"node {number} has {node.locks[0]} locks, and {holders} requests have it"


def _window(header: structs.Header) -> int | None:
    return next((group["window"] for group in header.groups if group["kind"] == structs.SLIDING_WINDOW), None)


@INVARIANTS.invariant("windows are mapped")
def windows_are_mapped(moment: PlainMoment) -> Iterator[str]:
    """A node's window slots are those that its full slots are mapped to; a tombstone's are mapped to none. The
    order by which they leave has every node that has some, once."""
    if _window(moment.header) is None:
        return
    mapping, nodes = dict(moment.after.window), moment.after.nodes
    for number, node in enumerate(nodes):
        mapped = [mapping.get(slot) for slot in node.slots]
        if mapped != (node.window or [None] * len(node.slots)):
            yield f"node {number} has window slots {node.window}, and its full slots are mapped to {mapped}"
    if sorted(moment.after.recent[0]) != [number for number, node in enumerate(nodes) if node.window is not None]:
        yield f"the order of window slots has the nodes {moment.after.recent}"


@INVARIANTS.invariant("windows are there")
def windows_are_there(moment: PlainMoment) -> Iterator[str]:
    """The window slots that a running request's next token reads are there."""
    window = _window(moment.header)
    if window is None:
        return
    mapping = dict(moment.after.window)
    for id, request in moment.after.requests.items():
        read = request.slots[max(0, len(request.slots) - window + 1) :]
        if gone := [slot for slot in read if slot not in mapping]:
            yield f"{id} reads the window of full slots {gone}, which is gone"
