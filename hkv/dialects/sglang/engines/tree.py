"""The text's tree alone, as SGLang's cache drives it behind `UnifiedTreeCoreInterface`.

Whoever drives it owns the pools: slots come with what is entered, and it says which of them leave. It is asked to let
nodes leave one by one, since SGLang's cache looks at its pools after each. Nodes and locks have names, given by the one
who first sees them.
"""

from __future__ import annotations

from typing import Any

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.engines.keyed import Keyed
from hkv.dialects.sglang.plain import LAYOUT, empty, nodes_left
from hkv.errors import OperationError
from reference.dialects.sglang.evicting import evict
from reference.dialects.sglang.holding import lock, release_state, release_window, unlock
from reference.dialects.sglang.radix import insert, match
from reference.dialects.sglang.records import Mode, Node, Pool, Request

SPLITS = 4
"""Nodes that one operation makes at most."""


class SGLangNumpyTree(Keyed):
    """The tree alone, whose pools are somebody else's.

    Args:
      header: the configuration, as a log's first line.

    Attributes:
      nodes: nodes by the names that the driver gave them. locks: those that are held, by name.
    """

    def __init__(self, header: structs.Header) -> None:
        super().__init__(header)
        self.nodes: dict[int, Node] = {}
        self.locks: dict[str, Request] = {}

    def perform(self, operation: structs.Operation) -> Any:
        """Performs one operation and returns its answer.

        Raises:
          OperationError: it is not one on a tree, or cannot come now; nothing changed.
        """
        cache = self.cache
        match operation:
            case structs.MatchOp():
                return self._match(operation)
            case structs.InsertOp():
                return self._insert(operation)
            case structs.LockOp():
                return self._lock(operation)
            case structs.UnlockOp():
                unlock(cache, self._held(operation.id))
                del self.locks[operation.id]
            case structs.ReleaseWindowOp():
                release_window(cache, self._held(operation.id))
            case structs.ReleaseStateOp():
                release_state(cache, self._held(operation.id))
            case structs.LeaveOp():
                full, window, states = (operation.steps if operation.kind == kind else 0 for kind in structs.KINDS)
                evict(cache, full, window, states, Mode.STEPS)
                self.nodes = {name: node for name, node in self.nodes.items() if node.children >= 0}
                return self._returned()
            case structs.ResetOp():
                self.nodes, self.locks = {}, {}
                self.cache = empty(self.config, keys=len(cache.keys) - 1, requests=1, row=cache.row, alone=True)
            case structs.EndedOp():
                pass
            case structs.StateOp():
                return structs.State([], [], {}, *self.reader.nodes(cache), self.reader.ledgers(cache))
            case _:
                raise OperationError("op", type(operation).__name__, "an operation on a tree alone")
        return None

    def _match(self, operation: structs.MatchOp) -> structs.Found:
        keys, size = self.keys(operation.tokens, operation.namespace), self.config.page_size
        self._make_room(len(keys))
        asked = self.cache.requests[1]
        self.note(asked, keys)
        node, length, end = match(self.cache, asked, len(keys))
        if operation.node is not None:
            self.nodes[operation.node] = node
        pages = [self.cache.keys[key].page for key in keys[:length]]
        return structs.Found(length * size, end * size, self.reader.slots(pages))

    def _insert(self, operation: structs.InsertOp) -> structs.Entered:
        keys, size = self.keys(operation.tokens, operation.namespace), self.config.page_size
        self._make_room(len(keys))
        asked, cache = self.cache.requests[1], self.cache
        self.note(asked, keys)
        pages = [slot // size for slot in operation.slots[: len(keys) * size : size]]
        windows = [slot // size for slot in operation.window[: len(keys) * size : size]] or [0] * len(pages)
        cache.peer += [0] * (max(pages, default=0) + 1 - len(cache.peer))
        for page, window in zip(pages, windows, strict=True):
            cache.peer[page] = window
        asked.row[: len(pages)], asked.slid = pages, operation.evicted // size
        owned, counted = operation.owned // size, operation.counted // size
        node, took, known = insert(cache, asked, len(keys), owned, counted, operation.priority, operation.state or 0)
        self.nodes[operation.node] = node
        return structs.Entered(known * size, bool(took), self._returned())

    def _lock(self, operation: structs.LockOp) -> structs.Held:
        if operation.node not in self.nodes:
            raise OperationError("node", operation.node, "a node that was named")
        if operation.id in self.locks:
            raise OperationError("id", operation.id, "a name that no lock has")
        held = self.locks[operation.id] = Request()
        lock(self.cache, held, self.nodes[operation.node])
        return structs.Held(held.edge > 0)

    def _held(self, id: str) -> Request:
        try:
            return self.locks[id]
        except KeyError:
            raise OperationError("id", id, "a lock that is held") from None

    def _make_room(self, pages: int) -> None:
        """Records for the nodes that an operation may make, and places for all that it may give back."""
        cache = self.cache
        if nodes_left(cache) < SPLITS:
            count = len(cache.nodes) + SPLITS
            LAYOUT.grow(cache, "nodes", count)
            cache.leaves.items += [None] * count  # type: ignore[list-item]
            for node in cache.nodes[-count:]:
                node.parent, cache.vacant = cache.vacant, node
        most = cache.full.idle + cache.full.held + pages
        for pool in (cache.full, cache.swa, cache.states):
            if pool.mask < most:
                pool.free += [0] * ((1 << most.bit_length()) - len(pool.free))
                pool.mask = len(pool.free) - 1

    def _returned(self) -> structs.Gone:
        """Slots given back since the last call: full slots, full slots whose window's were, and states."""
        cache = self.cache
        full, window, states = (self._taken(pool) for pool in (cache.full, cache.swa, cache.states))
        return structs.Gone(self.reader.slots(full), self.reader.slots(window), states)

    def _taken(self, pool: Pool) -> list[int]:
        taken = [pool.take() for _ in range(pool.count)]
        pool.front = 0
        return taken
