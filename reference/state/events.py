"""KV events: notifications of keys that come and go, for a router or a second cache tier."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

from hkv.keys.chained import PLAIN, PrefixIdentity
from reference.keys.views import Chain


@dataclasses.dataclass(frozen=True)
class BlockStored:
    """Blocks entered the prefix cache.

    Attributes:
      group: group of the blocks.
      chains: the prefix that each ends; skipped blocks of the span are left out, so there may be none.
      block_size: tokens per block: the group's, or a hash block for a partly filled block.
      tokens: the whole span looked at, skipped blocks included.
      parent: the prefix before the span, or None when it starts at 0.
      ends: length of each of those prefixes, in tokens.
      ahead: of each, the tokens after it that its key covers.
      identity: everything besides its tokens that identifies the prefix of the request that stored the blocks.
      session: the session of that request, "" for none.
    """

    group: int
    chains: tuple[Chain, ...]
    block_size: int
    tokens: Sequence[int]
    parent: Chain | None
    ends: tuple[int, ...] = ()
    ahead: tuple[tuple[int, ...], ...] = ()
    identity: PrefixIdentity = PLAIN
    session: str = ""


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


Event: TypeAlias = BlockStored | Removed | Cleared
