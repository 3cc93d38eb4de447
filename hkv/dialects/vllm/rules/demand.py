"""Demand of an allocation."""

from __future__ import annotations

import dataclasses

from hkv.state.loops import Scalar


@dataclasses.dataclass(frozen=True)
class Demand:
    """Demand of an allocation. Lengths are in tokens.

    Attributes:
      slot: the request.
      slots: tokens that must have slots, drafts and lookahead included.
      main: the same without lookahead.
      total: tokens computed before: the request's, the hit's and external ones.
      hit: tokens of a lookup's hit that are to be adopted.
      external: tokens that come from elsewhere.
      encoder: tokens of an encoder's output that want slots, where a group reads those.
      capped: True if a group counts no more than it can hold at once.
    """

    slot: Scalar
    slots: Scalar
    main: Scalar
    total: Scalar
    hit: Scalar
    external: Scalar
    encoder: Scalar
    capped: Scalar
