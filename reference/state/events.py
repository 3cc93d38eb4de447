"""KV events: what a router or a second cache tier is told about keys that come and go."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

from reference.keys.views import Chain


@dataclasses.dataclass(frozen=True)
class Stored:
    """Blocks entered the prefix cache.

    Attributes:
      group: group of the blocks.
      chains: the prefix that each ends; skipped blocks of the span are left out, so there may be none.
      block_size: tokens per block: the group's, or a hash block for a partly filled block.
      tokens: the whole span looked at, skipped blocks included.
      parent: the prefix before the span, or None when it starts at 0.
    """

    group: int
    chains: tuple[Chain, ...]
    block_size: int
    tokens: Sequence[int]
    parent: Chain | None


@dataclasses.dataclass(frozen=True)
class Removed:
    """One key of a block was taken away. Keys that one block loses at once have no order among themselves.

    Attributes:
      group: group of the block.
      chain: the prefix it ended.
    """

    group: int
    chain: Chain


@dataclasses.dataclass(frozen=True)
class Cleared:
    """The prefix cache was reset."""


Event: TypeAlias = Stored | Removed | Cleared
