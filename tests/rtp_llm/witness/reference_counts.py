"""Reference counts by role: how many of each role hold a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hkv.errors import OperationError


class ReferenceCounts:
    """Numbers of references of each role to each id.

    Args:
      size: ids run from 0 up to, but not including, this.
      roles: names of the roles.
    """

    def __init__(self, size: int, roles: Sequence[str]) -> None:
        self.counts = {role: [0] * size for role in roles}
        self._held: Counter[frozenset[str]] = Counter()
        """Number of ids that are held in exactly these roles, so that `busy` need not look at every id."""

    def add(self, role: str, id: int) -> None:
        """One more reference."""
        self._change(role, id, 1)

    def drop(self, role: str, id: int) -> None:
        """One reference less.

        Raises:
          OperationError: the count is 0.
        """
        if self.counts[role][id] == 0:
            raise OperationError("block", id, f"a block with a {role} reference")
        self._change(role, id, -1)

    def total(self, id: int, roles: Sequence[str]) -> int:
        """References of these roles to one id."""
        return sum(self.counts[role][id] for role in roles)

    def busy(self, roles: Sequence[str]) -> int:
        """Ids that any of these roles holds."""
        return sum(count for held, count in self._held.items() if not held.isdisjoint(roles))

    def _change(self, role: str, id: int, by: int) -> None:
        counts = self.counts[role]
        counts[id] += by
        if counts[id] == max(by, 0):
            now = self._roles(id)
            self._held[now ^ {role}] -= 1
            self._held[now] += 1

    def _roles(self, id: int) -> frozenset[str]:
        return frozenset(role for role, counts in self.counts.items() if counts[id])
