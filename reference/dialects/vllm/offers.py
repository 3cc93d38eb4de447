"""Recurrent states that a connector is offered, to store them elsewhere."""

from __future__ import annotations

from typing import NamedTuple

from reference.state.key_table import Key
from reference.state.pool import Pool


class Offer(NamedTuple):
    """A state, from its registration until it is taken.

    Attributes:
      id: the request that computed it.
      block: its block.
      tokens: tokens that it stands for.
      key: the key it was registered under.
    """

    id: str
    block: int
    tokens: int
    key: Key | None


def stands(pool: Pool, offer: Offer) -> bool:
    """True if the block is still held, and holds the state: it is known by its key, for exactly so many tokens."""
    block = offer.block
    return pool.refs[block] > 0 and pool.primary[block] == offer.key and pool.covered[block] == offer.tokens
