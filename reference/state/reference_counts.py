"""Reference counts by role: who holds a block, and for what."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.errors import OperationError


class ReferenceCounts:
    """For each role and each id, how many references there are.

    Args:
      size: ids run from 0 up to, but not including, this.
      roles: names of the roles.
    """

    def __init__(self, size: int, roles: Sequence[str]) -> None:
        self.counts = {role: [0] * size for role in roles}

    def add(self, role: str, id: int) -> None:
        """One more reference."""
        self.counts[role][id] += 1

    def drop(self, role: str, id: int) -> None:
        """One reference less.

        Raises:
          OperationError: there is none.
        """
        if self.counts[role][id] == 0:
            raise OperationError("block", id, f"a block with a {role} reference")
        self.counts[role][id] -= 1

    def total(self, id: int, roles: Sequence[str]) -> int:
        """References of these roles to one id."""
        return sum(self.counts[role][id] for role in roles)

    def busy(self, roles: Sequence[str]) -> int:
        """Ids that any of these roles holds."""
        return sum(any(held) for held in zip(*(self.counts[role] for role in roles), strict=True))
