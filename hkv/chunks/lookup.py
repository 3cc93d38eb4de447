"""Longest prefix that stored chunks can serve, over object groups with windows and over ranks (LMCache 0.5.6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from hkv.errors import OperationError


@dataclasses.dataclass(frozen=True)
class Row:
    """Chunks of one (object group, rank) that are stored.

    Attributes:
      present: indices of stored chunks.
      window: chunks at the end of a prefix that must be there; -1 (or 0) for all of them.
    """

    present: frozenset[int]
    window: int = -1

    @classmethod
    def of(cls, present: Collection[int], window: int = -1) -> Row:
        """A row of any collection of chunk indices."""
        return cls(frozenset(present), window)

    def wanted(self, length: int) -> range:
        """Chunks that a prefix of `length` chunks reads from this row."""
        return range(max(0, length - self.window) if self.window > 0 else 0, length)

    def serves(self, length: int) -> bool:
        """True if this row can serve a prefix of `length` chunks."""
        return all(chunk in self.present for chunk in self.wanted(length))


@dataclasses.dataclass(frozen=True)
class LookupResult:
    """A prefix hit, in chunks, and per row the chunks that its retrieve will read; everything else is let go."""

    hit: int
    retained: tuple[tuple[int, ...], ...]


def servable_lengths(rows: Sequence[Row], num_chunks: int) -> list[int]:
    """Every length, in chunks, that every row serves. Not monotone: a shorter prefix may be unservable."""
    return [length for length in range(1, num_chunks + 1) if all(row.serves(length) for row in rows)]


def longest_prefix(rows: Sequence[Row], num_chunks: int) -> LookupResult:
    """The longest servable prefix of `num_chunks` chunks over all rows, of which there is at least one."""
    if not rows:
        raise OperationError("rows", 0, "at least one object group and rank")
    hit = max(servable_lengths(rows, num_chunks), default=0)
    return LookupResult(hit, tuple(tuple(row.wanted(hit)) for row in rows))


def recurrent_hit(pages: Sequence[Collection[int]]) -> int:
    """The longest length at which every recurrent group has a state: the largest common member, 0 for none.

    Per group, `pages` are lengths, in chunks, at the end of which its state is stored.
    """
    common = set(pages[0]).intersection(*pages[1:]) if pages else set()
    return max(common, default=0)
