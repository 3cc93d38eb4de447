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
        held = Counter(_held(moment.after, group["kind"], mapping))
        if twice := sorted(slot for slot, times in held.items() if times > 1):
            yield f"slots {twice} of pool {pool} are in two places"
        pages = Counter({slot // size for slot in held})
        pages.update([*moment.after.pools[pool].free, *moment.after.pools[pool].waiting])
        if twice := sorted(page for page, times in pages.items() if times > 1):
            yield f"pages {twice} of pool {pool} are in two places"
        lost = sorted(set(range(1, count + 1)) - set(pages))
        if lost and DECODE_LOSES_PAGE not in moment.header.bugs:
            yield f"pages {lost} of pool {pool} are nowhere"


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


@INVARIANTS.remembering("a tree of pages")
class TreeOfPages:
    """Remembers the size of a page, and whether keys are bigrams."""

    def __init__(self, config: structs.Header) -> None:
        made = structs.to_config(config)
        self._size, self._eagle = made.page_size, made.bigrams

    def check(self, moment: PlainMoment) -> Iterator[str]:
        """Nodes are whole pages, with a slot a unit, and siblings differ in their first page."""
        seen = set[tuple[object, ...]]()
        for number, node in enumerate(moment.after.nodes):
            units = len(node.tokens) - self._eagle
            if units < 1 or units % self._size or len(node.slots) != units or len(node.window or node.slots) != units:
                yield f"node {number} has {units} units and slots {node.slots}"
            first = (node.parent, node.namespace, tuple(node.tokens[: self._size + self._eagle]))
            if first in seen:
                yield f"node {number} begins as a sibling does"
            seen.add(first)


@INVARIANTS.invariant("locks are counted")
def locks_are_counted(moment: PlainMoment) -> Iterator[str]:
    """As many locks are on a node's full slots as requests have it in their prefix."""
    prefixes = [set(request.slots[: request.protected]) for request in moment.after.requests.values()]
    for number, node in enumerate(moment.after.nodes):
        holders = sum(node.slots[0] in prefix for prefix in prefixes)
        if node.locks[0] != holders:
            yield f"node {number} has {node.locks[0]} locks, and {holders} requests have it"


class _OfWindow:
    """Remembers the window, None where there is none."""

    def __init__(self, config: structs.Header) -> None:
        self._window = structs.to_config(config).window


@INVARIANTS.remembering("windows are mapped")
class WindowsAreMapped(_OfWindow):
    """Nothing but the window."""

    def check(self, moment: PlainMoment) -> Iterator[str]:
        """A node's window slots are those that its full slots are mapped to; a tombstone's are mapped to none. The
        order by which they leave has every node that has some, once."""
        if self._window is None:
            return
        mapping, nodes = dict(moment.after.window), moment.after.nodes
        for number, node in enumerate(nodes):
            mapped = [mapping.get(slot) for slot in node.slots]
            if mapped != (node.window or [None] * len(node.slots)):
                yield f"node {number} has window slots {node.window}, and its full slots are mapped to {mapped}"
        if sorted(moment.after.recent[0]) != [number for number, node in enumerate(nodes) if node.window is not None]:
            yield f"the order of window slots has the nodes {moment.after.recent}"


@INVARIANTS.remembering("windows are there")
class WindowsAreThere(_OfWindow):
    """Nothing but the window."""

    def check(self, moment: PlainMoment) -> Iterator[str]:
        """The window slots that a running request's next token reads are there."""
        if self._window is None:
            return
        mapping = dict(moment.after.window)
        for id, request in moment.after.requests.items():
            read = request.slots[max(0, len(request.slots) - self._window + 1) :]
            if gone := [slot for slot in read if slot not in mapping]:
                yield f"{id} reads the window of full slots {gone}, which is gone"
