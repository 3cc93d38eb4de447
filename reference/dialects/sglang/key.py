"""Keys of the tree: what a prefix is called.

A key is a namespace (a LoRA adapter, a salt) and units. A unit is a token; under EAGLE it is a bigram, because a draft
layer reads each token together with the next one: n tokens then make n - 1 units, and unit i stands for the slot of
token i. Keys are compared unit by unit, never by hash, and a tree cuts them at whole pages only.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TypeAlias

Unit: TypeAlias = int | tuple[int, int]
"""A token, or a token and the next one."""

Namespace: TypeAlias = tuple[str | None, str | None]
"""SGLang's `extra_key` (an adapter's, say) and `cache_salt`."""


@dataclasses.dataclass(frozen=True)
class Key:
    """A sequence of units under a namespace (`RadixKey`)."""

    namespace: Namespace
    units: tuple[Unit, ...]

    @classmethod
    def of(cls, tokens: Sequence[int], namespace: Namespace = (None, None), *, eagle: bool = False) -> Key:
        """The key of some tokens (`maybe_to_bigram_view`)."""
        return cls(namespace, tuple(itertools.pairwise(tokens)) if eagle else tuple(tokens))

    def tokens(self) -> list[int]:
        """Its tokens; of bigrams, the one after the last, too."""
        firsts = [unit[0] if isinstance(unit, tuple) else unit for unit in self.units]
        return firsts + [unit[1] for unit in self.units[-1:] if isinstance(unit, tuple)]

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, part: slice) -> Key:
        return Key(self.namespace, self.units[part])

    def whole_pages(self, page_size: int) -> Key:
        """The key without what does not fill a page (`page_aligned`)."""
        return self[: len(self) // page_size * page_size]

    def shared(self, other: Key, page_size: int) -> int:
        """Units that two keys begin with alike, in whole pages (`match`)."""
        alike = 0
        for mine, theirs in zip(self.units, other.units, strict=False):
            if mine != theirs:
                break
            alike += 1
        return alike // page_size * page_size

    def first_page(self, page_size: int) -> tuple[Namespace, tuple[Unit, ...]]:
        """Name by which a parent knows a child (`child_key`): the namespace and the first page."""
        return self.namespace, self.units[:page_size]
