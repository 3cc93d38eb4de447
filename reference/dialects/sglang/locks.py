"""Locks: what requests that run hold of the tree.

A request holds the full slots of its whole prefix, but of the window's only those that a window back from its node
reaches, and of states the node's own. Nodes are held whole. Where the window ends the node gets a mark, and the receipt
keeps it: splits move the mark along, so that whoever unlocks walks over exactly the nodes that were locked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from reference.dialects.sglang.tree import TreeNode


@dataclasses.dataclass
class Receipt:
    """A lock to be undone (`TreeLock`).

    Attributes:
      node: the node from which on nodes are locked, upwards.
      mark: the mark at which the window's part ends; None where it goes up to the root.
      window_released: whether the window's part was given back early.
      state_released: whether the state's was.
    """

    node: TreeNode
    mark: int | None
    window_released: bool = False
    state_released: bool = False


class Locks:
    """Locks and unlocks paths of a tree.

    Args:
      window: tokens of the window, or None.
    """

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._marks = 0

    def lock(self, node: TreeNode) -> Receipt:
        """Holds a node and what is before it (`inc_lock_ref`)."""
        node.state_locks += node.parent is not None
        for each in node.path():
            each.full_locks += 1
        covered, mark = 0, None
        for each in node.path():
            if covered >= (self._window or 0):
                break
            each.window_locks += 1
            covered += len(each.key)
            if covered >= (self._window or 0):
                mark = each.mark = self._name() if each.mark is None else each.mark
        return Receipt(node, mark)

    def unlock(self, receipt: Receipt) -> None:
        """Undoes a lock (`dec_lock_ref`)."""
        for each in receipt.node.path():
            each.full_locks -= 1
        if not receipt.window_released:
            self._unlock_rest(receipt)

    def release_window(self, receipt: Receipt) -> None:
        """Gives the window's part back, and the state's, once the request reads them no more (`release_swa`)."""
        if not receipt.window_released:
            self._unlock_rest(receipt)
            receipt.window_released = True

    def release_state(self, receipt: Receipt) -> None:
        """Gives the state's part back alone, once (`skipped_lock_components`)."""
        if not receipt.state_released:
            receipt.node.state_locks -= receipt.node.parent is not None
            receipt.state_released = True

    def _name(self) -> int:
        self._marks += 1
        return self._marks

    def _unlock_rest(self, receipt: Receipt) -> None:
        self.release_state(receipt)
        for each in _until(receipt.mark, receipt.node.path()) if self._window is not None else ():
            each.window_locks -= 1


def _until(mark: int | None, nodes: Iterator[TreeNode]) -> Iterator[TreeNode]:
    for node in nodes:
        yield node
        if mark is not None and node.mark == mark:
            return
