"""The prefix tree over cached keys: which key builds on which, so that eviction takes leaves before what they stand on.

Nodes are named by namespace and key. A child may come before its parent and is attached when that comes. Children of a
node that leaves are roots from then on, also when it returns, until they are entered again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from tests.rtp_llm.witness.resource import Dependency

DEFAULT, GPU_LOGICAL, GPU_CP_CANONICAL = NAMESPACES = (0, 1, 2)
"""Keys of nobody in particular, of logical blocks, and of virtual blocks under context parallelism."""

Name: TypeAlias = tuple[int, int]
"""A namespace and a key."""


@dataclasses.dataclass
class Node:
    """One name of a cached key.

    Attributes:
      parent: name of the node it builds on, present or not; None for a root.
      ordinal: position among the keys of its sequence.
      resident: it is never evicted.
      access: number of its last use; larger is later.
    """

    parent: Name | None
    ordinal: int
    resident: bool
    access: int


class PrefixTree:
    """RTP-LLM's prefix tree of `SharedBlockCache`.

    Args:
      evictable: whether a name, apart from its place in the tree, may be evicted.
    """

    def __init__(self, evictable: Callable[[Name], bool]) -> None:
        self.nodes: dict[Name, Node] = {}
        self._below: dict[Name, dict[Name, None]] = {}
        self._evictable = evictable
        self._clock = 0

    def upsert(self, name: Name, dependency: Dependency, resident: bool) -> None:
        """Enter a name, or enter it anew under another parent; it counts as used.

        Residence belongs to the key: it holds for all its names, and stays.
        """
        known = self.nodes.get(name)
        if known is not None:
            self._detach(name, known)
        parent = None if dependency.parent in (None, name[1]) else (name[0], dependency.parent)
        self.nodes[name] = Node(parent, dependency.ordinal, resident, self._tick())
        if parent is not None:
            self._below.setdefault(parent, {})[name] = None
        names = self.names(name[1])
        for other in names:
            self.nodes[other].resident = resident or any(self.nodes[same].resident for same in names)

    def names(self, key: int) -> list[Name]:
        """The names of a key."""
        return [(namespace, key) for namespace in NAMESPACES if (namespace, key) in self.nodes]

    def touch(self, key: int) -> None:
        """Every name of a key was used."""
        for name in self.names(key):
            self.nodes[name].access = self._tick()

    def remove(self, key: int) -> None:
        """Take every name of a key out; what builds on it are roots now."""
        for name in self.names(key):
            self._detach(name, self.nodes.pop(name))
            for child in self._below.pop(name, ()):
                self.nodes[child].parent = None

    def children(self, name: Name) -> list[Name]:
        """Names that build on a name."""
        return list(self._below.get(name, ()))

    def parent(self, name: Name) -> Name | None:
        """The name that a name builds on, if it is there."""
        parent = self.nodes[name].parent
        return parent if parent in self.nodes else None

    def is_leaf(self, name: Name) -> bool:
        """True if eviction may begin here: nothing builds on it, and it may be evicted."""
        node = self.nodes.get(name)
        return node is not None and not node.resident and not self.children(name) and self._evictable(name)

    def leaves(self) -> list[Name]:
        """Names at which eviction may begin, least recently used first."""
        return sorted(filter(self.is_leaf, self.nodes), key=lambda name: (self.nodes[name].access, name))

    def chain(self, leaf: Name) -> list[Name]:
        """A leaf, and upwards whatever stands on nothing else: non-resident parents with one child."""
        chain = [leaf]
        while (parent := self.parent(chain[-1])) is not None:
            if self.nodes[parent].resident or len(self.children(parent)) != 1:
                break
            chain.append(parent)
        return chain

    def ancestors(self, name: Name) -> list[Name]:
        """Names that a name builds on, nearest first."""
        found: list[Name] = []
        above = self.parent(name)
        while above is not None and above not in found:
            found.append(above)
            above = self.parent(above)
        return found

    def subtree_evictable(self, name: Name) -> bool:
        """True if nothing at a name or below it is resident."""
        waiting, seen = [name], set()
        while waiting:
            name = waiting.pop()
            if self.nodes[name].resident:
                return False
            if name not in seen:
                seen.add(name)
                waiting += self.children(name)
        return True

    def _detach(self, name: Name, node: Node) -> None:
        if node.parent is not None:
            del self._below[node.parent][name]
            if not self._below[node.parent]:
                del self._below[node.parent]

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
