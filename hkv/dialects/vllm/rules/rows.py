"""Rows of block ids: what an allocation wants of them, where they begin, and making entries null.

Where queries read the beginning of a request and its end, a row is null between: after the sinks, up to `Row.FIRST`.
Such a row is written from its first entry on. Any other row is null before `Row.FIRST` only, and nothing is written
there.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from hkv.dialects.vllm.rules.parameters import GroupField, View
from hkv.state.loops import Scalar, fori_loop
from hkv.state.workspace import Workspace


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


def start(view: View, group: Scalar, first: Scalar) -> Scalar:
    """The first entry that is written in a group's row, of which `Row.FIRST` is `first`."""
    # Entries before `Row.FIRST` are not written when they become null: that would cost a trip for each block of a
    # window's past, in every step.
    return jnp.where(view.group(group, GroupField.SINKS) > 0, 0, first)


def null(work: Workspace, slot: Scalar, group: Scalar, start: Scalar, end: Scalar) -> Workspace:
    """Entries `[start, end)` of a request's row become null; none where `end` is not above `start`."""
    row = work.row(slot, group)

    def body(i: Scalar, w: Workspace) -> Workspace:
        return w.write("rows", 0, row + i)

    return fori_loop(start, end, body, work, writes=("rows",))
