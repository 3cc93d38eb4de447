"""Blocks of a cache at one moment, whatever the dialect: holders, cached content, order of eviction.

A dialect makes a snapshot of what its engines answer to `state` (`Dialect.snapshot`). From one snapshot an operation
follows everything that a page shows of a block: since when a request holds it, when its key came and went, and whether
it is free, cached, held, or lost to everybody.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Block: TypeAlias = tuple[int, int]
"""A block: its pool, and its id there."""

Holder: TypeAlias = tuple[str, int, int]
"""A request that holds a block, its group, and the column of its row."""

Entry: TypeAlias = tuple[int, int, str]
"""An entry of the cache: group, tokens of the prefix up to the block's end (-1: the state does not tell), and key."""


@dataclasses.dataclass(frozen=True)
class PoolSnapshot:
    """A pool of blocks.

    Attributes:
      name: as people call it.
      ids: ids that it may hand out.
      free: those that are free, next to be handed out first.
    """

    name: str
    ids: range
    free: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """All blocks at one moment.

    Attributes:
      pools: the pools, in order.
      holders: requests that hold a block, for blocks that some hold.
      references: number of references of a block, where there are any besides the cache's own.
      entries: what a block is cached as, for cached blocks.
    """

    pools: tuple[PoolSnapshot, ...]
    holders: Mapping[Block, Sequence[Holder]]
    references: Mapping[Block, int]
    entries: Mapping[Block, Entry]
