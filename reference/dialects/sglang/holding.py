"""Locks: what requests that run hold of the tree.

A request holds the full pages of its whole prefix, but of the window's only those that a window back from its node
reaches, and of states the node's own. Nodes are held whole. Where the window ends the node gets a mark, and the request
keeps it: splits move the mark along, so that whoever unlocks walks over exactly the nodes that were locked.
"""

from __future__ import annotations

from reference.dialects.sglang.radix import consider
from reference.dialects.sglang.records import Cache, Node, Request
from reference.language import Text, clause

TEXT = Text(__name__)


def lock(c: Cache, request: Request, node: Node) -> None:
    """A request holds a node and what is before it."""
    clause("lock", "UnifiedTreeCore.inc_lock_ref")
    request.held, request.edge, request.window_released, request.state_released = node, 0, 0, 0
    first, covered = node, 0
    if c.config.states and node is not c.root:
        hold_state(c, node)
    while node is not c.root:
        pages = node.end - node.start
        if node.full_locks == 0:
            c.full.idle -= pages
            c.full.held += pages
        node.full_locks += 1
        if covered < c.config.window:
            if node.window_locks == 0 and node.live:
                c.swa.idle -= pages
                c.swa.held += pages
            node.window_locks += 1
            covered += pages * c.config.page
            if covered >= c.config.window:
                if node.mark == 0:
                    c.marks += 1
                    node.mark = c.marks
                request.edge = node.mark
        node = node.parent
    consider(c, first)


def hold_state(c: Cache, node: Node) -> None:
    """One more request holds a node's state, whether it has one or not."""
    if node.state_locks == 0 and node.state > 0:
        c.states.idle -= 1
        c.states.held += 1
    node.state_locks += 1


def release_state(c: Cache, request: Request) -> None:
    """Gives back the state's part of a lock, once."""
    node = request.held
    if c.config.states and not request.state_released:
        request.state_released = 1
        if node is not c.root:
            clause("release-state", "MambaComponent.release_component_lock", "a lock's part on the state is given back")
            node.state_locks -= 1
            if node.state_locks == 0 and node.state > 0:
                c.states.held -= 1
                c.states.idle += 1


def release_window(c: Cache, request: Request) -> None:
    """Gives back the window's part of a lock, and the state's, once the request reads them no more."""
    release_state(c, request)
    if c.config.window and not request.window_released:
        clause("release-window", "SWAComponent.release_component_lock", "a lock's part on the window is given back")
        node = request.held
        while node is not c.root:
            node.window_locks -= 1
            if node.window_locks == 0 and node.live:
                c.swa.held -= node.end - node.start
                c.swa.idle += node.end - node.start
            if request.edge > 0 and node.mark == request.edge:
                break
            node = node.parent
    request.window_released = 1


def unlock(c: Cache, request: Request) -> None:
    """Undoes a lock."""
    clause("unlock", "UnifiedTreeCore.dec_lock_ref")
    if not request.window_released:
        release_window(c, request)
    node = request.held
    while node is not c.root:
        node.full_locks -= 1
        if node.full_locks == 0:
            c.full.held -= node.end - node.start
            c.full.idle += node.end - node.start
        node = node.parent
    consider(c, request.held)
